// Rounding weights to 4 bits.

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
