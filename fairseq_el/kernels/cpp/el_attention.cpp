// EL-attention's two products with the encoder output H of a sentence: scores = q H^T, out = softmax(scores) H. The
// rows of q are all heads of all beams. H is read from memory once; after that, arithmetic is the limit.

#include "online_softmax.h"

constexpr int BLOCK = 32;  // positions of H that stay in the cache

// The positions in single precision, as a tile takes them: a block, converted, or as they are.
static const float* widen(const Half* states, int64_t count, std::vector<float>& to) {
    to.resize(count);
    for (int64_t i = 0; i < count; i += WIDTH) store(to.data() + i, to_float(states + i));
    return to.data();
}
static const float* widen(const float* states, int64_t, std::vector<float>&) { return states; }

template <int V, class Number>
static void attend(float* queries, const Number* states, int64_t b, int64_t rows, int64_t n, int64_t d,
                   const int64_t* begin, const int64_t* end) {
    const int64_t lanes = V * WIDTH, parts = (rows + lanes - 1) / lanes;
#pragma omp parallel
    {
        QueryTile<V, BLOCK> tile(d);
        std::vector<float> wide;
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < b * parts; unit++) {
            const int64_t i = unit / parts, first = unit % parts * lanes, count = std::min(lanes, rows - first);
            float* q = queries + (i * rows + first) * d;
            tile.begin(q, d, count, 1.0f);
            for (int64_t position = begin[i]; position < end[i]; position += BLOCK) {
                const int64_t positions = std::min<int64_t>(BLOCK, end[i] - position);
                const float* h = widen(states + (i * n + position) * d, positions * d, wide);
                tile.attend_block(h, h, positions);
            }
            tile.end(q, d, count);
        }
    }
}

// queries: [b, rows, d], overwritten by the result; states: [b, n, d], in half or single precision, d a multiple of 16;
// begin and end: [b]. Narrow tiles where wide ones would leave threads without work.
extern "C" void fairseq_el_el_attention(float* queries, const void* states, int64_t half, int64_t b, int64_t rows,
                                        int64_t n, int64_t d, const int64_t* begin, const int64_t* end,
                                        int64_t threads) {
    const bool wide = rows > WIDTH && b * rows >= 2 * WIDTH * 2 * threads;
    auto attend_to = [&](auto* numbers) {
        wide ? attend<2>(queries, numbers, b, rows, n, d, begin, end)
             : attend<1>(queries, numbers, b, rows, n, d, begin, end);
    };
    half ? attend_to(static_cast<const Half*>(states)) : attend_to(static_cast<const float*>(states));
}
