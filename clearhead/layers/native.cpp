// Products, attention and whole steps for a few rows on a CPU, where reading the weights takes the time: each is read once, by
// all threads, at the speed of the memory. Plain C functions on plain pointers; native.py compiles this file on first use.
//
// Every result is summed in an order that knows nothing of the other rows, columns and threads: a row gives the same bits alone
// and in a batch.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <sched.h>
#include <type_traits>
#include <vector>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

using i64 = int64_t;

constexpr i64 AHEAD = 4096;   // bytes that are asked for before they are needed
constexpr i64 PIECE = 32768;  // bytes of a weight that a thread takes at a time
constexpr i64 TILE = 16;      // columns that lie side by side

// One register of numbers, as wide as the machine's.
#if defined(__AVX512F__)
constexpr int WIDE = 16, ROWS = 6;  // ROWS x 4 sums, ROWS inputs and a weight fill 32 registers
#elif defined(__AVX__)
constexpr int WIDE = 8, ROWS = 3;  // and here 16
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

// a * b + c, rounded once where the machine can. Left to itself, a compiler would do so in one place and not in another.
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
inline Wide all(float value) { return Wide{} + value; }

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

// e^x for x <= 0, to a few units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
inline Wide exponential(Wide x) {
    x = x < -87.f ? all(-87.f) : x;
    Wide n = fma(x, all(1.44269504f), all(12582912.f));  // 1.5 * 2^23: the sum is rounded to a whole number
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

// Scratch of the calling thread: grown, never given back.
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

// Work for `threads`: fewer where a product is over before the others have woken up.
inline int enough(i64 products, int threads) { return products < 32768 ? 1 : threads; }

// Rows dealt to one block of columns: equal shares of at most `most`.
inline i64 share(i64 rows, i64 most) { return (rows + (rows + most - 1) / most - 1) / ((rows + most - 1) / most); }

inline i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

// `work` with a count that the compiler knows, 1 .. MOST.
template <int MOST, class Work>
inline void counted(i64 count, const Work& work) {
    if constexpr (MOST > 0) {
        if (count == MOST)
            work(std::integral_constant<int, MOST>());
        else
            counted<MOST - 1>(count, work);
    }
}

// --- threads -------------------------------------------------------------------------------------------------------------

// One thing that threads do together, in pieces: taken, and done.
struct Phase {
    alignas(64) std::atomic<i64> taken{0};
    std::atomic<i64> done{0};
};

// One thread's view of what all do, phase after phase. A piece belongs to whoever comes first, and a phase is over when its pieces
// are done: a thread whose core others use too is not waited for. They wait awake, as it is never for long.
struct Team {
    Phase* phase;

    template <class Work>
    void each(i64 pieces, const Work& work) {
        Phase& now = *phase++;
        for (i64 i; (i = now.taken.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
            work(i);
            now.done.fetch_add(1, std::memory_order_release);
        }
        for (int spins = 0; now.done.load(std::memory_order_acquire) < pieces; spins++)
            if (spins < 1000)
                pause();
            else
                sched_yield();
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
};

// `work(team)` on each of these threads.
template <class Work>
void together(int threads, i64 n_phases, const Work& work) {
    std::vector<Phase> phases(n_phases);
#pragma omp parallel num_threads(threads)
    {
        Team team{phases.data()};
        work(team);
    }
}

// --- products ------------------------------------------------------------------------------------------------------------

// A weight as one of three kinds: float32, or as quantized.py describes.
struct Matrix {
    const void* q;           // (n, d)
    const uint16_t* scales;  // float16
    const uint16_t* mins;
    const float* bias;  // (n), or nothing
    i64 n, d, bits;
};

// Inputs of packed weights are rounded to 16 bits, `span` numbers sharing a scale: an error far below that of the weights, and
// whole numbers multiply twice as fast as real ones. Sums of 128 products fit 32 bits.
struct Input {
    const float* x;  // (rows, d)
    int16_t* q;      // (rows, spans, span); (spans, rows, span) for tiles
    float* scales;   // as many as spans
    float* sums;     // over 32 rounded numbers each, or over a span for tiles, for the weights' minimums
    i64 rows, spans;
};

i64 room_for(i64 rows, i64 d) { return rows * (d + 128) / 32 * (32 * sizeof(int16_t) + 2 * sizeof(float)); }

Input input(const float* x, void* memory, i64 rows, i64 d, i64 span) {
    const i64 spans = (d + span - 1) / span;
    float* scales = (float*)((int16_t*)memory + rows * spans * span);
    return {x, (int16_t*)memory, scales, scales + rows * spans, rows, spans};
}

// Where results go: over what is there, or added to it.
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
            if (WIDE == 16 || i % 16 == 0) __builtin_prefetch((const char*)(w + i * C + c * 16) + (R == 1 ? AHEAD : 4 * C * d));
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

// What can be read of a row's last span is copied where more can.
template <class T, int N>
inline const T* whole(T (&room)[N], const T* from, i64 there) {
    return there >= N ? from : (const T*)memcpy(memset(room, 0, sizeof room), from, sizeof(T) * there);
}

#if TILES
// 16 columns at a time, 4 bytes of each side by side: a load meets 4 inputs, which are the same for all columns, and nothing is
// summed across. Bytes multiply whole numbers of 8 bits, so an input is two of them: 256 high + low. The last tile is as wide as
// there are columns left.
struct Int8 {
    static constexpr int SPAN = 64, LOADS = 16;
    const int8_t* q;         // (tiles, d / 4, 16, 4)
    const uint16_t* scales;  // (tiles, d / 64, 16), float16
    i64 n, d;

    inline i64 loads() const { return (d + 3) / 4; }  // of a tile

    // What 16 inputs are sorted by, before each 4 of them meet a load.
    static inline __m512i sort(__m512i x) { return x; }
    static inline int start(float sum) { return -128 * (int)sum; }

    template <int R>
    static inline void gather(__m512i bytes, const int8_t* x, __m512i high[R], __m512i low[R]) {
        const __m512i weights = _mm512_xor_si512(bytes, _mm512_set1_epi8(-128));  // 128 more: 1 .. 255
        for (int r = 0; r < R; r++) add_products(weights, x + r * 2 * SPAN, high[r], low[r]);
    }
    static inline void add_products(__m512i weights, const int8_t* x, __m512i& high, __m512i& low) {
        int32_t digits[2];
        memcpy(digits, x, sizeof digits);
        high = _mm512_dpbusd_epi32(high, weights, _mm512_set1_epi32(digits[0]));
        low = _mm512_dpbusd_epi32(low, weights, _mm512_set1_epi32(digits[1]));
    }
    inline __m512 least(i64, __mmask16) const { return _mm512_setzero_ps(); }
};

struct Int4 {
    static constexpr int SPAN = 32, LOADS = 4;
    const uint8_t* q;        // (tiles, d / 8, 16, 4): the even neighbour low, the odd one high
    const uint16_t* scales;  // (tiles, d / 32, 16), float16
    const uint16_t* mins;
    i64 n, d;

    inline i64 loads() const { return d / 8; }
    static inline __m512i sort(__m512i x) {
        return _mm512_permutexvar_epi32(_mm512_set_epi32(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0), x);
    }
    static inline int start(float) { return 0; }

    template <int R>
    static inline void gather(__m512i bytes, const int8_t* x, __m512i high[R], __m512i low[R]) {
        const __m512i mask = _mm512_set1_epi8(15);
        const __m512i even = _mm512_and_si512(bytes, mask), odd = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
        for (int r = 0; r < R; r++) {
            Int8::add_products(even, x + r * 2 * SPAN, high[r], low[r]);
            Int8::add_products(odd, x + r * 2 * SPAN + 8, high[r], low[r]);
        }
    }
    inline __m512 least(i64 at, __mmask16 there) const { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, mins + at)); }
};

template <class Weights>
void round_row(const Input& in, i64 row, i64 d) {
    constexpr int SPAN = Weights::SPAN;
    for (i64 span = 0; span < in.spans; span++) {
        const i64 at = span * in.rows + row, first = span * SPAN;
        float room[SPAN];
        const float* x = whole(room, in.x + row * d + first, d - first);
        __m512 size = _mm512_setzero_ps(), wrong = size;
        for (int i = 0; i < SPAN; i += 16) {
            const __m512 some = _mm512_loadu_ps(x + i);
            size = _mm512_max_ps(_mm512_abs_ps(some), size);
            wrong = _mm512_fmadd_ps(some, _mm512_setzero_ps(), wrong);  // NaN and infinity must come out again
        }
        const float largest = _mm512_reduce_max_ps(size), limit = 127 * 256;
        const __m512 inverse = _mm512_set1_ps(largest > 0 && largest < 1e38f ? limit / largest : 0);
        in.scales[at] = largest / limit + sum((Wide)wrong);
        int8_t* to = (int8_t*)(in.q + at * SPAN);
        __m512i total = _mm512_setzero_si512();
        for (int i = 0; i < SPAN; i += 16, to += 32) {
            const __m512i near = Weights::sort(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), inverse)));
            total = _mm512_add_epi32(total, near);
            const __m128i low = _mm512_cvtepi32_epi8(near);
            const __m128i high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(near, _mm512_set1_epi32(128)), 8));
            _mm_storeu_si128((__m128i*)to, _mm_unpacklo_epi32(high, low));
            _mm_storeu_si128((__m128i*)to + 1, _mm_unpackhi_epi32(high, low));
        }
        in.sums[at] = (float)_mm512_reduce_add_epi32(total);
    }
}

// One tile for R rows, into its columns from .. to - 1.
template <int R, class Weights>
void tile(const Weights& w, const Input& in, i64 row, i64 t, i64 from, i64 to, const Target& target) {
    __m512 sums[R];
    for (int r = 0; r < R; r++) sums[r] = _mm512_setzero_ps();
    const i64 loads = w.loads(), c = t * TILE, width = smaller(TILE, w.n - c);
    const __mmask16 there = (__mmask16)(0xffff >> (TILE - width));
    auto* q = w.q + c * loads * 4;
    for (i64 span = 0; span < in.spans; span++) {
        __m512i high[R], low[R];
        const i64 at = span * in.rows + row;
        const int8_t* x = (const int8_t*)(in.q + at * Weights::SPAN);
        for (int r = 0; r < R; r++) high[r] = _mm512_setzero_si512(), low[r] = _mm512_set1_epi32(Weights::start(in.sums[at + r]));
        const i64 here = smaller(Weights::LOADS, loads - span * Weights::LOADS);
        for (i64 i = 0; i < here; i++, q += width * 4, x += Weights::SPAN * 2 / Weights::LOADS) {
            if (row == 0) __builtin_prefetch(q + AHEAD);
            Weights::template gather<R>(_mm512_maskz_loadu_epi32(there, q), x, high, low);
        }
        const i64 place = c * in.spans + span * width;
        const __m512 scale = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, w.scales + place)), least = w.least(place, there);
        for (int r = 0; r < R; r++) {
            __m512 value = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[r], 8), low[r]));
            value = _mm512_fmadd_ps(value, scale, _mm512_mul_ps(least, _mm512_set1_ps(in.sums[at + r])));
            sums[r] = _mm512_fmadd_ps(value, _mm512_set1_ps(in.scales[at + r]), sums[r]);
        }
    }
    const __mmask16 some = (__mmask16)(0xffff << std::max<i64>(from - c, 0) & 0xffff >> std::max<i64>(c + TILE - to, 0));
    for (int r = 0; r < R; r++) target.put(row + r, c, sums[r], some);
}

template <class Weights>
void tiles(const Weights& w, const Input& in, i64 rows, i64 from, i64 to, const Target& target) {
    const i64 most = share(rows, 8);
    for (i64 t = from / TILE; t * TILE < to; t++)
        for (i64 row = 0; row < rows; row += most)
            counted<8>(smaller(rows - row, most), [&](auto count) { tile<decltype(count)::value>(w, in, row, t, from, to, target); });
}

#else
// Registers of whole numbers and of sums, and how many weights int4 unpacks at a time: 4 registers' full.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FAST 1
using Int = __m256i;
using Sum = __m256;
inline Int multiply(Int sums, Int a, Int b) { return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)); }
inline Int load_whole(const int16_t* from) { return _mm256_loadu_si256((const Int*)from); }
inline Sum add(Sum sums, Int products, Sum scale) { return _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), scale, sums); }
inline Sum times(Sum a, float b) { return _mm256_mul_ps(a, _mm256_set1_ps(b)); }
#endif
constexpr int SPAN = 64, QROWS = 4, QCOLUMNS = 2;

// The weights of one column over one span, unpacked to 16 bits, and what their sums are multiplied with.
struct Int8 {
    static constexpr int SPAN = 64, MOST = QROWS, COLUMNS = QCOLUMNS;
    const int8_t* q;         // (n, d)
    const uint16_t* scales;  // (n, spans), float16
    i64 d;

    // Where the i-th number of a span stands among the unpacked ones.
    static constexpr int place(int i) { return i; }

#if FAST
    static constexpr int PARTS = SPAN * sizeof(int16_t) / sizeof(Int);
    template <bool LAST>
    inline void unpack(i64 c, i64 span, Int w[PARTS], Sum& scale) const {
        const int8_t* from = q + c * d + span * SPAN;
        int8_t room[SPAN];
        if (LAST) from = whole(room, from, d - span * SPAN);
        else __builtin_prefetch(from + AHEAD);
        const __m128i half = _mm_set1_epi16((short)scales[c * ((d + SPAN - 1) / SPAN) + span]);
        for (int i = 0; i < PARTS; i++) w[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from + i));
        scale = _mm256_cvtph_ps(half);
    }
#endif
    inline void unpack_slowly(i64 c, i64 span, int16_t w[SPAN], float scale[SPAN / 32]) const {
        for (i64 i = 0; i < SPAN; i++) w[i] = span * SPAN + i < d ? q[c * d + span * SPAN + i] : 0;
        scale[0] = scale[1] = half_to_float(scales[c * ((d + SPAN - 1) / SPAN) + span]);
    }
    inline float rest(i64, const float*) const { return 0; }
};

struct Int4 {
    static constexpr int SPAN = ::SPAN, MOST = QROWS, COLUMNS = QCOLUMNS;
    const uint8_t* q;        // (n, d / 2): the even neighbour low, the odd one high
    const uint16_t* scales;  // (n, d / 32), float16
    const uint16_t* mins;
    i64 d;

#if FAST
    // A word holds 4 neighbours; the first of each word come first, then the second ...
    static constexpr int PARTS = 4;
    static constexpr int place(int i) { return i % 4 * (SPAN / 4) + i / 4; }

    template <bool LAST>
    inline void unpack(i64 c, i64 span, Int w[PARTS], Sum& scale) const {
        const uint8_t* from = q + (c * d + span * SPAN) / 2;
        const uint16_t* s = scales + c * (d / 32) + span * (SPAN / 32);
        uint8_t room[SPAN / 2];
        uint16_t scales_room[SPAN / 32];
        if (LAST) {
            from = whole(room, from, (d - span * SPAN) / 2);
            s = whole(scales_room, s, d / 32 - span * (SPAN / 32));
        } else
            __builtin_prefetch(from + AHEAD);
        // 16 bytes, a quarter or half of the register, are 32 weights: they have a scale of their own
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

    // The minimums' share: each times the sum of its inputs.
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

template <class Weights>
void round_row(const Input& in, i64 row, i64 d) {
    constexpr int SPAN = Weights::SPAN;
    for (i64 at = row * in.spans; at < (row + 1) * in.spans; at++) {
        const i64 first = (at - row * in.spans) * SPAN;
        float room[SPAN], sizes[WIDE] = {}, wrong[WIDE] = {}, largest = 0, scale = 0;
        const float* x = whole(room, in.x + row * d + first, d - first);
        for (int i = 0; i < SPAN; i += WIDE)
            for (int j = 0; j < WIDE; j++) {
                const float size = std::fabs(x[i + j]);
                sizes[j] = size > sizes[j] ? size : sizes[j];
                wrong[j] += x[i + j] * 0;  // NaN and infinity must come out again
            }
        for (int j = 0; j < WIDE; j++) {
            largest = sizes[j] > largest ? sizes[j] : largest;
            scale += wrong[j];
        }
        const float inverse = largest > 0 && largest < 1e38f ? 32767 / largest : 0;
        in.scales[at] = scale += largest / 32767;
        int32_t rounded[SPAN];
        for (int i = 0; i < SPAN; i++) {
            const float near = x[i] * inverse + 12582912.f;  // 1.5 * 2^23: the whole number is in the low bits
            memcpy(rounded + i, &near, sizeof near);
            rounded[i] = (int16_t)rounded[i];
        }
        for (int i = 0; i < SPAN; i++) in.q[at * SPAN + Weights::place(i)] = (int16_t)rounded[i];
        for (int i = 0; i < SPAN; i += 32) {
            int32_t total = 0;
            for (int j = 0; j < 32; j++) total += rounded[i + j];
            in.sums[(at * SPAN + i) / 32] = total * scale;
        }
    }
}

#if FAST
// One span's share of the sums.
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
            sums[c][r] = add(sums[c][r], products, times(scale, in.scales[at]));
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
                    results[c][r] = fma(products * scale[i / 32], in.scales[at], results[c][r]);
                }
            }
        }
#endif
    for (int c = 0; c < C; c++)
        for (int r = 0; r < R; r++) results[c][r] += w.rest(c0 + c, in.sums + (row + r) * in.spans * (Weights::SPAN / 32));
}

#endif

// Some columns for all rows, a few at a time: what lies row after row.
template <int C, class Weights>
inline void columns(const Weights& w, const Input& in, i64 rows, i64 c, const Target& target) {
    const i64 most = share(rows, Weights::MOST);
    for (i64 row = 0; row < rows; row += most)
        counted<Weights::MOST>(smaller(rows - row, most), [&](auto count) {
            constexpr int R = decltype(count)::value;
            float results[C][R];
            dots<C, R>(w, in, row, c, results);
            for (int r = 0; r < R; r++)
                for (int i = 0; i < C; i++) target.put(row + r, c + i, results[i][r]);
        });
}

// Columns from .. to - 1. A single row reads the weights in the order they lie in.
template <class Weights>
inline void columns(const Weights& w, const Input& in, i64 rows, i64 from, i64 to, const Target& target) {
    i64 c = from;
    for (; rows > 1 && c + Weights::COLUMNS <= to; c += Weights::COLUMNS) columns<Weights::COLUMNS>(w, in, rows, c, target);
    for (; c < to; c++) columns<1>(w, in, rows, c, target);
}

inline void columns(const Matrix& m, const Input& in, i64 rows, i64 from, i64 to, const Target& target) {
    if (m.bits == 32) columns(Float{(const float*)m.q, m.d}, in, rows, from, to, target);
#if TILES
    if (m.bits == 8) tiles(Int8{(const int8_t*)m.q, m.scales, m.n, m.d}, in, rows, from, to, target);
    if (m.bits == 4) tiles(Int4{(const uint8_t*)m.q, m.scales, m.mins, m.n, m.d}, in, rows, from, to, target);
#else
    if (m.bits == 8) columns(Int8{(const int8_t*)m.q, m.scales, m.d}, in, rows, from, to, target);
    if (m.bits == 4) columns(Int4{(const uint8_t*)m.q, m.scales, m.mins, m.d}, in, rows, from, to, target);
#endif
}

// Columns that one thread takes at a time.
inline i64 piece(const Matrix& m, int threads) {
    const i64 fair = (m.n + threads - 1) / threads, some = PIECE * 8 / (m.d * m.bits);
    return (smaller(fair, some) + TILE) / TILE * TILE;
}

Input input(const Matrix& m, const float* x, void* memory, i64 rows) {
    return input(x, memory, rows, m.d, m.bits == 4 ? Int4::SPAN : Int8::SPAN);
}

inline void round_row(const Matrix& m, const Input& in, i64 row) {
    if (m.bits == 8) round_row<Int8>(in, row, m.d);
    if (m.bits == 4) round_row<Int4>(in, row, m.d);
}

void product(const Matrix& m, const float* x, float* out, i64 rows, int threads) {
    const Input in = input(m, x, scratch(room_for(rows, m.d)), rows);
    const i64 step = piece(m, threads);
    together(enough(rows * m.n * m.d, threads), 2, [&](Team& team) {
        if (m.bits != 32) team.each(rows, [&](i64 row) { round_row(m, in, row); });
        team.each((m.n + step - 1) / step, [&](i64 i) {
            columns(m, in, rows, i * step, smaller(m.n, (i + 1) * step), {out, m.n, m.bias, false});
        });
    });
}

}  // namespace

// Whether packed weights are to lie in tiles (quantized.py).
extern "C" {
extern const int has_tiles;
const int has_tiles = TILES;
}

extern "C" void linear_f32(const float* x, const float* w, const float* bias, float* out, i64 rows, i64 n, i64 d, int threads) {
    product({w, nullptr, nullptr, bias, n, d, 32}, x, out, rows, threads);
}

extern "C" void linear_packed(const float* x, const void* q, const uint16_t* scales, const uint16_t* mins, const float* bias,
                              float* out, i64 rows, i64 n, i64 d, i64 bits, int threads) {
    product({q, scales, mins, bias, n, d, bits}, x, out, rows, threads);
}

// --- attention -----------------------------------------------------------------------------------------------------------

namespace {

// Keys and values in the blocks of a pool, counted in numbers from one to the next.
struct Blocks {
    const float *k, *v;
    i64 size, width, k_block, k_head, v_block, v_head;
};

// Some heads of one row that share keys and values: a block at a time, so that these are read once.
void look(const float* in, float* to, i64 together, const Blocks& blocks, i64 kv, const int32_t* table, i64 end, i64 window,
          float scale) {
    const i64 width = blocks.width, block = blocks.size, padded = (block + WIDE - 1) / WIDE * WIDE;
    const i64 start = window && end > window ? end - window : 0;
    memset(to, 0, sizeof(float) * together * width);
    if (end <= start) return;
    // for each head: the weights of a block, then the largest score so far and the sum of the weights
    float* weights = (float*)__builtin_alloca(sizeof(float) * (padded + 2 * together));
    float *largest = weights + padded, *sums = largest + together;
    for (i64 h = 0; h < together; h++) largest[h] = -INFINITY, sums[h] = 0;
    for (i64 first = start / block * block; first < end; first += block) {
        const i64 page = table[first / block];
        const i64 from = start > first ? start - first : 0, until = end - first < block ? end - first : block;
        const float* keys = blocks.k + page * blocks.k_block + kv * blocks.k_head;
        const float* values = blocks.v + page * blocks.v_block + kv * blocks.v_head;
        for (i64 h = 0; h < together; h++) {
            float top = largest[h];
            for (i64 i = 0; i < padded; i++) weights[i] = -INFINITY;
            for (i64 i = from; i < until; i++) {
                Wide products = {};
                i64 e = 0;
                for (; e + WIDE <= width; e += WIDE) 
                    products = fma(load(in + h * width + e), load(keys + i * width + e), products);
                float score = sum(products);
                for (; e < width; e++) score = fma(in[h * width + e], keys[i * width + e], score);
                weights[i] = score *= scale;
                top = score > top ? score : top;
            }
            const float fade = largest[h] == top ? 1.f : std::exp(largest[h] - top);
            largest[h] = top;
            Wide added = {};
            for (i64 i = 0; i < padded; i += WIDE) {
                Wide score = load(weights + i);
                Wide weight = exponential(score - top);
                weight = score == -INFINITY ? Wide{} : weight;
                store(weights + i, weight);
                added += weight;
            }
            sums[h] = fma(sums[h], fade, sum(added));
            float* o = to + h * width;
            i64 e = 0;
            for (; e + WIDE <= width; e += WIDE) {
                Wide total = load(o + e) * fade;
                for (i64 i = from; i < until; i++) 
                    total = fma(load(values + i * width + e), all(weights[i]), total);
                store(o + e, total);
            }
            for (; e < width; e++) {
                float total = o[e] * fade;
                for (i64 i = from; i < until; i++) total = fma(values[i * width + e], weights[i], total);
                o[e] = total;
            }
        }
    }
    for (i64 h = 0; h < together; h++)
        for (i64 e = 0; e < width; e++) to[h * width + e] /= sums[h];
}

}  // namespace

// One query a row and head.
extern "C" void paged_attention(const float* q, const float* k, const float* v, const int32_t* table, const int32_t* counts,
                                float* out, i64 rows, i64 heads, i64 kv_heads, i64 width, i64 block, i64 table_width,
                                i64 k_block, i64 k_head, i64 v_block, i64 v_head, float scale, i64 window, int threads) {
    const Blocks blocks = {k, v, block, width, k_block, k_head, v_block, v_head};
    const i64 group = heads / kv_heads, most = rows * kv_heads >= 4 * threads ? group : 1, parts = group / most;
    i64 longest = 0;
    for (i64 b = 0; b < rows; b++) longest += counts[b];
    together(enough(longest * heads * width, threads), 1, [&](Team& team) {
        team.each(rows * kv_heads * parts, [&](i64 task) {
            const i64 b = task / (kv_heads * parts), kv = task / parts % kv_heads, head = kv * group + task % parts * most;
            const i64 at = (b * heads + head) * width;
            look(q + at, out + at, most, blocks, kv, table + b * table_width, counts[b], window, scale);
        });
    });
}

// A token a row into its block.
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

// --- a whole step --------------------------------------------------------------------------------------------------------

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

// As one_token.py fills it.
struct Step {
    const Layer* layers;
    Norm last;
    float* x;  // (rows, d): embeddings, and in the end final states
    float *pool, *cos, *sin;
    Pages pages, source;  // counts are of the tokens before this one
    i64 n_layers, rows, d, heads, kv_heads, width, n_turns, window;
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

class Stack {
    const Step& s;
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
        char* room = (char*)scratch(sizeof(float) * (s.rows * s.d + wide_size + heard_size) + room_for(s.rows, longest));
        y = (float*)room;
        wide = y + s.rows * s.d;
        heard = wide + wide_size;
        memory = heard + heard_size;
    }

    void run(Team& team) const {
        i64 at = 0;
        const float* from = s.norm_first ? y : s.x;
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
        if (s.norm_first) team.each(s.rows, [&](i64 row) { s.last(s.x + row * s.d, s.x + row * s.d, s.d); });
    }

   private:
    Input to(const Matrix& m, const float* x) const { return input(m, x, memory, s.rows); }

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
        team.each((m.n + step - 1) / step, [&](i64 i) {
            columns(m, to(m, x), s.rows, i * step, smaller(m.n, (i + 1) * step), {out, m.n, m.bias, false});
        });
    }

    // What a step found joins the stream.
    void speak(Team& team, const Matrix& m) const {
        round(team, m, heard);
        const i64 step = piece(m, s.threads);
        team.each((m.n + step - 1) / step, [&](i64 i) {
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
        if (s.n_turns) turn(head, s.cos + row * s.n_turns, s.sin + row * s.n_turns, s.width, s.n_turns);
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
    together(step->threads, step->n_layers * PHASES + 2, [&](Team& team) { stack.run(team); });
}
