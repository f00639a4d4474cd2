// Vector registers of floats, as wide as the machine's, and small helpers that every kernel needs.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <omp.h>
#include <sched.h>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

using i64 = int64_t;

// How far ahead weights are prefetched, in bytes. A single row uses them once: its prefetches ask the caches not to keep them.
constexpr i64 AHEAD = 2048;
constexpr i64 PIECE = 32768;  // bytes of a weight that a thread takes at a time
constexpr i64 TILE = 16;      // columns of a tile (packed_tiles.h)

// WIDE: floats in a register. ROWS: rows that are multiplied together.
#if defined(__AVX512F__)
constexpr int WIDE = 16, ROWS = 6;  // ROWS x 4 sums, ROWS inputs and a weight fill the 32 registers
#elif defined(__AVX__)
constexpr int WIDE = 8, ROWS = 3;  // and the 16 registers here
#else
constexpr int WIDE = 4, ROWS = 4;
#endif
typedef float Wide __attribute__((vector_size(WIDE * 4)));
typedef int32_t WideInt __attribute__((vector_size(WIDE * 4)));

inline Wide load(const float* from) {
    Wide value;
    memcpy(&value, from, sizeof value);
    return value;
}
inline void store(float* to, Wide value) { memcpy(to, &value, sizeof value); }

// a * b + c, rounded once where the machine can. Written out, because a compiler fuses some of these and not others, and
// results must not depend on that.
inline Wide fma(Wide a, Wide b, Wide c) {
#if defined(__AVX512F__)
    return (Wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Wide)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
inline float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
inline Wide all(float value) { return value - Wide{}; }

#if defined(__AVX__)
inline float total(__m256 s) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#endif
inline float sum(Wide value) {
#if defined(__AVX512F__)
    return total(_mm256_add_ps(_mm512_castps512_ps256((__m512)value), _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)value, 1))));
#elif defined(__AVX__)
    return total((__m256)value);
#else
    float parts[WIDE];
    memcpy(parts, &value, sizeof value);
    for (int half = WIDE / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
#endif
}

// A bit for each number of a that is larger than that of b.
inline unsigned above(Wide a, Wide b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#elif defined(__AVX__)
    return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ));
#else
    unsigned bits = 0;
    for (int i = 0; i < WIDE; i++) bits |= (unsigned)(a[i] > b[i]) << i;
    return bits;
#endif
}

// The first or second half of a0 b0 a1 b1 ..
template <int HALF, size_t... I>
inline Wide interleave(Wide a, Wide b, std::index_sequence<I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (int)(HALF * WIDE / 2 + I / 2 + I % 2 * WIDE)...);
#else
    return __builtin_shuffle(a, b, WideInt{(int)(HALF * WIDE / 2 + I / 2 + I % 2 * WIDE)...});
#endif
}

// The sums of WIDE registers, side by side. Each is added up in the order of `sum`.
template <int HALF = WIDE / 2>
inline Wide sums(Wide (&parts)[WIDE]) {
    constexpr auto lanes = std::make_index_sequence<WIDE>();
    for (int i = 0; i < HALF; i++)
        parts[i] = interleave<0>(parts[i], parts[i + HALF], lanes) + interleave<1>(parts[i], parts[i + HALF], lanes);
    if constexpr (HALF > 1) return sums<HALF / 2>(parts);
    return parts[0];
}

// e^x for x <= 0, to a few units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
inline Wide exponential(Wide x) {
    x = x < -87.f ? all(-87.f) : x;
    Wide n = fma(x, all(1.44269504f), all(12582912.f));  // 1.5 * 2^23: adding it rounds to a whole number
    WideInt power;
    memcpy(&power, &n, sizeof n);
    n -= 12582912.f;
    Wide r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), x));
    Wide p = all(1.9875691500e-4f);
    for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fma(p, r, all(next));
    p = fma(p, r * r, r + 1.f);
    WideInt bits;
    memcpy(&bits, &p, sizeof p);
    bits += power << 23;
    memcpy(&p, &bits, sizeof p);
    return p;
}

// Scratch memory of the calling thread. It grows when needed and is kept until the next call.
void* scratch(size_t bytes) {
    static thread_local void* memory = nullptr;
    static thread_local size_t size = 0;
    if (bytes > size) {
        free(memory);
        size = bytes + bytes / 2;
        memory = aligned_alloc(64, (size + 63) / 64 * 64);
    }
    return memory;
}

// How many threads to use: one if the work is done before other threads have started.
inline int threads_for(i64 products, int threads) { return products < 32768 ? 1 : threads; }

// Split `rows` into as few parts as possible of at most `most`; the size of the largest part, all being nearly equal.
inline i64 equal_share(i64 rows, i64 most) { return (rows + (rows + most - 1) / most - 1) / ((rows + most - 1) / most); }

inline i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

// Call `work` with `count` (1 .. MOST) as a compile-time constant.
template <int MOST, class Work>
inline void dispatch(i64 count, const Work& work) {
    if constexpr (MOST > 0) {
        if (count == MOST)
            work(std::integral_constant<int, MOST>());
        else
            dispatch<MOST - 1>(count, work);
    }
}

}  // namespace
