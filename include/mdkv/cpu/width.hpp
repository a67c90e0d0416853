/// \file width.hpp: the inline namespace that all of mdkv::cpu stands in, named after the vector width of the compilation.
#pragma once

// Two sources of one program may be compiled for different machines. Every function of the CPU backend has the width in its
// name, so that the linker never replaces one machine's code with the other's, and a dry run measures its own call.

#if defined(__AVX512F__)
#    define MDKV_CPU_WIDTH wide16
#elif defined(__AVX2__)
#    define MDKV_CPU_WIDTH wide8
#else
#    define MDKV_CPU_WIDTH wide4
#endif

namespace mdkv::cpu::inline MDKV_CPU_WIDTH
{

/// Floats of a vector register.
#if defined(__AVX512F__)
inline constexpr int vector_lanes = 16;
#elif defined(__AVX2__)
inline constexpr int vector_lanes = 8;
#else
inline constexpr int vector_lanes = 4;
#endif

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH
