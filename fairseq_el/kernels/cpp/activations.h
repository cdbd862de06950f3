// Activation functions of feed-forward blocks, for vectors.

#pragma once
#include "vec.h"

enum Activation : int64_t { NONE, RELU, GELU, GELU_TANH };  // numbered as in ops.py

static inline Vec magnitude(Vec x) { return x < broadcast(0) ? -x : x; }

// x * (1 + erf(x / sqrt(2))) / 2; erf by Abramowitz and Stegun 7.1.26, within 1.5e-7, as in torch
static inline Vec gelu(Vec x) {
    const Vec z = magnitude(x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z);
    Vec p = broadcast(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const Vec tail = 0.5f * p * t * exponential(-z * z);  // of the normal distribution, above |x|
    return x * (x < broadcast(0) ? tail : 1.0f - tail);
}

// x * (1 + tanh(u)) / 2 = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
static inline Vec gelu_tanh(Vec x) {
    const Vec u = 1.5957691f * (x + 0.044715f * x * x * x), e = exponential(-magnitude(u));
    return x * (u < broadcast(0) ? e : broadcast(1)) / (1.0f + e);
}

static inline Vec activate(Vec x, Activation activation) {
    switch (activation) {
        case RELU: return x < broadcast(0) ? broadcast(0) : x;
        case GELU: return gelu(x);
        case GELU_TANH: return gelu_tanh(x);
        default: return x;
    }
}
