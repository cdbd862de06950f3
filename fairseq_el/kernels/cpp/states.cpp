// EL-attention's two products with a sentence's H: scores = q H^T, out = softmax(scores) H. All heads of all beams are
// rows of q, so there are few of them, and arithmetic is the limit once H is in the cache: it is read once from memory.

#include "rows.h"

constexpr int BLOCK = 32;  // places of H that stay in the cache

template <int V>
static void attend_all(float* queries, const float* states, int64_t b, int64_t rows, int64_t n, int64_t d,
                       const int64_t* begin, const int64_t* end) {
    const int64_t lanes = V * WIDTH, parts = (rows + lanes - 1) / lanes;
#pragma omp parallel
    {
        Rows<V, BLOCK> mine(d);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < b * parts; unit++) {
            const int64_t i = unit / parts, first = unit % parts * lanes, count = std::min(lanes, rows - first);
            float* q = queries + (i * rows + first) * d;
            const float* h = states + (i * n + begin[i]) * d;
            mine.begin(q, d, count, 1.0f);
            mine.attend_all(h, h, end[i] - begin[i]);
            mine.end(q, d, count);
        }
    }
}

// queries: [b, rows, d], which the result takes the place of; states: [b, n, d], d a multiple of 16; begin and end: [b].
// Few rows for many threads are divided into more parts.
extern "C" void fairseq_el_attend_states(float* queries, const float* states, int64_t b, int64_t rows, int64_t n,
                                         int64_t d, const int64_t* begin, const int64_t* end, int64_t threads) {
    if (rows > WIDTH && b * rows >= 2 * WIDTH * 2 * threads)
        attend_all<2>(queries, states, b, rows, n, d, begin, end);
    else
        attend_all<1>(queries, states, b, rows, n, d, begin, end);
}
