// One token a row through a whole stack, or a whole model.

#pragma once

#include "attention.h"
#include "products.h"

namespace {

struct Norm {
    const float *weight, *bias;
    float eps;
    int32_t is_rms;

    void operator()(const float* x, float* out, i64 d) const {
        Wide sums = {};
        float mean = 0, rest = 0;
        i64 i;
        if (!is_rms) {
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

struct Attention {
    Matrix in, out;  // `in` gives queries, keys and values side by side; queries alone where keys are a source's
    Norm q_norm, k_norm;
    float scale;
};

struct Layer {
    Attention self, cross;
    Matrix up, down;  // `up` gives gates and values side by side where there are gates
    Norm norms[3];    // of the steps in turn
};

struct Pages {
    const int32_t *table, *counts;
    i64 width;
};

// From tokens to embeddings, and from final states to logits.
struct Ends {
    Matrix embedding, head;
    Norm norm;               // of embeddings
    const float* positions;  // (max_len, d), added to embeddings, or nothing
    const i64* tokens;       // (rows)
    float* logits;           // (rows, n)
    i64* likeliest;          // (rows): the first of the largest
    float factor, scale;     // of embeddings, and of final states
};

// As prepared.py fills it.
struct Step {
    const Layer* layers;
    const Ends* ends;  // or nothing: x holds embeddings, and states are what is asked for
    Norm last;
    float* x;  // (rows, d): embeddings, and in the end final states
    float *pool, *cos, *sin;
    Pages pages, source;  // counts are of the tokens before this one
    i64 n_layers, rows, d, heads, kv_heads, width, n_turns, window;  // cos and sin are a row's, or with ends a position's
    i64 block, block_stride, layer_stride, value_stride, head_stride;
    i64 has_cross, norm_first, is_gated, activation, threads;
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

// In the order of ACTIVATIONS in feedforward.py.
inline Wide activate(Wide x, i64 kind) {
    switch (kind) {
        case 1: return x * 0.5f * (erf(x * 0.70710678f) + 1.f);
        case 2: return x * sigmoid(x * fma(x * x, all(0.07135481f), all(1.59576912f)));  // (1 + tanh(a)) / 2 = sigmoid(2 a)
        case 3: return x * sigmoid(x);
    }
    const Wide up = x > 0.f ? x : (x <= 0.f ? Wide{} : x);  // NaN stays
    return kind == 4 ? up * up : up;
}

void activate(float* x, const float* times, i64 n, i64 kind) {
    for (i64 i = 0; i < n; i += WIDE) {
        const i64 size = sizeof(float) * smaller(WIDE, n - i);
        Wide value = {}, other = {};
        memcpy(&value, x + i, size);
        value = activate(value, kind);
        if (times) {
            memcpy(&other, times + i, size);
            value *= other;
        }
        memcpy(x + i, &value, size);
    }
}

// One head's pairs by their angles: i and i + width / 2 have one of width / 2, the neighbours 2 i and 2 i + 1 two of width.
void turn(float* x, const float* cos, const float* sin, i64 width, i64 n_turns) {
    const bool halves = n_turns < width;
    for (i64 i = 0; i < width / 2; i++) {
        const i64 a = halves ? i : 2 * i, b = halves ? i + width / 2 : 2 * i + 1, at = halves ? i : 2 * i;
        const float first = x[a], second = x[b];
        x[a] = first * cos[at] - second * sin[at];
        x[b] = second * cos[at] + first * sin[at];
    }
}

constexpr i64 PHASES = 16;  // of a layer, at most

// The largest of some logits: NaN is larger than all others, and of equal ones the first counts, as in torch.
struct Best {
    float value;
    i64 at;

    static Best of(const float* x, i64 from, i64 to) {
        Wide most = all(-INFINITY);
        WideInt wrong = {};
        i64 i = from;
        for (; i + WIDE <= to; i += WIDE) {
            const Wide value = load(x + i);
            most = value > most ? value : most;
            wrong |= value != value;
        }
        float top = -INFINITY;
        bool has_nan = false;
        for (int j = 0; j < WIDE; j++) top = std::max(top, most[j]), has_nan |= wrong[j] != 0;
        for (; i < to; i++) top = std::max(top, x[i]), has_nan |= x[i] != x[i];
        for (i = from; has_nan ? x[i] == x[i] : x[i] != top;) i++;
        return {x[i], i};
    }
    bool beats(const Best& other) const { return value > other.value || (value != value && other.value == other.value); }
};

class Stack {
    const Step& s;
    Best* bests;  // (pieces of the head, rows)
    float *y, *wide, *heard;
    void* memory;

   public:
    static i64 widest(const Step& s) {
        const Layer& layer = s.layers[0];
        return std::max(layer.self.in.n, layer.up.n);
    }

    Stack(const Step& s) : s(s) {
        const i64 wide_size = s.rows * widest(s), heard_size = s.rows * std::max(s.heads * s.width, s.layers[0].down.d);
        const i64 longest = std::max({s.d, s.heads * s.width, s.layers[0].down.d});
        const i64 n_best = s.ends ? s.rows * n_pieces(s.ends->head) : 0;
        char* room = (char*)scratch(sizeof(Best) * n_best + sizeof(float) * (s.rows * s.d + wide_size + heard_size) +
                                    room_for(s.rows, longest));
        bests = (Best*)room;
        y = (float*)(bests + n_best);
        wide = y + s.rows * s.d;
        heard = wide + wide_size;
        memory = heard + heard_size;
    }

    void run(Team& team) const {
        i64 at = 0;
        const float* from = s.norm_first ? y : s.x;
        if (s.ends) team.each(s.rows, [&](i64 row) { enter(*s.ends, row); });
        for (i64 i = 0; i < s.n_layers; i++) {
            const Layer& layer = s.layers[i];
            if (s.norm_first)
                listen(team, layer.norms[0], layer.self.in);
            else if (i == 0)
                round(team, layer.self.in, s.x);
            at = 0;
            multiply(team, layer.self.in, from, wide);
            team.each(s.rows * s.kv_heads, [&](i64 task) { remember_and_look(layer.self, i, task); });
            speak(team, layer.self.out);
            if (s.has_cross) {
                listen(team, layer.norms[s.norm_first ? ++at : at++], layer.cross.in);
                multiply(team, layer.cross.in, from, wide);
                team.each(s.rows * s.kv_heads, [&](i64 task) { look_at_source(layer.cross, i, task); });
                speak(team, layer.cross.out);
            }
            listen(team, layer.norms[s.norm_first ? ++at : at++], layer.up);
            think(team, layer, from);
            speak(team, layer.down);
            if (!s.norm_first) listen(team, layer.norms[at], s.layers[std::min(i + 1, s.n_layers - 1)].self.in);
        }
        if (s.ends)
            leave(team, *s.ends);
        else if (s.norm_first)
            team.each(s.rows, [&](i64 row) { s.last(s.x + row * s.d, s.x + row * s.d, s.d); });
    }

    // After all threads are done.
    void choose() const {
        for (i64 row = 0; row < s.rows; row++) {
            Best best = bests[row];
            for (i64 i = 1; i < n_pieces(s.ends->head); i++)
                if (bests[i * s.rows + row].beats(best)) best = bests[i * s.rows + row];
            s.ends->likeliest[row] = best.at;
        }
    }

   private:
    i64 n_pieces(const Matrix& m) const { return (m.n + piece(m, s.threads) - 1) / piece(m, s.threads); }

    Input to(const Matrix& m, const float* x) const { return input(m, x, memory, s.rows); }

    void enter(const Ends& ends, i64 row) const {
        float* x = s.x + row * s.d;
        unpack(ends.embedding, ends.tokens[row], x);
        for (i64 i = 0; ends.factor != 1 && i < s.d; i++) x[i] *= ends.factor;
        for (i64 i = 0; ends.positions && i < s.d; i++) x[i] += ends.positions[s.pages.counts[row] * s.d + i];
        if (ends.norm.weight) ends.norm(x, x, s.d);
    }

    void leave(Team& team, const Ends& ends) const {
        const Matrix& head = ends.head;
        const i64 step = piece(head, s.threads);
        team.each(s.rows, [&](i64 row) {
            float* x = s.x + row * s.d;
            if (s.norm_first) s.last(x, x, s.d);
            for (i64 i = 0; ends.scale != 1 && i < s.d; i++) x[i] *= ends.scale;
            round_row(head, to(head, s.x), row);
        });
        team.each(n_pieces(head), [&](i64 i) {
            const i64 from = i * step, until = smaller(head.n, from + step);
            columns(head, to(head, s.x), s.rows, from, until, {ends.logits, head.n, head.bias, false});
            for (i64 row = 0; row < s.rows; row++) bests[i * s.rows + row] = Best::of(ends.logits + row * head.n, from, until);
        });
    }

    void round(Team& team, const Matrix& m, const float* x) const {
        if (m.bits != 32) team.each(s.rows, [&](i64 row) { round_row(m, to(m, x), row); });
    }

    // The normed stream, as the next product takes it.
    void listen(Team& team, const Norm& norm, const Matrix& next) const {
        float* out = s.norm_first ? y : s.x;
        team.each(s.rows, [&](i64 row) {
            norm(s.x + row * s.d, out + row * s.d, s.d);
            round_row(next, to(next, out), row);
        });
    }

    void multiply(Team& team, const Matrix& m, const float* x, float* out) const {
        const i64 step = piece(m, s.threads);
        team.each(n_pieces(m), [&](i64 i) {
            columns(m, to(m, x), s.rows, i * step, smaller(m.n, (i + 1) * step), {out, m.n, m.bias, false});
        });
    }

    // What a step found joins the stream.
    void speak(Team& team, const Matrix& m) const {
        round(team, m, heard);
        const i64 step = piece(m, s.threads);
        team.each(n_pieces(m), [&](i64 i) {
            columns(m, to(m, heard), s.rows, i * step, smaller(m.n, (i + 1) * step), {s.x, s.d, m.bias, true});
        });
    }

    Blocks blocks(i64 layer) const {
        const float* k = s.pool + layer * s.layer_stride;
        return {k, k + s.value_stride, s.block, s.width, s.block_stride, s.head_stride, s.block_stride, s.head_stride};
    }

    // One row's queries of the heads that share keys, normed and turned, over what was said before and the token's own.
    void remember_and_look(const Attention& a, i64 layer, i64 task) const {
        const i64 row = task / s.kv_heads, kv = task % s.kv_heads, group = s.heads / s.kv_heads, count = s.pages.counts[row];
        const int32_t* table = s.pages.table + row * s.pages.width;
        float* q = wide + row * a.in.n + kv * group * s.width;
        float *k = wide + row * a.in.n + (s.heads + kv) * s.width, *v = k + s.kv_heads * s.width;
        prepare(a.k_norm, k, row);
        for (i64 h = 0; h < group; h++) prepare(a.q_norm, q + h * s.width, row);
        float* held = s.pool + layer * s.layer_stride + table[count / s.block] * s.block_stride + kv * s.head_stride +
                      count % s.block * s.width;
        memcpy(held, k, sizeof(float) * s.width);
        memcpy(held + s.value_stride, v, sizeof(float) * s.width);
        float* out = heard + (row * s.heads + kv * group) * s.width;
        look(q, out, group, blocks(layer), kv, table, count + 1, s.window, a.scale);
    }

    void prepare(const Norm& norm, float* head, i64 row) const {
        if (norm.weight) norm(head, head, s.width);
        const i64 at = (s.ends ? s.pages.counts[row] : row) * s.n_turns;
        if (s.n_turns) turn(head, s.cos + at, s.sin + at, s.width, s.n_turns);
    }

    void look_at_source(const Attention& a, i64 layer, i64 task) const {
        const i64 row = task / s.kv_heads, kv = task % s.kv_heads, group = s.heads / s.kv_heads;
        float* q = wide + (row * s.heads + kv * group) * s.width;
        for (i64 h = 0; a.q_norm.weight && h < group; h++) a.q_norm(q + h * s.width, q + h * s.width, s.width);
        look(q, heard + (row * s.heads + kv * group) * s.width, group, blocks(layer), kv, s.source.table + row * s.source.width,
             s.source.counts[row], 0, a.scale);
    }

    void think(Team& team, const Layer& layer, const float* from) const {
        const Matrix& m = layer.up;
        const i64 d_ff = layer.down.d, step = piece(m, s.threads);
        const Input in = to(m, from);
        team.each((d_ff + step - 1) / step, [&](i64 i) {
            const i64 c = i * step, n = smaller(d_ff, c + step) - c;
            float* out = s.is_gated ? wide : heard;
            columns(m, in, s.rows, c, c + n, {out, m.n, m.bias, false});
            if (s.is_gated) columns(m, in, s.rows, d_ff + c, d_ff + c + n, {out, m.n, m.bias, false});
            for (i64 row = 0; row < s.rows; row++) {
                float* x = out + row * m.n + c;
                activate(x, s.is_gated ? x + d_ff : nullptr, n, s.activation);
                if (s.is_gated) memcpy(heard + row * d_ff + c, x, sizeof(float) * n);
            }
        });
    }
};

}  // namespace

extern "C" void one_token(const Step* step) {
    const Stack stack(*step);
    together(step->threads, step->n_layers * PHASES + 4, [&](Team& team) { stack.run(team); });
    if (step->ends) stack.choose();
}
