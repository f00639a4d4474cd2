// Rounding weights to 4 bits: the searches of quantization/int4_rounding.py.

#pragma once

#include "threads.h"

namespace {

// Rounded to float16.
inline float as_half(float x) {
    if (std::fabs(x) < 0x1p-14f) return (x + 0.75f) - 0.75f;  // subnormal: multiples of 2^-24
    uint32_t bits;
    memcpy(&bits, &x, sizeof x);
    bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// 32 weights as u * scale + least, u = 0 .. 15. Computes what `search` in quantization/int4_rounding.py does.
struct Group {
    static constexpr int SIZE = 32, PARTS = SIZE / WIDE;
    Wide w[PARTS], u[PARTS];
    float scale, least;

    void round() {
        for (int i = 0; i < PARTS; i++) {
            Wide value = (w[i] - least) / std::max(scale, 1e-7f);
            value = value > 0.f ? value : Wide{};
            value = value < 15.f ? value : all(15.f);
            u[i] = (value + 12582912.f) - 12582912.f;
        }
    }

    // The line through the points (u, w), by least squares.
    void fit() {
        Wide us = {}, ws = {}, uus = {}, uws = {};
        for (int i = 0; i < PARTS; i++) us += u[i], ws += w[i], uus += u[i] * u[i], uws += u[i] * w[i];
        const float su = sum(us), sw = sum(ws), spread = SIZE * sum(uus) - su * su, slope = (SIZE * sum(uws) - su * sw) / spread;
        if (!(spread > 0 && slope > 0)) return;
        scale = as_half(slope), least = as_half((sw - slope * su) / SIZE);
    }

    float loss() const {
        Wide lost = {};
        for (int i = 0; i < PARTS; i++) lost += (u[i] * scale + least - w[i]) * (u[i] * scale + least - w[i]);
        return sum(lost);
    }
};

inline Wide as_half(Wide x) {
    float each[WIDE];
    store(each, x);
    for (float& one : each) one = as_half(one);
    return load(each);
}

// WIDE groups, side by side in the registers, whose errors are made up for by the weights that are rounded after them: one try.
struct Columns {
    static constexpr int SIZE = Group::SIZE;
    Wide u[SIZE], lost[SIZE], moved[SIZE];
    Wide scale, least, inverse, loss;
    Wide vv, vo, vp, op;  // sums for `fit`, with v = u U^-1 * scale

    void start(const Wide* weights) {
        inverse = 1.f / (scale > 1e-7f ? scale : all(1e-7f));
        for (int i = 0; i < SIZE; i++) moved[i] = weights[i] - least;
        loss = vv = vo = vp = op = Wide{};
    }

    // `row` is row i of U, with 1 / U[i, i] in its place i; `point` and `one` are the i-th of w U^-1 and of (1, ..., 1) U^-1.
    void round(int i, const float* row, Wide point, Wide one) {
        Wide value = moved[i] * inverse;
        value = value > 0.f ? value : Wide{};
        value = value < 15.f ? value : all(15.f);
        u[i] = (value + 12582912.f) - 12582912.f;
        const Wide error = (moved[i] - u[i] * scale) * row[i], v = point - error - least * one;
        const Wide back = -error;
        for (int j = i + 1; j < SIZE; j++) moved[j] = fma(back, all(row[j]), moved[j]);
        lost[i] = error, loss = fma(error, error, loss);
        vv = fma(v, v, vv), vo = fma(v, one, vo), vp = fma(v, point, vp), op = fma(one, point, op);
    }

    // The line points = slope v + least ones by least squares; where there is none, it stays as it is.
    void fit(float oo) {
        const Wide spread = vv * oo - vo * vo, slope = (vp * oo - op * vo) / spread;
        const auto fits = (spread > 1e-6f * oo * vv) & (slope > 0.f);
        least = fits ? as_half((op - slope * vo) / oo) : least;
        scale = fits ? as_half(slope * scale) : scale;
    }

    void keep_better(const Columns& other) {
        const auto better = other.loss < loss;
        for (int i = 0; i < SIZE; i++) u[i] = better ? other.u[i] : u[i], lost[i] = better ? other.lost[i] : lost[i];
        loss = better ? other.loss : loss, scale = better ? other.scale : scale, least = better ? other.least : least;
    }
};

}  // namespace

// For each group, try some shrunken ranges: round, fit scale and minimum to the rounded weights, a few times over. Keep the range
// with the smallest squared error.
extern "C" void pack_int4(const float* weights, uint8_t* q, float* scales, float* mins, const float* shrinks, i64 groups,
                          i64 n_shrinks, i64 n_fits, int threads) {
    constexpr i64 step = 1024, MOST = 16;
    n_shrinks = smaller(n_shrinks, MOST);
    parallel(threads_for(groups * Group::SIZE, threads), 1, [&](Team& team) {
        team.for_each((groups + step - 1) / step, [&](i64 piece) {
            for (i64 g = piece * step; g < smaller(groups, (piece + 1) * step); g++) {
                const float *from = weights + g * Group::SIZE, low = *std::min_element(from, from + Group::SIZE);
                const float range = *std::max_element(from, from + Group::SIZE) - low;
                Group tries[MOST];
                for (i64 i = 0; i < n_shrinks; i++) {
                    memcpy(tries[i].w, from, sizeof tries[i].w);
                    tries[i].scale = as_half(range * shrinks[i] / 15);
                    tries[i].least = as_half(low + range * (1 - shrinks[i]) / 2);
                    tries[i].round();
                }
                // A try depends on its own last result: in turns, the processor can work on several tries at once.
                for (i64 fit = 0; fit < n_fits; fit++)
                    for (i64 i = 0; i < n_shrinks; i++) tries[i].fit(), tries[i].round();
                i64 at = 0;
                float lost[MOST];
                for (i64 i = 0; i < n_shrinks; i++) lost[i] = tries[i].loss(), at = lost[i] < lost[at] ? i : at;
                const Group& best = tries[at];
                scales[g] = best.scale, mins[g] = best.least;
                float u[Group::SIZE];
                memcpy(u, best.u, sizeof u);
                uint8_t* to = q + g * (Group::SIZE / 2);
                for (int i = 0; i < Group::SIZE / 2; i++) to[i] = (uint8_t)u[2 * i] | (uint8_t)u[2 * i + 1] << 4;
            }
        });
    });
}

// The best of several starts for n groups, each a column of `weights` (32, n). `factor` (32, 32) is U with 1 / U[i, i] on its diagonal.
extern "C" void search_int4(const float* weights, const float* points, const float* factor, const float* ones, const float* shrinks,
                            float* u, float* lost, float* scales, float* mins, i64 n, i64 n_shrinks, i64 n_fits, int threads) {
    constexpr i64 step = 128, SIZE = Group::SIZE;
    constexpr int AT_ONCE = 2;  // tries: a weight waits for the one before it
    float oo = 0;
    for (i64 i = 0; i < SIZE; i++) oo += ones[i] * ones[i];
    parallel(threads_for(n * SIZE, threads), 1, [&](Team& team) {
        team.for_each((n + step - 1) / step, [&](i64 piece) {
            for (i64 at = piece * step; at < smaller(n, (piece + 1) * step); at += WIDE) {
                const i64 bytes = smaller(n - at, WIDE) * 4;
                Wide w[SIZE] = {}, point[SIZE] = {};
                for (i64 i = 0; i < SIZE; i++)
                    memcpy(&w[i], weights + i * n + at, bytes), memcpy(&point[i], points + i * n + at, bytes);
                Wide low = w[0], high = w[0];
                for (const Wide& each : w) low = each < low ? each : low, high = each > high ? each : high;
                Columns tries[AT_ONCE], best;
                for (i64 first = 0; first < n_shrinks; first += AT_ONCE) {
                    for (int t = 0; t < AT_ONCE; t++) {
                        const float share = shrinks[smaller(first + t, n_shrinks - 1)];
                        tries[t].scale = as_half((high - low) * (share / 15));
                        tries[t].least = as_half(low + (high - low) * ((1 - share) / 2));
                    }
                    for (i64 fit = 0; fit <= n_fits; fit++) {
                        for (Columns& each : tries) {
                            if (fit) each.fit(oo);
                            each.start(w);
                        }
                        for (int i = 0; i < SIZE; i++)
                            for (Columns& each : tries) each.round(i, factor + i * SIZE, point[i], all(ones[i]));
                    }
                    if (first == 0) best = tries[0];
                    for (const Columns& each : tries) best.keep_better(each);
                }
                for (i64 i = 0; i < SIZE; i++)
                    memcpy(u + i * n + at, &best.u[i], bytes), memcpy(lost + i * n + at, &best.lost[i], bytes);
                memcpy(scales + at, &best.scale, bytes), memcpy(mins + at, &best.least, bytes);
            }
        });
    });
}
