// Keys or values as linear layers compute them, [b, n, h * d_k], in the order of the cache, [b, h, d_k, n].

#include <algorithm>

#include "vec.h"

// 16 positions of 16 numbers at a time: whole cache lines on both sides
template <class Number>
static void transpose(const float* x, Number* out, int64_t b, int64_t n, int64_t d) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t i = 0; i < b; i++)
        for (int64_t c = 0; c < d; c += LINE)
            for (int64_t j = 0; j < n; j += LINE) {
                const int64_t count = std::min<int64_t>(LINE, n - j);
                float block[LINE][LINE] = {};
                for (int64_t p = 0; p < count; p++)
                    for (int64_t k = 0; k < LINE; k++) block[k][p] = x[(i * n + j + p) * d + c + k];
                for (int64_t k = 0; k < LINE; k++) {
                    Number line[LINE];
                    for (int64_t p = 0; p < LINE; p += WIDTH) store_number(line + p, load(block[k] + p));
                    std::copy(line, line + count, out + (i * d + c + k) * n + j);
                }
            }
}

// x: [b, n, d], d a multiple of 16; out: [b, d, n], in half or single precision
extern "C" void fairseq_el_transpose_heads(const float* x, void* out, int64_t half, int64_t b, int64_t n, int64_t d) {
    half ? transpose(x, static_cast<Half*>(out), b, n, d) : transpose(x, static_cast<float*>(out), b, n, d);
}
