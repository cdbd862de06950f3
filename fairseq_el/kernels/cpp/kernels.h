// Kernels that other kernels call. Each is described where it is defined.

#pragma once
#include <cstdint>

extern "C" {
void fairseq_el_linear(const float* x, const float* w, const float* bias, float* y, int64_t rows, int64_t in,
                       int64_t out);
void fairseq_el_packed_gemm(const float* x, const void* weights, int64_t half, const float* bias, float* y,
                            int64_t rows, int64_t in, int64_t out, int64_t activation, int64_t threads);
void fairseq_el_low_precision_gemm(const float* x, const void* weights, const float* scales, const int32_t* totals,
                                   const float* bias, float* y, int64_t rows, int64_t in, int64_t out,
                                   int64_t activation, int64_t threads);
void fairseq_el_decoder_attention(const float* queries, int64_t q_stride, float* out, int64_t b, int64_t rows,
                                  int64_t h, int64_t d_k, float scale, const void* keys, const void* values, int64_t n,
                                  const int64_t* begin, const int64_t* end, const void* slot_keys,
                                  const void* slot_values, const uint8_t* beam_mask, int64_t capacity, int64_t used,
                                  int64_t half);
void fairseq_el_add_norm(const float* x, const float* residual, const float* weight, const float* bias, float eps,
                         float* sum, float* y, int64_t rows, int64_t d);
}
