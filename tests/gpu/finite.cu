#include <mdkv/gpu/finite.cuh>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include "gpu/support/device.hpp"
#include "support/host.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using support::device_tensor;
using support::error_text;
using support::placement;
using support::tensor;

template <class T>
tensor<T, 3> ones(index_t heads, index_t count, index_t dim, placement how = {})
{
    tensor<T, 3> x{{heads, count, dim}, how};
    x.assign(std::vector<T>(static_cast<std::size_t>(x.count()), narrow<T>(1.0F)));
    return x;
}

template <class T>
std::string verdict(tensor<T, 3> const& x, index_t layer = -1)
{
    device_tensor<T, 3> const rows{x};
    return error_text<non_finite_input>([&] {
        support::run_on_device_now([&](gpu::backend const& on) { expects_finite(on, "keys", rows.in(), layer); });
    });
}

template <class T>
T from_bits(std::uint32_t bits)
{
    T value;
    std::memcpy(static_cast<void*>(&value), &bits, sizeof value); // the low bytes
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

TEST_CASE_TEMPLATE("one bad element anywhere in a row is found on the GPU, whatever its kind", T, float, half, bfloat16)
{
    for (index_t const dim : {1, 7, 17, 40, 64})
    {
        for (index_t at = 0; at < dim; ++at)
        {
            tensor<T, 3> x = ones<T>(2, 3, dim);
            x.set(bad_values<T>()[static_cast<std::size_t>(at % 5)], 1, 2, at);
            CHECK(verdict(x) == "keys: NaN or infinity in head 1, row 2");
        }
    }
    for (T const bad : bad_values<T>())
    {
        tensor<T, 3> x = ones<T>(1, 2, 16);
        x.set(bad, 0, 1, 5);
        CHECK(verdict(x) == "keys: NaN or infinity in head 0, row 1");
    }
}

TEST_CASE_TEMPLATE("the largest numbers, subnormals and zeros are finite on the GPU", T, float, half, bfloat16)
{
    for (T const good : good_values<T>())
    {
        tensor<T, 3> x = ones<T>(2, 3, 40);
        for (index_t d = 0; d < 40; ++d) { x.set(good, 1, 1, d); }
        CHECK(verdict(x) == "threw nothing");
    }
}

TEST_CASE("the first offending row in head and row order is named by the GPU, whatever the number of blocks")
{
    half const nan = narrow<half>(std::numeric_limits<float>::quiet_NaN());
    for (index_t const dim : {16, 2056}) // rows of more pieces than a block has threads, too
    {
        tensor<half, 3> x = ones<half>(3, dim == 16 ? 5000 : 50, dim);
        index_t const end = x.extent(1);
        x.set(nan, 2, 0, 3);
        x.set(nan, 1, end - 1, 0);
        x.set(nan, 1, end - 12, dim - 1);
        CHECK(verdict(x) == "keys: NaN or infinity in head 1, row " + std::to_string(end - 12));
        x.set(nan, 0, 7, 2);
        CHECK(verdict(x) == "keys: NaN or infinity in head 0, row 7");
    }
}

TEST_CASE("the GPU's message names the layer when it is known")
{
    tensor<float, 3> x = ones<float>(1, 2, 8);
    x.set(std::numeric_limits<float>::infinity(), 0, 1, 7);
    CHECK(verdict(x, 17) == "keys: NaN or infinity in layer 17, head 0, row 1");
    CHECK(verdict(x, 0) == "keys: NaN or infinity in layer 0, head 0, row 1");
}

TEST_CASE_TEMPLATE("NaN in slack between the rows is nobody's business on the GPU either", T, float, half, bfloat16)
{
    for (placement const how :
        {placement{.slack = 1}, placement{.slack = 8}, placement{.swapped = true, .slack = 9, .misalign = sizeof(T)}})
    {
        for (index_t const dim : {1, 7, 40, 64}) { CHECK(verdict(ones<T>(2, 5, dim, how)) == "threw nothing"); }
    }
}

TEST_CASE("empty inputs are finite on the GPU, and a dry run looks at nothing")
{
    CHECK(verdict(ones<float>(0, 5, 8)) == "threw nothing");
    CHECK(verdict(ones<float>(2, 0, 8)) == "threw nothing");
    CHECK(verdict(ones<float>(2, 5, 0)) == "threw nothing");
    workspace count;
    gpu::backend const on{nullptr, &count};
    CHECK_NOTHROW(expects_finite(on, "keys", in(on, static_cast<half*>(nullptr), 2, 100000000, 128)));
    CHECK(count.bytes() <= 16384);
}

TEST_CASE("expects_finite on the GPU refuses misaligned elements")
{
    CHECK(error_text<invalid_argument>([&] {
        device_tensor<half, 3> const odd{ones<half>(1, 2, 8, {.misalign = 1})};
        workspace count;
        expects_finite(gpu::backend{nullptr, &count}, "keys", odd.in());
    }) == "expects_finite: keys is not aligned to 2 bytes");
}
