// log(sum(exp(x))) of each row. Both passes over a row find it in the cache; torch writes two intermediate tensors as
// large as the logits.

#include <cmath>

#include "vec.h"

static float row_logsumexp(const float* x, int64_t width) {
    float max = -INFINITY;
    for (int64_t j = 0; j < width; j++) max = x[j] > max ? x[j] : max;
    if (max == -INFINITY) return width && x[0] == x[0] ? max : NAN;
    Vec sums = {};
    int64_t j = 0;
    for (; j + WIDTH <= width; j += WIDTH) sums += exponential(load(x + j) - max);
    float total = sum(sums);
    for (; j < width; j++) total += std::exp(x[j] - max);
    return max + std::log(total);
}

// x: [rows, width], out: [rows]
extern "C" void fairseq_el_logsumexp(const float* x, float* out, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) out[row] = row_logsumexp(x + row * width, width);
}
