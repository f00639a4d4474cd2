// One token a row through a whole decoder: from each row's last token to the logits of its next one.

#pragma once

#include "argmax.h"
#include "linear.h"
#include "paged_attention.h"

// The names of what Python passes as a number: name i of a list has the number i. kernels/decode_step.py reads these lists.
#define ACTIVATIONS(X) X(relu) X(gelu) X(gelu_tanh) X(silu) X(relu2)
#define NORMS(X) X(none) X(layer) X(rms)
#define NAME(name) #name " "

extern "C" {
extern const char activation_names[], norm_names[];
const char activation_names[] = ACTIVATIONS(NAME);
const char norm_names[] = NORMS(NAME);
}

namespace {

#define ACTIVATION(name) ACTIVATION_##name,
#define NORM(name) NORM_##name,
enum Activation : i64 { ACTIVATIONS(ACTIVATION) N_ACTIVATIONS };
enum NormKind : i64 { NORMS(NORM) N_NORMS };

struct Norm {
    const float *weight, *bias;  // bias may be null
    i64 kind;
    float eps;

    bool exists() const { return kind != NORM_none; }

    void operator()(const float* x, float* out, i64 d) const {
        Wide sums = {};
        float mean = 0, rest = 0;
        i64 i;
        if (kind == NORM_layer) {
            for (i = 0; i + WIDE <= d; i += WIDE) sums += load(x + i);
            for (; i < d; i++) rest += x[i];
            mean = (sum(sums) + rest) / d;
        }
        sums = Wide{}, rest = 0;
        for (i = 0; i + WIDE <= d; i += WIDE) sums = fma(load(x + i) - mean, load(x + i) - mean, sums);
        for (; i < d; i++) rest = fma(x[i] - mean, x[i] - mean, rest);
        const float scale = 1 / std::sqrt((sum(sums) + rest) / d + eps);
        for (i = 0; i < d; i++) out[i] = (x[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0.f);
    }
};

// Layers may differ in their number of heads. An attention uses the first `kv_heads` of the heads that the pool has room for.
struct Attention {
    Matrix qkv, out;  // `qkv` gives queries, keys and values side by side; of cross-attention, queries alone
    Norm q_norm, k_norm;
    i64 heads, kv_heads;
    float scale;
};

struct Layer {
    Attention self, cross;
    Matrix up, down;  // of a gated layer, `up` gives gates and values side by side
    Norm norms[3];    // in the order of the sublayers
};

// What stays the same from step to step. Several threads may run steps of one model at the same time.
struct Model {
    const Layer* layers;
    Matrix embedding, head;
    Norm embedding_norm, final_norm;
    i64 n_layers, d_model, d_head, window, activation;
    i64 has_cross, norm_first, is_gated;
    float embedding_scale, head_scale;
};

// Row b's token p lies in block table[b * width + p / block], slot p % block.
struct BlockTable {
    const int32_t *table, *counts;
    i64 width;
};

// One call.
struct Step {
    const Model* model;
    i64* tokens;                           // (rows): each row's last token; replaced by the most likely next one
    float* logits;                         // (rows, vocabulary)
    const float *positions, *cos, *sin;    // a row for each position: added to embeddings; angles of rotary pairs; or null
    float* pool;                           // keys and values: (block, layer, k or v, head, slot, d_head)
    BlockTable own, source;                // counts of `own` are the tokens before this one
    BlockTable kept;                       // the blocks of `own` that a sparse pattern keeps whole, the last one last; or null
    i64 rows, n_angles, block, block_stride, layer_stride, value_stride, head_stride, threads;
    i64 stores_first;  // rows may be successive tokens of one text: all their keys are stored before any row attends
};

inline Wide sigmoid(Wide x) {
    Wide e = exponential(x < 0.f ? x : -x);
    return (x < 0.f ? e : all(1.f)) / (e + 1.f);
}

// Abramowitz and Stegun 7.1.26: to 1.5e-7.
inline Wide erf(Wide x) {
    const Wide size = x < 0.f ? -x : x, t = 1.f / fma(size, all(0.3275911f), all(1.f));
    Wide p = all(1.061405429f);
    for (float next : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = fma(p, t, all(next));
    const Wide up = 1.f - p * t * exponential(-size * size);
    return x < 0.f ? -up : up;
}

inline Wide relu(Wide x) { return x > 0.f ? x : (x <= 0.f ? Wide{} : x); }  // NaN stays NaN

// `is_known` has refused every other kind.
inline Wide activate(Wide x, i64 kind) {
    switch ((Activation)kind) {
        case ACTIVATION_relu: return relu(x);
        case ACTIVATION_gelu: return x * 0.5f * (erf(x * 0.70710678f) + 1.f);
        case ACTIVATION_gelu_tanh:  // (1 + tanh(a)) / 2 = sigmoid(2 a)
            return x * sigmoid(x * fma(x * x, all(0.07135481f), all(1.59576912f)));
        case ACTIVATION_silu: return x * sigmoid(x);
        case ACTIVATION_relu2: return relu(x) * relu(x);
        case N_ACTIVATIONS: break;
    }
    abort();
}

// x = activation(x), times `factors` if there are any.
void activate(float* x, const float* factors, i64 n, i64 kind) {
    for (i64 i = 0; i < n; i += WIDE) {
        const i64 size = sizeof(float) * smaller(WIDE, n - i);
        Wide value = {}, factor = {};
        memcpy(&value, x + i, size);
        value = activate(value, kind);
        if (factors) {
            memcpy(&factor, factors + i, size);
            value *= factor;
        }
        memcpy(x + i, &value, size);
    }
}

// Rotate the pairs of one head. Pairs (i, i + d / 2) have d / 2 angles; interleaved pairs (2 i, 2 i + 1) have d, two equal ones each.
void rotate(float* x, const float* cos, const float* sin, i64 d, i64 n_angles) {
    const bool halves = n_angles < d;
    for (i64 i = 0; i < d / 2; i++) {
        const i64 a = halves ? i : 2 * i, b = halves ? i + d / 2 : 2 * i + 1, at = halves ? i : 2 * i;
        const float first = x[a], second = x[b];
        x[a] = first * cos[at] - second * sin[at];
        x[b] = second * cos[at] + first * sin[at];
    }
}

bool is_known(const Norm& norm) { return norm.kind >= 0 && norm.kind < N_NORMS && (!norm.exists() || norm.weight); }

bool is_known(const Attention& a) {
    return is_known(a.qkv) && is_known(a.out) && is_known(a.q_norm) && is_known(a.k_norm) && a.kv_heads > 0 &&
           a.heads % a.kv_heads == 0;
}

// Whether all numbers that stand for a kind are those of a kind that this file computes.
bool is_known(const Model& m) {
    bool known = m.activation >= 0 && m.activation < N_ACTIVATIONS && is_known(m.embedding) && m.embedding.bits != 4 &&
                 is_known(m.head) && is_known(m.embedding_norm) && is_known(m.final_norm);
    for (i64 i = 0; i < m.n_layers; i++) {
        const Layer& layer = m.layers[i];
        known = known && is_known(layer.self) && (!m.has_cross || is_known(layer.cross)) && is_known(layer.up) && is_known(layer.down);
        for (int n = 0; n < 2 + (m.has_cross != 0); n++) known = known && is_known(layer.norms[n]) && layer.norms[n].exists();
    }
    return known;
}

constexpr i64 PHASES = 16;  // of a layer, at most

class Decoder {
    const Step& s;
    const Model& m;
    Argmax* tops;      // (pieces of the head, rows)
    float* x;          // (rows, d_model): the residual stream
    float* normed;     // (rows, d_model): its norm, of pre-norm layers
    float* projected;  // (rows, widest): queries, keys and values; or gates and values
    float* result;     // (rows, widest): of a sublayer, before its last projection
    void* rounded;     // inputs of packed weights

   public:
    Decoder(const Step& s) : s(s), m(*s.model) {
        i64 widest_in = 0, widest_out = m.d_model;
        for (i64 i = 0; i < m.n_layers; i++) {
            const Layer& layer = m.layers[i];
            widest_in = std::max({widest_in, layer.self.qkv.n, m.has_cross ? layer.cross.qkv.n : 0, layer.up.n});
            widest_out = std::max({widest_out, layer.self.out.d, m.has_cross ? layer.cross.out.d : 0, layer.down.d});
        }
        const i64 n_tops = s.rows * n_pieces(m.head), d = s.rows * m.d_model;
        char* room = (char*)scratch(sizeof(Argmax) * n_tops + sizeof(float) * (2 * d + s.rows * (widest_in + widest_out)) +
                                    room_for(s.rows, widest_out));
        tops = (Argmax*)room;
        x = (float*)(tops + n_tops);
        normed = x + d;
        projected = normed + d;
        result = projected + s.rows * widest_in;
        rounded = result + s.rows * widest_out;
    }

    void run(Team& team) const {
        const float* in = m.norm_first ? normed : x;
        team.for_each(s.rows, [&](i64 row) { embed(row); });
        for (i64 i = 0; i < m.n_layers; i++) {
            const Layer& layer = m.layers[i];
            const Norm* norm = layer.norms;
            if (m.norm_first)
                normalize(team, *norm++, layer.self.qkv);
            else if (i == 0)
                round(team, layer.self.qkv, x);
            project(team, layer.self.qkv, in);
            if (s.stores_first) team.for_each(n_tasks(layer.self), [&](i64 task) { store_kv(layer.self, i, task); });
            team.for_each(n_tasks(layer.self), [&](i64 task) {
                if (!s.stores_first) store_kv(layer.self, i, task);
                attend(layer.self, i, task);
            });
            add_to_stream(team, layer.self.out);
            if (m.has_cross) {
                normalize(team, *norm++, layer.cross.qkv);
                project(team, layer.cross.qkv, in);
                team.for_each(n_tasks(layer.cross), [&](i64 task) { attend_to_source(layer.cross, i, task); });
                add_to_stream(team, layer.cross.out);
            }
            normalize(team, *norm++, layer.up);
            feed_forward(team, layer, in);
            add_to_stream(team, layer.down);
            if (!m.norm_first) normalize(team, *norm, m.layers[smaller(i + 1, m.n_layers - 1)].self.qkv);
        }
        compute_logits(team);
    }

    // Each row's most likely next token; after all threads are done.
    void choose_tokens() const {
        for (i64 row = 0; row < s.rows; row++) {
            Argmax top = tops[row];
            for (i64 i = 1; i < n_pieces(m.head); i++)
                if (tops[i * s.rows + row].beats(top)) top = tops[i * s.rows + row];
            s.tokens[row] = top.at;
        }
    }

   private:
    i64 n_pieces(const Matrix& w) const { return (w.n + piece(w, s.threads) - 1) / piece(w, s.threads); }

    Input input_of(const Matrix& w, const float* from) const { return input(w, from, rounded, s.rows); }

    void embed(i64 row) const {
        const i64 d = m.d_model;
        float* out = x + row * d;
        unpack(m.embedding, s.tokens[row], out);
        for (i64 i = 0; m.embedding_scale != 1 && i < d; i++) out[i] *= m.embedding_scale;
        for (i64 i = 0; s.positions && i < d; i++) out[i] += s.positions[s.own.counts[row] * d + i];
        if (m.embedding_norm.exists()) m.embedding_norm(out, out, d);
    }

    void compute_logits(Team& team) const {
        const Matrix& head = m.head;
        const i64 d = m.d_model, step = piece(head, s.threads);
        team.for_each(s.rows, [&](i64 row) {
            float* states = x + row * d;
            if (m.final_norm.exists()) m.final_norm(states, states, d);
            for (i64 i = 0; m.head_scale != 1 && i < d; i++) states[i] *= m.head_scale;
            round_row(head, input_of(head, x), row);
        });
        team.for_each(n_pieces(head), [&](i64 i) {
            const i64 from = i * step, until = smaller(head.n, from + step);
            columns(head, input_of(head, x), s.rows, from, until, {s.logits, head.n, head.bias, false});
            for (i64 row = 0; row < s.rows; row++) tops[i * s.rows + row] = Argmax::of(s.logits + row * head.n, from, until);
        });
    }

    // Round the inputs of a packed weight.
    void round(Team& team, const Matrix& w, const float* from) const {
        if (w.bits != 32) team.for_each(s.rows, [&](i64 row) { round_row(w, input_of(w, from), row); });
    }

    // The norm of the residual stream, rounded as the next product needs it; post-norm in place.
    void normalize(Team& team, const Norm& norm, const Matrix& next) const {
        float* out = m.norm_first ? normed : x;
        team.for_each(s.rows, [&](i64 row) {
            norm(x + row * m.d_model, out + row * m.d_model, m.d_model);
            round_row(next, input_of(next, out), row);
        });
    }

    void project(Team& team, const Matrix& w, const float* from) const {
        const i64 step = piece(w, s.threads);
        team.for_each(n_pieces(w), [&](i64 i) {
            columns(w, input_of(w, from), s.rows, i * step, smaller(w.n, (i + 1) * step), {projected, w.n, w.bias, false});
        });
    }

    // A sublayer's last projection, added to the residual stream.
    void add_to_stream(Team& team, const Matrix& w) const {
        round(team, w, result);
        const i64 step = piece(w, s.threads);
        team.for_each(n_pieces(w), [&](i64 i) {
            columns(w, input_of(w, result), s.rows, i * step, smaller(w.n, (i + 1) * step), {x, m.d_model, w.bias, true});
        });
    }

    KeyValueBlocks blocks(i64 layer) const {
        const float* k = s.pool + layer * s.layer_stride;
        return {k, k + s.value_stride, s.block, m.d_head, s.block_stride, s.head_stride, s.block_stride, s.head_stride};
    }

    // A task is some rows and one key/value head.
    i64 n_tasks(const Attention& a) const {
        const i64 step = rows_together(s.rows, a.kv_heads, s.threads);
        return (s.rows + step - 1) / step * a.kv_heads;
    }

    // Call `work` with each row of a task.
    template <class Work>
    void for_rows(const Attention& a, i64 task, const Work& work) const {
        const i64 step = rows_together(s.rows, a.kv_heads, s.threads), first = task / a.kv_heads * step;
        for (i64 row = first; row < smaller(first + step, s.rows); row++) work(row);
    }

    // Here each token's key and value.
    void store_kv(const Attention& a, i64 layer, i64 task) const {
        for_rows(a, task, [&](i64 row) {
            const i64 kv = task % a.kv_heads, count = s.own.counts[row], d = m.d_head;
            const int32_t* table = s.own.table + row * s.own.width;
            float *k = projected + row * a.qkv.n + (a.heads + kv) * d, *v = k + a.kv_heads * d;
            norm_and_rotate(a.k_norm, k, count);
            float* slot = s.pool + layer * s.layer_stride + table[count / s.block] * s.block_stride + kv * s.head_stride +
                          count % s.block * d;
            memcpy(slot, k, sizeof(float) * d);
            memcpy(slot + s.value_stride, v, sizeof(float) * d);
        });
    }

    // Here the query heads that share a key/value head.
    void attend(const Attention& a, i64 layer, i64 task) const {
        const i64 kv = task % a.kv_heads, group = a.heads / a.kv_heads, d = m.d_head;
        const BlockTable& read = s.kept.table ? s.kept : s.own;
        PagedRow rows[MOST_ROWS];
        i64 n = 0;
        for_rows(a, task, [&](i64 row) {
            float* q = projected + row * a.qkv.n + kv * group * d;
            for (i64 h = 0; h < group; h++) norm_and_rotate(a.q_norm, q + h * d, s.own.counts[row]);
            rows[n++] = {q, result + (row * a.heads + kv * group) * d, read.table + row * read.width, read.counts[row] + 1};
        });
        attend_paged(rows, n, group, blocks(layer), kv, m.window, a.scale);
    }

    void norm_and_rotate(const Norm& norm, float* head, i64 position) const {
        if (norm.exists()) norm(head, head, m.d_head);
        const i64 at = position * s.n_angles;
        if (s.n_angles) rotate(head, s.cos + at, s.sin + at, m.d_head, s.n_angles);
    }

    void attend_to_source(const Attention& a, i64 layer, i64 task) const {
        const i64 kv = task % a.kv_heads, group = a.heads / a.kv_heads, d = m.d_head;
        PagedRow rows[MOST_ROWS];
        i64 n = 0;
        for_rows(a, task, [&](i64 row) {
            const i64 at = (row * a.heads + kv * group) * d;
            float* q = projected + at;
            for (i64 h = 0; a.q_norm.exists() && h < group; h++) a.q_norm(q + h * d, q + h * d, d);
            rows[n++] = {q, result + at, s.source.table + row * s.source.width, s.source.counts[row]};
        });
        attend_paged(rows, n, group, blocks(layer), kv, 0, a.scale);
    }

    // Everything but the last projection.
    void feed_forward(Team& team, const Layer& layer, const float* from) const {
        const Matrix& w = layer.up;
        const i64 d_ff = layer.down.d, step = piece(w, s.threads);
        const Input in = input_of(w, from);
        team.for_each((d_ff + step - 1) / step, [&](i64 i) {
            const i64 c = i * step, n = smaller(d_ff, c + step) - c;
            float* out = m.is_gated ? projected : result;
            columns(w, in, s.rows, c, c + n, {out, w.n, w.bias, false});
            if (m.is_gated) columns(w, in, s.rows, d_ff + c, d_ff + c + n, {out, w.n, w.bias, false});
            for (i64 row = 0; row < s.rows; row++) {
                float* hidden = out + row * w.n + c;
                activate(hidden, m.is_gated ? hidden + d_ff : nullptr, n, m.activation);
                if (m.is_gated) memcpy(result + row * d_ff + c, hidden, sizeof(float) * n);
            }
        });
    }
};

}  // namespace

// 0: done. 1: nothing was done, because a number in the model stands for no kind that is known here.
extern "C" int decode_step(const Step* step) {
    if (!is_known(*step->model)) return 1;
    const Decoder decoder(*step);
    parallel(step->threads, step->model->n_layers * PHASES + 4, [&](Team& team) { decoder.run(team); });
    decoder.choose_tokens();
    return 0;
}
