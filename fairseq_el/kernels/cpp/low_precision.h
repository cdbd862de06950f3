// Numbers in int8 and bfloat16, and their dot products. Four bytes are a unit: four int8 or two bfloat16 numbers of
// neighbouring inputs. A vector of weights has one unit for each of WIDTH outputs, which is multiplied with one unit of
// the activations.

#pragma once
#include "vec.h"

typedef uint32_t UnitVec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int16_t ShortVec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t __attribute__((may_alias)) Unit;

static inline UnitVec load_units(const Unit* p) { return *reinterpret_cast<const UnitVec*>(p); }
static inline UnitVec broadcast_unit(uint32_t x) { return x + UnitVec{}; }

// Weights from -127 to 127, activations from 0 to 255, sums in 32-bit integers: exact, and so the same everywhere.
struct Int8 {
    static constexpr int PER_UNIT = 4;
    typedef IntVec Sum;
#ifdef __AVX512VNNI__
    typedef UnitVec Input, Weights;
    static Input broadcast(uint32_t x) { return broadcast_unit(x); }
    static Weights load(const Unit* p) { return load_units(p); }
    // not an intrinsic: GCC 12 then moves the sums to memory and back
    static Sum add_products(Sum sum, Input x, Weights w) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
        return sum;
    }
#else
    // Even and odd bytes are widened to 16 bits and multiplied pairwise; 8-bit products of AVX2 would saturate.
    struct Input {
        UnitVec even, odd;
    };
    struct Weights {
        ShortVec even, odd;
    };
    static Input broadcast(uint32_t x) {
        return {broadcast_unit(x & 0x00ff00ff), broadcast_unit(x >> 8 & 0x00ff00ff)};
    }
    static Weights load(const Unit* p) {
        const ShortVec w = reinterpret_cast<ShortVec>(load_units(p));
        return {(w << 8) >> 8, w >> 8};
    }
    static IntVec multiply_pairs(UnitVec x, ShortVec w) {
#if defined(__AVX512BW__)
        return reinterpret_cast<IntVec>(_mm512_madd_epi16(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(w)));
#elif defined(__AVX2__)
        return reinterpret_cast<IntVec>(_mm256_madd_epi16(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(w)));
#else
        const IntVec a = reinterpret_cast<IntVec>(x), b = reinterpret_cast<IntVec>(w);
        return (a & 0xffff) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
    }
    static Sum add_products(Sum sum, const Input& x, const Weights& w) {
        return sum + multiply_pairs(x.even, w.even) + multiply_pairs(x.odd, w.odd);
    }
#endif
};

// Sums in single precision.
struct BFloat16 {
    static constexpr int PER_UNIT = 2;
    typedef Vec Sum;
#ifdef __AVX512BF16__
    typedef UnitVec Input, Weights;
    static Input broadcast(uint32_t x) { return broadcast_unit(x); }
    static Weights load(const Unit* p) { return load_units(p); }
    static Sum add_products(Sum sum, Input x, Weights w) {
        asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
        return sum;
    }
#else
    // The upper half of a single-precision number is the number in bfloat16.
    struct Pair {
        Vec first, second;
    };
    typedef Pair Input, Weights;
    static Pair widen(UnitVec x) { return {reinterpret_cast<Vec>(x << 16), reinterpret_cast<Vec>(x & 0xffff0000)}; }
    static Input broadcast(uint32_t x) { return widen(broadcast_unit(x)); }
    static Weights load(const Unit* p) { return widen(load_units(p)); }
    static Sum add_products(Sum sum, const Input& x, const Weights& w) {
        return sum + x.first * w.first + x.second * w.second;
    }
#endif
};

// To bfloat16, ties to even; NaN stays NaN.
static inline void store_bfloat16(uint16_t* to, Vec x) {
#ifdef __AVX512BF16__
    const __m256bh rounded = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(x));
    __builtin_memcpy(to, &rounded, sizeof rounded);
#else
    const UnitVec bits = reinterpret_cast<UnitVec>(x);
    const UnitVec rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const UnitVec kept = reinterpret_cast<UnitVec>(x == x);
    const UnitVec result = (rounded & kept) | (0x7fc0 & ~kept);
    for (int i = 0; i < WIDTH; i++) to[i] = static_cast<uint16_t>(result[i]);
#endif
}

constexpr int64_t AHEAD = 1024;  // prefetch distance, in units

// totals[r][v] += the products of row r of x with vector v of w, over all units. Rows of x are `x_stride` units apart,
// lines of w, one for each unit of x, `w_stride`.
template <class Format, int N, int V>
static inline __attribute__((always_inline)) void add_tile(const Unit* x, int64_t x_stride, const Unit* w,
                                                           int64_t w_stride, int64_t units,
                                                           typename Format::Sum (&totals)[N][V]) {
    for (int64_t u = 0; u < units; u++) {
        const Unit* line = w + u * w_stride;
        typename Format::Weights weights[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) weights[v] = Format::load(line + v * WIDTH);
#pragma GCC unroll 4
        for (int i = 0; i < V * WIDTH; i += LINE) __builtin_prefetch(line + AHEAD + i);
#pragma GCC unroll 8
        for (int r = 0; r < N; r++) {
            const typename Format::Input input = Format::broadcast(x[r * x_stride + u]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) totals[r][v] = Format::add_products(totals[r][v], input, weights[v]);
        }
    }
}
