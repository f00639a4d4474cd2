// Attention of one query a row over keys and values in the blocks of a pool.

#pragma once

#include "threads.h"

namespace {

// Where keys and values lie: `size` slots a block, `width` numbers a slot; the others are strides.
struct KeyValueBlocks {
    const float *k, *v;
    i64 size, width, k_block, k_head, v_block, v_head;
};

// `group` query heads of one row, which share key/value head `kv`, over the tokens before `end` (the last `window` of them, if not
// 0). Block by block with a running softmax, so that keys and values are read once.
void attend_paged(const float* q, float* out, i64 group, const KeyValueBlocks& blocks, i64 kv, const int32_t* table, i64 end,
                  i64 window, float scale) {
    const i64 width = blocks.width, block = blocks.size, padded = (block + WIDE - 1) / WIDE * WIDE;
    const i64 start = window && end > window ? end - window : 0;
    memset(out, 0, sizeof(float) * group * width);
    if (end <= start) return;
    // the weights of one head in one block; then, of each head, the largest score so far and the sum of the weights
    float* weights = (float*)__builtin_alloca(sizeof(float) * (padded + 2 * group));
    float *largest = weights + padded, *sums = largest + group;
    for (i64 h = 0; h < group; h++) largest[h] = -INFINITY, sums[h] = 0;
    for (i64 first = start / block * block; first < end; first += block) {
        const i64 page = table[first / block];
        const i64 from = start > first ? start - first : 0, until = end - first < block ? end - first : block;
        const float* keys = blocks.k + page * blocks.k_block + kv * blocks.k_head;
        const float* values = blocks.v + page * blocks.v_block + kv * blocks.v_head;
        for (i64 h = 0; h < group; h++) {
            float top = largest[h];
            for (i64 i = 0; i < padded; i++) weights[i] = -INFINITY;
            for (i64 i = from; i < until; i++) {
                Wide products = {};
                i64 e = 0;
                for (; e + WIDE <= width; e += WIDE) 
                    products = fma(load(q + h * width + e), load(keys + i * width + e), products);
                float score = sum(products);
                for (; e < width; e++) score = fma(q[h * width + e], keys[i * width + e], score);
                weights[i] = score *= scale;
                top = score > top ? score : top;
            }
            const float decay = largest[h] == top ? 1.f : std::exp(largest[h] - top);
            largest[h] = top;
            Wide added = {};
            for (i64 i = 0; i < padded; i += WIDE) {
                Wide score = load(weights + i);
                Wide weight = exponential(score - top);
                weight = score == -INFINITY ? Wide{} : weight;
                store(weights + i, weight);
                added += weight;
            }
            sums[h] = fma(sums[h], decay, sum(added));
            float* o = out + h * width;
            i64 e = 0;
            for (; e + WIDE <= width; e += WIDE) {
                Wide total = load(o + e) * decay;
                for (i64 i = from; i < until; i++) 
                    total = fma(load(values + i * width + e), all(weights[i]), total);
                store(o + e, total);
            }
            for (; e < width; e++) {
                float total = o[e] * decay;
                for (i64 i = from; i < until; i++) total = fma(values[i * width + e], weights[i], total);
                o[e] = total;
            }
        }
    }
    for (i64 h = 0; h < group; h++)
        for (i64 e = 0; e < width; e++) out[h * width + e] /= sums[h];
}

}  // namespace

// One query a row and head. A task is all query heads that share a key/value head, or a single one if tasks would be too few.
extern "C" void paged_attention(const float* q, const float* k, const float* v, const int32_t* table, const int32_t* counts,
                                float* out, i64 rows, i64 heads, i64 kv_heads, i64 width, i64 block, i64 table_width,
                                i64 k_block, i64 k_head, i64 v_block, i64 v_head, float scale, i64 window, int threads) {
    const KeyValueBlocks blocks = {k, v, block, width, k_block, k_head, v_block, v_head};
    const i64 group = heads / kv_heads, most = rows * kv_heads >= 4 * threads ? group : 1, parts = group / most;
    i64 longest = 0;
    for (i64 b = 0; b < rows; b++) longest += counts[b];
    parallel(threads_for(longest * heads * width, threads), 1, [&](Team& team) {
        team.for_each(rows * kv_heads * parts, [&](i64 task) {
            const i64 b = task / (kv_heads * parts), kv = task / parts % kv_heads, head = kv * group + task % parts * most;
            const i64 at = (b * heads + head) * width;
            attend_paged(q + at, out + at, most, blocks, kv, table + b * table_width, counts[b], window, scale);
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
