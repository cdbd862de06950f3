// Vectors of floats as wide as the registers of the CPU, written with the vector extension of GCC and Clang.
// build.py compiles the kernels for the CPU they run on: plain C interface, no dependencies.

#pragma once
#include <cstdint>
#ifdef __F16C__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
constexpr int WIDTH = 16;
#else
constexpr int WIDTH = 8;
#endif
constexpr int LINE = 16;  // floats in a cache line

typedef float Vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

static inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
static inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
static inline void store_number(float* p, Vec v) { store(p, v); }
static inline Vec broadcast(float x) { return x - Vec{}; }

struct Half {  // a number in half precision
    uint16_t bits;
};

static inline Vec to_float(const float* p) { return load(p); }
static inline Vec to_float(const Half* p) {
#if defined(__AVX512F__)
    return reinterpret_cast<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__)
    return reinterpret_cast<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else  // a multiplication corrects the exponent bias; exact for all finite numbers
    IntVec bits;
    for (int i = 0; i < WIDTH; i++) bits[i] = p[i].bits;
    const Vec magnitude = reinterpret_cast<Vec>((bits & 0x7fff) << 13) * 0x1p112f;
    return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(magnitude) | (bits & 0x8000) << 16);
#endif
}

static inline float to_float(float x) { return x; }
static inline float to_float(Half x) {
#ifdef __F16C__
    return _cvtsh_ss(x.bits);
#else
    Half lanes[WIDTH] = {x};
    return to_float(lanes)[0];
#endif
}

// To half precision, ties to even. Numbers that are too large become the largest one: an infinity would turn into NaN.
static inline void store_number(Half* to, Vec x) {
    const Vec most = broadcast(65504.0f);
    x = x > most ? most : x < -most ? -most : x;
#if defined(__AVX512F__)
    const __m256i bits = _mm512_cvtps_ph(reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT);
    __builtin_memcpy(to, &bits, sizeof bits);
#elif defined(__F16C__)
    const __m128i bits = _mm256_cvtps_ph(reinterpret_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT);
    __builtin_memcpy(to, &bits, sizeof bits);
#else  // adding a number so large that the sum keeps ten bits of the magnitude rounds it
    const IntVec bits = reinterpret_cast<IntVec>(x), sign = bits & INT32_MIN;
    const Vec size = reinterpret_cast<Vec>(bits ^ sign);
    const IntVec exponent = reinterpret_cast<IntVec>(size) & 0x7f800000;
    const IntVec least = exponent > 0x38800000 ? exponent : 0x38800000 + IntVec{};  // of normal numbers
    const Vec large = reinterpret_cast<Vec>(least + (13 << 23));
    const Vec rounded = (size + large) - large;
    const IntVec scaled = reinterpret_cast<IntVec>(rounded * 0x1p-112f) >> 13;
    for (int i = 0; i < WIDTH; i++)
        to[i].bits = x[i] == x[i] ? static_cast<uint16_t>(scaled[i] | (static_cast<uint32_t>(sign[i]) >> 16)) : 0x7e00;
#endif
}

// Stops the compiler from loading the same vector again for each use.
static inline void keep_in_register(Vec& v) {
#ifdef __AVX__
    asm("" : "+x"(v));
#endif
}

// Pairwise: adding the elements one after the other would make each sum wait for the one before.
static inline float sum(Vec v) {
    float part[WIDTH];
    store(part, v);
    for (int half = WIDTH / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

// e^x for x <= 0: x = k ln 2 + f, a polynomial for e^f, and k added to the exponent's bits. Within 2 units in
// the last place; below -87 the result is 0 in single precision.
static inline Vec exponential(Vec x) {
    x = x < broadcast(-87.0f) ? broadcast(-87.0f) : x;
    const Vec round = broadcast(12582912.0f);  // 1.5 * 2^23: adding it leaves an integer in the low bits
    Vec shifted = x * 1.44269504088896341f + round;
    Vec k = shifted - round;
    Vec f = x - k * 0.693359375f + k * 2.12194440e-4f;
    Vec p = broadcast(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    IntVec exponent = __builtin_convertvector(k, IntVec) << 23;
    return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(p) + exponent);
}
