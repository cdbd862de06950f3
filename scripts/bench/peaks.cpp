// Peaks of this machine, a line each: GFLOP/s of products in registers, by precision, and GB/s of reading memory.
// Precisions for which the processor has no instructions are left out.

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

constexpr int CHAINS = 12;  // independent sums, enough to hide the latency of an instruction
constexpr long ROUNDS = 20'000'000;
constexpr long NUMBERS = 64L << 20;  // floats a thread reads: larger than any cache

#if defined(__AVX512F__)
using Register = __m512;
#define ZERO _mm512_setzero_ps()
#else
using Register = __m256;
#define ZERO _mm256_setzero_ps()
#endif
constexpr int LANES = sizeof(Register) / sizeof(float);

// The least of some runs: a peak is what the machine can do at best.
static double seconds_of(int threads, const std::function<void(int)>& work) {
    double least = 1e9;
    for (int repeat = 0; repeat < 5; ++repeat) {
        auto started = std::chrono::steady_clock::now();
        std::vector<std::thread> team;
        for (int t = 0; t < threads; ++t) team.emplace_back(work, t);
        for (auto& member : team) member.join();
        std::chrono::duration<double> taken = std::chrono::steady_clock::now() - started;
        least = std::min(least, taken.count());
    }
    return least;
}

// Repeats one instruction on independent sums. Written as asm, so that the compiler neither drops nor spills them.
#define REPEAT(NAME, INSTRUCTION)                                                                       \
    static void NAME(int) {                                                                             \
        Register sums[CHAINS], x = ZERO;                                                                \
        _Pragma("GCC unroll 12") for (int c = 0; c < CHAINS; ++c) sums[c] = ZERO;                       \
        for (long round = 0; round < ROUNDS; ++round) {                                                 \
            _Pragma("GCC unroll 12") for (int c = 0; c < CHAINS; ++c)                                   \
                asm volatile(INSTRUCTION " %1, %1, %0" : "+v"(sums[c]) : "v"(x));                       \
        }                                                                                               \
    }

REPEAT(float32, "vfmadd231ps")
#if defined(__AVX512BF16__)
REPEAT(bf16, "vdpbf16ps")
#endif
#if defined(__AVX512VNNI__)
REPEAT(int8, "vpdpbusd")
#endif

// products: of one lane and instruction; each is a multiplication and an addition
static void print_peak(const char* name, void (*work)(int), int threads, int products) {
    double flops = 2.0 * products * LANES * CHAINS * ROUNDS * threads;
    std::printf("%s %.1f\n", name, flops / seconds_of(threads, work) / 1e9);
}

int main(int, char** words) {
    int threads = std::atoi(words[1]);
    print_peak("float32", float32, threads, 1);
#if defined(__AVX512BF16__)
    print_peak("bf16", bf16, threads, 2);
#endif
#if defined(__AVX512VNNI__)
    print_peak("int8", int8, threads, 4);
#endif
    std::vector<float> numbers(NUMBERS * threads, 1.0f);
    std::vector<double> sums(threads);
    double seconds = seconds_of(threads, [&](int t) {
        Register part[8];
        for (auto& p : part) p = ZERO;
        const float* from = numbers.data() + t * NUMBERS;
        for (long i = 0; i < NUMBERS; i += 8 * LANES) {
#pragma GCC unroll 8
            for (int k = 0; k < 8; ++k) part[k] += *reinterpret_cast<const Register*>(from + i + k * LANES);
        }
        for (auto& p : part) sums[t] += p[0];
    });
    std::printf("memory %.1f\n", 4.0 * NUMBERS * threads / seconds / 1e9);
    return sums[0] > 0 ? 0 : 1;
}
