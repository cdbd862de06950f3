// EL-attention's two products with a sentence's H: scores = q H^T, out = softmax(scores) H. All heads of all beams are
// rows of q, so there are few of them, and arithmetic is the limit once H is in the cache. A block of H is read once
// from memory, scores and sum done with it, and sums so far scaled down where a larger score turns up.
//
// The lanes of a vector are rows of q: nothing is added across lanes, and H is read as it lies, number by number.

#include <algorithm>
#include <vector>

#include "vec.h"

constexpr int SUMS = WIDTH == 16 ? 16 : 8;  // vectors that are summed up at a time; half of the registers
constexpr int BLOCK = 32;                   // places of H that stay in the cache

// Lanes of V vectors: q and out of one thread, sorted as [d][lanes].
template <int V>
struct Rows {
    static constexpr int LANES = V * WIDTH, PLACES = SUMS / V < 8 ? SUMS / V : 8, COLUMNS = SUMS / V;
    int64_t d;
    std::vector<float> q, out;
    Vec most[V], total[V];
    float weights[BLOCK * LANES];

    explicit Rows(int64_t d) : d(d), q(d * LANES), out(d * LANES) {}

    void begin(const float* queries, int64_t count) {
        std::fill(q.begin(), q.end(), 0.0f);
        std::fill(out.begin(), out.end(), 0.0f);
        for (int64_t line = 0; line < d; line += LINE)  // a few lines of both sides at a time
            for (int64_t r = 0; r < count; r++)
                for (int64_t k = line; k < line + LINE; k++) q[k * LANES + r] = queries[r * d + k];
        for (int v = 0; v < V; v++) most[v] = all(-3e38f), total[v] = all(0);
    }

    // scores of P places, which go to weights
    template <int P>
    void score(const float* h, int place) {
        Vec sums[P][V] = {};
        for (int64_t k = 0; k < d; k++) {
            Vec lanes[V];
            for (int v = 0; v < V; v++) lanes[v] = load(q.data() + k * LANES + v * WIDTH);
            for (int p = 0; p < P; p++) {
                const Vec state = all(h[(place + p) * d + k]);
                for (int v = 0; v < V; v++) sums[p][v] += lanes[v] * state;
            }
        }
        for (int p = 0; p < P; p++)
            for (int v = 0; v < V; v++) store(weights + (place + p) * LANES + v * WIDTH, sums[p][v]);
    }

    // scores become weights; returns by how much what was summed up before is too large
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

    void add(const float* h, int places, const Vec* shrink) {
        for (int64_t c = 0; c < d; c += COLUMNS) {
            float* to = out.data() + c * LANES;
            Vec sums[COLUMNS][V];
            for (int i = 0; i < COLUMNS; i++)
                for (int v = 0; v < V; v++) sums[i][v] = load(to + i * LANES + v * WIDTH) * shrink[v];
            for (int p = 0; p < places; p++) {
                Vec weight[V];
                for (int v = 0; v < V; v++) weight[v] = load(weights + p * LANES + v * WIDTH);
                if (c % LINE == 0) __builtin_prefetch(h + (p + BLOCK) * d + c, 0, 2);  // of the next block
                for (int i = 0; i < COLUMNS; i++) {
                    const Vec state = all(h[p * d + c + i]);
                    for (int v = 0; v < V; v++) sums[i][v] += weight[v] * state;
                }
            }
            for (int i = 0; i < COLUMNS; i++)
                for (int v = 0; v < V; v++) store(to + i * LANES + v * WIDTH, sums[i][v]);
        }
    }

    void attend(const float* h, int places) {
        int place = 0;
        for (; place + PLACES <= places; place += PLACES) score<PLACES>(h, place);
        if (place < places && places >= PLACES) score<PLACES>(h, places - PLACES);  // some of them once more
        if (places < PLACES)
            for (; place < places; place++) score<1>(h, place);
        Vec shrink[V];
        normalise(places, shrink);
        add(h, places, shrink);
    }

    void end(float* to, int64_t count) const {
        for (int64_t line = 0; line < d; line += LINE)
            for (int64_t r = 0; r < count; r++) {
                const float share = 1 / total[r / WIDTH][r % WIDTH];
                for (int64_t k = line; k < line + LINE; k++) to[r * d + k] = out[k * LANES + r] * share;
            }
    }
};

template <int V>
static void attend_all(float* queries, const float* states, int64_t b, int64_t rows, int64_t n, int64_t d,
                       const int64_t* begin, const int64_t* end) {
    const int64_t lanes = Rows<V>::LANES, parts = (rows + lanes - 1) / lanes;
#pragma omp parallel
    {
        Rows<V> mine(d);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < b * parts; unit++) {
            const int64_t i = unit / parts, first = unit % parts * lanes, count = std::min(lanes, rows - first);
            float* q = queries + (i * rows + first) * d;
            mine.begin(q, count);
            for (int64_t place = begin[i]; place < end[i]; place += BLOCK)
                mine.attend(states + (i * n + place) * d, std::min<int64_t>(BLOCK, end[i] - place));
            mine.end(q, count);
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
