// Attention of many queries over many keys, text by text and head by head, by fused multiply-adds on what fits the caches.

#pragma once

#include "threads.h"

namespace {

constexpr int PANEL = 4 * WIDE;             // keys that lie side by side
constexpr i64 KEYS = 512, QUERIES = 128;    // at a time: of a text's, and of a piece of work
static_assert(KEYS % PANEL == 0);

// Some queries of one text and head, and all its keys; the numbers of a token lie side by side, one `row` after the other.
struct Part {
    const float *q, *k, *v;
    float* out;
    i64 q_row, k_row, v_row, out_row, width, queries, keys;
    float scale;
    i64 seen;  // keys that the first query sees, each further one seeing one more; or all of them
};

inline Wide larger(Wide a, Wide b) { return a > b ? a : b; }

inline float largest(Wide value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#else
    float parts[WIDE];
    memcpy(parts, &value, sizeof value);
    return *std::max_element(parts, parts + WIDE);
#endif
}

// a0 b0 a1 b1 .., the first half of them or the second.
template <int HALF, size_t... I>
inline Wide deal(Wide a, Wide b, std::index_sequence<I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (int)(HALF * WIDE / 2 + I / 2 + I % 2 * WIDE)...);
#else
    return __builtin_shuffle(a, b, WideInt{(int)(HALF * WIDE / 2 + I / 2 + I % 2 * WIDE)...});
#endif
}

// Rows become columns: dealt into each other log2(WIDE) times, as cards are.
inline void turn(Wide rows[WIDE]) {
    constexpr auto lanes = std::make_index_sequence<WIDE>();
    for (int times = 1; times < WIDE; times *= 2) {
        Wide dealt[WIDE];
        for (int i = 0; i < WIDE / 2; i++) {
            dealt[2 * i] = deal<0>(rows[i], rows[i + WIDE / 2], lanes);
            dealt[2 * i + 1] = deal<1>(rows[i], rows[i + WIDE / 2], lanes);
        }
        memcpy(rows, dealt, sizeof dealt);
    }
}

// Keys into panels: the first number of each of PANEL keys, then the second.
void lay(const float* k, i64 row, i64 n, i64 width, float* panels) {
    for (i64 first = 0; first < n; first += WIDE)
        for (i64 e = 0; e < width; e += WIDE) {
            Wide rows[WIDE];
            for (int i = 0; i < WIDE; i++) rows[i] = first + i < n ? load(k + (first + i) * row + e) : Wide{};
            turn(rows);
            float* to = panels + first / PANEL * PANEL * width + e * PANEL + first % PANEL;
            for (int i = 0; i < WIDE; i++) store(to + i * PANEL, rows[i]);
        }
}

// Scores of R queries and C registers of keys.
template <int R, int C>
inline void score(const float* q, i64 q_row, const float* panel, i64 width, float scale, float* to) {
    Wide sums[R][C] = {};
    for (i64 e = 0; e < width; e++) {
        Wide keys[C];
        for (int c = 0; c < C; c++) keys[c] = load(panel + e * PANEL + c * WIDE);
        for (int r = 0; r < R; r++) {
            const Wide one = all(q[r * q_row + e]);
            for (int c = 0; c < C; c++) sums[r][c] = fma(one, keys[c], sums[r][c]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(to + r * KEYS + c * WIDE, sums[r][c] * scale);
}

// R rows of weights times the values, C registers of them: added to what is there, faded, and divided by the sums at the end.
template <int R, int C>
inline void mix(const float* weights, const float* v, i64 n, i64 width, float* out, i64 out_row, const float* fades, const float* sums) {
    Wide totals[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) totals[r][c] = fades ? load(out + r * out_row + c * WIDE) * fades[r] : Wide{};
    for (i64 i = 0; i < n; i++) {
        Wide values[C];
        for (int c = 0; c < C; c++) values[c] = load(v + i * width + c * WIDE);
        for (int r = 0; r < R; r++) {
            const Wide one = all(weights[r * KEYS + i]);
            for (int c = 0; c < C; c++) totals[r][c] = fma(one, values[c], totals[r][c]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(out + r * out_row + c * WIDE, sums ? totals[r][c] / sums[r] : totals[r][c]);
}

// A row's scores become weights: of `n` keys, zeros up to `room`. Says by how much earlier ones fade.
inline float soften(float* row, i64 n, i64 room, float& top, float& total) {
    if (n % WIDE)
        for (i64 i = n; i % WIDE; i++) row[i] = -INFINITY;
    Wide tops = all(top);
    for (i64 i = 0; i < n; i += WIDE) tops = larger(load(row + i), tops);
    const float before = top;
    top = largest(tops);
    Wide added = {};
    for (i64 i = 0; i < n; i += WIDE) {
        const Wide scores = load(row + i);
        Wide weights = exponential(scores - top);
        weights = scores == -INFINITY ? Wide{} : weights;
        store(row + i, weights);
        added += weights;
    }
    for (i64 i = (n + WIDE - 1) / WIDE * WIDE; i < room; i++) row[i] = 0;
    const float fade = before == top ? 1.f : std::exp(before - top);
    total = fma(total, fade, sum(added));
    return fade;
}

void attend(const Part& part) {
    const i64 width = part.width, room = smaller((part.keys + PANEL - 1) / PANEL * PANEL, KEYS);
    float* panels = (float*)scratch(sizeof(float) * (2 * room * width + ROWS * KEYS + 2 * part.queries));
    float *values = panels + room * width, *scores = values + room * width;
    float *tops = scores + ROWS * KEYS, *totals = tops + part.queries;
    std::fill_n(tops, part.queries, -INFINITY);
    std::fill_n(totals, part.queries, 0.f);
    const i64 all_seen = smaller(part.keys, part.seen + part.queries - 1);
    for (i64 first = 0; first < all_seen; first += KEYS) {
        const i64 n = smaller(all_seen - first, KEYS);
        lay(part.k + first * part.k_row, part.k_row, n, width, panels);
        for (i64 i = 0; i < n; i++) memcpy(values + i * width, part.v + (first + i) * part.v_row, sizeof(float) * width);
        for (i64 t = 0; t < part.queries; t += ROWS)
            counted<ROWS>(smaller(part.queries - t, ROWS), [&](auto count) {
                constexpr int R = decltype(count)::value;
                const i64 seen = smaller(part.keys, part.seen + t + R - 1), now = smaller(n, seen - first);
                if (now <= 0) return;
                for (i64 key = 0; key < now; key += PANEL)
                    counted<4>(smaller((now - key + WIDE - 1) / WIDE, 4), [&](auto registers) {
                        score<R, decltype(registers)::value>(part.q + t * part.q_row, part.q_row, panels + key * width, width,
                                                             part.scale, scores + key);
                    });
                float fades[R];
                for (int r = 0; r < R; r++) {
                    const i64 own = smaller(now, std::max<i64>(part.seen + t + r - first, 0));
                    fades[r] = soften(scores + r * KEYS, own, now, tops[t + r], totals[t + r]);
                }
                const bool is_last = first + now >= seen;
                for (i64 e = 0; e < width; e += 4 * WIDE)
                    counted<4>(smaller((width - e) / WIDE, 4), [&](auto registers) {
                        mix<R, decltype(registers)::value>(scores, values + e, now, width, part.out + t * part.out_row + e,
                                                           part.out_row, first ? fades : nullptr, is_last ? totals + t : nullptr);
                    });
            });
    }
}

}  // namespace

// `texts` of them: text i has the queries starts[i] .. starts[i + 1] - 1 of one row and the keys likewise, or where nothing says so
// `queries` and `keys` each. The width is a multiple of WIDE. Of a causal one each query sees itself and the keys before it.
extern "C" void text_attention(const float* q, const float* k, const float* v, float* out, const int32_t* q_starts,
                               const int32_t* k_starts, i64 texts, i64 queries, i64 keys, i64 heads, i64 kv_heads, i64 width,
                               i64 q_row, i64 q_head, i64 k_row, i64 k_head, i64 v_row, i64 v_head, float scale, int is_causal,
                               int threads) {
    struct Piece {
        i64 q, n, k, keys, seen;
    };
    std::vector<Piece> pieces;
    i64 products = 0;
    for (i64 i = 0; i < texts; i++) {
        const i64 from = q_starts ? q_starts[i] : i * queries, n = q_starts ? q_starts[i + 1] - from : queries;
        const i64 k_from = k_starts ? k_starts[i] : i * keys, n_keys = k_starts ? k_starts[i + 1] - k_from : keys;
        if (!n_keys) memset(out + from * heads * width, 0, sizeof(float) * n * heads * width);
        if (!n || !n_keys) continue;
        const i64 step = share(n, QUERIES);
        for (i64 t = 0; t < n; t += step)
            pieces.push_back({from + t, smaller(step, n - t), k_from, n_keys, is_causal ? t + 1 : n_keys});
        products += n * n_keys * heads * width;
    }
    together(enough(products, threads), 1, [&](Team& team) {
        team.each(pieces.size() * heads, [&](i64 task) {
            const Piece& piece = pieces[task / heads];
            const i64 head = task % heads, kv = head / (heads / kv_heads);
            attend({q + piece.q * q_row + head * q_head, k + piece.k * k_row + kv * k_head, v + piece.k * v_row + kv * v_head,
                    out + (piece.q * heads + head) * width, q_row, k_row, v_row, heads * width, width, piece.n, piece.keys, scale,
                    piece.seen});
        });
    });
}
