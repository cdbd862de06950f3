// Attention with online softmax, for kernels that are bound by arithmetic. The lanes of a vector are queries: nothing
// is added across lanes, and keys and values are read in memory order, number by number. A block of positions is scored
// and summed while it is in the cache; where it raises the running max, the sums so far are rescaled.

#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "vec.h"

// Vectors of sums held in registers. Sums of weighted values come in powers of two, which divide d. Scores need not:
// with 16 registers, 12 sums do half as much work again per load as 8.
constexpr int SUMS = WIDTH == 16 ? 16 : 8, SCORES = WIDTH == 16 ? 16 : 12;

// A tile of V * WIDTH queries of one thread; q and out are [d][lanes]. Positions are processed in blocks of BLOCK.
template <int V, int BLOCK>
struct QueryTile {
    static constexpr int LANES = V * WIDTH, COLUMNS = SUMS / V;
    static constexpr int POSITIONS = WIDTH == 16 && V == 1 ? 8 : SCORES / V;
    int64_t d;
    std::vector<float> q, out;
    Vec running_max[V], total[V];
    float weights[BLOCK * LANES];

    explicit QueryTile(int64_t d) : d(d), q(d * LANES), out(d * LANES) {}

    // queries: `count` rows of d, `stride` apart
    void begin(const float* queries, int64_t stride, int64_t count, float scale) {
        std::fill(q.begin(), q.end(), 0.0f);
        std::fill(out.begin(), out.end(), 0.0f);
        for (int64_t line = 0; line < d; line += LINE)  // a few cache lines of both sides at a time
            for (int64_t r = 0; r < count; r++)
                for (int64_t k = line; k < line + LINE; k++) q[k * LANES + r] = queries[r * stride + k] * scale;
        for (int v = 0; v < V; v++) running_max[v] = broadcast(-INFINITY), total[v] = broadcast(0);
    }

    // scores of P positions, written to weights
    template <int P>
    void score(const float* keys, int position) {
        Vec sums[P][V] = {};
        for (int64_t k = 0; k < d; k++) {
            Vec lanes[V];
            for (int v = 0; v < V; v++) lanes[v] = load(q.data() + k * LANES + v * WIDTH);
            for (int p = 0; p < P; p++) {
                const Vec key = broadcast(keys[(position + p) * d + k]);
                for (int v = 0; v < V; v++) sums[p][v] += lanes[v] * key;
            }
        }
        for (int p = 0; p < P; p++)
            for (int v = 0; v < V; v++) store(weights + (position + p) * LANES + v * WIDTH, sums[p][v]);
    }

    // Turns scores into weights relative to the running max. rescale: what the sums so far are multiplied by. Where all
    // scores are -inf, weights are NaN, as in torch.
    void exponentiate(int positions, Vec* rescale) {
        for (int v = 0; v < V; v++) {
            float* w = weights + v * WIDTH;
            const Vec before = running_max[v];
            for (int p = 0; p < positions; p++) {
                const Vec x = load(w + p * LANES);
                running_max[v] = x > running_max[v] ? x : running_max[v];
            }
            rescale[v] = exponential(before - running_max[v]);
            total[v] *= rescale[v];
            for (int p = 0; p < positions; p++) {
                const Vec e = exponential(load(w + p * LANES) - running_max[v]);
                store(w + p * LANES, e);
                total[v] += e;
            }
        }
    }

    void sum_values(const float* values, int positions, const Vec* rescale) {
        for (int64_t c = 0; c < d; c += COLUMNS) {
            float* to = out.data() + c * LANES;
            Vec sums[COLUMNS][V];
            for (int i = 0; i < COLUMNS; i++)
                for (int v = 0; v < V; v++) sums[i][v] = load(to + i * LANES + v * WIDTH) * rescale[v];
            for (int p = 0; p < positions; p++) {
                Vec weight[V];
                for (int v = 0; v < V; v++) weight[v] = load(weights + p * LANES + v * WIDTH);
                if (c % LINE == 0) __builtin_prefetch(values + (p + BLOCK) * d + c, 0, 2);  // the next block
                for (int i = 0; i < COLUMNS; i++) {
                    const Vec value = broadcast(values[p * d + c + i]);
                    for (int v = 0; v < V; v++) sums[i][v] += weight[v] * value;
                }
            }
            for (int i = 0; i < COLUMNS; i++)
                for (int v = 0; v < V; v++) store(to + i * LANES + v * WIDTH, sums[i][v]);
        }
    }

    // keys and values: [positions, d]
    void attend_block(const float* keys, const float* values, int positions) {
        int position = 0;
        for (; position + POSITIONS <= positions; position += POSITIONS) score<POSITIONS>(keys, position);
        if (position < positions && positions >= POSITIONS)
            score<POSITIONS>(keys, positions - POSITIONS);  // some of them twice
        if (positions < POSITIONS)
            for (; position < positions; position++) score<1>(keys, position);
        Vec rescale[V];
        exponentiate(positions, rescale);
        sum_values(values, positions, rescale);
    }

    void attend_all(const float* keys, const float* values, int64_t positions) {
        for (int64_t position = 0; position < positions; position += BLOCK)
            attend_block(keys + position * d, values + position * d, std::min<int64_t>(BLOCK, positions - position));
    }

    void end(float* to, int64_t stride, int64_t count) const {
        for (int64_t line = 0; line < d; line += LINE)
            for (int64_t r = 0; r < count; r++) {
                const float inverse = 1 / total[r / WIDTH][r % WIDTH];
                for (int64_t k = line; k < line + LINE; k++) to[r * stride + k] = out[k * LANES + r] * inverse;
            }
    }
};
