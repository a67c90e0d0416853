/// \file strange_environment.hpp: floating-point environments in which a caller may be: subnormal numbers flushed, other rounding, traps
#pragma once

#include <cstdint>

namespace support
{

#if defined(__SSE2__)
struct control
{
    static std::uint64_t read() { return __builtin_ia32_stmxcsr(); }
    static void write(std::uint64_t word) { __builtin_ia32_ldmxcsr(static_cast<unsigned>(word)); }
    static constexpr std::uint64_t flush = 0x8040, up = 0x4000, down = 0x2000,
                                   trapped = 0x0680; // invalid, division, overflow
    static std::uint64_t with(std::uint64_t bits)
    {
        return bits == trapped ? std::uint64_t{0x1f80} & ~bits : std::uint64_t{0x1f80} | bits;
    }
};
#    define MDKV_TEST_ENVIRONMENTS
#elif defined(__aarch64__)
struct control
{
    static std::uint64_t read()
    {
        std::uint64_t word = 0;
        asm volatile("mrs %0, fpcr" : "=r"(word));
        return word;
    }
    static void write(std::uint64_t word) { asm volatile("msr fpcr, %0" : : "r"(word) : "memory"); }
    static constexpr std::uint64_t flush = 1U << 24U, up = 1U << 22U, down = 2U << 22U, trapped = 7U << 8U;
    static std::uint64_t with(std::uint64_t bits) { return bits; }
};
#    define MDKV_TEST_ENVIRONMENTS
#endif

#if defined(MDKV_TEST_ENVIRONMENTS)

/// The thread's environment while one lives.
struct strange_environment
{
    std::uint64_t before = control::read();
    explicit strange_environment(std::uint64_t bits) { control::write(control::with(bits)); }
    ~strange_environment() { control::write(before); }
    strange_environment(strange_environment const&)            = delete;
    strange_environment& operator=(strange_environment const&) = delete;
};

#endif

} // namespace support
