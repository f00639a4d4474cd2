// The operands of a product: weights, inputs, and where results go.

#pragma once

#include "vectors.h"

namespace {

// A weight in float32 (bits = 32), or packed in 8 or 4 bits as quantization/integer.py describes. The inputs of a packed one are
// rounded to integers of `inputs` bits, 16 or 8.
struct Matrix {
    const void* q;           // (n, d)
    const uint16_t* scales;  // float16
    const uint16_t* mins;
    const float* bias;  // (n), or null
    i64 n, d, bits, inputs;
};

// Inputs of packed weights are rounded to integers, with one scale for each `span` numbers. With 16 bits the error is far below that
// of the weights, and integers multiply twice as fast as floats. A sum of 128 products fits 32 bits.
struct Input {
    const float* x;  // (rows, d)
    int16_t* q;      // (rows, spans, span); for tiles (spans, rows, span), of bytes where inputs have 8 bits
    float* scales;   // as many as spans, or twice as many (packed_rows.h)
    float* sums;     // of each 32 rounded numbers (of each span for tiles): what the minimums of 4-bit weights are multiplied with
    i64 rows, spans;
};

// Bytes of memory that `input` needs.
i64 room_for(i64 rows, i64 d) { return rows * (d + 128) / 32 * (32 * sizeof(int16_t) + 2 * sizeof(float)); }

Input input(const float* x, void* memory, i64 rows, i64 d, i64 span, i64 scales_of_span) {
    const i64 spans = (d + span - 1) / span;
    float* scales = (float*)((int16_t*)memory + rows * spans * span);
    return {x, (int16_t*)memory, scales, scales + rows * spans * scales_of_span, rows, spans};
}

// Where results go. They replace what is there, or are added to it.
struct Target {
    float* out;
    i64 stride;
    const float* bias;
    bool adds;

    inline void put(i64 row, i64 c, float value) const {
        float& to = out[row * stride + c];
        value += bias ? bias[c] : 0.f;
        to = adds ? to + value : value;
    }
#if defined(__AVX512F__)
    inline void put(i64 row, i64 c, __m512 values, __mmask16 some) const {
        float* to = out + row * stride + c;
        if (bias) values = _mm512_add_ps(values, _mm512_maskz_loadu_ps(some, bias + c));
        if (adds) values = _mm512_add_ps(_mm512_maskz_loadu_ps(some, to), values);
        _mm512_mask_storeu_ps(to, some, values);
    }
#endif
};

struct Float {
    static constexpr int MOST = ROWS, COLUMNS = 4;
    const float* w;
    i64 d;
};

template <int C, int R>
inline void dots(const Float& weights, const Input& in, i64 row, i64 c0, float results[C][R]) {
    const i64 d = weights.d;
    const float *w = weights.w + c0 * d, *x = in.x + row * d;
    Wide sums[C][R] = {};
    i64 i = 0;
    for (; i + WIDE <= d; i += WIDE) {
        Wide inputs[R];
        for (int r = 0; r < R; r++) inputs[r] = load(x + r * d + i);
        for (int c = 0; c < C; c++) {
            Wide weight = load(w + c * d + i);
            const char* next = (const char*)(w + i * C + c * 16) + (R == 1 ? AHEAD : 4 * C * d);
            if (WIDE == 16 || i % 16 == 0) __builtin_prefetch(next, 0, R == 1 ? 0 : 3);
            for (int r = 0; r < R; r++) sums[c][r] = fma(weight, inputs[r], sums[c][r]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            float rest = 0;
            for (i64 j = i; j < d; j++) rest = fma(w[c * d + j], x[r * d + j], rest);
            results[c][r] = sum(sums[c][r]) + rest;
        }
}

inline float half_to_float(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13 | (uint32_t)(half & 0x8000) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value * 0x1p112f;
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define TILES 1
#else
#define TILES 0
#endif

// A row's last span may be shorter than N: it is then copied to `room` and padded with zeros.
template <class T, int N>
inline const T* padded_span(T (&room)[N], const T* from, i64 there) {
    return there >= N ? from : (const T*)memcpy(memset(room, 0, sizeof room), from, sizeof(T) * there);
}

inline bool is_known(const Matrix& m) { return m.bits == 32 || ((m.bits == 8 || m.bits == 4) && (m.inputs == 8 || m.inputs == 16)); }

}  // namespace
