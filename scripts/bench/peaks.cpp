// Peaks of this machine, a line each: GFLOP/s of products in registers, by precision, and GB/s of reading memory.
// Precisions for which the processor has no instructions are left out.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstdio>
#include <vector>

constexpr int CHAINS = 12;  // independent sums, enough to hide the latency of an instruction
constexpr long ROUNDS = 20'000'000;
constexpr long NUMBERS = 64L << 20;  // floats a thread reads: larger than any cache

#if defined(__AVX512F__)
using Register = __m512;
#else
using Register = __m256;
#endif
constexpr int LANES = sizeof(Register) / sizeof(float);

// Seconds of the fastest of some runs on all threads: a peak is what the machine can do at best.
template <typename Work>
static double seconds_of(Work work) {
    double least = 1e9;
    for (int repeat = 0; repeat < 5; ++repeat) {
        double started = omp_get_wtime();
#pragma omp parallel
        work(omp_get_thread_num());
        least = std::min(least, omp_get_wtime() - started);
    }
    return least;
}

// Repeats one instruction on independent sums: `products` multiplications and additions in each lane. Written as asm, so
// that the compiler neither drops nor spills the sums.
#define PRINT_PEAK(NAME, INSTRUCTION, PRODUCTS)                                             \
    {                                                                                       \
        double seconds = seconds_of([](int) {                                               \
            Register sums[CHAINS] = {}, x = {};                                             \
            for (long round = 0; round < ROUNDS; ++round)                                   \
                _Pragma("GCC unroll 12") for (int c = 0; c < CHAINS; ++c)                   \
                    asm volatile(INSTRUCTION " %1, %1, %0" : "+v"(sums[c]) : "v"(x));       \
        });                                                                                 \
        double flops = 2.0 * PRODUCTS * LANES * CHAINS * ROUNDS * omp_get_max_threads();    \
        std::printf(NAME " %.1f\n", flops / seconds / 1e9);                                 \
    }

int main() {
    PRINT_PEAK("float32", "vfmadd231ps", 1)
#if defined(__AVX512BF16__)
    PRINT_PEAK("bf16", "vdpbf16ps", 2)
#endif
#if defined(__AVX512VNNI__)
    PRINT_PEAK("int8", "vpdpbusd", 4)
#endif
    std::vector<float> numbers(NUMBERS * omp_get_max_threads(), 1.0f);
    std::vector<float> sums(omp_get_max_threads());
    double seconds = seconds_of([&](int thread) {
        Register part[8] = {};
        const float* from = numbers.data() + thread * NUMBERS;
        for (long i = 0; i < NUMBERS; i += 8 * LANES)
#pragma GCC unroll 8
            for (int k = 0; k < 8; ++k) part[k] += *reinterpret_cast<const Register*>(from + i + k * LANES);
        for (auto& p : part) sums[thread] += p[0];
    });
    std::printf("memory %.1f\n", 4.0 * numbers.size() / seconds / 1e9);
    return sums[0] > 0 ? 0 : 1;
}
