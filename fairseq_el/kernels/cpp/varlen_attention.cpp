// Self-attention of a padding-free (varlen) batch: sentences are concatenated, and each attends to itself alone, as in
// an encoder. Queries, keys and values are read from the output of the joint projection. Keys and values of a head
// are first copied together: positions that are whole rows apart compete for the same cache lines.

#include <cstring>

#ifdef __AVX512BF16__
#include "bf16_attention.h"
#endif
#include "online_softmax.h"

constexpr int BLOCK = 64;  // positions whose weights stay in the L1 cache, beside queries and sums

static void gather(const float* from, int64_t stride, int64_t n, int64_t d, float* to) {
    for (int64_t i = 0; i < n; i++) std::memcpy(to + i * d, from + i * stride, sizeof(float) * d);
}

struct Head {  // one head of one sentence
    const float *q, *keys, *values;
    float* out;
    int64_t n, stride, out_stride;
};

template <int V>
static int64_t attend_from(int64_t first, const Head& head, QueryTile<V, BLOCK>& tile, float scale) {
    const int64_t count = std::min<int64_t>(V * WIDTH, head.n - first);
    tile.begin(head.q + first * head.stride, head.stride, count, scale);
    tile.attend_all(head.keys, head.values, head.n);
    tile.end(head.out + first * head.out_stride, head.out_stride, count);
    return first + count;
}

static void attend_in_single(const float* projected, float* out, const int64_t* starts, int64_t sentences, int64_t h,
                             int64_t d_k, float scale) {
    const int64_t d = h * d_k, stride = 3 * d;
    int64_t longest = 0;
    for (int64_t i = 0; i < sentences; i++) longest = std::max(longest, starts[i + 1] - starts[i]);
#pragma omp parallel
    {
        QueryTile<2, BLOCK> many(d_k);
        QueryTile<1, BLOCK> few(d_k);
        std::vector<float> keys(longest * d_k), values(longest * d_k);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < sentences * h; unit++) {
            const int64_t start = starts[unit / h], n = starts[unit / h + 1] - start, at = unit % h * d_k;
            const float* q = projected + start * stride + at;
            gather(q + d, stride, n, d_k, keys.data());
            gather(q + 2 * d, stride, n, d_k, values.data());
            const Head head{q, keys.data(), values.data(), out + start * d + at, n, stride, d};
            for (int64_t first = 0; first < n;)
                first = n - first > WIDTH ? attend_from(first, head, many, scale)
                                          : attend_from(first, head, few, scale);
        }
    }
}

#ifdef __AVX512BF16__
static void attend_in_bf16(const float* projected, float* out, const int64_t* starts, int64_t sentences, int64_t h,
                           int64_t d_k, float scale) {
    const int64_t d = h * d_k;
#pragma omp parallel
    {
        BFloat16Head head(d_k);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < sentences * h; unit++) {
            const int64_t start = starts[unit / h], at = unit % h * d_k;
            head.attend(projected + start * 3 * d + at, d, 3 * d, starts[unit / h + 1] - start, scale,
                        out + start * d + at, d);
        }
    }
}
#endif

// projected: [tokens, 3, h, d_k], queries, keys and values, d_k a multiple of 16; out: [tokens, h, d_k]; starts:
// [sentences + 1], the first token of each sentence, and the number of tokens; low_precision: whether products may be
// in bfloat16, as they are on CPUs with such instructions
extern "C" void fairseq_el_varlen_attention(const float* projected, float* out, const int64_t* starts,
                                            int64_t sentences, int64_t h, int64_t d_k, float scale,
                                            int64_t low_precision) {
#ifdef __AVX512BF16__
    if (low_precision) return attend_in_bf16(projected, out, starts, sentences, h, d_k, scale);
#endif
    attend_in_single(projected, out, starts, sentences, h, d_k, scale);
}
