// Attention of many queries over many keys, text by text and head by head, in blocks that fit the caches.

#pragma once

#include "softmax.h"
#include "threads.h"

namespace {

constexpr int PANEL = 4 * WIDE;             // keys side by side
constexpr i64 KEYS = 512, QUERIES = 128;    // in one block of keys, and in one task
static_assert(KEYS % PANEL == 0);

// Some queries of one text and head, and all its keys. `_row` is the stride from one token to the next.
struct Part {
    const float *q, *k, *v;
    float* out;
    i64 q_row, k_row, v_row, out_row, width, queries, keys;
    float scale;
    i64 seen;  // keys that the first query sees; each further query sees one more, up to all
};

// Transpose a square of registers: interleave its two halves log2(WIDE) times.
inline void transpose(Wide rows[WIDE]) {
    constexpr auto lanes = std::make_index_sequence<WIDE>();
    for (int times = 1; times < WIDE; times *= 2) {
        Wide next[WIDE];
        for (int i = 0; i < WIDE / 2; i++) {
            next[2 * i] = interleave<0>(rows[i], rows[i + WIDE / 2], lanes);
            next[2 * i + 1] = interleave<1>(rows[i], rows[i + WIDE / 2], lanes);
        }
        memcpy(rows, next, sizeof next);
    }
}

// Keys into panels: the first number of each of PANEL keys, then the second number of each, and so on.
void pack_keys(const float* k, i64 row, i64 n, i64 width, float* panels) {
    for (i64 first = 0; first < n; first += WIDE)
        for (i64 e = 0; e < width; e += WIDE) {
            Wide rows[WIDE];
            for (int i = 0; i < WIDE; i++) rows[i] = first + i < n ? load(k + (first + i) * row + e) : Wide{};
            transpose(rows);
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

// R rows of weights times C registers of values. `decays`: added to the earlier result times its decay. `sums`: divided by them.
template <int R, int C>
inline void weighted_sum(const float* weights, const float* v, i64 n, i64 width, float* out, i64 out_row, const float* decays, const float* sums) {
    Wide totals[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) totals[r][c] = decays ? load(out + r * out_row + c * WIDE) * decays[r] : Wide{};
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

void attend_text(const Part& part) {
    const i64 width = part.width, room = smaller((part.keys + PANEL - 1) / PANEL * PANEL, KEYS);
    float* panels = (float*)scratch(sizeof(float) * (2 * room * width + ROWS * KEYS + 2 * part.queries));
    float *values = panels + room * width, *scores = values + room * width;
    float *tops = scores + ROWS * KEYS, *totals = tops + part.queries;
    std::fill_n(tops, part.queries, -INFINITY);
    std::fill_n(totals, part.queries, 0.f);
    const i64 all_seen = smaller(part.keys, part.seen + part.queries - 1);
    for (i64 first = 0; first < all_seen; first += KEYS) {
        const i64 n = smaller(all_seen - first, KEYS);
        pack_keys(part.k + first * part.k_row, part.k_row, n, width, panels);
        for (i64 i = 0; i < n; i++) memcpy(values + i * width, part.v + (first + i) * part.v_row, sizeof(float) * width);
        for (i64 t = 0; t < part.queries; t += ROWS)
            dispatch<ROWS>(smaller(part.queries - t, ROWS), [&](auto count) {
                constexpr int R = decltype(count)::value;
                const i64 seen = smaller(part.keys, part.seen + t + R - 1), now = smaller(n, seen - first);
                if (now <= 0) return;
                for (i64 key = 0; key < now; key += PANEL)
                    dispatch<4>(smaller((now - key + WIDE - 1) / WIDE, 4), [&](auto registers) {
                        score<R, decltype(registers)::value>(part.q + t * part.q_row, part.q_row, panels + key * width, width,
                                                             part.scale, scores + key);
                    });
                float decays[R];
                for (int r = 0; r < R; r++) {
                    const i64 own = smaller(now, std::max<i64>(part.seen + t + r - first, 0));
                    decays[r] = running_softmax(scores + r * KEYS, own, now, tops[t + r], totals[t + r]);
                }
                const bool is_last = first + now >= seen;
                for (i64 e = 0; e < width; e += 4 * WIDE)
                    dispatch<4>(smaller((width - e) / WIDE, 4), [&](auto registers) {
                        weighted_sum<R, decltype(registers)::value>(scores, values + e, now, width, part.out + t * part.out_row + e,
                                                           part.out_row, first ? decays : nullptr, is_last ? totals + t : nullptr);
                    });
            });
    }
}

}  // namespace

// Text i has the queries q_starts[i] .. q_starts[i + 1] - 1 of one row, and the keys of k_starts likewise; without starts, `queries`
// and `keys` each. The width is a multiple of WIDE. If causal, each query sees itself and the keys before it.
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
        const i64 step = equal_share(n, QUERIES);
        for (i64 t = 0; t < n; t += step)
            pieces.push_back({from + t, smaller(step, n - t), k_from, n_keys, is_causal ? t + 1 : n_keys});
        products += n * n_keys * heads * width;
    }
    parallel(threads_for(products, threads), 1, [&](Team& team) {
        team.for_each(pieces.size() * heads, [&](i64 task) {
            const Piece& piece = pieces[task / heads];
            const i64 head = task % heads, kv = head / (heads / kv_heads);
            attend_text({q + piece.q * q_row + head * q_head, k + piece.k * k_row + kv * k_head, v + piece.k * v_row + kv * v_head,
                    out + (piece.q * heads + head) * width, q_row, k_row, v_row, heads * width, width, piece.n, piece.keys, scale,
                    piece.seen});
        });
    });
}
