// EL-attention's two products with the encoder output H of a sentence: scores = q H^T, out = softmax(scores) H. The
// rows of q are all heads of all beams. H is read from memory once; after that, arithmetic is the limit.

#include "online_softmax.h"

constexpr int BLOCK = 32;  // positions of H that stay in the cache

template <int V>
static void attend(float* queries, const float* states, int64_t b, int64_t rows, int64_t n, int64_t d,
                       const int64_t* begin, const int64_t* end) {
    const int64_t lanes = V * WIDTH, parts = (rows + lanes - 1) / lanes;
#pragma omp parallel
    {
        QueryTile<V, BLOCK> tile(d);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < b * parts; unit++) {
            const int64_t i = unit / parts, first = unit % parts * lanes, count = std::min(lanes, rows - first);
            float* q = queries + (i * rows + first) * d;
            const float* h = states + (i * n + begin[i]) * d;
            tile.begin(q, d, count, 1.0f);
            tile.attend_all(h, h, end[i] - begin[i]);
            tile.end(q, d, count);
        }
    }
}

// queries: [b, rows, d], overwritten by the result; states: [b, n, d], d a multiple of 16; begin and end: [b]. Narrow
// tiles where wide ones would leave threads without work.
extern "C" void fairseq_el_el_attention(float* queries, const float* states, int64_t b, int64_t rows, int64_t n,
                                        int64_t d, const int64_t* begin, const int64_t* end, int64_t threads) {
    if (rows > WIDTH && b * rows >= 2 * WIDTH * 2 * threads)
        attend<2>(queries, states, b, rows, n, d, begin, end);
    else
        attend<1>(queries, states, b, rows, n, d, begin, end);
}
