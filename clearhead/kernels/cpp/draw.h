// One token for each row, drawn with the probabilities softmax(logits): the largest logit after Gumbel noise, as `sample` in
// sampling/strategy.py computes it, where the noise is explained. The noise of nearly all tokens need not be known: a token wins only
// if its random number is closer to 1 than exp(logit - best so far), and that is seen without a logarithm.

#pragma once

#include "argmax.h"
#include "threads.h"

namespace {

using Keys = uint64_t __attribute__((vector_size(WIDE * 4)));  // half as many as floats

// SplitMix64 of one number, or of several.
template <class Number>
inline Number scramble(Number x) {
    x = x * 0x9E3779B97F4A7C15u + 0x1234567u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

inline double noisy(float logit, uint64_t bits) {
    const double uniform = ((double)(bits >> 11) + 0.5) * 0x1p-53;
    return (double)logit - std::log(-std::log(uniform));
}

// How far each random number is from 1, never rounded up: in units of 2^-24.
inline Wide distances(Keys low, Keys high) {
    int32_t far[WIDE];
    for (int i = 0; i < WIDE / 2; i++) far[i] = (int32_t)(low[i] >> 40), far[i + WIDE / 2] = (int32_t)(high[i] >> 40);
    Wide found;
    for (int i = 0; i < WIDE; i++) found[i] = (float)far[i];
    return found;
}

i64 draw_row(const float* logits, i64 n, uint64_t seed, uint64_t step) {
    const Argmax top = Argmax::of(logits, 0, n);
    if (!std::isfinite(top.value)) return top.at;  // NaN, infinity, or nothing that is possible: as without noise
    const uint64_t key = scramble(scramble(seed) + step);
    i64 best = top.at;
    double most = noisy(top.value, scramble(key + (uint64_t)best));
    Keys at;
    for (int i = 0; i < WIDE / 2; i++) at[i] = key + (uint64_t)i;
    for (i64 i = 0; i < n; i += WIDE, at += (uint64_t)WIDE) {
        Wide x = all(-INFINITY);
        memcpy(&x, logits + i, sizeof(float) * smaller(WIDE, n - i));
        const Keys low = scramble(at), high = scramble(at + (uint64_t)(WIDE / 2));
        // exp(x - most) is not below 1 only if x is above; the factor is for the rounding of floats
        const Wide below = x - (float)most, near = below < 0.f ? exponential(below) * (1.0001f * 0x1p24f) : all(INFINITY);
        for (unsigned bits = above(near, distances(~low, ~high)); bits; bits &= bits - 1) {
            const int j = __builtin_ctz(bits);
            const double found = noisy(x[j], j < WIDE / 2 ? low[j] : high[j - WIDE / 2]);
            if (found > most || (found == most && i + j < best)) most = found, best = i + j;
        }
    }
    return best;
}

}  // namespace

extern "C" void draw(const float* logits, const i64* seeds, const i64* steps, i64* tokens, i64 rows, i64 n, int threads) {
    parallel(threads_for(rows * n, threads), 1, [&](Team& team) {
        team.for_each(rows, [&](i64 row) { tokens[row] = draw_row(logits + row * n, n, (uint64_t)seeds[row], (uint64_t)steps[row]); });
    });
}
