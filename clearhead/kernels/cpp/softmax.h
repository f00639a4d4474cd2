// A softmax whose scores come block by block.

#pragma once

#include "vectors.h"

namespace {

inline Wide larger(Wide a, Wide b) { return a > b ? a : b; }

inline float largest(Wide value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#else
    float parts[WIDE];
    memcpy(parts, &value, sizeof value);
    return *std::max_element(parts, parts + WIDE);
#endif
}

// Turn a row's `n` scores into softmax weights, and fill up to `room` with zeros. `top` and `total` are updated; returns the
// factor by which earlier weights shrink.
inline float running_softmax(float* row, i64 n, i64 room, float& top, float& total) {
    if (n % WIDE)
        for (i64 i = n; i % WIDE; i++) row[i] = -INFINITY;
    Wide tops = all(top);
    for (i64 i = 0; i < n; i += WIDE) tops = larger(load(row + i), tops);
    const float before = top;
    top = largest(tops);
    Wide added = {};
    for (i64 i = 0; i < n; i += WIDE) {
        const Wide scores = load(row + i);
        Wide weights = exponential(scores - top);
        weights = scores == -INFINITY ? Wide{} : weights;
        store(row + i, weights);
        added += weights;
    }
    for (i64 i = (n + WIDE - 1) / WIDE * WIDE; i < room; i++) row[i] = 0;
    const float decay = before == top ? 1.f : std::exp(before - top);
    total = fma(total, decay, sum(added));
    return decay;
}

}  // namespace
