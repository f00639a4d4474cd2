// Load a compiled native.cpp and compare its products and attention with plain sums in double. It needs no Python and no torch, so
// that a library for another processor can be tried under an emulator: build.py compiles and runs it.
//
//   check_kernels LIBRARY

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <dlfcn.h>
#include <omp.h>
#include <random>
#include <vector>

using i64 = int64_t;
using Floats = std::vector<float>;

std::mt19937 generator(5);

Floats random(i64 n) {
    Floats values(n);
    std::normal_distribution<float> normal;
    for (float& each : values) each = normal(generator);
    return values;
}

int failures = 0;

void compare(const char* what, const Floats& ours, const std::vector<double>& expected) {
    double worst = 0;
    for (size_t i = 0; i < ours.size(); i++) worst = std::fmax(worst, std::fabs(ours[i] - expected[i]) / (1 + std::fabs(expected[i])));
    // float32 sums of some hundred numbers near 1
    const bool good = worst < 2e-5;
    std::printf("%s %s: largest error %.1e\n", good ? "ok  " : "FAIL", what, worst);
    failures += !good;
}

// One query over `n` keys, in double.
void attend(const float* q, const float* k, const float* v, i64 n, i64 stride, i64 width, double scale, double* out) {
    std::vector<double> weights(n);
    double total = 0;
    for (i64 s = 0; s < n; s++) {
        double score = 0;
        for (i64 e = 0; e < width; e++) score += (double)q[e] * k[s * stride + e];
        total += weights[s] = std::exp(score * scale);
    }
    for (i64 s = 0; s < n; s++)
        for (i64 e = 0; e < width; e++) out[e] += weights[s] / total * v[s * stride + e];
}

int main(int, char** words) {
    omp_get_max_threads();  // this program brings the OpenMP library that the kernels expect in the process
    void* library = dlopen(words[1], RTLD_NOW);
    if (!library) return std::printf("FAIL %s\n", dlerror()), 1;

    auto linear = (void (*)(const float*, const float*, const float*, float*, i64, i64, i64, int))dlsym(library, "linear_f32");
    for (i64 rows : {1, 3, 13, 32}) {
        const i64 n = 37, d = 131;
        const Floats x = random(rows * d), w = random(n * d), bias = random(n);
        Floats out(rows * n);
        linear(x.data(), w.data(), bias.data(), out.data(), rows, n, d, 2);
        std::vector<double> expected;
        for (i64 r = 0; r < rows; r++)
            for (i64 c = 0; c < n; c++) {
                double sum = bias[c];
                for (i64 i = 0; i < d; i++) sum += (double)x[r * d + i] * w[c * d + i];
                expected.push_back(sum);
            }
        compare("linear_f32", out, expected);
    }

    const i64 T = 45, H = 3, E = 48, row = H * E;
    const double scale = 1 / std::sqrt((double)E);
    const Floats q = random(T * row), k = random(T * row), v = random(T * row);
    auto text = (void (*)(const float*, const float*, const float*, float*, const int32_t*, const int32_t*, i64, i64, i64, i64, i64, i64,
                          i64, i64, i64, i64, i64, i64, float, int, int))dlsym(library, "text_attention");
    for (int causal : {0, 1}) {
        Floats out(T * row);
        text(q.data(), k.data(), v.data(), out.data(), nullptr, nullptr, 1, T, T, H, H, E, row, E, row, E, row, E, scale, causal, 2);
        std::vector<double> expected(T * row);
        for (i64 t = 0; t < T; t++)
            for (i64 h = 0; h < H; h++)
                attend(&q[t * row + h * E], &k[h * E], &v[h * E], causal ? t + 1 : T, row, E, scale, &expected[t * row + h * E]);
        compare(causal ? "text_attention, causal" : "text_attention", out, expected);
    }

    const i64 B = 2, block = 16, blocks = 4;
    const Floats pool_k = random(blocks * H * block * E), pool_v = random(blocks * H * block * E);
    const int32_t table[] = {0, 1, 2, 3}, counts[] = {29, 7};
    Floats out(B * row);
    auto paged = (void (*)(const float*, const float*, const float*, const int32_t*, const int32_t*, float*, i64, i64, i64, i64, i64, i64,
                           i64, i64, i64, i64, float, i64, int))dlsym(library, "paged_attention");
    const i64 a_block = H * block * E, a_head = block * E;
    paged(q.data(), pool_k.data(), pool_v.data(), table, counts, out.data(), B, H, H, E, block, 2, a_block, a_head, a_block, a_head, scale, 0, 2);
    std::vector<double> expected(B * row);
    for (i64 b = 0; b < B; b++)
        for (i64 h = 0; h < H; h++) {
            Floats keys, values;
            for (i64 p = 0; p < counts[b]; p++)
                for (i64 e = 0; e < E; e++) {
                    const i64 at = table[b * 2 + p / block] * a_block + h * a_head + p % block * E + e;
                    keys.push_back(pool_k[at]), values.push_back(pool_v[at]);
                }
            attend(&q[b * row + h * E], keys.data(), values.data(), counts[b], E, E, scale, &expected[b * row + h * E]);
        }
    compare("paged_attention", out, expected);
    return failures != 0;
}
