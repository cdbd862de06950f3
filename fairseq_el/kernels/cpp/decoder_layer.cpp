// A decoding step of one Transformer decoder layer. Its parts are the kernels of the other files; what is saved is the
// way back to Python and new tensors between them. fused_layer.py declares the same structures.

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "activations.h"
#include "kernels.h"

enum WeightFormat : int64_t { ROW_MAJOR, PACKED_SINGLE, PACKED_HALF, LOW_PRECISION };

struct Linear {
    const void* weights;  // null if there is no such layer
    const float* scales;
    const int32_t* totals;
    const float* bias;
    int64_t in, out, format, activation;
};

struct Norm {
    const float *weight, *bias;
    double eps;
};

struct DecoderLayer {
    Linear query, key_value;  // no key_value: query has the outputs of all three
    Linear self_out, cross_query, cross_out, fc1, fc2;  // no cross_query: no encoder-decoder attention
    Norm self_norm, cross_norm, final_norm;
    double self_scale, cross_scale;
    int64_t self_heads, cross_heads, norm_first, d;
};

struct Prefix {  // keys and values that the rows of a sentence share, [b, h, d_k, n]; see decoder_attention.cpp
    const void *keys, *values;
    const int64_t *begin, *end;
    int64_t n, half;
};

struct State {
    Prefix prompt, source;
    void *slot_keys, *slot_values;  // [b, h, capacity, d_k], those of the newest tokens still to be written
    const uint8_t* beam_mask;       // [b, beam, capacity]
    int64_t b, beam, capacity, used, half;
};

static void apply(const Linear& layer, const float* x, float* y, int64_t rows, int64_t threads) {
    const auto [weights, scales, totals, bias, in, out, format, activation] = layer;
    if (format == LOW_PRECISION)
        return fairseq_el_low_precision_gemm(x, weights, scales, totals, bias, y, rows, in, out, activation, threads);
    if (format != ROW_MAJOR)
        return fairseq_el_packed_gemm(x, weights, format == PACKED_HALF, bias, y, rows, in, out, activation, threads);
    fairseq_el_linear(x, static_cast<const float*>(weights), bias, y, rows, in, out);
    if (activation == NONE) return;
    const auto function = static_cast<Activation>(activation);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < out; k += WIDTH) store(y + r * out + k, activate(load(y + r * out + k), function));
}

// from: [b, beam, h * d_k], rows `stride` apart, to the last `beam` slots that are used
template <class Number>
static void write_slots(const float* from, int64_t stride, Number* slots, const State& state, int64_t h, int64_t d_k) {
    for (int64_t row = 0; row < state.b * state.beam; row++)
        for (int64_t head = 0; head < h; head++) {
            const int64_t slot = state.used - state.beam + row % state.beam;
            Number* to = slots + ((row / state.beam * h + head) * state.capacity + slot) * d_k;
            for (int64_t k = 0; k < d_k; k += WIDTH) store_number(to + k, load(from + row * stride + head * d_k + k));
        }
}

class Step {
    const DecoderLayer& layer;
    const State& state;
    const int64_t rows, threads;
    std::vector<float>&projected, &context, &hidden;  // outputs of linear layers, of attention, and of residual sums

public:
    Step(const DecoderLayer& layer, const State& state, int64_t threads, std::vector<float> (&buffers)[3])
        : layer(layer), state(state), rows(state.b * state.beam), threads(threads), projected(buffers[0]),
          context(buffers[1]), hidden(buffers[2]) {
        const int64_t self_outputs = layer.query.out + (layer.key_value.weights ? layer.key_value.out : 0);
        projected.resize(rows * std::max(self_outputs, layer.fc1.out));
        context.resize(rows * std::max({layer.d, layer.self_out.in, layer.cross_out.in}));
        hidden.resize(rows * layer.d);
    }

    // x: [rows, d] -> y: [rows, d]
    void run(const float* x, float* y) {
        const bool has_source = layer.cross_query.weights;
        std::vector<float>& normed = context;  // free whenever a block begins
        const float *residual = x, *input = x;
        if (layer.norm_first) input = norm(x, nullptr, layer.self_norm, nullptr, normed.data());
        attend_to_past(input, y);
        std::tie(residual, input) = finish(y, residual, layer.self_norm, has_source ? layer.cross_norm : layer.final_norm);
        if (has_source) {
            attend_to_source(input, y);
            std::tie(residual, input) = finish(y, residual, layer.cross_norm, layer.final_norm);
        }
        apply(layer.fc1, input, projected.data(), rows, threads);
        apply(layer.fc2, projected.data(), y, rows, threads);
        if (!layer.norm_first)
            norm(y, residual, layer.final_norm, nullptr, y);
        else
            for (int64_t k = 0; k < rows * layer.d; k += WIDTH) store(y + k, load(residual + k) + load(y + k));
    }

private:
    const float* norm(const float* x, const float* residual, const Norm& norm, float* sum, float* y) {
        fairseq_el_add_norm(x, residual, norm.weight, norm.bias, norm.eps, sum, y, rows, layer.d);
        return y;
    }

    // The residual connection behind a block. Returns what the next block adds and what it takes.
    std::pair<const float*, const float*> finish(const float* block, const float* residual, const Norm& own,
                                                 const Norm& next) {
        if (layer.norm_first) return {hidden.data(), norm(block, residual, next, hidden.data(), context.data())};
        norm(block, residual, own, nullptr, hidden.data());
        return {hidden.data(), hidden.data()};
    }

    void attend_to_past(const float* x, float* y) {
        float *q = projected.data(), *keys = q + layer.query.out / 3;
        int64_t stride = layer.query.out, width = layer.query.out / 3;
        apply(layer.query, x, q, rows, threads);
        if (layer.key_value.weights) {
            keys = q + rows * layer.query.out, stride = layer.key_value.out, width = layer.query.out;
            apply(layer.key_value, x, keys, rows, threads);
        }
        const int64_t d_k = width / layer.self_heads;
        auto write = [&](auto* slot_keys, auto* slot_values) {
            write_slots(keys, stride, slot_keys, state, layer.self_heads, d_k);
            write_slots(keys + width, stride, slot_values, state, layer.self_heads, d_k);
        };
        state.half ? write(static_cast<Half*>(state.slot_keys), static_cast<Half*>(state.slot_values))
                   : write(static_cast<float*>(state.slot_keys), static_cast<float*>(state.slot_values));
        const Prefix& prompt = state.prompt;
        fairseq_el_decoder_attention(q, layer.query.out, context.data(), state.b, state.beam, layer.self_heads, d_k,
                                     layer.self_scale, prompt.keys, prompt.values, prompt.n, prompt.begin, prompt.end,
                                     state.slot_keys, state.slot_values, state.beam_mask, state.capacity, state.used,
                                     state.half);
        apply(layer.self_out, context.data(), y, rows, threads);
    }

    void attend_to_source(const float* x, float* y) {
        const Prefix& source = state.source;
        apply(layer.cross_query, x, projected.data(), rows, threads);
        fairseq_el_decoder_attention(projected.data(), layer.cross_query.out, context.data(), state.b, state.beam,
                                     layer.cross_heads, layer.cross_query.out / layer.cross_heads, layer.cross_scale,
                                     source.keys, source.values, source.n, source.begin, source.end, nullptr, nullptr,
                                     nullptr, 0, 0, source.half);
        apply(layer.cross_out, context.data(), y, rows, threads);
    }
};

// x and y: [b * beam, d]; all widths are multiples of 16
extern "C" void fairseq_el_decoder_layer(const DecoderLayer* layer, const State* state, const float* x, float* y,
                                         int64_t threads) {
    static thread_local std::vector<float> buffers[3];  // kept for the next call
    Step(*layer, *state, threads, buffers).run(x, y);
}
