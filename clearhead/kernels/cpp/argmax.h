#pragma once

#include "vectors.h"

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
            most = value > most ? value : most;
            nans |= value != value;
        }
        float top = -INFINITY;
        bool has_nan = false;
        for (int j = 0; j < WIDE; j++) top = std::max(top, most[j]), has_nan |= nans[j] != 0;
        for (; i < to; i++) top = std::max(top, x[i]), has_nan |= x[i] != x[i];
        for (i = from; has_nan ? x[i] == x[i] : x[i] != top;) i++;
        return {x[i], i};
    }
    bool beats(const Argmax& other) const { return value > other.value || (value != value && other.value == other.value); }
};

}  // namespace
