// flags: -ffp-contract=off
// GEMM with weights in int8 or bfloat16: y = activation(x W^T + bias), x and y in single precision.
//
// int8: weights have a scale per output. Activations become unsigned bytes, with a scale and a zero point per row that
// are computed here: the row's range, and 0, become 0 to 254. What the zero point adds to each sum is taken out again.
// Sums are exact, and every operation on them is rounded on its own (see flags), so all CPUs give the same bits.
// bfloat16: weights and activations are rounded, sums are in single precision.
//
// A panel has the weights of PANEL outputs, unit by unit (see low_precision.h). A group of panels is multiplied with
// all blocks of rows in turn and stays in the cache meanwhile.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "activations.h"
#include "low_precision.h"

constexpr int PANEL = 64;                                        // outputs
constexpr int VECTORS = WIDTH == 16 ? 4 : 2, TILE = VECTORS * WIDTH;
constexpr int ROWS = WIDTH == 16 ? 6 : 4;                        // whose sums, weights and an input fill the registers
constexpr int64_t GROUP_UNITS = 1 << 17;                         // weights of a group: half of a typical L2 cache

struct Layer {
    const float* x;       // [rows, in]
    const Unit* weights;  // [panels, units, PANEL]
    const float* scales;     // of int8 weights, [panels, PANEL]
    const int32_t* totals;   // sum of the int8 weights of each output, [panels, PANEL]
    const float* bias;       // [panels, PANEL]
    float* y;                // [rows, out]
    int64_t rows, in, out, units;
    Activation activation;
};

struct Range {  // of a row of activations, in int8
    float scale;
    int32_t zero_point;
};

struct Rows {  // activations in low precision
    std::vector<uint32_t> units;  // [rows, stride]
    std::vector<Range> ranges;
    int64_t stride;
};

static Range range_of(const float* x, int64_t in) {
    Vec least = {}, most = {}, check = {};
    for (int64_t k = 0; k < in; k += WIDTH) {
        const Vec v = load(x + k);
        least = v < least ? v : least;
        most = v > most ? v : most;
        check += v * 0.0f;  // NaN if a number is not finite, which rounding to integers would hide
    }
    float low = 0, high = 0;
    for (int i = 0; i < WIDTH; i++) low = std::min(low, least[i]), high = std::max(high, most[i]);
    const float scale = (high - low) / 254;
    return {scale + sum(check), scale > 0 && scale < INFINITY ? (int32_t)std::nearbyint(-low / scale) : 0};
}

static void convert_row(Int8, const float* x, int64_t in, Unit* units, Range* range) {
    *range = range_of(x, in);
    const float inverse = range->scale > 0 && range->scale < INFINITY ? 1 / range->scale : 0;
    const float offset = 12582912.0f + range->zero_point;  // 1.5 * 2^23 leaves the rounded number in the low bits
    typedef uint8_t Bytes __attribute__((vector_size(WIDTH), aligned(1)));
    for (int64_t k = 0; k < in; k += WIDTH) {
        const Vec shifted = load(x + k) * inverse + offset;
        const Bytes narrow = __builtin_convertvector(reinterpret_cast<IntVec>(shifted) & 0xff, Bytes);
        std::memcpy(reinterpret_cast<uint8_t*>(units) + k, &narrow, WIDTH);
    }
}

static void convert_row(BFloat16, const float* x, int64_t in, Unit* units, Range*) {
    auto* numbers = reinterpret_cast<uint16_t*>(units);
    for (int64_t k = 0; k < in; k += WIDTH) store_bfloat16(numbers + k, load(x + k));
}

static Vec finish(const Layer& layer, Vec sums, const Range&, int64_t o) { return sums + load(layer.bias + o); }
static Vec finish(const Layer& layer, IntVec sums, const Range& range, int64_t o) {
    const IntVec products = sums - range.zero_point * *reinterpret_cast<const IntVec*>(layer.totals + o);
    return __builtin_convertvector(products, Vec) * (load(layer.scales + o) * range.scale) + load(layer.bias + o);
}

// N rows times a tile of outputs from `o` on, which is written to `to`
template <class Format, int N>
static inline __attribute__((always_inline)) void tile(const Layer& layer, const Unit* x, int64_t stride,
                                                       const Range* ranges, const Unit* w, int64_t o, float* to,
                                                       int64_t to_stride) {
    typename Format::Sum total[N][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) total[r][v] = typename Format::Sum{};
    add_tile<Format, N, VECTORS>(x, stride, w, PANEL, layer.units, total);
#pragma GCC unroll 8
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            store(to + r * to_stride + v * WIDTH,
                  activate(finish(layer, total[r][v], ranges[r], o + v * WIDTH), layer.activation));
}

// `count` rows, at most N, times one panel
template <class Format, int N = ROWS>
static void multiply_panel(const Layer& layer, const Rows& rows, int64_t first, int64_t count, int64_t panel) {
    if constexpr (N > 1) {
        if (count < N) return multiply_panel<Format, N - 1>(layer, rows, first, count, panel);
    }
    const Unit* x = rows.units.data() + first * rows.stride;
    const Unit* w = layer.weights + panel * layer.units * PANEL;
    for (int64_t o = panel * PANEL; o < std::min((panel + 1) * PANEL, layer.out); o += TILE, w += TILE) {
        float* y = layer.y + first * layer.out + o;
        const int64_t width = std::min<int64_t>(TILE, layer.out - o);
        if (width == TILE) {
            tile<Format, N>(layer, x, rows.stride, rows.ranges.data() + first, w, o, y, layer.out);
        } else {  // y has no room for a whole tile
            float edge[N * TILE];
            tile<Format, N>(layer, x, rows.stride, rows.ranges.data() + first, w, o, edge, TILE);
            for (int r = 0; r < N; r++) std::memcpy(y + r * layer.out, edge + r * TILE, sizeof(float) * width);
        }
    }
}

template <class Format>
static void multiply(const Layer& layer, int64_t threads) {
    static thread_local Rows rows;  // kept for the next call
    Rows& converted = rows;
    converted.stride = layer.units + LINE;  // rows a power of two apart compete for the same cache lines
    converted.units.resize(layer.rows * converted.stride);
    converted.ranges.resize(layer.rows);
    const int64_t panels = (layer.out + PANEL - 1) / PANEL;
    const int64_t group_size = std::max<int64_t>(1, GROUP_UNITS / (layer.units * PANEL));
    const int64_t groups = std::min(panels, std::max((panels + group_size - 1) / group_size, threads));
    const int64_t blocks = (layer.rows + ROWS - 1) / ROWS;
    const int64_t parts = std::min(blocks, (threads + groups - 1) / groups);  // of the rows, to occupy all threads
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < layer.rows; r++)
            convert_row(Format{}, layer.x + r * layer.in, layer.in, converted.units.data() + r * converted.stride,
                        converted.ranges.data() + r);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < groups * parts; unit++) {
            const int64_t group = unit / parts, part = unit % parts;
            for (int64_t block = part * blocks / parts; block < (part + 1) * blocks / parts; block++) {
                const int64_t first = block * layer.rows / blocks, last = (block + 1) * layer.rows / blocks;
                for (int64_t panel = group * panels / groups; panel < (group + 1) * panels / groups; panel++)
                    multiply_panel<Format>(layer, converted, first, last - first, panel);
            }
        }
    }
}

// in: a multiple of 16. scales and totals are null for bfloat16.
extern "C" void fairseq_el_low_precision_gemm(const float* x, const void* weights, const float* scales,
                                              const int32_t* totals, const float* bias, float* y, int64_t rows,
                                              int64_t in, int64_t out, int64_t activation, int64_t threads) {
    Layer layer{x, static_cast<const Unit*>(weights), scales, totals, bias, y, rows, in, out, 0,
                static_cast<Activation>(activation)};
    layer.units = in / (scales ? Int8::PER_UNIT : BFloat16::PER_UNIT);
    if (scales)
        multiply<Int8>(layer, threads);
    else
        multiply<BFloat16>(layer, threads);
}
