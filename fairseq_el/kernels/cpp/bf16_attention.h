// Attention of one head of one sentence with products in bfloat16 and sums in single precision, for CPUs with such
// instructions. A few queries are scored against all positions, whose softmax then stays in the cache.

#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "low_precision.h"

// 2^x for x <= 0 within 8e-5: weights are rounded to bfloat16, within 4e-3.
static inline Vec coarse_exp2(Vec x) {
    const auto k = _mm512_roundscale_ps(reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vec f = x - reinterpret_cast<Vec>(k);
    const Vec p = ((0.05517051f * f + 0.24260854f) * f + 0.69326094f) * f + 0.99992824f;
    return reinterpret_cast<Vec>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), k));
}

static inline UnitVec rounded_bits(Vec x) {
    return reinterpret_cast<UnitVec>(
        _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x)))));
}

// Keys, values and queries of a head, packed for `add_tile`. Positions are padded to whole panels.
class BFloat16Head {
    static constexpr int PANEL = 64, VECTORS = PANEL / WIDTH, ROWS = 6;
    int64_t d, n = 0, padded = 0;
    std::vector<uint32_t> keys;    // [padded / PANEL, d / 2, PANEL], pairs of neighbouring numbers of a key
    std::vector<uint32_t> values;  // [padded / 2, d], pairs of neighbouring positions
    std::vector<uint32_t> queries, weights;  // [ROWS, d / 2], [ROWS, padded / 2]
    std::vector<float> scores;               // [ROWS, padded]

    static void to_pairs(const float* x, int64_t count, float scale, uint32_t* pairs) {
        for (int64_t i = 0; i < count; i += WIDTH)
            store_bfloat16(reinterpret_cast<uint16_t*>(pairs) + i, load(x + i) * scale);
    }

    void pack_keys(const float* x, int64_t stride) {
        for (int64_t first = 0; first < padded; first += PANEL) {
            uint32_t* panel = keys.data() + first * (d / 2);
            for (int64_t j = 0; j < PANEL; j++) {
                uint32_t* pairs = queries.data();  // not in use yet
                std::fill_n(pairs, d / 2, 0);
                if (first + j < n) to_pairs(x + (first + j) * stride, d, 1.0f, pairs);
                for (int64_t u = 0; u < d / 2; u++) panel[u * PANEL + j] = pairs[u];
            }
        }
    }

    void pack_values(const float* x, int64_t stride) {
        for (int64_t j = 0; j < padded; j += 2)
            for (int64_t c = 0; c < d; c += WIDTH) {
                const Vec first = j < n ? load(x + j * stride + c) : Vec{};
                const Vec second = j + 1 < n ? load(x + (j + 1) * stride + c) : Vec{};
                const UnitVec pairs = rounded_bits(first) | rounded_bits(second) << 16;
                __builtin_memcpy(values.data() + j / 2 * d + c, &pairs, sizeof pairs);
            }
    }

    // Weights of one row, before they are divided by their sum, which is returned.
    float exponentiate(float* row, uint32_t* to) const {
        std::fill(row + n, row + padded, -1e30f);  // whose weight is 0
        Vec most = load(row);
        for (int64_t j = WIDTH; j < padded; j += WIDTH) {
            const Vec x = load(row + j);
            most = x > most ? x : most;
        }
        float largest = most[0];
        for (int i = 1; i < WIDTH; i++) largest = std::max(largest, most[i]);
        Vec total = {};
        for (int64_t j = 0; j < padded; j += WIDTH) {
            const Vec weight = coarse_exp2(load(row + j) - largest);
            total += weight;
            store_bfloat16(reinterpret_cast<uint16_t*>(to) + j, weight);
        }
        return sum(total);
    }

    // `N` queries of d numbers, `stride` apart; V vectors of the result at a time
    template <int N, int V>
    void attend_rows(const float* q, int64_t stride, float scale, float* out, int64_t out_stride) {
        for (int r = 0; r < N; r++) to_pairs(q + r * stride, d, scale * 1.44269504f, queries.data() + r * (d / 2));
        for (int64_t first = 0; first < padded; first += PANEL) {
            Vec sums[N][VECTORS] = {};
            add_tile<BFloat16, N, VECTORS>(queries.data(), d / 2, keys.data() + first * (d / 2), PANEL, d / 2, sums);
            for (int r = 0; r < N; r++)
                for (int v = 0; v < VECTORS; v++) store(scores.data() + r * padded + first + v * WIDTH, sums[r][v]);
        }
        float inverse[N];
        for (int r = 0; r < N; r++)
            inverse[r] = 1 / exponentiate(scores.data() + r * padded, weights.data() + r * (padded / 2));
        for (int64_t c = 0; c < d; c += V * WIDTH) {
            Vec sums[N][V] = {};
            add_tile<BFloat16, N, V>(weights.data(), padded / 2, values.data() + c, d, padded / 2, sums);
            for (int r = 0; r < N; r++)
                for (int v = 0; v < V; v++) store(out + r * out_stride + c + v * WIDTH, sums[r][v] * inverse[r]);
        }
    }

    template <int V, int N = ROWS>
    void attend_at_most(int64_t count, const float* q, int64_t stride, float scale, float* out, int64_t out_stride) {
        if constexpr (N > 1) {
            if (count < N) return attend_at_most<V, N - 1>(count, q, stride, scale, out, out_stride);
        }
        attend_rows<N, V>(q, stride, scale, out, out_stride);
    }

   public:
    explicit BFloat16Head(int64_t d) : d(d), queries(ROWS * d / 2) {}

    // projected: queries, keys and values of n positions, one behind the other `width` apart, rows `stride` apart
    void attend(const float* projected, int64_t width, int64_t stride, int64_t positions, float scale, float* out,
                int64_t out_stride) {
        n = positions, padded = (n + PANEL - 1) / PANEL * PANEL;
        keys.resize(padded * d / 2), values.resize(padded * d / 2);
        weights.resize(ROWS * padded / 2), scores.resize(ROWS * padded);
        pack_keys(projected + width, stride);
        pack_values(projected + 2 * width, stride);
        for (int64_t first = 0; first < n; first += ROWS) {
            const float* q = projected + first * stride;
            const int64_t count = std::min<int64_t>(ROWS, n - first);
            if (d % PANEL == 0)
                attend_at_most<PANEL / WIDTH>(count, q, stride, scale, out + first * out_stride, out_stride);
            else
                attend_at_most<1>(count, q, stride, scale, out + first * out_stride, out_stride);
        }
    }
};
