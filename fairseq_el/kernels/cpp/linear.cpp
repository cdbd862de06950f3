// A linear layer for few rows and a row-major weight: y = x W^T + bias. A decoding step is bound by reading W. General
// matrix kernels first copy it into another layout, in every call; here it is read once, in memory order.

#include <algorithm>
#include <vector>

#include "vec.h"

constexpr int ROWS = 4, OUTPUTS = WIDTH == 16 ? 6 : 3;  // a tile's sums, weights and an input fill 32 or 16 registers
constexpr int64_t CHUNK = 1024;                         // inputs at a time: those of all rows stay in the cache

// x: [rows, in] -> [in / WIDTH, ROWS, WIDTH], because rows a power of two apart compete for the same cache lines
static void interleave(const float* x, int64_t rows, int64_t in, float* to) {
    for (int64_t k = 0; k < in; k += WIDTH)
        for (int64_t r = 0; r < ROWS; r++, to += WIDTH) store(to, r < rows ? load(x + r * in + k) : Vec{});
}

// y[r][o] += x[r] . w[o] over `length` inputs; x interleaved
template <int O>
static void add_products(const float* x, const float* w, int64_t in, int64_t length, bool first_use, float* y,
                         int64_t rows, int64_t out) {
    Vec total[ROWS][O] = {};
    for (int64_t k = 0; k < length; k += WIDTH, x += ROWS * WIDTH) {
        Vec weight[O];
        for (int o = 0; o < O; o++) weight[o] = load(w + o * in + k);
        if (first_use && k % LINE == 0)  // the weights of the next outputs
            for (int o = 0; o < O; o++) __builtin_prefetch(w + (o + O) * in + k);
        for (int r = 0; r < ROWS; r++) {
            Vec input = load(x + r * WIDTH);
            keep_in_register(input);
            for (int o = 0; o < O; o++) total[r][o] += input * weight[o];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < O; o++) y[r * out + o] += sum(total[r][o]);
}

template <int O>
static void output_tile(const float* x, const float* w, float* y, int64_t rows, int64_t in, int64_t out) {
    for (int64_t k = 0; k < in; k += CHUNK)
        for (int64_t row = 0; row < rows; row += ROWS)
            add_products<O>(x + row * in + k * ROWS, w + k, in, std::min(CHUNK, in - k), row == 0, y + row * out,
                            std::min<int64_t>(ROWS, rows - row), out);
}

// x: [rows, in], in a multiple of 16; w: [out, in], bias: [out] or null, y: [rows, out]
extern "C" void fairseq_el_linear(const float* x, const float* w, const float* bias, float* y, int64_t rows, int64_t in,
                                  int64_t out) {
    const int64_t blocks = (rows + ROWS - 1) / ROWS, tiles = (out + OUTPUTS - 1) / OUTPUTS;
    std::vector<float> interleaved(blocks * ROWS * in);
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t row = block * ROWS;
            interleave(x + row * in, rows - row, in, interleaved.data() + row * in);
        }
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t o = tile * OUTPUTS, outputs = std::min<int64_t>(OUTPUTS, out - o);
            for (int64_t r = 0; r < rows; r++)
                for (int64_t i = o; i < o + outputs; i++) y[r * out + i] = bias ? bias[i] : 0.0f;
            switch (outputs) {
                case 1: output_tile<1>(interleaved.data(), w + o * in, y + o, rows, in, out); break;
                case 2: output_tile<2>(interleaved.data(), w + o * in, y + o, rows, in, out); break;
                case 3: output_tile<3>(interleaved.data(), w + o * in, y + o, rows, in, out); break;
                case 4: output_tile<4>(interleaved.data(), w + o * in, y + o, rows, in, out); break;
                case 5: output_tile<5>(interleaved.data(), w + o * in, y + o, rows, in, out); break;
                default: output_tile<OUTPUTS>(interleaved.data(), w + o * in, y + o, rows, in, out);
            }
        }
    }
}
