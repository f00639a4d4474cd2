#pragma once

#include "softmax.h"

namespace {

// As torch.argmax: NaN is larger than every number, and among equals the first wins.
struct Argmax {
    float value;
    i64 at;

    static Argmax of(const float* x, i64 from, i64 to) {
        Wide most = all(-INFINITY);
        WideInt nans = {};
        i64 i = from;
        for (; i + WIDE <= to; i += WIDE) {
            const Wide value = load(x + i);
            most = larger(value, most);
            nans |= value != value;
        }
        float top = largest(most);
        bool has_nan = largest(nans ? all(1) : Wide{}) > 0;
        for (; i < to; i++) top = std::max(top, x[i]), has_nan |= x[i] != x[i];
        i = from;
        if (!has_nan)
            while (i + WIDE <= to && !above(all(1), load(x + i) == top ? Wide{} : all(1))) i += WIDE;
        for (; has_nan ? x[i] == x[i] : x[i] != top;) i++;
        return {x[i], i};
    }
    bool beats(const Argmax& other) const { return value > other.value || (value != value && other.value == other.value); }
};

}  // namespace
