/// \file float_environment.hpp: the floating-point environment in which results are computed, regardless of the calling thread's own.
#pragma once

#include <mdkv/core/types.hpp>

namespace MDKV_NAMESPACE
{

/// While an object lives, its thread rounds to nearest, keeps subnormal numbers and traps no exception; afterwards the
/// thread has its own environment and its own exception flags again. A library that was linked with -ffast-math makes every
/// thread take subnormal numbers for 0 once it is loaded; a host may do the same, round otherwise, or trap exceptions.
/// x86-64 and aarch64; on other processors the environment stays the caller's.
class float_environment
{
public:
    float_environment(float_environment const&)            = delete;
    float_environment& operator=(float_environment const&) = delete;

    // "memory": what is loaded or stored before or after must not be moved across.
#if defined(__SSE2__)
    float_environment() noexcept
    {
        constexpr std::uint32_t standard = 0x1f80; // all exceptions masked, no flag set
        asm volatile("stmxcsr %0" : "=m"(callers_) : : "memory");
        asm volatile("ldmxcsr %0" : : "m"(standard) : "memory");
    }
    ~float_environment() { asm volatile("ldmxcsr %0" : : "m"(callers_) : "memory"); }

private:
    std::uint32_t callers_;
#elif defined(__aarch64__)
    float_environment() noexcept
    {
        asm volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(control_), "=r"(status_) : : "memory");
        asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}) : "memory");
    }
    ~float_environment()
    {
        asm volatile("msr fpcr, %0\n\tmsr fpsr, %1" : : "r"(control_), "r"(status_) : "memory");
    }

private:
    std::uint64_t control_;
    std::uint64_t status_;
#else
    float_environment() noexcept {}
    ~float_environment() {}
#endif
};

} // namespace MDKV_NAMESPACE
