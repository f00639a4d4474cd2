// Products and attention for a few rows on a CPU, where reading the weights takes the time: each is read once, by all threads,
// at the speed of the memory. Plain C functions on plain pointers; native.py compiles this file on first use.
//
// Every result is summed in an order that knows nothing of the other rows, columns and threads: a row gives the same bits alone
// and in a batch.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

using i64 = int64_t;

constexpr i64 AHEAD = 4096;  // bytes that are asked for before they are needed

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

// --- float32 -------------------------------------------------------------------------------------------------------------

template <int C, int R>
inline void dots(const float* w, const float* x, const float* bias, float* out, i64 n, i64 d) {
    Wide sums[C][R] = {};
    i64 i = 0;
    for (; i + WIDE <= d; i += WIDE) {
        Wide in[R];
        for (int r = 0; r < R; r++) in[r] = load(x + r * d + i);
        for (int c = 0; c < C; c++) {
            Wide weight = load(w + c * d + i);
            if (WIDE == 16 || i % 16 == 0) __builtin_prefetch((const char*)(w + i * C + c * 16) + (R == 1 ? AHEAD : 4 * C * d));
            for (int r = 0; r < R; r++) sums[c][r] = fma(weight, in[r], sums[c][r]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            float rest = 0;
            for (i64 j = i; j < d; j++) rest = fma(w[c * d + j], x[r * d + j], rest);
            out[r * n + c] = sum(sums[c][r]) + rest + (bias ? bias[c] : 0.f);
        }
}

template <int C>
inline void columns(const float* w, const float* x, const float* bias, float* out, i64 rows, i64 n, i64 d) {
    const i64 most = share(rows, ROWS);
    for (i64 row = 0; row < rows; row += most) {
        const float* in = x + row * d;
        float* to = out + row * n;
        switch (rows - row < most ? rows - row : most) {
            case 1: dots<C, 1>(w, in, bias, to, n, d); break;
            case 2: dots<C, 2>(w, in, bias, to, n, d); break;
            case 3: dots<C, 3>(w, in, bias, to, n, d); break;
#if !defined(__AVX__) || defined(__AVX512F__)
            case 4: dots<C, 4>(w, in, bias, to, n, d); break;
#endif
#if defined(__AVX512F__)
            case 5: dots<C, 5>(w, in, bias, to, n, d); break;
            case 6: dots<C, 6>(w, in, bias, to, n, d); break;
#endif
        }
    }
}

}  // namespace

extern "C" void linear_f32(const float* x, const float* w, const float* bias, float* out, i64 rows, i64 n, i64 d, int threads) {
    const i64 whole = rows == 1 ? 0 : n / 4;  // a single row reads the weights in the order they lie in
#pragma omp parallel for schedule(static) num_threads(enough(rows * n * d, threads))
    for (i64 block = 0; block < n - whole * 3; block++) {
        i64 c = block < whole ? block * 4 : whole * 3 + block;
        const float* b = bias ? bias + c : nullptr;
        if (block < whole)
            columns<4>(w + c * d, x, b, out + c, rows, n, d);
        else
            columns<1>(w + c * d, x, b, out + c, rows, n, d);
    }
}

// --- int8 and int4 -------------------------------------------------------------------------------------------------------

namespace {

// Inputs are rounded to 16 bits, 64 numbers sharing a scale: an error far below that of the weights, and whole numbers multiply
// twice as fast as real ones. Sums of 64 products fit 32 bits.
constexpr i64 GROUP = 64;

struct Input {
    int16_t* q;     // (rows, groups * 64)
    float* scales;  // (rows, groups)
    float* sums;    // (rows, groups * 2): over 32 rounded numbers, for the weights' minimums
    i64 groups;
};

Input room(i64 rows, i64 d) {
    i64 groups = (d + GROUP - 1) / GROUP;
    char* memory = (char*)scratch(rows * groups * (GROUP * sizeof(int16_t) + 3 * sizeof(float)));
    float* scales = (float*)(memory + rows * groups * GROUP * sizeof(int16_t));
    return {(int16_t*)memory, scales, scales + rows * groups, groups};
}

// `apart`: 4 is for int4, whose words hold 4 neighbours; the first of each word come first, then the second ...
inline void round_row(const float* x, const Input& in, i64 row, i64 d, int apart) {
    for (i64 g = 0; g < in.groups; g++) {
        float part[GROUP] = {}, largest = 0, wrong = 0;
        memcpy(part, x + row * d + g * GROUP, sizeof(float) * (d - g * GROUP < GROUP ? d - g * GROUP : GROUP));
        for (int i = 0; i < GROUP; i++) {
            float size = std::fabs(part[i]);
            largest = size > largest ? size : largest;
            wrong += part[i] * 0;  // NaN and infinity must come out again
        }
        float inverse = largest > 0 && largest < 1e38f ? 32767 / largest : 0;
        const float scale = largest / 32767 + wrong;
        in.scales[row * in.groups + g] = scale;
        int16_t* to = in.q + (row * in.groups + g) * GROUP;
        int32_t totals[2] = {};
        for (int j = 0; j < apart; j++)
            for (int i = 0; i < GROUP / apart; i++) {
                float rounded = part[i * apart + j] * inverse + 12582912.f;  // 1.5 * 2^23: the whole number is in the low bits
                int32_t bits;
                memcpy(&bits, &rounded, sizeof bits);
                to[j * (GROUP / apart) + i] = (int16_t)bits;
                totals[i * apart + j >= GROUP / 2] += (int16_t)bits;
            }
        for (int half = 0; half < 2; half++) in.sums[(row * in.groups + g) * 2 + half] = totals[half] * scale;
    }
}

inline float half_to_float(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13 | (uint32_t)(half & 0x8000) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value * 0x1p112f;
}

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FAST 1
using Int = __m256i;
using Sum = __m256;
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
inline Int multiply(Int sums, Int a, Int b) { return _mm256_dpwssd_epi32(sums, a, b); }
constexpr int QROWS = 4, QCOLUMNS = 4;
#else
inline Int multiply(Int sums, Int a, Int b) { return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)); }
constexpr int QROWS = 4, QCOLUMNS = 2;
#endif
inline Sum add(Sum sums, Int products, Sum scale) { return _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), scale, sums); }
#else
constexpr int QROWS = 4, QCOLUMNS = 2;
#endif

// The weights of one column over one group, unpacked to 16 bits, and what their sums are multiplied with.
struct Int8 {
    static constexpr int APART = 1;
    const int8_t* q;         // (n, d)
    const uint16_t* scales;  // (n, groups), float16
    i64 d, groups;

#if FAST
    template <bool LAST>
    inline void unpack(i64 c, i64 g, Int w[4], Sum& scale) const {
        const int8_t* from = q + c * d + g * GROUP;
        int8_t last[GROUP];
        if (LAST) from = (int8_t*)memcpy(memset(last, 0, GROUP), from, d - g * GROUP);
        for (int i = 0; i < 4; i++) w[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(from + 16 * i)));
        scale = _mm256_cvtph_ps(_mm_set1_epi16((short)scales[c * groups + g]));
        if (!LAST) __builtin_prefetch(from + AHEAD);
    }
#else
    inline void unpack(i64 c, i64 g, int16_t w[GROUP], float scale[2]) const {
        for (i64 i = 0; i < GROUP; i++) w[i] = g * GROUP + i < d ? q[c * d + g * GROUP + i] : 0;
        scale[0] = scale[1] = half_to_float(scales[c * groups + g]);
    }
#endif
    inline float rest(i64, const float*) const { return 0; }
};

struct Int4 {
    static constexpr int APART = 4;
    const uint8_t* q;        // (n, d / 2): the even neighbour low, the odd one high
    const uint16_t* scales;  // (n, d / 32), float16
    const uint16_t* mins;
    i64 d, groups;

#if FAST
    template <bool LAST>
    inline void unpack(i64 c, i64 g, Int w[4], Sum& scale) const {
        const uint8_t* from = q + (c * d + g * GROUP) / 2;
        const uint16_t* s = scales + c * d / 32 + g * 2;
        Int words;
        uint32_t pair = 0;
        if (LAST) {
            words = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)from));
            words = _mm256_inserti128_si256(words, _mm_setzero_si128(), 1);
            pair = *s;
        } else {
            words = _mm256_loadu_si256((const Int*)from);
            memcpy(&pair, s, sizeof pair);
        }
        const Int low = _mm256_set1_epi16(15);
        w[0] = _mm256_and_si256(words, low);
        w[1] = _mm256_and_si256(_mm256_srli_epi16(words, 4), low);
        w[2] = _mm256_and_si256(_mm256_srli_epi16(words, 8), low);
        w[3] = _mm256_srli_epi16(words, 12);
        // 8 words, the lower half of the register, are the first 32 weights
        __m128 two = _mm_cvtph_ps(_mm_cvtsi32_si128((int)pair));
        scale = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(two), _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0));
        if (!LAST) __builtin_prefetch(from + AHEAD);
    }
#else
    inline void unpack(i64 c, i64 g, int16_t w[GROUP], float scale[2]) const {
        for (i64 i = 0; i < GROUP; i++) {
            i64 at = g * GROUP + i;
            uint8_t pair = at < d ? q[(c * d + at) / 2] : 0;
            w[i % 4 * 16 + i / 4] = i % 2 ? pair >> 4 : pair & 15;
        }
        for (int half = 0; half < 2; half++)
            scale[half] = g * 2 + half < d / 32 ? half_to_float(scales[c * d / 32 + g * 2 + half]) : 0.f;
    }
#endif
    // The minimums' share: each times the sum of its inputs.
    inline float rest(i64 c, const float* sums) const {
        const uint16_t* m = mins + c * d / 32;
        float total = 0;
        i64 g = 0;
#if FAST
        Sum eight = _mm256_setzero_ps();
        for (; g + 8 <= d / 32; g += 8)
            eight = _mm256_fmadd_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(m + g))), _mm256_loadu_ps(sums + g), eight);
        total = ::total(eight);
#endif
        for (; g < d / 32; g++) total = fma(half_to_float(m[g]), sums[g], total);
        return total;
    }
};

#if FAST
// One group's share of the sums.
template <int C, int R, bool LAST, class Weights>
inline void gather(const Weights& w, const int16_t* x, const float* xs, i64 c0, i64 g, i64 groups, Sum sums[C][R]) {
    for (int c = 0; c < C; c++) {
        Int weights[4];
        Sum scale;
        w.template unpack<LAST>(c0 + c, g, weights, scale);
        for (int r = 0; r < R; r++) {
            const Int* from = (const Int*)(x + (r * groups + g) * GROUP);
            Int products = _mm256_setzero_si256();
            for (int i = 0; i < 4; i++) products = multiply(products, weights[i], _mm256_loadu_si256(from + i));
            sums[c][r] = add(sums[c][r], products, _mm256_mul_ps(scale, _mm256_broadcast_ss(xs + r * groups + g)));
        }
    }
}
#endif

template <int C, int R, class Weights>
inline void dots(const Weights& w, const Input& in, i64 row, i64 c0, const float* bias, float* out, i64 n) {
    const int16_t* x = in.q + row * in.groups * GROUP;
    const float* xs = in.scales + row * in.groups;
    float results[C][R];
#if FAST
    Sum sums[C][R];
    for (int c = 0; c < C; c++)
        for (int r = 0; r < R; r++) sums[c][r] = _mm256_setzero_ps();
    const i64 whole = w.d / GROUP;
    for (i64 g = 0; g < whole; g++) gather<C, R, false>(w, x, xs, c0, g, in.groups, sums);
    if (whole < in.groups) gather<C, R, true>(w, x, xs, c0, whole, in.groups, sums);
    for (int c = 0; c < C; c++)
        for (int r = 0; r < R; r++) results[c][r] = total(sums[c][r]);
#else
    memset(results, 0, sizeof results);
    for (i64 g = 0; g < in.groups; g++)
        for (int c = 0; c < C; c++) {
            int16_t weights[GROUP];
            float scale[2];
            w.unpack(c0 + c, g, weights, scale);
            for (int r = 0; r < R; r++) {
                const int16_t* from = x + (r * in.groups + g) * GROUP;
                // Lanes of 8 words, as two scales lie over them: words 0-7 are the first 32 weights of int4.
                int32_t products[2] = {};
                for (int j = 0; j < 4; j++)
                    for (int half = 0; half < 2; half++)
                        for (int i = 0; i < 8; i++)
                            products[half] += weights[j * 16 + half * 8 + i] * from[j * 16 + half * 8 + i];
                results[c][r] = fma(fma(products[0], scale[0], products[1] * scale[1]), xs[r * in.groups + g], results[c][r]);
            }
        }
#endif
    for (int c = 0; c < C; c++)
        for (int r = 0; r < R; r++) {
            float rest = w.rest(c0 + c, in.sums + (row + r) * in.groups * 2);
            out[r * n + c0 + c] = results[c][r] + rest + (bias ? bias[c0 + c] : 0.f);
        }
}

template <int C, class Weights>
inline void columns(const Weights& w, const Input& in, i64 rows, i64 c, const float* bias, float* out, i64 n) {
    const i64 most = share(rows, QROWS);
    for (i64 row = 0; row < rows; row += most) {
        float* to = out + row * n;
        switch (rows - row < most ? rows - row : most) {
            case 1: dots<C, 1>(w, in, row, c, bias, to, n); break;
            case 2: dots<C, 2>(w, in, row, c, bias, to, n); break;
            case 3: dots<C, 3>(w, in, row, c, bias, to, n); break;
            case 4: dots<C, 4>(w, in, row, c, bias, to, n); break;
        }
    }
}

template <class Weights>
void product(const Weights& w, const float* x, const float* bias, float* out, i64 rows, i64 n, i64 d, int threads) {
    const Input in = room(rows, d);
    const i64 whole = rows == 1 ? 0 : n / QCOLUMNS;
#pragma omp parallel num_threads(enough(rows * n * d, threads))
    {
#pragma omp for schedule(static)
        for (i64 row = 0; row < rows; row++) round_row(x, in, row, d, Weights::APART);
#pragma omp for schedule(static)
        for (i64 block = 0; block < n - whole * (QCOLUMNS - 1); block++) {
            if (block < whole)
                columns<QCOLUMNS>(w, in, rows, block * QCOLUMNS, bias, out, n);
            else
                columns<1>(w, in, rows, whole * (QCOLUMNS - 1) + block, bias, out, n);
        }
    }
}

}  // namespace

extern "C" void linear_int8(const float* x, const int8_t* q, const uint16_t* scales, const float* bias, float* out, i64 rows,
                            i64 n, i64 d, int threads) {
    product(Int8{q, scales, d, (d + GROUP - 1) / GROUP}, x, bias, out, rows, n, d, threads);
}

extern "C" void linear_int4(const float* x, const uint8_t* q, const uint16_t* scales, const uint16_t* mins, const float* bias,
                            float* out, i64 rows, i64 n, i64 d, int threads) {
    product(Int4{q, scales, mins, d, (d + GROUP - 1) / GROUP}, x, bias, out, rows, n, d, threads);
}

// --- attention -----------------------------------------------------------------------------------------------------------

// One query a row and head over keys and values that lie in the blocks of a pool. Heads that share keys are taken together, a
// block at a time, so that these are read once.
extern "C" void paged_attention(const float* q, const float* k, const float* v, const int32_t* table, const int32_t* counts,
                                float* out, i64 rows, i64 heads, i64 kv_heads, i64 width, i64 block, i64 table_width,
                                i64 k_block, i64 k_head, i64 v_block, i64 v_head, float scale, i64 window, int threads) {
    const i64 group = heads / kv_heads, padded = (block + WIDE - 1) / WIDE * WIDE;
    const i64 together = rows * kv_heads >= 4 * threads ? group : 1;
    const i64 parts = group / together;
    i64 longest = 0;
    for (i64 b = 0; b < rows; b++) longest += counts[b];
#pragma omp parallel for schedule(dynamic) num_threads(enough(longest * heads * width, threads))
    for (i64 task = 0; task < rows * kv_heads * parts; task++) {
        const i64 b = task / (kv_heads * parts), kv = task / parts % kv_heads, head = kv * group + task % parts * together;
        const float* in = q + (b * heads + head) * width;
        float* to = out + (b * heads + head) * width;
        memset(to, 0, sizeof(float) * together * width);
        const i64 end = counts[b], start = window && end > window ? end - window : 0;
        if (end <= start) continue;
        // for each head: the weights of a block, then the largest score so far and the sum of the weights
        float* weights = (float*)scratch(sizeof(float) * (padded + 2 * together));
        float *largest = weights + padded, *sums = largest + together;
        for (i64 h = 0; h < together; h++) largest[h] = -INFINITY, sums[h] = 0;
        for (i64 first = start / block * block; first < end; first += block) {
            const i64 page = table[b * table_width + first / block];
            const i64 from = start > first ? start - first : 0, until = end - first < block ? end - first : block;
            const float* keys = k + page * k_block + kv * k_head;
            const float* values = v + page * v_block + kv * v_head;
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
