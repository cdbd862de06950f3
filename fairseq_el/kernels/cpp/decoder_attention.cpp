// Attention of a few queries to many keys: the shape of every decoding step. General matrix kernels are slow at it,
// because they repack the keys for a handful of rows. Here keys and values are read once, in memory order, at the speed
// of memory.
//
// One softmax over two kinds of keys, either of which may be missing:
//   prefix: [b, h, d_k, n], the source or prompt that all rows of a sentence share, from `begin` to `end`
//   slots:  [b, h, capacity, d_k], generated tokens; a row attends to the slots where its `beam_mask` is 0

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "vec.h"

constexpr int ROWS = 4;  // queries that share one pass over the keys; more would not fit in registers

struct HeadCache {  // keys and values of one head of one sentence
    const float *keys, *values;  // of the prefix, at position `begin`; the d_k rows are `stride` apart
    int64_t stride;
    int length;
    const float *slot_keys, *slot_values;  // [capacity, d_k]
    const uint8_t* beam_mask;              // of the first query; rows are `mask_stride` apart
    int64_t mask_stride;
    int used;
    int d_k;
    float scale;
};

// scores[r][j] = scale * q[r] . keys[:, j]
template <int R>
static void score_prefix(const HeadCache& cache, const float* q, int64_t q_stride, float* scores, int64_t row_size) {
    for (int r = 0; r < R; r++) std::memset(scores + r * row_size, 0, sizeof(float) * cache.length);
    for (int c = 0; c < cache.d_k; c += 4) {
        const float* k[4];
        float w[R][4];
        for (int i = 0; i < 4; i++) {
            k[i] = cache.keys + (c + i) * cache.stride;
            for (int r = 0; r < R; r++) w[r][i] = q[r * q_stride + c + i] * cache.scale;
        }
        int j = 0;
        for (; j + WIDTH <= cache.length; j += WIDTH) {
            Vec a = load(k[0] + j), b = load(k[1] + j), d = load(k[2] + j), e = load(k[3] + j);
            if (j % LINE == 0)  // a cache line ahead, in the next four rows
                for (int i = 0; i < 4; i++) __builtin_prefetch(k[i] + 4 * cache.stride + j);
            for (int r = 0; r < R; r++) {
                float* to = scores + r * row_size + j;
                store(to, load(to) + a * w[r][0] + b * w[r][1] + d * w[r][2] + e * w[r][3]);
            }
        }
        for (; j < cache.length; j++)
            for (int r = 0; r < R; r++)
                for (int i = 0; i < 4; i++) scores[r * row_size + j] += k[i][j] * w[r][i];
    }
}

// out[r][c] = sum over j of weights[r][j] * values[c][j]
template <int R>
static void sum_prefix(const HeadCache& cache, const float* weights, int64_t row_size, float* out, int64_t out_stride) {
    for (int c = 0; c < cache.d_k; c += 2) {
        const float *v = cache.values + c * cache.stride, *w = v + cache.stride;
        Vec x[R] = {}, y[R] = {};
        int j = 0;
        for (; j + WIDTH <= cache.length; j += WIDTH) {
            Vec a = load(v + j), b = load(w + j);
            if (j % LINE == 0) {
                __builtin_prefetch(v + 4 * cache.stride + j);
                __builtin_prefetch(w + 4 * cache.stride + j);
            }
            for (int r = 0; r < R; r++) {
                Vec p = load(weights + r * row_size + j);
                x[r] += p * a;
                y[r] += p * b;
            }
        }
        for (int r = 0; r < R; r++) {
            float first = sum(x[r]), second = sum(y[r]);
            for (int i = j; i < cache.length; i++) {
                first += weights[r * row_size + i] * v[i];
                second += weights[r * row_size + i] * w[i];
            }
            out[r * out_stride + c] = first;
            out[r * out_stride + c + 1] = second;
        }
    }
}

static void score_slots(const HeadCache& cache, const float* q, const int* visible, int count, float* scores) {
    for (int i = 0; i < count; i++) {
        const float* key = cache.slot_keys + (int64_t)visible[i] * cache.d_k;
        Vec dot = {};
        for (int c = 0; c < cache.d_k; c += WIDTH) dot += load(q + c) * load(key + c);
        scores[i] = sum(dot) * cache.scale;
    }
}

static void sum_slots(const HeadCache& cache, const float* weights, const int* visible, int count, float* out) {
    for (int i = 0; i < count; i++) {
        const float* value = cache.slot_values + (int64_t)visible[i] * cache.d_k;
        for (int c = 0; c < cache.d_k; c += WIDTH) store(out + c, load(out + c) + load(value + c) * weights[i]);
    }
}

static void softmax(float* scores, int count) {
    float max = -INFINITY;
    for (int j = 0; j < count; j++) max = scores[j] > max ? scores[j] : max;
    Vec sums = {};
    int j = 0;
    for (; j + WIDTH <= count; j += WIDTH) {
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
template <int R>
static void attend_rows(const HeadCache& cache, const float* q, float* out, int64_t stride, float* scores, int* visible,
                        int64_t row_size) {
    score_prefix<R>(cache, q, stride, scores, row_size);
    int count[R];
    for (int r = 0; r < R; r++) {
        const uint8_t* mask = cache.beam_mask + r * cache.mask_stride;
        count[r] = 0;
        for (int slot = 0; slot < cache.used; slot++) {
            visible[r * row_size + count[r]] = slot;
            count[r] += !mask[slot];
        }
        score_slots(cache, q + r * stride, visible + r * row_size, count[r], scores + r * row_size + cache.length);
        softmax(scores + r * row_size, cache.length + count[r]);
    }
    sum_prefix<R>(cache, scores, row_size, out, stride);
    for (int r = 0; r < R; r++)
        sum_slots(cache, scores + r * row_size + cache.length, visible + r * row_size, count[r], out + r * stride);
}

// queries and out: [b, rows, h * d_k]; begin and end: [b]; beam_mask: [b, rows, capacity]; `used` slots are filled
extern "C" void fairseq_el_decoder_attention(const float* queries, float* out, int64_t b, int64_t rows, int64_t h,
                                             int64_t d_k, float scale, const float* keys, const float* values,
                                             int64_t n, const int64_t* begin, const int64_t* end,
                                             const float* slot_keys, const float* slot_values,
                                             const uint8_t* beam_mask, int64_t capacity, int64_t used) {
    const int64_t d = h * d_k, row_size = (n + used + 15) / 16 * 16 + 16;
#pragma omp parallel
    {
        std::vector<float> scores(ROWS * row_size);
        std::vector<int> ids(ROWS * row_size);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < b * h; unit++) {
            const int64_t i = unit / h, head = unit % h;
            const int64_t first = n ? begin[i] : 0, prefix = unit * d_k * n + first, slot = unit * capacity * d_k;
            for (int64_t row = 0; row < rows; row += ROWS) {
                const HeadCache cache = {keys + prefix, values + prefix, n, n ? (int)(end[i] - first) : 0,
                                         slot_keys + slot, slot_values + slot, beam_mask + (i * rows + row) * capacity,
                                         capacity, (int)used, (int)d_k, scale};
                const int64_t at = (i * rows + row) * d + head * d_k;
                switch (std::min<int64_t>(ROWS, rows - row)) {
                    case 1: attend_rows<1>(cache, queries + at, out + at, d, scores.data(), ids.data(), row_size); break;
                    case 2: attend_rows<2>(cache, queries + at, out + at, d, scores.data(), ids.data(), row_size); break;
                    case 3: attend_rows<3>(cache, queries + at, out + at, d, scores.data(), ids.data(), row_size); break;
                    default: attend_rows<4>(cache, queries + at, out + at, d, scores.data(), ids.data(), row_size);
                }
            }
        }
    }
}
