#include <mdkv/engine/finite.hpp>

#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "support/host.hpp"
#include "support/sparse_memory.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::placement;
using support::tensor;
using host = cpu::backend;

template <class T>
tensor<T, 3> ones(index_t heads, index_t count, index_t dim, placement how = {})
{
    tensor<T, 3> x{{heads, count, dim}, how};
    x.assign(std::vector<T>(static_cast<std::size_t>(x.count()), narrow<T>(1.0F)));
    return x;
}

template <class T>
std::string verdict(tensor<T, 3> const& x, index_t layer = -1, cpu::executor_ref threads = {})
{
    return error_text<non_finite_input>(
        [&] { support::run([&](host const& on) { expects_finite(on, "keys", x.in(), layer); }, threads); });
}

template <class T>
T from_bits(std::uint32_t bits)
{
    T value;
    if constexpr (sizeof(T) == 2)
    {
        auto const low = static_cast<std::uint16_t>(bits);
        std::memcpy(static_cast<void*>(&value), &low, 2);
    }
    else { std::memcpy(&value, &bits, 4); }
    return value;
}

/// Quiet and signalling NaNs of both signs, and both infinities.
template <class T>
std::vector<T> bad_values()
{
    if constexpr (std::is_same_v<T, float>)
    {
        return {from_bits<T>(0x7fc00000), from_bits<T>(0x7f800001), from_bits<T>(0xffffffff), from_bits<T>(0x7f800000),
            from_bits<T>(0xff800000)};
    }
    else if constexpr (std::is_same_v<T, half>)
    {
        return {from_bits<T>(0x7e00), from_bits<T>(0x7c01), from_bits<T>(0xffff), from_bits<T>(0x7c00),
            from_bits<T>(0xfc00)};
    }
    else
    {
        return {from_bits<T>(0x7fc0), from_bits<T>(0x7f81), from_bits<T>(0xffff), from_bits<T>(0x7f80),
            from_bits<T>(0xff80)};
    }
}

/// The largest number of both signs, the smallest, and both zeros.
template <class T>
std::vector<T> good_values()
{
    if constexpr (std::is_same_v<T, float>)
    {
        return {from_bits<T>(0x7f7fffff), from_bits<T>(0xff7fffff), from_bits<T>(1), from_bits<T>(0),
            from_bits<T>(0x80000000)};
    }
    else if constexpr (std::is_same_v<T, half>)
    {
        return {from_bits<T>(0x7bff), from_bits<T>(0xfbff), from_bits<T>(1), from_bits<T>(0), from_bits<T>(0x8000)};
    }
    else
    {
        return {from_bits<T>(0x7f7f), from_bits<T>(0xff7f), from_bits<T>(1), from_bits<T>(0), from_bits<T>(0x8000)};
    }
}

} // namespace

TEST_CASE_TEMPLATE("one bad element anywhere in a row is found, whatever its kind", T, float, half, bfloat16)
{
    for (index_t const dim : {1, 7, 17, 64, 100})
    {
        for (index_t at = 0; at < dim; ++at)
        {
            for (T const bad : bad_values<T>())
            {
                tensor<T, 3> x = ones<T>(2, 3, dim);
                x.set(bad, 1, 2, at);
                CHECK(verdict(x) == "keys: NaN or infinity in head 1, row 2");
            }
        }
    }
}

TEST_CASE_TEMPLATE("the largest numbers, subnormals and zeros are finite", T, float, half, bfloat16)
{
    for (T const good : good_values<T>())
    {
        tensor<T, 3> x = ones<T>(2, 3, 40);
        for (index_t d = 0; d < 40; ++d) { x.set(good, 1, 1, d); }
        CHECK(verdict(x) == "threw nothing");
    }
}

TEST_CASE("the first offending row in head and row order is named, for any number of threads")
{
    tensor<half, 3> x = ones<half>(3, 5000, 16);
    half const nan    = narrow<half>(std::numeric_limits<float>::quiet_NaN());
    x.set(nan, 2, 0, 3);
    x.set(nan, 1, 4999, 0);
    x.set(nan, 1, 3100, 15);
    cpu::thread_pool pool{4};
    for (int round = 0; round < 20; ++round)
    {
        CHECK(verdict(x, -1, pool) == "keys: NaN or infinity in head 1, row 3100");
    }
    CHECK(verdict(x) == "keys: NaN or infinity in head 1, row 3100");
}

TEST_CASE("the layer is named when it is known")
{
    tensor<float, 3> x = ones<float>(1, 2, 8);
    x.set(std::numeric_limits<float>::infinity(), 0, 1, 7);
    CHECK(verdict(x, 17) == "keys: NaN or infinity in layer 17, head 0, row 1");
    CHECK(verdict(x, 0) == "keys: NaN or infinity in layer 0, head 0, row 1");
}

TEST_CASE("offsets beyond 2^32 elements are followed")
{
    // Two heads 2^32 + 64 elements apart: 8 GiB of addresses, two pages of memory.
    index_t const step = (index_t{1} << 32) + 64;
    support::sparse_memory const memory{static_cast<std::size_t>(2 * step) * sizeof(half)};
    auto* const data = memory.as<half>();
    host const any{};
    auto const x = in(any, data, {2, 3, 8}, {step, 8, 1});
    support::run([&](host const& on) { CHECK_NOTHROW(expects_finite(on, "keys", x)); });
    data[step + 8] = narrow<half>(std::numeric_limits<float>::infinity());
    CHECK(error_text<non_finite_input>([&] { support::run([&](host const& on) { expects_finite(on, "keys", x); }); })
          == "keys: NaN or infinity in head 1, row 1");
}

TEST_CASE("more than 2^31 elements are counted right")
{
    // One row seen 2^26 times: 2^32 elements.
    tensor<half, 3> const row = ones<half>(1, 1, 64);
    host const any{};
    auto const many = in(any, row.data(), {1, index_t{1} << 26, 64}, {0, 0, 1});
    cpu::thread_pool pool{2};
    support::run([&](host const& on) { CHECK_NOTHROW(expects_finite(on, "keys", many)); }, pool);
}
