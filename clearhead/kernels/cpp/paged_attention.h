// Attention of one query a row over keys and values in the blocks of a pool.

#pragma once

#include "softmax.h"
#include "threads.h"

namespace {

// Where keys and values lie: `size` slots a block, `width` numbers a slot; the others are strides.
struct KeyValueBlocks {
    const float *k, *v;
    i64 size, width, k_block, k_head, v_block, v_head;
};

// One row's query heads that share a key/value head, their results, and the blocks of its tokens, which are those before `end`.
struct PagedRow {
    const float* q;
    float* out;
    const int32_t* table;
    i64 end;
};

constexpr i64 MOST_ROWS = 8;  // that are computed together, block by block: those of drafts and beams often read the same blocks

// Attention over one block at a time with a running softmax, for `group` query heads of each of `n` rows, which share key/value head
// `kv`. WIDTH is that of a head, if the compiler knows it, else 0.
template <int WIDTH>
struct PagedHeads {
    const KeyValueBlocks& blocks;
    const i64 group, kv;
    const float scale;
    const i64 padded = (blocks.size + WIDE - 1) / WIDE * WIDE;

    i64 head_width() const { return WIDTH ? WIDTH : blocks.width; }

    // Numbers of memory that `run` needs.
    i64 room(i64 n) const { return n * group * (padded + 3); }

    const float* keys(i64 page) const { return blocks.k + page * blocks.k_block + kv * blocks.k_head; }
    const float* values(i64 page) const { return blocks.v + page * blocks.v_block + kv * blocks.v_head; }

    // Scores of one query and the keys from .. until - 1 of a block; -inf for all others. A score is summed up in the same order
    // whether it is computed alone or with its neighbours.
    void block_scores(const float* q, const float* keys, i64 from, i64 until, float* scores) const {
        const i64 width = head_width();
        i64 i = from / WIDE * WIDE;
        for (; i + WIDE <= blocks.size && i < until; i += WIDE) {
            Wide parts[WIDE] = {};
            const float* first = keys + i * width;
            i64 e = 0;
            for (; e + WIDE <= width; e += WIDE) {
                const Wide some = load(q + e);
                for (int j = 0; j < WIDE; j++) parts[j] = fma(some, load(first + j * width + e), parts[j]);
            }
            Wide found = sums(parts);
            if (width % WIDE)
                for (; e < width; e++)
                    for (int j = 0; j < WIDE; j++) found[j] = fma(q[e], first[j * width + e], found[j]);
            store(scores + i, found * scale);
        }
        for (; i < until; i++) {
            Wide parts = {};
            i64 e = 0;
            for (; e + WIDE <= width; e += WIDE) parts = fma(load(q + e), load(keys + i * width + e), parts);
            scores[i] = sum(parts);
            for (; e < width; e++) scores[i] = fma(q[e], keys[i * width + e], scores[i]);
            scores[i] *= scale;
        }
        for (i = 0; i < from; i++) scores[i] = -INFINITY;
        for (i = until; i < padded; i++) scores[i] = -INFINITY;
    }

    // out = out * decays + weights * values, for R heads and C registers of their results.
    template <int R, int C>
    void add(const float* weights, const float* values, i64 from, i64 until, const float* decays, float* out) const {
        const i64 width = head_width();
        Wide totals[R][C];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) totals[r][c] = load(out + r * width + c * WIDE) * decays[r];
        for (i64 i = from; i < until; i++)
            for (int c = 0; c < C; c++) {
                const Wide value = load(values + i * width + c * WIDE);
                for (int r = 0; r < R; r++) totals[r][c] = fma(value, all(weights[r * padded + i]), totals[r][c]);
            }
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) store(out + r * width + c * WIDE, totals[r][c]);
    }

    // The same for all heads of one row.
    void add_values(const float* weights, const float* values, i64 from, i64 until, const float* decays, float* out) const {
        const i64 width = head_width();
        constexpr i64 HEADS = 4, REGISTERS = WIDE == 16 ? 4 : 2;
        i64 e = 0;
        for (; e + WIDE <= width; e += REGISTERS * WIDE)
            for (i64 h = 0; h < group; h += HEADS)
                dispatch<REGISTERS>(smaller((width - e) / WIDE, REGISTERS), [&](auto registers) {
                    dispatch<HEADS>(smaller(group - h, HEADS), [&](auto heads) {
                        add<decltype(heads)::value, decltype(registers)::value>(weights + h * padded, values + e, from, until, decays + h,
                                                                               out + h * width + e);
                    });
                });
        for (e = width / WIDE * WIDE; e < width; e++)
            for (i64 h = 0; h < group; h++) {
                float& o = out[h * width + e];
                o *= decays[h];
                for (i64 i = from; i < until; i++) o = fma(values[i * width + e], weights[h * padded + i], o);
            }
    }

    // Over the tokens before each row's end (the last `window` of them, if not 0). A row reads its keys and values once; a block that
    // several rows read is in the cache after the first of them. Rows and heads are independent of each other: the processor
    // works on several at once, so each part is done for all of them in turn.
    void run(const PagedRow* rows, i64 n, i64 window, float* weights) const {
        const i64 width = head_width();
        float *decays = weights + n * group * padded, *tops = decays + n * group, *totals = tops + n * group;
        i64 starts[MOST_ROWS], start = INT64_MAX, end = 0;
        for (i64 row = 0; row < n; row++) {
            const i64 last = rows[row].end;
            starts[row] = window && last > window ? last - window : 0;
            start = smaller(start, starts[row]), end = std::max(end, last);
            memset(rows[row].out, 0, sizeof(float) * group * width);
            for (i64 h = 0; h < group; h++) tops[row * group + h] = -INFINITY, totals[row * group + h] = 0;
        }
        for (i64 first = start / blocks.size * blocks.size; first < end; first += blocks.size) {
            const auto for_rows = [&](const auto& work) {
                for (i64 row = 0; row < n; row++) {
                    const i64 from = std::max<i64>(starts[row] - first, 0), until = smaller(rows[row].end - first, blocks.size);
                    if (from < until) work(rows[row], row * group, from, until, rows[row].table[first / blocks.size]);
                }
            };
            const auto prefetch = [&](i64 at, i64 page, const float* (PagedHeads::*place)(i64) const) {
                const i64 row = at / group + 1, block = first / blocks.size;
                i64 next = page;
                if (row < n) { if (first < rows[row].end) next = rows[row].table[block]; }
                else if (first + blocks.size < rows[0].end) next = rows[0].table[block + 1];
                if (next == page) return;
                const char* from = (const char*)(this->*place)(next);
                for (i64 i = 0; i < blocks.size * width * 4; i += 64) __builtin_prefetch(from + i);
            };
            for_rows([&](const PagedRow& row, i64 at, i64 from, i64 until, i64 page) {
                prefetch(at, page, &PagedHeads::keys);
                for (i64 h = 0; h < group; h++)
                    block_scores(row.q + h * width, keys(page), from, until, weights + (at + h) * padded);
            });
            for_rows([&](const PagedRow&, i64 at, i64, i64, i64) {
                for (i64 h = at; h < at + group; h++)
                    decays[h] = running_softmax(weights + h * padded, padded, padded, tops[h], totals[h]);
            });
            for_rows([&](const PagedRow& row, i64 at, i64 from, i64 until, i64 page) {
                prefetch(at, page, &PagedHeads::values);
                add_values(weights + at * padded, values(page), from, until, decays + at, row.out);
            });
        }
        for (i64 row = 0; row < n; row++)
            for (i64 h = 0; rows[row].end > 0 && h < group; h++)
                for (i64 e = 0; e < width; e++) rows[row].out[h * width + e] /= totals[row * group + h];
    }
};

void attend_paged(const PagedRow* rows, i64 n, i64 group, const KeyValueBlocks& blocks, i64 kv, i64 window, float scale) {
    const auto run = [&](const auto& heads) { heads.run(rows, n, window, (float*)__builtin_alloca(sizeof(float) * heads.room(n))); };
    switch (blocks.width) {
        case 32: return run(PagedHeads<32>{blocks, group, kv, scale});
        case 64: return run(PagedHeads<64>{blocks, group, kv, scale});
        case 128: return run(PagedHeads<128>{blocks, group, kv, scale});
        default: return run(PagedHeads<0>{blocks, group, kv, scale});
    }
}

// How many rows a task takes, so that there are enough tasks for all threads.
inline i64 rows_together(i64 rows, i64 kv_heads, int threads) {
    const i64 fair = threads == 1 ? MOST_ROWS : std::max<i64>(rows * kv_heads / (4 * threads), 1);
    return equal_share(rows, smaller(fair, MOST_ROWS));
}

}  // namespace

// One query a row and head. A task is all query heads that share a key/value head, of some rows, or a single one if tasks would be too few.
extern "C" void paged_attention(const float* q, const float* k, const float* v, const int32_t* table, const int32_t* counts,
                                float* out, i64 rows, i64 heads, i64 kv_heads, i64 width, i64 block, i64 table_width,
                                i64 k_block, i64 k_head, i64 v_block, i64 v_head, float scale, i64 window, int threads) {
    const KeyValueBlocks blocks = {k, v, block, width, k_block, k_head, v_block, v_head};
    const i64 group = heads / kv_heads, most = rows * kv_heads >= 4 * threads ? group : 1, parts = group / most;
    const i64 step = rows_together(rows, kv_heads, threads);
    i64 longest = 0;
    for (i64 b = 0; b < rows; b++) longest += counts[b];
    parallel(threads_for(longest * heads * width, threads), 1, [&](Team& team) {
        team.for_each((rows + step - 1) / step * kv_heads * parts, [&](i64 task) {
            const i64 first = task / (kv_heads * parts) * step, kv = task / parts % kv_heads, head = kv * group + task % parts * most;
            PagedRow together[MOST_ROWS];
            i64 n = 0;
            for (i64 b = first; b < smaller(first + step, rows); b++) {
                const i64 at = (b * heads + head) * width;
                together[n++] = {q + at, out + at, table + b * table_width, counts[b]};
            }
            attend_paged(together, n, most, blocks, kv, window, scale);
        });
    });
}

// Store the key and value of one token a row in its block; nothing for a negative position.
extern "C" void paged_store(const float* k, const float* v, float* k_pool, float* v_pool, const int32_t* table,
                            const int32_t* positions, i64 rows, i64 kv_heads, i64 width, i64 block, i64 table_width, i64 k_block,
                            i64 k_head, i64 v_block, i64 v_head, i64 k_row, i64 v_row) {
    for (i64 b = 0; b < rows; b++) {
        if (positions[b] < 0) continue;
        const i64 page = table[b * table_width + positions[b] / block], slot = positions[b] % block;
        for (i64 h = 0; h < kv_heads; h++) {
            memcpy(k_pool + page * k_block + h * k_head + slot * width, k + b * k_row + h * width, sizeof(float) * width);
            memcpy(v_pool + page * v_block + h * v_head + slot * width, v + b * v_row + h * width, sizeof(float) * width);
        }
    }
}
