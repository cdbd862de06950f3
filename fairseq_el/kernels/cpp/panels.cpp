// A linear layer whose weights were put into another order beforehand: y = activation(x W^T + bias). A panel holds the
// weights of PANEL outputs, input by input, so that a tile of rows and outputs is summed up in registers with nothing
// added across lanes. A sum runs over the inputs in their order, however many rows or threads there are.
//
// Some panels at a time meet all rows, one block after the other, and stay in the cache meanwhile. Half-precision
// weights are widened for the first block, while memory is the limit, and kept in single precision for the others.

#include <algorithm>
#include <cstring>
#include <memory>

#include "activations.h"

constexpr int PANEL = 32, VECTORS = 2, TILE = VECTORS * WIDTH;  // outputs
constexpr int ROWS = WIDTH == 16 ? 12 : 6;                      // their sums, two weights and an input fill the registers
constexpr int PANELS = 8;                                       // at most, at a time; half of it in single precision
constexpr int64_t CHUNK = 1024;                                 // inputs at a time
constexpr int64_t STRIDE = CHUNK + LINE;  // rows that lie a power of two apart compete for places in the cache
constexpr int64_t AHEAD = 1024;           // weights to ask for before they are needed

template <class Weight>
struct Layer {
    const float* x;         // [rows, in]
    const Weight* weights;  // [panels, in, PANEL]
    const float* bias;      // [panels, PANEL]
    float* y;               // [rows, out]
    int64_t rows, in, out;
    Activation activation;
};

struct Workspace {  // of a thread
    alignas(64) float wide[PANELS][CHUNK * PANEL], x[ROWS * STRIDE], edge[ROWS * PANEL];
};

struct Range {
    int64_t from, to;
    int64_t size() const { return to - from; }
};

static Range part(int64_t i, int64_t parts, Range of) {
    return {of.from + i * of.size() / parts, of.from + (i + 1) * of.size() / parts};
}

// What a block of rows and a panel have to do with each other, over one chunk of inputs.
struct Task {
    const float* x;         // rows STRIDE apart
    float *y, *wide;        // wide: the panel in single precision, to write or to read
    const float* bias;      // null where y holds the sums so far
    Activation activation;  // NONE where sums go on
    int64_t y_stride, length;
    const float* next;  // rows of the block that comes next, to ask for
    int64_t next_rows, next_stride;
};

// y[r] += x[r] . w over `length` inputs, a multiple of LINE, for N rows
template <int N, bool KEEP, class Weight>
static void tile(const Task& t, const Weight* w) {
    Vec total[N][VECTORS];
    for (int r = 0; r < N; r++)
        for (int v = 0; v < VECTORS; v++) total[r][v] = load((t.bias ? t.bias : t.y + r * t.y_stride) + v * WIDTH);
    for (int64_t line = 0; line < t.length; line += LINE) {
        for (int64_t r = 0; r < t.next_rows; r++) __builtin_prefetch(t.next + r * t.next_stride + line, 0, 2);
#pragma GCC unroll 4
        for (int64_t k = line; k < line + LINE; k++) {
            Vec weight[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                weight[v] = widened(w + k * PANEL + v * WIDTH);
                keep_in_register(weight[v]);
                if (KEEP) store(t.wide + k * PANEL + v * WIDTH, weight[v]);
            }
            for (size_t i = 0; i < PANEL; i += LINE * sizeof(float) / sizeof(Weight))
                __builtin_prefetch(w + k * PANEL + i + AHEAD);
            for (int r = 0; r < N; r++) {
                const Vec input = all(t.x[r * STRIDE + k]);
                for (int v = 0; v < VECTORS; v++) total[r][v] += input * weight[v];
            }
        }
    }
    for (int r = 0; r < N; r++)
        for (int v = 0; v < VECTORS; v++) store(t.y + r * t.y_stride + v * WIDTH, activated(total[r][v], t.activation));
}

// for at most N rows
template <int N, bool KEEP, class Weight>
static void tiles(int64_t rows, Task t, const Weight* w) {
    if constexpr (N > 1) {
        if (rows < N) return tiles<N - 1, KEEP>(rows, t, w);
    }
    for (int o = 0; o < PANEL; o += TILE) {
        tile<N, KEEP>(t, w + o);
        t.y += TILE, t.wide += TILE, t.bias += t.bias ? TILE : 0;
    }
}

// only: there is no other block of rows
template <class Weight>
static void panel(int64_t rows, const Task& t, const Weight* w, bool first, bool only) {
    if (sizeof(Weight) == sizeof(float) || only)
        tiles<ROWS, false>(rows, t, w);
    else if (first)
        tiles<ROWS, true>(rows, t, w);
    else
        tiles<ROWS, false>(rows, t, t.wide);
}

// The last panel may have fewer outputs than the others: y has no room for all of its sums.
template <class Weight>
static void last_panel(int64_t rows, Task t, const Weight* w, bool first, bool only, int64_t width, float* edge) {
    float* y = t.y;
    const int64_t stride = t.y_stride;
    t.y = edge, t.y_stride = PANEL;
    for (int64_t r = 0; !t.bias && r < rows; r++) std::memcpy(edge + r * PANEL, y + r * stride, sizeof(float) * width);
    panel(rows, t, w, first, only);
    for (int64_t r = 0; r < rows; r++) std::memcpy(y + r * stride, edge + r * PANEL, sizeof(float) * width);
}

// rows: a block of all that meet these panels; k: the first input
template <class Weight>
static void block(const Layer<Weight>& layer, Range panels, Range rows, Range all_rows, int64_t k, Workspace& mine) {
    const int64_t length = std::min(CHUNK, layer.in - k);
    const bool first = rows.from == all_rows.from, last = rows.to == all_rows.to;
    for (int64_t r = 0; r < rows.size(); r++)
        std::memcpy(mine.x + r * STRIDE, layer.x + (rows.from + r) * layer.in + k, sizeof(float) * length);
    for (int64_t p = panels.from; p < panels.to; p++) {
        const int64_t i = p - panels.from, o = p * PANEL;
        const Range next = part(i, panels.size(), {rows.to, std::min(rows.to + ROWS, all_rows.to)});
        const Task task{mine.x, layer.y + rows.from * layer.out + o, mine.wide[i], k ? nullptr : layer.bias + o,
                        k + length == layer.in ? layer.activation : NONE, layer.out, length,
                        layer.x + next.from * layer.in + k, next.size(), layer.in};
        const Weight* w = layer.weights + (p * layer.in + k) * PANEL;
        if (o + PANEL <= layer.out)
            panel(rows.size(), task, w, first, first && last);
        else
            last_panel(rows.size(), task, w, first, first && last, layer.out - o, mine.edge);
    }
}

static Workspace& workspace() {  // of this thread, kept for the next call
    static thread_local const std::unique_ptr<Workspace> mine(new Workspace);
    return *mine;
}

template <class Weight>
static void multiply(const Layer<Weight>& layer, int64_t threads) {
    const int64_t panels = (layer.out + PANEL - 1) / PANEL;
    const int64_t at_a_time = threads * PANELS * sizeof(Half) / sizeof(Weight);
    const int64_t groups = std::min(panels, threads * ((panels + at_a_time - 1) / at_a_time));
    const int64_t parts = std::min(layer.rows, (threads + groups - 1) / groups);  // of rows: more threads than panels
#pragma omp parallel for schedule(static)
    for (int64_t unit = 0; unit < groups * parts; unit++) {
        const Range some = part(unit / parts, groups, {0, panels}), rows = part(unit % parts, parts, {0, layer.rows});
        const int64_t blocks = (rows.size() + ROWS - 1) / ROWS;
        for (int64_t k = 0; k < layer.in; k += CHUNK)
            for (int64_t i = 0; i < blocks; i++) block(layer, some, part(i, blocks, rows), rows, k, workspace());
    }
}

// in: a multiple of 16; half: weights are in half precision, not single
extern "C" void fairseq_el_multiply_panels(const float* x, const void* weights, int64_t half, const float* bias,
                                           float* y, int64_t rows, int64_t in, int64_t out, int64_t activation,
                                           int64_t threads) {
    const auto apply = static_cast<Activation>(activation);
    if (half)
        multiply(Layer<Half>{x, static_cast<const Half*>(weights), bias, y, rows, in, out, apply}, threads);
    else
        multiply(Layer<float>{x, static_cast<const float*>(weights), bias, y, rows, in, out, apply}, threads);
}
