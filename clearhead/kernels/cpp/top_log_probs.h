// Each row's likeliest tokens, for beam search: one pass for the largest logit, and one for the sum and the candidates, while the
// row is in the cache. No row of probabilities is written.

#pragma once

#include "threads.h"

namespace {

// The `most` largest numbers so far, descending, of equals the first.
struct Best {
    float* values;
    i64* ids;
    i64 most, n = 0;

    inline float least() const { return n < most ? -INFINITY : values[n - 1]; }
    void add(float value, i64 id) {
        i64 at = n < most ? n++ : n - 1;
        for (; at && values[at - 1] < value; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
        values[at] = value, ids[at] = id;
    }
};

void row_top(const float* logits, const float* bias, i64 n, Best best) {
    Wide most = all(-INFINITY), wrong = {};
    i64 i = 0;
    for (; i + WIDE <= n; i += WIDE) {
        const Wide x = load(logits + i);
        most = x > most ? x : most;
        wrong = x == x ? wrong : all(1);
    }
    float largest = -INFINITY;
    bool is_wrong = sum(wrong) > 0;
    for (int j = 0; j < WIDE; j++) largest = std::max(largest, most[j]);
    for (i64 j = i; j < n; j++) largest = std::max(largest, logits[j]), is_wrong |= std::isnan(logits[j]);

    Wide sums[4] = {};
    for (i = 0; i < n; i += WIDE) {
        const i64 here = smaller(WIDE, n - i);
        Wide x = all(-INFINITY), added = x;
        memcpy(&x, logits + i, here * sizeof(float));
        const Wide part = exponential(x - largest);
        sums[i / WIDE % 4] += x == -INFINITY ? all(0) : part;
        added = x;
        if (bias) {
            Wide more = {};
            memcpy(&more, bias + i, here * sizeof(float));
            added += more;
        }
        for (unsigned bits = above(added, all(best.least())); bits; bits &= bits - 1) {
            const int j = __builtin_ctz(bits);
            if (added[j] > best.least()) best.add(added[j], i + j);
        }
    }
    for (i64 id = 0; best.n < best.most; id++)  // the rest is impossible: the first ids that are not there
        if (std::find(best.ids, best.ids + best.n, id) == best.ids + best.n) best.add(-INFINITY, id);
    is_wrong |= !std::isfinite(largest);  // as a softmax: infinity, and nothing possible, have no probabilities
    const float log_sum = std::log(sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
    for (i64 k = 0; k < best.most; k++) best.values[k] = is_wrong ? NAN : best.values[k] - largest - log_sum;
}

}  // namespace

// The `most` largest of log_softmax(row) + bias, and their ids. `bias` may be null; n >= most.
extern "C" void top_log_probs(const float* logits, const float* bias, float* values, i64* ids, i64 rows, i64 n, i64 most,
                              int threads) {
    parallel(threads_for(rows * n, threads), 1, [&](Team& team) {
        team.for_each(rows, [&](i64 row) { row_top(logits + row * n, bias, n, {values + row * most, ids + row * most, most}); });
    });
}
