// Attention of a few queries to many keys: the shape of every decoding step. General matrix kernels are slow at it,
// because they repack the keys for a handful of rows. Here keys and values are read once, in memory order, at the speed
// of memory.
//
// One softmax over two kinds of keys, either of which may be missing, in single or half precision:
//   prefix: [b, h, d_k, n], the source or prompt that all rows of a sentence share, from `begin` to `end`
//   slots:  [b, h, capacity, d_k], generated tokens; a row attends to the slots where its `beam_mask` is 0

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "vec.h"

constexpr int ROWS = 4;                       // queries that share one pass over the keys
constexpr int VECTORS = WIDTH == 16 ? 4 : 2;  // of scores, or of sums, that each query has in registers

// Brings keys or values to the L2 cache in memory order, some lines at a time, while others are computed with.
class Prefetch {
    const char *at = nullptr, *row_end = nullptr;
    int64_t row_bytes = 0, stride = 0;

public:
    Prefetch() = default;
    template <class Number>
    Prefetch(const Number* rows, int64_t length, int64_t stride)
        : at(reinterpret_cast<const char*>(rows)), row_end(reinterpret_cast<const char*>(rows + length)),
          row_bytes(length * sizeof(Number)), stride(stride * sizeof(Number)) {}

    void lines(int count) {  // may run past the last row: a prefetch doesn't fault
        for (int i = 0; i < count; i++) {
            __builtin_prefetch(at, 0, 2);
            at += 64;
            const bool row_ends = at >= row_end;
            at = row_ends ? row_end - row_bytes + stride : at;
            row_end += row_ends ? stride : 0;
        }
    }
};

template <class Number>
struct HeadCache {  // keys and values of one head of one sentence
    const Number *keys, *values;  // of the prefix, at position `begin`; the d_k rows are `stride` apart
    int64_t stride;
    int length;
    const Number *slot_keys, *slot_values;  // [capacity, d_k]
    const uint8_t* beam_mask;               // of the first query; rows are `mask_stride` apart
    int64_t mask_stride;
    int used;
    int d_k;
    float scale;
};

// scores[r][j] = scale * q[r] . keys[:, j] for V vectors of positions from j on, summed in registers.
template <int R, int V, class Number>
static void score_block(const HeadCache<Number>& cache, const float* q, int64_t q_stride, float* scores,
                        int64_t row_size, int j, Prefetch& next) {
    Vec sums[R][V] = {};
    const Number* key = cache.keys + j;
    for (int c = 0; c < cache.d_k; c++, key += cache.stride) {
        next.lines(V * WIDTH * sizeof(Number) / 64);
        Vec k[V];
        for (int v = 0; v < V; v++) k[v] = to_float(key + v * WIDTH);
        for (int r = 0; r < R; r++) {
            const Vec input = broadcast(q[r * q_stride + c]);
            for (int v = 0; v < V; v++) sums[r][v] += input * k[v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(scores + r * row_size + j + v * WIDTH, sums[r][v] * cache.scale);
}

// The last positions may be scored twice, so that all are scored in whole vectors.
template <int R, class Number>
static void score_prefix(const HeadCache<Number>& cache, const float* q, int64_t q_stride, float* scores,
                         int64_t row_size, Prefetch& next) {
    int j = 0;
    for (; j + VECTORS * WIDTH <= cache.length; j += VECTORS * WIDTH)
        score_block<R, VECTORS>(cache, q, q_stride, scores, row_size, j, next);
    for (; j + WIDTH <= cache.length; j += WIDTH) score_block<R, 1>(cache, q, q_stride, scores, row_size, j, next);
    if (j < cache.length && cache.length >= WIDTH)
        return score_block<R, 1>(cache, q, q_stride, scores, row_size, cache.length - WIDTH, next);
    for (; j < cache.length; j++)
        for (int r = 0; r < R; r++) {
            float total = 0;
            for (int c = 0; c < cache.d_k; c++) total += q[r * q_stride + c] * to_float(cache.keys[c * cache.stride + j]);
            scores[r * row_size + j] = total * cache.scale;
        }
}

// out[r][c] = sum over j of weights[r][j] * values[c][j], for V rows of values from c on
template <int R, int V, class Number>
static void sum_rows(const HeadCache<Number>& cache, const float* weights, int64_t row_size, int c, float* out,
                     int64_t out_stride, Prefetch& next) {
    const Number* values = cache.values + c * cache.stride;
    Vec sums[R][V] = {};
    int j = 0;
    for (; j + WIDTH <= cache.length; j += WIDTH) {
        Vec value[V];
        for (int v = 0; v < V; v++) value[v] = to_float(values + v * cache.stride + j);
        next.lines(V * WIDTH * sizeof(Number) / 64);
        for (int r = 0; r < R; r++) {
            Vec weight = load(weights + r * row_size + j);
            keep_in_register(weight);
            for (int v = 0; v < V; v++) sums[r][v] += weight * value[v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            float total = sum(sums[r][v]);
            for (int i = j; i < cache.length; i++)
                total += weights[r * row_size + i] * to_float(values[v * cache.stride + i]);
            out[r * out_stride + c + v] = total;
        }
}

template <int R, class Number>
static void sum_prefix(const HeadCache<Number>& cache, const float* weights, int64_t row_size, float* out,
                       int64_t out_stride, Prefetch& next) {
    for (int c = 0; c < cache.d_k; c += VECTORS)
        sum_rows<R, VECTORS>(cache, weights, row_size, c, out, out_stride, next);
}

template <class Number>
static void score_slots(const HeadCache<Number>& cache, const float* q, const int* visible, int count, float* scores) {
    for (int i = 0; i < count; i++) {
        const Number* key = cache.slot_keys + (int64_t)visible[i] * cache.d_k;
        Vec dot = {};
        for (int c = 0; c < cache.d_k; c += WIDTH) dot += load(q + c) * to_float(key + c);
        scores[i] = sum(dot) * cache.scale;
    }
}

template <class Number>
static void sum_slots(const HeadCache<Number>& cache, const float* weights, const int* visible, int count, float* out) {
    for (int i = 0; i < count; i++) {
        const Number* value = cache.slot_values + (int64_t)visible[i] * cache.d_k;
        for (int c = 0; c < cache.d_k; c += WIDTH) store(out + c, load(out + c) + to_float(value + c) * weights[i]);
    }
}

static void softmax(float* scores, int count) {
    float max = -INFINITY;
    int j = 0;
    if (count >= WIDTH) {
        Vec most = load(scores);
        for (j = WIDTH; j + WIDTH <= count; j += WIDTH) {
            const Vec x = load(scores + j);
            most = x > most ? x : most;
        }
        for (int i = 0; i < WIDTH; i++) max = most[i] > max ? most[i] : max;
    }
    for (; j < count; j++) max = scores[j] > max ? scores[j] : max;
    Vec sums = {};
    for (j = 0; j + WIDTH <= count; j += WIDTH) {
        Vec e = exponential(load(scores + j) - max);
        store(scores + j, e);
        sums += e;
    }
    float total = sum(sums);
    for (; j < count; j++) total += scores[j] = std::exp(scores[j] - max);
    const float inverse = 1 / total;
    for (j = 0; j < count; j++) scores[j] *= inverse;
}

// scores and visible: scratch space, R rows of row_size
template <int R, class Number>
static void attend_rows(const HeadCache<Number>& cache, const float* q, int64_t q_stride, float* out,
                        int64_t out_stride, float* scores, int* visible, int64_t row_size, Prefetch next) {
    Prefetch own_values(cache.values, cache.length, cache.stride);
    score_prefix<R>(cache, q, q_stride, scores, row_size, own_values);
    int count[R];
    for (int r = 0; r < R; r++) {
        const uint8_t* mask = cache.beam_mask + r * cache.mask_stride;
        count[r] = 0;
        for (int slot = 0; slot < cache.used; slot++) {
            visible[r * row_size + count[r]] = slot;
            count[r] += !mask[slot];
        }
        score_slots(cache, q + r * q_stride, visible + r * row_size, count[r], scores + r * row_size + cache.length);
        softmax(scores + r * row_size, cache.length + count[r]);
    }
    sum_prefix<R>(cache, scores, row_size, out, out_stride, next);
    for (int r = 0; r < R; r++)
        sum_slots(cache, scores + r * row_size + cache.length, visible + r * row_size, count[r], out + r * out_stride);
}

template <class Number>
struct Batch {  // the arguments of fairseq_el_decoder_attention
    const float* queries;
    int64_t q_stride;
    float* out;
    int64_t b, rows, h, d_k;
    float scale;
    const Number *keys, *values;
    int64_t n;
    const int64_t *begin, *end;
    const Number *slot_keys, *slot_values;
    const uint8_t* beam_mask;
    int64_t capacity, used;

    int64_t length(int64_t head) const { return n ? end[head / h] - begin[head / h] : 0; }
    int64_t first_key(int64_t head) const { return head * d_k * n + (n ? begin[head / h] : 0); }

    HeadCache<Number> cache(int64_t head, int64_t row) const {
        const int64_t slot = head * capacity * d_k;
        return {keys + first_key(head), values + first_key(head), n, (int)length(head), slot_keys + slot,
                slot_values + slot, beam_mask + (head / h * rows + row) * capacity, capacity, (int)used, (int)d_k, scale};
    }
    Prefetch keys_of(int64_t head) const { return Prefetch(keys + first_key(head), length(head), n); }
};

template <class Number>
static void attend_head(const Batch<Number>& batch, int64_t head, float* scores, int* visible, int64_t row_size,
                        Prefetch next) {
    for (int64_t row = 0; row < batch.rows; row += ROWS) {
        const HeadCache<Number> cache = batch.cache(head, row);
        const int64_t at = head / batch.h * batch.rows + row, column = head % batch.h * batch.d_k;
        const float* q = batch.queries + at * batch.q_stride + column;
        float* out = batch.out + at * batch.h * batch.d_k + column;
        auto attend = [&](auto count) {
            attend_rows<count()>(cache, q, batch.q_stride, out, batch.h * batch.d_k, scores, visible, row_size, next);
        };
        switch (std::min<int64_t>(ROWS, batch.rows - row)) {
            case 1: attend(std::integral_constant<int, 1>()); break;
            case 2: attend(std::integral_constant<int, 2>()); break;
            case 3: attend(std::integral_constant<int, 3>()); break;
            default: attend(std::integral_constant<int, 4>());
        }
    }
}

template <class Number>
static void attend_all(const Batch<Number>& batch) {
    const int64_t heads = batch.b * batch.h, row_size = (batch.n + batch.used + 15) / 16 * 16 + 16;
    int64_t claimed = 0;
#pragma omp parallel
    {
        std::vector<float> scores(ROWS * row_size);
        std::vector<int> visible(ROWS * row_size);
        auto claim = [&] {  // one head ahead of the work, to prefetch its keys
            int64_t mine;
#pragma omp atomic capture
            mine = claimed++;
            return mine;
        };
        for (int64_t head = claim(), next; head < heads; head = next) {
            next = claim();
            attend_head(batch, head, scores.data(), visible.data(), row_size, batch.keys_of(std::min(next, heads - 1)));
        }
    }
}

// queries: [b, rows, h * d_k], rows q_stride apart; out: [b, rows, h * d_k]; begin and end: [b]; beam_mask: [b, rows,
// capacity]; `used` slots are filled; half: whether keys and values are in half precision, else single
extern "C" void fairseq_el_decoder_attention(const float* queries, int64_t q_stride, float* out, int64_t b,
                                             int64_t rows, int64_t h, int64_t d_k, float scale, const void* keys,
                                             const void* values, int64_t n, const int64_t* begin, const int64_t* end,
                                             const void* slot_keys, const void* slot_values, const uint8_t* beam_mask,
                                             int64_t capacity, int64_t used, int64_t half) {
    auto attend_to = [&](auto* type) {
        typedef decltype(type) Numbers;
        typedef std::remove_const_t<std::remove_pointer_t<Numbers>> Number;
        attend_all(Batch<Number>{queries, q_stride, out, b, rows, h, d_k, scale, static_cast<Numbers>(keys),
                                 static_cast<Numbers>(values), n, begin, end, static_cast<Numbers>(slot_keys),
                                 static_cast<Numbers>(slot_values), beam_mask, capacity, used});
    };
    half ? attend_to(static_cast<const Half*>(nullptr)) : attend_to(static_cast<const float*>(nullptr));
}
