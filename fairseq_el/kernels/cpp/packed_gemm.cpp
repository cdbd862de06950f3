// GEMM with a packed weight: y = activation(x W^T + bias). A panel holds the weights of PANEL outputs, input by input,
// so that a tile of rows and outputs is summed in registers with nothing added across lanes. A sum runs over the inputs
// in order: results don't depend on the number of rows or threads.
//
// A group of panels is multiplied with all blocks of rows in turn and stays in the cache meanwhile. Half-precision
// weights are converted for the first block, while memory is the limit, and kept in single precision for the others.

#include <algorithm>
#include <cstring>
#include <memory>

#include "activations.h"

constexpr int PANEL = 32, VECTORS = 2, TILE = VECTORS * WIDTH;  // outputs
constexpr int ROWS = WIDTH == 16 ? 12 : 6;                      // whose sums, weights and an input fill the registers
constexpr int GROUP = 8;                                        // panels, at most; half as many in single precision
constexpr int64_t CHUNK = 1024;                                 // inputs at a time
constexpr int64_t STRIDE = CHUNK + LINE;  // rows a power of two apart compete for the same cache lines
constexpr int64_t AHEAD = 1024;           // prefetch distance, in weights

template <class Weight>
struct Layer {
    const float* x;         // [rows, in]
    const Weight* weights;  // [panels, in, PANEL]
    const float* bias;      // [panels, PANEL]
    float* y;               // [rows, out]
    int64_t rows, in, out;
    Activation activation;
};

struct Workspace {  // one per thread
    alignas(64) float wide[GROUP][CHUNK * PANEL], x[ROWS * STRIDE], edge[ROWS * PANEL];
};

struct Range {
    int64_t from, to;
    int64_t size() const { return to - from; }
};

static Range part(int64_t i, int64_t parts, Range of) {
    return {of.from + i * of.size() / parts, of.from + (i + 1) * of.size() / parts};
}

// One block of rows times one panel, over one chunk of inputs.
struct Task {
    const float* x;         // rows STRIDE apart
    float *y, *wide;        // wide: the panel in single precision, written or read
    const float* bias;      // null if y holds the sums so far
    Activation activation;  // NONE if more chunks follow
    int64_t y_stride, length;
    const float* next;  // rows of the next block, to prefetch
    int64_t next_rows, next_stride;
};

// y[r] += x[r] . w over `length` inputs, a multiple of LINE, for N rows
template <int N, bool STORE_WIDE, class Weight>
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
                weight[v] = to_float(w + k * PANEL + v * WIDTH);
                keep_in_register(weight[v]);
                if (STORE_WIDE) store(t.wide + k * PANEL + v * WIDTH, weight[v]);
            }
            for (size_t i = 0; i < PANEL; i += LINE * sizeof(float) / sizeof(Weight))
                __builtin_prefetch(w + k * PANEL + i + AHEAD);
            for (int r = 0; r < N; r++) {
                const Vec input = broadcast(t.x[r * STRIDE + k]);
                for (int v = 0; v < VECTORS; v++) total[r][v] += input * weight[v];
            }
        }
    }
    for (int r = 0; r < N; r++)
        for (int v = 0; v < VECTORS; v++) store(t.y + r * t.y_stride + v * WIDTH, activate(total[r][v], t.activation));
}

// for at most N rows
template <int N, bool STORE_WIDE, class Weight>
static void tiles(int64_t rows, Task t, const Weight* w) {
    if constexpr (N > 1) {
        if (rows < N) return tiles<N - 1, STORE_WIDE>(rows, t, w);
    }
    for (int o = 0; o < PANEL; o += TILE) {
        tile<N, STORE_WIDE>(t, w + o);
        t.y += TILE, t.wide += TILE, t.bias += t.bias ? TILE : 0;
    }
}

// only: this is the only block of rows
template <class Weight>
static void multiply_panel(int64_t rows, const Task& t, const Weight* w, bool first, bool only) {
    if (sizeof(Weight) == sizeof(float) || only)
        tiles<ROWS, false>(rows, t, w);
    else if (first)
        tiles<ROWS, true>(rows, t, w);
    else
        tiles<ROWS, false>(rows, t, t.wide);
}

// The last panel may have fewer outputs than the others: y has no room for all its sums.
template <class Weight>
static void multiply_last_panel(int64_t rows, Task t, const Weight* w, bool first, bool only, int64_t width,
                                float* edge) {
    float* y = t.y;
    const int64_t stride = t.y_stride;
    t.y = edge, t.y_stride = PANEL;
    for (int64_t r = 0; !t.bias && r < rows; r++) std::memcpy(edge + r * PANEL, y + r * stride, sizeof(float) * width);
    multiply_panel(rows, t, w, first, only);
    for (int64_t r = 0; r < rows; r++) std::memcpy(y + r * stride, edge + r * PANEL, sizeof(float) * width);
}

// rows: one block of all_rows; k: the first input of the chunk
template <class Weight>
static void multiply_block(const Layer<Weight>& layer, Range panels, Range rows, Range all_rows, int64_t k,
                           Workspace& workspace) {
    const int64_t length = std::min(CHUNK, layer.in - k);
    const bool first = rows.from == all_rows.from, last = rows.to == all_rows.to;
    for (int64_t r = 0; r < rows.size(); r++)
        std::memcpy(workspace.x + r * STRIDE, layer.x + (rows.from + r) * layer.in + k, sizeof(float) * length);
    for (int64_t p = panels.from; p < panels.to; p++) {
        const int64_t i = p - panels.from, o = p * PANEL;
        const Range next = part(i, panels.size(), {rows.to, std::min(rows.to + ROWS, all_rows.to)});
        const Task task{workspace.x, layer.y + rows.from * layer.out + o, workspace.wide[i],
                        k ? nullptr : layer.bias + o, k + length == layer.in ? layer.activation : NONE,
                        layer.out, length,
                        layer.x + next.from * layer.in + k, next.size(), layer.in};
        const Weight* w = layer.weights + (p * layer.in + k) * PANEL;
        if (o + PANEL <= layer.out)
            multiply_panel(rows.size(), task, w, first, first && last);
        else
            multiply_last_panel(rows.size(), task, w, first, first && last, layer.out - o, workspace.edge);
    }
}

static Workspace& thread_workspace() {  // kept for the next call
    static thread_local const std::unique_ptr<Workspace> mine(new Workspace);
    return *mine;
}

template <class Weight>
static void multiply(const Layer<Weight>& layer, int64_t threads) {
    const int64_t panels = (layer.out + PANEL - 1) / PANEL;
    const int64_t group_size = threads * GROUP * sizeof(Half) / sizeof(Weight);
    const int64_t groups = std::min(panels, threads * ((panels + group_size - 1) / group_size));
    const int64_t parts = std::min(layer.rows, (threads + groups - 1) / groups);  // of the rows, to occupy all threads
#pragma omp parallel for schedule(static)
    for (int64_t unit = 0; unit < groups * parts; unit++) {
        const Range group = part(unit / parts, groups, {0, panels}), rows = part(unit % parts, parts, {0, layer.rows});
        const int64_t blocks = (rows.size() + ROWS - 1) / ROWS;
        for (int64_t k = 0; k < layer.in; k += CHUNK)
            for (int64_t i = 0; i < blocks; i++)
                multiply_block(layer, group, part(i, blocks, rows), rows, k, thread_workspace());
    }
}

// in: a multiple of 16; half: whether weights are in half precision, else single
extern "C" void fairseq_el_packed_gemm(const float* x, const void* weights, int64_t half, const float* bias, float* y,
                                       int64_t rows, int64_t in, int64_t out, int64_t activation, int64_t threads) {
    const auto applied = static_cast<Activation>(activation);
    if (half)
        multiply(Layer<Half>{x, static_cast<const Half*>(weights), bias, y, rows, in, out, applied}, threads);
    else
        multiply(Layer<float>{x, static_cast<const float*>(weights), bias, y, rows, in, out, applied}, threads);
}
