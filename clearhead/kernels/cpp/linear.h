// x W^T + b for every kind of weight, by all threads.

#pragma once

#include "matrix.h"
#include "threads.h"

#if TILES
#include "packed_tiles.h"
#else
#include "packed_rows.h"
#endif

namespace {

// C columns of the result for all rows, a few rows at a time; weights in row-major order.
template <int C, class Weights>
inline void columns(const Weights& w, const Input& in, i64 rows, i64 c, const Target& target) {
    const i64 most = equal_share(rows, Weights::MOST);
    for (i64 row = 0; row < rows; row += most)
        dispatch<Weights::MOST>(smaller(rows - row, most), [&](auto count) {
            constexpr int R = decltype(count)::value;
            float results[C][R];
            dots<C, R>(w, in, row, c, results);
            for (int r = 0; r < R; r++)
                for (int i = 0; i < C; i++) target.put(row + r, c + i, results[i][r]);
        });
}

// Columns from .. to - 1. For a single row, one column at a time: weights are then read in the order of memory.
template <class Weights>
inline void columns(const Weights& w, const Input& in, i64 rows, i64 from, i64 to, const Target& target) {
    i64 c = from;
    for (; rows > 1 && c + Weights::COLUMNS <= to; c += Weights::COLUMNS) columns<Weights::COLUMNS>(w, in, rows, c, target);
    for (; c < to; c++) columns<1>(w, in, rows, c, target);
}

inline void columns(const Matrix& m, const Input& in, i64 rows, i64 from, i64 to, const Target& target) {
    if (m.bits == 32) columns(Float{(const float*)m.q, m.d}, in, rows, from, to, target);
#if TILES
    const auto packed = [&](const auto& weights) {
        m.inputs == 8 ? tiles<1>(weights, in, rows, from, to, target) : tiles<2>(weights, in, rows, from, to, target);
    };
    if (m.bits == 8) packed(Int8{(const int8_t*)m.q, m.scales, m.n, m.d});
    if (m.bits == 4) packed(Int4{(const uint8_t*)m.q, m.scales, m.mins, m.n, m.d});
#else
    if (m.bits == 8) columns(Int8{(const int8_t*)m.q, m.scales, m.d}, in, rows, from, to, target);
    if (m.bits == 4) columns(Int4{(const uint8_t*)m.q, m.scales, m.mins, m.d}, in, rows, from, to, target);
#endif
}

// One row of a weight as float32, for an embedding; 32 or 8 bits.
void unpack(const Matrix& m, i64 row, float* out) {
    if (m.bits == 32) {
        memcpy(out, (const float*)m.q + row * m.d, sizeof(float) * m.d);
        return;
    }
    const int8_t* q = (const int8_t*)m.q;
    const i64 spans = (m.d + Int8::SPAN - 1) / Int8::SPAN;
#if TILES
    const i64 first = row / TILE * TILE, width = smaller(TILE, m.n - first), c = row - first, padded = (m.d + 3) / 4 * 4;
    for (i64 i = 0; i < m.d; i++)
        out[i] = q[first * padded + (i / 4 * width + c) * 4 + i % 4] * half_to_float(m.scales[first * spans + i / Int8::SPAN * width + c]);
#else
    for (i64 i = 0; i < m.d; i++) out[i] = q[row * m.d + i] * half_to_float(m.scales[row * spans + i / Int8::SPAN]);
#endif
}

// Columns that a thread takes at a time.
inline i64 piece(const Matrix& m, int threads) {
    const i64 fair = (m.n + threads - 1) / threads, some = PIECE * 8 / (m.d * m.bits);
    return (smaller(fair, some) + TILE) / TILE * TILE;
}

Input input(const Matrix& m, const float* x, void* memory, i64 rows) {
    return m.bits == 4 ? input(x, memory, rows, m.d, Int4::SPAN, Int4::SCALES) : input(x, memory, rows, m.d, Int8::SPAN, Int8::SCALES);
}

inline void round_row(const Matrix& m, const Input& in, i64 row) {
    if (m.bits == 8) m.inputs == 8 ? round_row<1, Int8>(in, row, m.d) : round_row<2, Int8>(in, row, m.d);
    if (m.bits == 4) m.inputs == 8 ? round_row<1, Int4>(in, row, m.d) : round_row<2, Int4>(in, row, m.d);
}

void product(const Matrix& m, const float* x, float* out, i64 rows, int threads) {
    const Input in = input(m, x, scratch(room_for(rows, m.d)), rows);
    const i64 step = piece(m, threads);
    parallel(threads_for(rows * m.n * m.d, threads), 2, [&](Team& team) {
        if (m.bits != 32) team.for_each(rows, [&](i64 row) { round_row(m, in, row); });
        team.for_each((m.n + step - 1) / step, [&](i64 i) {
            columns(m, in, rows, i * step, smaller(m.n, (i + 1) * step), {out, m.n, m.bias, false});
        });
    });
}

}  // namespace

// Whether packed weights must be stored in tiles (quantization/integer.py).
extern "C" {
extern const int has_tiles;
const int has_tiles = TILES;
}

extern "C" void linear_f32(const float* x, const float* w, const float* bias, float* out, i64 rows, i64 n, i64 d, int threads) {
    product({w, nullptr, nullptr, bias, n, d, 32, 32}, x, out, rows, threads);
}

// 0: done. 1: not done, because there is no weight, or no input, of that many bits.
extern "C" int linear_packed(const float* x, const void* q, const uint16_t* scales, const uint16_t* mins, const float* bias,
                              float* out, i64 rows, i64 n, i64 d, i64 bits, i64 inputs, int threads) {
    const Matrix weight = {q, scales, mins, bias, n, d, bits, inputs};
    if (!is_known(weight)) return 1;
    product(weight, x, out, rows, threads);
    return 0;
}
