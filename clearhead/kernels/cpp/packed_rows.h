// Products with packed weights in row-major order: for processors without AVX-512 VNNI.

#pragma once

#include "matrix.h"

namespace {

// Registers of integers and of sums. A span of 64 weights fills four.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FAST 1
using Int = __m256i;
using Sum = __m256;
inline Int multiply(Int sums, Int a, Int b) { return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)); }
inline Int load_whole(const int16_t* from) { return _mm256_loadu_si256((const Int*)from); }
inline Sum add(Sum sums, Int products, Sum scale) { return _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), scale, sums); }
#endif
constexpr int SPAN = 64, QROWS = 4, QCOLUMNS = 2;

// `unpack` gives the weights of one column and span as 16-bit integers, and their scale. SCALES: of a span's inputs.
struct Int8 {
    static constexpr int SPAN = 64, SCALES = 1, MOST = QROWS, COLUMNS = QCOLUMNS;
    const int8_t* q;         // (n, d)
    const uint16_t* scales;  // (n, spans), float16
    i64 d;

    // The place of a span's i-th number among the unpacked ones.
    static constexpr int place(int i) { return i; }

#if FAST
    static constexpr int PARTS = SPAN * sizeof(int16_t) / sizeof(Int);
    template <bool LAST>
    inline void unpack(i64 c, i64 span, Int w[PARTS], Sum& scale) const {
        const int8_t* from = q + c * d + span * SPAN;
        int8_t room[SPAN];
        if (LAST) from = padded_span(room, from, d - span * SPAN);
        else __builtin_prefetch(from + AHEAD);
        const __m128i half = _mm_set1_epi16((short)scales[c * ((d + SPAN - 1) / SPAN) + span]);
        for (int i = 0; i < PARTS; i++) w[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from + i));
        scale = _mm256_cvtph_ps(half);
    }
    static inline Sum of_inputs(const float* scales) { return _mm256_set1_ps(scales[0]); }
#endif
    inline void unpack_slowly(i64 c, i64 span, int16_t w[SPAN], float scale[SPAN / 32]) const {
        for (i64 i = 0; i < SPAN; i++) w[i] = span * SPAN + i < d ? q[c * d + span * SPAN + i] : 0;
        scale[0] = scale[1] = half_to_float(scales[c * ((d + SPAN - 1) / SPAN) + span]);
    }
    inline float rest(i64, const float*) const { return 0; }
};

struct Int4 {
    static constexpr int SPAN = ::SPAN, SCALES = 2, MOST = QROWS, COLUMNS = QCOLUMNS;
    const uint8_t* q;        // (n, d / 2): the even neighbour low, the odd one high
    const uint16_t* scales;  // (n, d / 32), float16
    const uint16_t* mins;
    i64 d;

#if FAST
    // A 16-bit word holds 4 neighbours. Unpacked, the first of each word come first, then the second of each, and so on.
    static constexpr int PARTS = 4;
    static constexpr int place(int i) { return i % 4 * (SPAN / 4) + i / 4; }

    template <bool LAST>
    inline void unpack(i64 c, i64 span, Int w[PARTS], Sum& scale) const {
        const uint8_t* from = q + (c * d + span * SPAN) / 2;
        const uint16_t* s = scales + c * (d / 32) + span * (SPAN / 32);
        uint8_t room[SPAN / 2];
        uint16_t scales_room[SPAN / 32];
        if (LAST) {
            from = padded_span(room, from, (d - span * SPAN) / 2);
            s = padded_span(scales_room, s, d / 32 - span * (SPAN / 32));
        } else
            __builtin_prefetch(from + AHEAD);
        // each half of the register holds 32 weights, which have their own scale
        const Int words = _mm256_loadu_si256((const Int*)from), low = _mm256_set1_epi16(15);
        w[0] = _mm256_and_si256(words, low);
        w[1] = _mm256_and_si256(_mm256_srli_epi16(words, 4), low);
        w[2] = _mm256_and_si256(_mm256_srli_epi16(words, 8), low);
        w[3] = _mm256_srli_epi16(words, 12);
        uint32_t pair;
        memcpy(&pair, s, sizeof pair);
        const Int each = _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0);
        scale = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_cvtph_ps(_mm_cvtsi32_si128((int)pair))), each);
    }
    static inline Sum of_inputs(const float* scales) { return _mm256_set_m128(_mm_set1_ps(scales[1]), _mm_set1_ps(scales[0])); }
#else
    static constexpr int place(int i) { return i; }
#endif
    inline void unpack_slowly(i64 c, i64 span, int16_t w[SPAN], float scale[SPAN / 32]) const {
        for (i64 i = 0; i < SPAN; i++) {
            const i64 at = span * SPAN + i;
            const uint8_t pair = at < d ? q[(c * d + at) / 2] : 0;
            w[i] = i % 2 ? pair >> 4 : pair & 15;
        }
        for (i64 i = 0; i < SPAN / 32; i++) {
            const i64 at = span * (SPAN / 32) + i;
            scale[i] = at < d / 32 ? half_to_float(scales[c * (d / 32) + at]) : 0.f;
        }
    }

    // The part of the minimums: each times the sum of its inputs.
    inline float rest(i64 c, const float* sums) const {
        const uint16_t* m = mins + c * (d / 32);
        float total = 0;
        i64 g = 0;
#if FAST
        __m256 eight = _mm256_setzero_ps();
        for (; g + 8 <= d / 32; g += 8)
            eight = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(m + g))), _mm256_loadu_ps(sums + g), eight);
        total = ::total(eight);
#endif
        for (; g < d / 32; g++) total = fma(half_to_float(m[g]), sums[g], total);
        return total;
    }
};

// DIGITS: bytes of a rounded input. With one, a group of weights and its inputs have a scale each, as in tiles.
template <int DIGITS, class Weights>
void round_row(const Input& in, i64 row, i64 d) {
    constexpr int SPAN = Weights::SPAN, EACH = SPAN / Weights::SCALES, GROUP = DIGITS == 2 ? SPAN : EACH;
    constexpr float LIMIT = DIGITS == 2 ? 32767 : 127;
    for (i64 at = row * in.spans; at < (row + 1) * in.spans; at++) {
        const i64 first = (at - row * in.spans) * SPAN;
        float room[SPAN];
        const float* x = padded_span(room, in.x + row * d + first, d - first);
        for (int g = 0; g < SPAN; g += GROUP) {
            float sizes[WIDE] = {}, wrong[WIDE] = {}, largest = 0, scale = 0;
            for (int i = g; i < g + GROUP; i += WIDE)
                for (int j = 0; j < WIDE; j++) {
                    const float size = std::fabs(x[i + j]);
                    sizes[j] = size > sizes[j] ? size : sizes[j];
                    wrong[j] += x[i + j] * 0;  // NaN and infinity must reach the result
                }
            for (int j = 0; j < WIDE; j++) {
                largest = sizes[j] > largest ? sizes[j] : largest;
                scale += wrong[j];
            }
            const float inverse = largest > 0 && largest < 1e38f ? LIMIT / largest : 0;
            scale += largest / LIMIT;
            for (int i = g; i < g + GROUP; i += EACH) in.scales[(at * SPAN + i) / EACH] = scale;
            int32_t rounded[GROUP];
            for (int i = 0; i < GROUP; i++) {
                const float near = x[g + i] * inverse + 12582912.f;  // 1.5 * 2^23: the rounded integer is in the low bits
                memcpy(rounded + i, &near, sizeof near);
                rounded[i] = (int16_t)rounded[i];
            }
            for (int i = 0; i < GROUP; i++) in.q[at * SPAN + Weights::place(g + i)] = (int16_t)rounded[i];
            for (int i = 0; i < GROUP; i += 32) {
                int32_t total = 0;
                for (int j = 0; j < 32; j++) total += rounded[i + j];
                in.sums[(at * SPAN + g + i) / 32] = total * scale;
            }
        }
    }
}

#if FAST
// Add one span's products to the sums.
template <int C, int R, bool LAST, class Weights>
inline void gather(const Weights& w, const Input& in, i64 row, i64 c0, i64 span, Sum sums[C][R]) {
    for (int c = 0; c < C; c++) {
        Int weights[Weights::PARTS];
        Sum scale;
        w.template unpack<LAST>(c0 + c, span, weights, scale);
        for (int r = 0; r < R; r++) {
            const i64 at = (row + r) * in.spans + span;
            Int products = {};
            for (int i = 0; i < Weights::PARTS; i++)
                products = multiply(products, weights[i], load_whole(in.q + at * Weights::SPAN + i * (Weights::SPAN / Weights::PARTS)));
            sums[c][r] = add(sums[c][r], products, _mm256_mul_ps(scale, Weights::of_inputs(in.scales + at * Weights::SCALES)));
        }
    }
}
#endif

template <int C, int R, class Weights>
inline void dots(const Weights& w, const Input& in, i64 row, i64 c0, float results[C][R]) {
#if FAST
    Sum sums[C][R] = {};
    const i64 whole = w.d / Weights::SPAN;
    for (i64 span = 0; span < whole; span++) gather<C, R, false>(w, in, row, c0, span, sums);
    if (whole < in.spans) gather<C, R, true>(w, in, row, c0, whole, sums);
    for (int c = 0; c < C; c++)
        for (int r = 0; r < R; r++) results[c][r] = total(sums[c][r]);
#else
    memset(results, 0, sizeof(float) * C * R);
    for (i64 span = 0; span < in.spans; span++)
        for (int c = 0; c < C; c++) {
            int16_t weights[Weights::SPAN];
            float scale[Weights::SPAN / 32];
            w.unpack_slowly(c0 + c, span, weights, scale);
            for (int r = 0; r < R; r++) {
                const i64 at = (row + r) * in.spans + span;
                for (int i = 0; i < Weights::SPAN; i += 32) {
                    int32_t products = 0;
                    for (int j = i; j < i + 32; j++) products += weights[j] * in.q[at * Weights::SPAN + j];
                    results[c][r] = fma(products * scale[i / 32], in.scales[at * Weights::SCALES + i * Weights::SCALES / Weights::SPAN], results[c][r]);
                }
            }
        }
#endif
    for (int c = 0; c < C; c++)
        for (int r = 0; r < R; r++) results[c][r] += w.rest(c0 + c, in.sums + (row + r) * in.spans * (Weights::SPAN / 32));
}

}  // namespace
