/// \file compiled_for.hpp: sets of instructions that a program was compiled for, by the names of __builtin_cpu_supports
#pragma once

// F(name, macro): the compiler defines the macro as 1 where it may use the instructions. fma4 is of processors that have
// nothing later, so that no processor has all.
#define MDKV_RUNNER_FEATURES(F)                                                                                        \
    F("sse3", __SSE3__)                                                                                                \
    F("ssse3", __SSSE3__)                                                                                              \
    F("sse4.1", __SSE4_1__)                                                                                            \
    F("sse4.2", __SSE4_2__)                                                                                            \
    F("popcnt", __POPCNT__)                                                                                            \
    F("avx", __AVX__)                                                                                                  \
    F("fma4", __FMA4__)                                                                                                \
    F("avx2", __AVX2__)                                                                                                \
    F("fma", __FMA__)                                                                                                  \
    F("bmi", __BMI__)                                                                                                  \
    F("bmi2", __BMI2__)                                                                                                \
    F("avx512f", __AVX512F__)                                                                                          \
    F("avx512cd", __AVX512CD__)                                                                                        \
    F("avx512bw", __AVX512BW__)                                                                                        \
    F("avx512dq", __AVX512DQ__)                                                                                        \
    F("avx512vl", __AVX512VL__)                                                                                        \
    F("avx512vnni", __AVX512VNNI__)                                                                                    \
    F("avx512vbmi", __AVX512VBMI__)                                                                                    \
    F("avx512vbmi2", __AVX512VBMI2__)                                                                                  \
    F("avx512bitalg", __AVX512BITALG__)                                                                                \
    F("avx512vpopcntdq", __AVX512VPOPCNTDQ__)                                                                          \
    F("gfni", __GFNI__)                                                                                                \
    F("vpclmulqdq", __VPCLMULQDQ__)                                                                                    \
    F("avx512bf16", __AVX512BF16__)

namespace runner
{

/// In the order of MDKV_RUNNER_FEATURES, whether the program may use them. Data alone: it is read before any code that may.
extern bool const compiled_for[];

/// What its vector code uses: the widest of what the library has code for.
[[nodiscard]] constexpr char const* vector_instructions() noexcept
{
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
    return "AVX-512 VNNI";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#elif defined(__x86_64__)
    return "x86-64 baseline";
#else
    return "the compiler's default";
#endif
}

} // namespace runner
