// Attention of a few queries to many keys: the shape of every decoding step, which general matrix kernels are
// slow at (they repack the keys for a handful of rows). Here keys and values are read once, in the order in
// which they lie, at the speed of memory.
//
// Two kinds of keys, either of which may be missing, under one softmax:
//   shared: [b, h, d_k, n] of a source or prompt, seen by all rows of a sentence from `begin` to `end`
//   slots:  [b, h, capacity, d_k] of generated tokens; row r of a sentence sees those where `hidden` is 0
//

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "vec.h"

constexpr int ROWS = 4;  // queries that share one pass over the keys; more would not fit the registers

struct Sentence {  // of one head
    const float *keys, *values;  // shared, at position `begin`; rows of d_k are `stride` apart
    int64_t stride;
    int length;
    const float *slot_keys, *slot_values;  // [capacity, d_k]
    const uint8_t* hidden;                 // of the first row; rows are `hidden_stride` apart
    int64_t hidden_stride;
    int used;
    int d_k;
    float scale;
};

// scores[r][j] = scale * q[r] . keys[:, j]
template <int R>
static void score_shared(const Sentence& s, const float* q, int64_t q_stride, float* scores, int64_t row_size) {
    for (int r = 0; r < R; r++) std::memset(scores + r * row_size, 0, sizeof(float) * s.length);
    for (int c = 0; c < s.d_k; c += 4) {
        const float* k[4];
        float w[R][4];
        for (int i = 0; i < 4; i++) {
            k[i] = s.keys + (c + i) * s.stride;
            for (int r = 0; r < R; r++) w[r][i] = q[r * q_stride + c + i] * s.scale;
        }
        int j = 0;
        for (; j + WIDTH <= s.length; j += WIDTH) {
            Vec a = load(k[0] + j), b = load(k[1] + j), d = load(k[2] + j), e = load(k[3] + j);
            if (j % LINE == 0)  // a cache line ahead, in the next four rows
                for (int i = 0; i < 4; i++) __builtin_prefetch(k[i] + 4 * s.stride + j);
            for (int r = 0; r < R; r++) {
                float* to = scores + r * row_size + j;
                store(to, load(to) + a * w[r][0] + b * w[r][1] + d * w[r][2] + e * w[r][3]);
            }
        }
        for (; j < s.length; j++)
            for (int r = 0; r < R; r++)
                for (int i = 0; i < 4; i++) scores[r * row_size + j] += k[i][j] * w[r][i];
    }
}

// out[r][c] = sum over j of weights[r][j] * values[c][j]
template <int R>
static void mix_shared(const Sentence& s, const float* weights, int64_t row_size, float* out, int64_t out_stride) {
    for (int c = 0; c < s.d_k; c += 2) {
        const float *v = s.values + c * s.stride, *w = v + s.stride;
        Vec x[R] = {}, y[R] = {};
        int j = 0;
        for (; j + WIDTH <= s.length; j += WIDTH) {
            Vec a = load(v + j), b = load(w + j);
            if (j % LINE == 0) {
                __builtin_prefetch(v + 4 * s.stride + j);
                __builtin_prefetch(w + 4 * s.stride + j);
            }
            for (int r = 0; r < R; r++) {
                Vec p = load(weights + r * row_size + j);
                x[r] += p * a;
                y[r] += p * b;
            }
        }
        for (int r = 0; r < R; r++) {
            float first = sum(x[r]), second = sum(y[r]);
            for (int i = j; i < s.length; i++) {
                first += weights[r * row_size + i] * v[i];
                second += weights[r * row_size + i] * w[i];
            }
            out[r * out_stride + c] = first;
            out[r * out_stride + c + 1] = second;
        }
    }
}

static void score_slots(const Sentence& s, const float* q, const int* seen, int count, float* scores) {
    for (int i = 0; i < count; i++) {
        const float* key = s.slot_keys + (int64_t)seen[i] * s.d_k;
        Vec dot = {};
        for (int c = 0; c < s.d_k; c += WIDTH) dot += load(q + c) * load(key + c);
        scores[i] = sum(dot) * s.scale;
    }
}

static void add_slots(const Sentence& s, const float* weights, const int* seen, int count, float* out) {
    for (int i = 0; i < count; i++) {
        const float* value = s.slot_values + (int64_t)seen[i] * s.d_k;
        for (int c = 0; c < s.d_k; c += WIDTH) store(out + c, load(out + c) + load(value + c) * weights[i]);
    }
}

static void softmax(float* scores, int count) {
    float most = -INFINITY;
    for (int j = 0; j < count; j++) most = scores[j] > most ? scores[j] : most;
    Vec totals = {};
    int j = 0;
    for (; j + WIDTH <= count; j += WIDTH) {
        Vec e = exponential(load(scores + j) - most);
        store(scores + j, e);
        totals += e;
    }
    float total = sum(totals);
    for (; j < count; j++) total += scores[j] = std::exp(scores[j] - most);
    const float share = 1 / total;
    for (j = 0; j < count; j++) scores[j] *= share;
}

// scratch: R rows of row_size floats, then R rows of row_size ints
template <int R>
static void attend_rows(const Sentence& s, const float* q, float* out, int64_t stride, float* scores, int* seen,
                        int64_t row_size) {
    score_shared<R>(s, q, stride, scores, row_size);
    int count[R];
    for (int r = 0; r < R; r++) {
        const uint8_t* hidden = s.hidden + r * s.hidden_stride;
        count[r] = 0;
        for (int slot = 0; slot < s.used; slot++) {
            seen[r * row_size + count[r]] = slot;
            count[r] += !hidden[slot];
        }
        score_slots(s, q + r * stride, seen + r * row_size, count[r], scores + r * row_size + s.length);
        softmax(scores + r * row_size, s.length + count[r]);
    }
    mix_shared<R>(s, scores, row_size, out, stride);
    for (int r = 0; r < R; r++)
        add_slots(s, scores + r * row_size + s.length, seen + r * row_size, count[r], out + r * stride);
}

// queries and out: [b, rows, h * d_k]; begin and end: [b]; hidden: [b, rows, capacity], of which `used` count
extern "C" void fairseq_el_attend(const float* queries, float* out, int64_t b, int64_t rows, int64_t h, int64_t d_k,
                                  float scale, const float* keys, const float* values, int64_t n,
                                  const int64_t* begin, const int64_t* end, const float* slot_keys,
                                  const float* slot_values, const uint8_t* hidden, int64_t capacity, int64_t used) {
    const int64_t d = h * d_k, row_size = (n + used + 15) / 16 * 16 + 16;
#pragma omp parallel
    {
        std::vector<float> scores(ROWS * row_size);
        std::vector<int> seen(ROWS * row_size);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < b * h; unit++) {
            const int64_t i = unit / h, head = unit % h;
            const int64_t first = n ? begin[i] : 0, shared = unit * d_k * n + first, slot = unit * capacity * d_k;
            for (int64_t row = 0; row < rows; row += ROWS) {
                const Sentence s = {keys + shared, values + shared, n, n ? (int)(end[i] - first) : 0,
                                    slot_keys + slot, slot_values + slot, hidden + (i * rows + row) * capacity,
                                    capacity, (int)used, (int)d_k, scale};
                const int64_t at = (i * rows + row) * d + head * d_k;
                switch (std::min<int64_t>(ROWS, rows - row)) {
                    case 1: attend_rows<1>(s, queries + at, out + at, d, scores.data(), seen.data(), row_size); break;
                    case 2: attend_rows<2>(s, queries + at, out + at, d, scores.data(), seen.data(), row_size); break;
                    case 3: attend_rows<3>(s, queries + at, out + at, d, scores.data(), seen.data(), row_size); break;
                    default: attend_rows<4>(s, queries + at, out + at, d, scores.data(), seen.data(), row_size);
                }
            }
        }
    }
}
