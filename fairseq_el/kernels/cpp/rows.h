// Attention of some queries to many places, for kernels whose limit is arithmetic. The lanes of a vector are queries:
// nothing is added across lanes, and keys and values are read as they lie, number by number. A block of places is
// scored and summed up while it is in the cache, and sums so far are scaled down where a larger score turns up.

#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "vec.h"

// Vectors that are summed up at a time. Sums of weighted values come in powers of two, which divide d; scores need not,
// and of 16 registers 12 do half as much again as 8.
constexpr int SUMS = WIDTH == 16 ? 16 : 8, SCORES = WIDTH == 16 ? 16 : 12;

// Lanes of V vectors: q and out of one thread, sorted as [d][lanes]. Places go through in blocks of at most BLOCK.
template <int V, int BLOCK>
struct Rows {
    static constexpr int LANES = V * WIDTH, COLUMNS = SUMS / V;
    static constexpr int PLACES = WIDTH == 16 && V == 1 ? 8 : SCORES / V;
    int64_t d;
    std::vector<float> q, out;
    Vec most[V], total[V];
    float weights[BLOCK * LANES];

    explicit Rows(int64_t d) : d(d), q(d * LANES), out(d * LANES) {}

    // queries: `count` rows of d, `stride` apart
    void begin(const float* queries, int64_t stride, int64_t count, float scale) {
        std::fill(q.begin(), q.end(), 0.0f);
        std::fill(out.begin(), out.end(), 0.0f);
        for (int64_t line = 0; line < d; line += LINE)  // a few lines of both sides at a time
            for (int64_t r = 0; r < count; r++)
                for (int64_t k = line; k < line + LINE; k++) q[k * LANES + r] = queries[r * stride + k] * scale;
        for (int v = 0; v < V; v++) most[v] = all(-INFINITY), total[v] = all(0);
    }

    // scores of P places, which go to weights
    template <int P>
    void score(const float* keys, int place) {
        Vec sums[P][V] = {};
        for (int64_t k = 0; k < d; k++) {
            Vec lanes[V];
            for (int v = 0; v < V; v++) lanes[v] = load(q.data() + k * LANES + v * WIDTH);
            for (int p = 0; p < P; p++) {
                const Vec key = all(keys[(place + p) * d + k]);
                for (int v = 0; v < V; v++) sums[p][v] += lanes[v] * key;
            }
        }
        for (int p = 0; p < P; p++)
            for (int v = 0; v < V; v++) store(weights + (place + p) * LANES + v * WIDTH, sums[p][v]);
    }

    // scores become weights; returns by how much what was summed up before is too large. Where all scores are -inf, no
    // weight is a number, as in torch.
    void normalise(int places, Vec* shrink) {
        for (int v = 0; v < V; v++) {
            float* w = weights + v * WIDTH;
            const Vec before = most[v];
            for (int p = 0; p < places; p++) {
                const Vec x = load(w + p * LANES);
                most[v] = x > most[v] ? x : most[v];
            }
            shrink[v] = exponential(before - most[v]);
            total[v] *= shrink[v];
            for (int p = 0; p < places; p++) {
                const Vec e = exponential(load(w + p * LANES) - most[v]);
                store(w + p * LANES, e);
                total[v] += e;
            }
        }
    }

    void add(const float* values, int places, const Vec* shrink) {
        for (int64_t c = 0; c < d; c += COLUMNS) {
            float* to = out.data() + c * LANES;
            Vec sums[COLUMNS][V];
            for (int i = 0; i < COLUMNS; i++)
                for (int v = 0; v < V; v++) sums[i][v] = load(to + i * LANES + v * WIDTH) * shrink[v];
            for (int p = 0; p < places; p++) {
                Vec weight[V];
                for (int v = 0; v < V; v++) weight[v] = load(weights + p * LANES + v * WIDTH);
                if (c % LINE == 0) __builtin_prefetch(values + (p + BLOCK) * d + c, 0, 2);  // of the next block
                for (int i = 0; i < COLUMNS; i++) {
                    const Vec value = all(values[p * d + c + i]);
                    for (int v = 0; v < V; v++) sums[i][v] += weight[v] * value;
                }
            }
            for (int i = 0; i < COLUMNS; i++)
                for (int v = 0; v < V; v++) store(to + i * LANES + v * WIDTH, sums[i][v]);
        }
    }

    // keys and values: [places, d]
    void attend(const float* keys, const float* values, int places) {
        int place = 0;
        for (; place + PLACES <= places; place += PLACES) score<PLACES>(keys, place);
        if (place < places && places >= PLACES) score<PLACES>(keys, places - PLACES);  // some of them once more
        if (places < PLACES)
            for (; place < places; place++) score<1>(keys, place);
        Vec shrink[V];
        normalise(places, shrink);
        add(values, places, shrink);
    }

    void attend_all(const float* keys, const float* values, int64_t places) {
        for (int64_t place = 0; place < places; place += BLOCK)
            attend(keys + place * d, values + place * d, std::min<int64_t>(BLOCK, places - place));
    }

    void end(float* to, int64_t stride, int64_t count) const {
        for (int64_t line = 0; line < d; line += LINE)
            for (int64_t r = 0; r < count; r++) {
                const float share = 1 / total[r / WIDTH][r % WIDTH];
                for (int64_t k = line; k < line + LINE; k++) to[r * stride + k] = out[k * LANES + r] * share;
            }
    }
};
