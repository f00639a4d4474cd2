// Products with packed weights in tiles: for processors with AVX-512 VNNI.

#pragma once

#include "matrix.h"

namespace {

// A tile is 16 columns, 4 bytes of each side by side: one load is multiplied with 4 inputs, the same ones for all columns, and no
// sum goes across a register. The instruction multiplies 8-bit integers, so a 16-bit input is split in two DIGITS: 256 high + low.
// The last tile is as wide as the columns that are left.
struct Int8 {
    static constexpr bool HAS_MINS = false;
    static constexpr int SPAN = 64, SCALES = 1, LOADS = 16, ALONE = 12;  // up to so many rows a tile alone is faster
    const int8_t* q;         // (tiles, d / 4, 16, 4)
    const uint16_t* scales;  // (tiles, d / 64, 16), float16
    i64 n, d;

    inline i64 loads() const { return (d + 3) / 4; }  // of a tile

    // The order of 16 inputs in memory, in which each 4 of them belong to one load.
    static inline __m512i sort(__m512i x) { return x; }
    // What a row keeps of the sum of a span's rounded inputs, and where its products start.
    static inline void keep(float* to, int sum) {
        const int32_t start = -128 * sum;
        memcpy(to, &start, sizeof start);
    }
    static inline __m512i start(const float* kept) {
        int32_t start;
        memcpy(&start, kept, sizeof start);
        return _mm512_set1_epi32(start);
    }

    template <int R, int T, int DIGITS>
    static inline void gather(const __m512i bytes[T], const int8_t* x, WideInt products[R][T][DIGITS]) {
        __m512i weights[T];
        for (int t = 0; t < T; t++) weights[t] = _mm512_xor_si512(bytes[t], _mm512_set1_epi8(-128));  // adds 128: 1 .. 255
        for (int r = 0; r < R; r++) add_products<T, DIGITS>(weights, x + r * DIGITS * SPAN, products[r]);
    }
    template <int T, int DIGITS>
    static inline void add_products(const __m512i weights[T], const int8_t* x, WideInt products[T][DIGITS]) {
        for (int i = 0; i < DIGITS; i++) {
            int32_t digits;  // one by one: each is then read from memory into all places of a register by one instruction
            memcpy(&digits, x + 4 * i, sizeof digits);
            for (int t = 0; t < T; t++) products[t][i] = (WideInt)_mm512_dpbusd_epi32((__m512i)products[t][i], weights[t], _mm512_set1_epi32(digits));
        }
    }
    inline __m512 least(i64, __mmask16) const { return _mm512_setzero_ps(); }
};

struct Int4 {
    static constexpr bool HAS_MINS = true;
    static constexpr int SPAN = 32, SCALES = 1, LOADS = 4, ALONE = 2;
    const uint8_t* q;        // (tiles, d / 8, 16, 4): the even neighbour low, the odd one high
    const uint16_t* scales;  // (tiles, d / 32, 16), float16
    const uint16_t* mins;
    i64 n, d;

    inline i64 loads() const { return d / 8; }
    static inline __m512i sort(__m512i x) {
        return _mm512_permutexvar_epi32(_mm512_set_epi32(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0), x);
    }
    static inline void keep(float* to, int sum) { *to = (float)sum; }
    static inline __m512i start(const float*) { return _mm512_setzero_si512(); }

    template <int R, int T, int DIGITS>
    static inline void gather(const __m512i bytes[T], const int8_t* x, WideInt products[R][T][DIGITS]) {
        const __m512i mask = _mm512_set1_epi8(15);
        __m512i even[T], odd[T];
        for (int t = 0; t < T; t++) {
            even[t] = _mm512_and_si512(bytes[t], mask);
            odd[t] = _mm512_and_si512(_mm512_srli_epi16(bytes[t], 4), mask);
        }
        for (int r = 0; r < R; r++) {
            Int8::add_products<T, DIGITS>(even, x + r * DIGITS * SPAN, products[r]);
            Int8::add_products<T, DIGITS>(odd, x + r * DIGITS * SPAN + 4 * DIGITS, products[r]);
        }
    }
    inline __m512 least(i64 at, __mmask16 there) const { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, mins + at)); }
};

template <int DIGITS, class Weights>
void round_row(const Input& in, i64 row, i64 d) {
    constexpr int SPAN = Weights::SPAN;
    for (i64 span = 0; span < in.spans; span++) {
        const i64 at = span * in.rows + row, first = span * SPAN;
        float room[SPAN];
        const float* x = padded_span(room, in.x + row * d + first, d - first);
        __m512 size = _mm512_setzero_ps(), wrong = size;
        for (int i = 0; i < SPAN; i += 16) {
            const __m512 some = _mm512_loadu_ps(x + i);
            size = _mm512_max_ps(_mm512_abs_ps(some), size);
            wrong = _mm512_fmadd_ps(some, _mm512_setzero_ps(), wrong);  // NaN and infinity must reach the result
        }
        const float largest = _mm512_reduce_max_ps(size), limit = DIGITS == 2 ? 127 * 256 : 127;
        const __m512 inverse = _mm512_set1_ps(largest > 0 && largest < 1e38f ? limit / largest : 0);
        in.scales[at] = largest / limit + sum((Wide)wrong);
        int8_t* to = (int8_t*)in.q + at * SPAN * DIGITS;
        __m512i total = _mm512_setzero_si512();
        for (int i = 0; i < SPAN; i += 16, to += 16 * DIGITS) {
            const __m512i near = Weights::sort(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), inverse)));
            total = _mm512_add_epi32(total, near);
            const __m128i low = _mm512_cvtepi32_epi8(near);
            if (DIGITS == 1) {
                _mm_storeu_si128((__m128i*)to, low);
                continue;
            }
            const __m128i high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(near, _mm512_set1_epi32(128)), 8));
            _mm_storeu_si128((__m128i*)to, _mm_unpacklo_epi32(high, low));
            _mm_storeu_si128((__m128i*)to + 1, _mm_unpackhi_epi32(high, low));
        }
        Weights::keep(in.sums + at, _mm512_reduce_add_epi32(total));
    }
}

// T tiles for R rows; of their columns, only from .. to - 1 are written. Several tiles are whole: an input is loaded once for all.
template <int R, int T, int DIGITS, class Weights>
void tile(const Weights& w, const Input& in, i64 row, i64 first, i64 from, i64 to, const Target& target) {
    __m512 sums[R][T] = {};
    const i64 loads = w.loads(), c = first * TILE, width = T > 1 ? TILE : smaller(TILE, w.n - c);
    const __mmask16 there = (__mmask16)(0xffff >> (TILE - width));
    auto* q = w.q + c * loads * 4;
    // One span, of whose loads there are `count`: a constant for whole ones, so that sums stay in registers.
    const auto add_span = [&](i64 span, auto count) {
        WideInt products[R][T][DIGITS];
        const i64 at = span * in.rows + row;
        const int8_t* x = (const int8_t*)in.q + at * Weights::SPAN * DIGITS;
        for (int r = 0; r < R; r++)
            for (int t = 0; t < T; t++) {
                products[r][t][0] = WideInt{};
                products[r][t][DIGITS - 1] = (WideInt)Weights::start(in.sums + at + r);
            }
        for (i64 i = 0; i < count; i++, q += width * 4, x += Weights::SPAN * DIGITS / Weights::LOADS) {
            __m512i bytes[T];
            for (int t = 0; t < T; t++) {
                if (row == 0) __builtin_prefetch(q + t * loads * TILE * 4 + AHEAD, 0, R == 1 ? 0 : 3);
                bytes[t] = T > 1 ? _mm512_loadu_si512(q + t * loads * TILE * 4) : _mm512_maskz_loadu_epi32(there, q);
            }
            Weights::template gather<R, T, DIGITS>(bytes, x, products);
        }
        for (int t = 0; t < T; t++) {
            const i64 place = (c + t * TILE) * in.spans + span * width;
            const __m512 scale = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, w.scales + place)), least = w.least(place, there);
            for (int r = 0; r < R; r++) {
                const __m512i last = (__m512i)products[r][t][DIGITS - 1];
                __m512 value = _mm512_cvtepi32_ps(DIGITS == 1 ? last : _mm512_add_epi32(_mm512_slli_epi32((__m512i)products[r][t][0], 8), last));
                value = Weights::HAS_MINS ? _mm512_fmadd_ps(value, scale, _mm512_mul_ps(least, _mm512_set1_ps(in.sums[at + r])))
                                          : _mm512_mul_ps(value, scale);
                sums[r][t] = _mm512_fmadd_ps(value, _mm512_set1_ps(in.scales[at + r]), sums[r][t]);
            }
        }
    };
    const i64 whole = loads / Weights::LOADS;
    for (i64 span = 0; span < whole; span++) add_span(span, std::integral_constant<i64, Weights::LOADS>());
    if (whole < in.spans) add_span(whole, loads - whole * Weights::LOADS);
    for (int t = 0; t < T; t++) {
        const i64 here = c + t * TILE;
        const __mmask16 some = (__mmask16)(0xffff << std::max<i64>(from - here, 0) & 0xffff >> std::max<i64>(here + TILE - to, 0));
        for (int r = 0; r < R; r++) target.put(row + r, here, sums[r][t], some);
    }
}

template <int DIGITS, class Weights>
void tiles(const Weights& w, const Input& in, i64 rows, i64 from, i64 to, const Target& target) {
    constexpr int MOST = 8, PAIRED = DIGITS == 1 ? 6 : 4;  // as many sums as registers hold
    const i64 whole = rows > Weights::ALONE ? w.n / TILE - 1 : 0;  // tiles that are followed by a whole one
    for (i64 t = from / TILE; t * TILE < to;) {
        const bool pairs = t < whole && (t + 1) * TILE < to;
        const i64 most = equal_share(rows, pairs ? PAIRED : MOST);
        for (i64 row = 0; row < rows; row += most) {
            const auto one = [&](auto n) { tile<decltype(n)::value, 1, DIGITS>(w, in, row, t, from, to, target); };
            const auto two = [&](auto n) { tile<decltype(n)::value, 2, DIGITS>(w, in, row, t, from, to, target); };
            pairs ? dispatch<PAIRED>(smaller(rows - row, most), two) : dispatch<MOST>(smaller(rows - row, most), one);
        }
        t += pairs ? 2 : 1;
    }
}

}  // namespace
