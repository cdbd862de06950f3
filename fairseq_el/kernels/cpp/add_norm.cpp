// A residual connection and the layer norm that follows it.

#include <cmath>

#include "kernels.h"
#include "vec.h"

constexpr int64_t PARALLEL = 1 << 14;  // numbers from which on threads pay

static void normalise(float* x, const float* weight, const float* bias, float eps, float mean, float* y, int64_t d) {
    Vec squares = {};
    for (int64_t k = 0; k < d; k += WIDTH) {
        const Vec centred = load(x + k) - mean;
        squares += centred * centred;
    }
    const float scale = 1 / std::sqrt(sum(squares) / d + eps);
    for (int64_t k = 0; k < d; k += WIDTH)
        store(y + k, (load(x + k) - mean) * scale * load(weight + k) + load(bias + k));
}

// sum = residual + x, y = the layer norm of sum; [rows, d] each, d a multiple of 16. Without a residual (null), sum is
// x. sum may be null if only y is needed. y may be residual, and so may sum.
extern "C" void fairseq_el_add_norm(const float* x, const float* residual, const float* weight, const float* bias,
                                    float eps, float* sums, float* y, int64_t rows, int64_t d) {
#pragma omp parallel for schedule(static) if (rows * d >= PARALLEL)
    for (int64_t at = 0; at < rows * d; at += d) {
        float* to = (sums ? sums : y) + at;
        Vec total = {};
        for (int64_t k = 0; k < d; k += WIDTH) {
            const Vec v = residual ? load(residual + at + k) + load(x + at + k) : load(x + at + k);
            store(to + k, v);
            total += v;
        }
        normalise(to, weight, bias, eps, sum(total) / d, y + at, d);
    }
}
