// log(sum(exp(x))) of each row, in one pass over a row that the cache still holds: torch writes two tensors as
// large as the logits on the way, and a vocabulary's are large.

#include <cmath>

#include "vec.h"

static float row_logsumexp(const float* x, int64_t width) {
    float most = -INFINITY;
    for (int64_t j = 0; j < width; j++) most = x[j] > most ? x[j] : most;
    if (most == -INFINITY) return width && x[0] == x[0] ? most : NAN;
    Vec totals = {};
    int64_t j = 0;
    for (; j + WIDTH <= width; j += WIDTH) totals += exponential(load(x + j) - most);
    float total = sum(totals);
    for (; j < width; j++) total += std::exp(x[j] - most);
    return most + std::log(total);
}

// x: [rows, width], out: [rows]
extern "C" void fairseq_el_logsumexp(const float* x, float* out, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) out[row] = row_logsumexp(x + row * width, width);
}
