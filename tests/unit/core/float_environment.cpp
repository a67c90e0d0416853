#include <mdkv/core/float_environment.hpp>

#include <mdkv/attend.hpp>
#include <mdkv/compress.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/basis.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/cpu/thread_pool.hpp>
#include <mdkv/recompress.hpp>

#include "support/host.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <cfenv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace
{

using namespace mdkv;
using host = cpu::backend;

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

struct strange_environment
{
    std::uint64_t before = control::read();
    explicit strange_environment(std::uint64_t bits) { control::write(control::with(bits)); }
    ~strange_environment() { control::write(before); }
    strange_environment(strange_environment const&)            = delete;
    strange_environment& operator=(strange_environment const&) = delete;
};

std::uint32_t bits_of(float x)
{
    return __builtin_bit_cast(std::uint32_t, x);
}

/// A layer whose codes' scales are subnormal halves: its values are as small as `size`.
struct small_layer
{
    static constexpr index_t heads = 2, group = 2, tokens = 120, window = 16, dim = 64;

    support::tensor<half, 3> queries{{heads * group, window, dim}};
    support::tensor<half, 3> keys{{heads, tokens, dim}};
    support::tensor<half, 3> values{{heads, tokens, dim}};
    support::tensor<float, 2> next{{heads * group, dim}};

    explicit small_layer(double size)
    {
        support::source random{"float_environment", 7};
        auto const fill = [&](auto& rows, double scale) {
            for (index_t h = 0; h < rows.extent(0); ++h)
            {
                for (index_t t = 0; t < rows.extent(1); ++t)
                {
                    for (index_t d = 0; d < dim; ++d)
                    {
                        rows.set(narrow<half>(static_cast<float>(scale * random.normal())), h, t, d);
                    }
                }
            }
        };
        fill(queries, 1.0);
        fill(keys, 1.0);
        fill(values, size);
        for (index_t h = 0; h < heads * group; ++h)
        {
            for (index_t d = 0; d < dim; ++d) { next.set(static_cast<float>(random.normal()), h, d); }
        }
    }

    /// The bits of everything that compress, attend and recompress make of it.
    std::vector<std::uint32_t> results(ratio_set const& ratios, cpu::executor_ref threads) const
    {
        std::vector<std::uint32_t> all;
        cpu::cache<half> cache;
        support::tensor<float, 2> output{{heads * group, dim}};
        support::tensor<float, 1> lse{{heads * group}};
        auto const attend_once = [&] {
            support::run([&](host on) { attend(on, next.in(), cache.view(), {}, output.out(), lse.out()); }, threads);
            for (float const x : output.elements()) { all.push_back(bits_of(x)); }
            for (float const x : lse.elements()) { all.push_back(bits_of(x)); }
        };
        support::run(
            [&](host on) {
                preset const p{.name = "test", .ratios = ratios, .window = window, .queries = queries.extent(1)};
                prompt_rows<host, half> const rows{queries.in(), keys.in(), values.in()};
                static_cast<void>(compress(on, rows, p, budget::fraction(6, 10), cache));
            },
            threads);
        attend_once();
        support::run(
            [&](host on) {
                static_cast<void>(recompress(on, queries.in(), ratios, {.limit = budget::fraction(4, 10)}, cache));
            },
            threads);
        attend_once();
        return all;
    }
};

#endif

} // namespace

#if defined(MDKV_TEST_ENVIRONMENTS)

TEST_CASE("while one lives the thread computes as usual, and afterwards as it did before")
{
    for (std::uint64_t const bits : {control::flush, control::up, control::down, control::trapped})
    {
        strange_environment const strange{bits};
        std::uint64_t const before = control::read();
        {
            float_environment const standard;
            float volatile tiny  = 0x1p-140F;
            float volatile third = 3.0F;
            CHECK(tiny * 0x1p100F == 0x1p-40F);
            CHECK(bits_of(1.0F / third) == 0x3eaaaaabU);
            float volatile zero = 0.0F;
            CHECK(std::isnan(zero / zero)); // trapped elsewhere
        }
        CHECK(control::read() == before);
    }
}

TEST_CASE("stages give the same bits in any floating-point environment, on any thread, and raise no exception")
{
    for (double const size : {1.0, 1e-3, 1e-6})
    {
        small_layer const layer{size};
        for (ratio_set const& ratios : {bit_ratios, paper_ratios})
        {
            CAPTURE(size);
            auto const expected = layer.results(ratios, {});
            for (std::uint64_t const bits : {control::flush, control::up, control::down, control::trapped})
            {
                CAPTURE(bits);
                strange_environment const strange{bits};
                cpu::thread_pool pool{2}; // its thread has the environment of the one that starts it
                std::feclearexcept(FE_ALL_EXCEPT);
                auto const serial = layer.results(ratios, {});
                auto const shared = layer.results(ratios, pool);
                int const raised  = std::fetestexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW);
                CHECK(serial == expected);
                CHECK(shared == expected);
                CHECK(raised == 0);
            }
        }
    }
}

TEST_CASE("half becomes float and back whatever the thread does with subnormal numbers")
{
    strange_environment const strange{control::flush};
    std::uint32_t wrong = 0;
    for (std::uint32_t bits = 0; bits < 0x400U; ++bits) // the subnormal ones
    {
        half const value{static_cast<std::uint16_t>(bits)};
        float const wide = widen(value);
        wrong += bits_of(wide) != bits_of(static_cast<float>(bits) * 0x1p-24F) || narrow<half>(wide).bits != bits;
    }
    CHECK(wrong == 0);
}

#else

TEST_CASE("on this processor the floating-point environment stays the caller's")
{
    static_assert(sizeof(float_environment) > 0);
}

#endif
