#include <mdkv/core/view.hpp>

#include "support/host.hpp"

#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/detail/check.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using host = cpu::backend;

struct device_backend
{
    static constexpr space memory_space = space::device;
};

std::vector<float> numbered(std::size_t count)
{
    std::vector<float> data(count);
    std::iota(data.begin(), data.end(), 0.0F);
    return data;
}

} // namespace

TEST_CASE("in and out see contiguous rows in index order")
{
    std::vector<float> data = numbered(2 * 3 * 4);
    auto const read         = in(host{}, data.data(), 2, 3, 4);
    auto const write        = out(host{}, data.data(), 2, 3, 4);
    for (index_t h = 0; h < 2; ++h)
    {
        for (index_t n = 0; n < 3; ++n)
        {
            for (index_t d = 0; d < 4; ++d) { CHECK(read(h, n, d) == static_cast<float>((h * 3 + n) * 4 + d)); }
        }
    }
    write(1, 2, 3) = -1.0F;
    CHECK(data.back() == -1.0F);
    CHECK(read.required_span_size() == 24);
}

TEST_CASE("direction, element type and memory space are part of a view's type")
{
    float data[6]{};
    static_assert(std::is_same_v<decltype(in(host{}, data, 2, 3)), in_view<float, 2, host>>);
    static_assert(std::is_same_v<decltype(out(host{}, data, 2, 3)), out_view<float, 2, host>>);
    static_assert(std::is_convertible_v<out_view<float, 2, host>, in_view<float, 2, host>>);
    static_assert(!std::is_convertible_v<in_view<float, 2, host>, out_view<float, 2, host>>);
    static_assert(!std::is_convertible_v<in_view<float, 2, device_backend>, in_view<float, 2, host>>);
    static_assert(std::is_trivially_copyable_v<in_view<half, 3, host>>);
    in_view<float, 2, host> const read = out(host{}, data, 2, 3);
    CHECK(read.data_handle() == data);
}

TEST_CASE("free strides read [N, H, D] as [H, N, D]")
{
    constexpr index_t H = 2, N = 3, D = 4;
    std::vector<float> const data = numbered(H * N * D);
    auto const view               = in(host{}, data.data(), {H, N, D}, {D, H * D, 1});
    for (index_t h = 0; h < H; ++h)
    {
        for (index_t n = 0; n < N; ++n) { CHECK(view(h, n, 1) == static_cast<float>((n * H + h) * D + 1)); }
    }
    CHECK(view.required_span_size() == H * N * D);
}

TEST_CASE("a stride of zero shows one row as many")
{
    std::vector<float> const data = numbered(4);
    auto const view               = in(host{}, data.data(), {5, 4}, {0, 1});
    CHECK(view(0, 3) == view(4, 3));
    CHECK(view.required_span_size() == 4);
}

TEST_CASE("any strided tensor type is an input, and an output if it is not const")
{
    std::vector<float> data = numbered(12);
    struct // the members of std::mdspan that count
    {
        float* data;
        [[nodiscard]] static constexpr std::size_t rank() { return 2; }
        [[nodiscard]] float* data_handle() const { return data; }
        [[nodiscard]] int extent(std::size_t i) const { return i == 0 ? 3 : 4; }
        [[nodiscard]] int stride(std::size_t i) const { return i == 0 ? 4 : 1; }
    } const foreign{data.data()};
    CHECK(in(host{}, foreign)(2, 3) == 11.0F);
    out(host{}, foreign)(2, 3) = 5.0F;
    CHECK(data[11] == 5.0F);
    support::tensor<float, 3> own{{2, 3, 4}, {.swapped = true, .slack = 3}};
    own.set(7.0F, 1, 2, 3);
    CHECK(own.in()(1, 2, 3) == 7.0F);
}

TEST_CASE("a view with an extent of zero is empty and needs no memory")
{
    auto const view = in(host{}, static_cast<float*>(nullptr), 2, 0, 4);
    CHECK(view.required_span_size() == 0);
    CHECK(view.extent(1) == 0);
}

TEST_CASE("an empty view may have any strides, whose sum leaves 64 bits")
{
    index_t const large = std::int64_t{9151598116766284922}; // found by tests/fuzz/views.cpp
    auto const view     = in(host{}, static_cast<float const*>(nullptr), {0, 0, 4}, {large, large, 1});
    CHECK(view.required_span_size() == 0);
    workspace none{support::nan_memory{}};
    detail::checks{host{&none}, "test"}.in("view", view, {0, 0, 4}, "a,b,c");
}

TEST_CASE("a negative extent is refused, naming dimension and value")
{
    float data[4]{};
    CHECK(error_text<invalid_argument>([&] { static_cast<void>(in(host{}, data, 2, -3)); })
          == "view: extent 1 is -3; it must not be negative");
}

TEST_CASE("a negative stride is refused, naming dimension and value")
{
    float data[4]{};
    CHECK(error_text<invalid_argument>([&] {
        static_cast<void>(in(host{}, data, {2, 2}, {-2, 1}));
    }) == "view: stride 0 is -2; negative strides are not supported");
}

TEST_CASE("a last dimension whose elements are no neighbours is refused")
{
    float data[8]{};
    CHECK(error_text<invalid_argument>([&] {
        static_cast<void>(in(host{}, data, {2, 2}, {4, 2}));
    }) == "view: stride 1 is 2; elements of the last dimension must be neighbours (stride 1)");
    CHECK_NOTHROW(static_cast<void>(in(host{}, data, {2, 1}, {4, 2})));
}

TEST_CASE("extents and strides whose span leaves 64 bits are refused, those within are not")
{
    float data[4]{};
    index_t const big = index_t{1} << 32;
    CHECK_THROWS_AS(static_cast<void>(in(host{}, data, big, big)), size_overflow);
    CHECK_THROWS_AS(static_cast<void>(in(host{}, data, {INT64_MAX, 4}, {2, 1})), size_overflow);
    // 2^61 floats are 2^63 bytes: the elements would fit 64 bits, the bytes do not.
    CHECK_THROWS_AS(static_cast<void>(in(host{}, data, index_t{1} << 61)), size_overflow);
    CHECK(in(host{}, data, {big, 4}, {0, 1}).required_span_size() == 4);
}

TEST_CASE(
    "an extent whose sums with others leave 64 bits is refused, of views without elements and of one repeated row, too")
{
    float data[4]{};
    for (index_t const large : {INT64_MAX, INT64_MAX - 63, largest_extent + 1})
    {
        for (std::size_t i = 0; i < 3; ++i)
        {
            index_t extents[3]{0, 0, 0};
            extents[i]         = large;
            auto const refused = error_text<invalid_argument>([&] {
                static_cast<void>(in(host{}, data, extents, {0, 0, 1}));
            });
            CHECK(refused.find("view: extent " + std::to_string(i) + " is " + std::to_string(large))
                  != std::string::npos);
        }
        CHECK_THROWS_AS(static_cast<void>(in(host{}, data, {large, 1}, {0, 1})), invalid_argument);
        CHECK_THROWS_AS(static_cast<void>(out(host{}, data, 0, large)), invalid_argument);
    }
    auto const most = in(host{}, data, {largest_extent, 0}, {0, 1});
    CHECK(most.empty());
    CHECK(in(host{}, data, {largest_extent, 1}, {0, 1}).required_span_size() == 1);
}

TEST_CASE("offsets beyond 2^31 elements are right")
{
    // Two rows 3 * 2^31 elements apart: only addresses are made, nothing is read.
    index_t const step = index_t{3} << 31;
    auto const view    = in(host{}, static_cast<half*>(nullptr), {2, 1, 4}, {step, 4, 1});
    CHECK(view.offset(1, 0, 3) == step + 3);
    CHECK(view.required_span_size() == step + 4);
}

TEST_CASE("slice keeps the rows it is asked for and the strides of the whole")
{
    std::vector<float> data = numbered(2 * 5 * 3);
    auto const whole        = in(host{}, data.data(), 2, 5, 3);
    auto const part         = slice<1>(whole, 2, 3);
    static_assert(std::is_same_v<decltype(part), in_view<float, 3, host> const>);
    CHECK(part.extent(0) == 2);
    CHECK(part.extent(1) == 3);
    CHECK(part(1, 0, 1) == whole(1, 2, 1));
    CHECK(part(0, 2, 2) == whole(0, 4, 2));
    CHECK(slice<0>(whole, 1, 1)(0, 4, 2) == whole(1, 4, 2));
    CHECK(slice<1>(whole, 5, 0).extent(1) == 0);
    slice<1>(out(host{}, data.data(), 2, 5, 3), 0, 1)(0, 0, 0) = 9.0F;
    CHECK(data[0] == 9.0F);
}

TEST_CASE("slice refuses to leave the view, naming range, extent and dimension")
{
    float data[30]{};
    auto const whole = in(host{}, data, 2, 5, 3);
    CHECK(error_text<invalid_argument>([&] { static_cast<void>(slice<1>(whole, 3, 3)); })
          == "slice: 3 from 3 on leave the extent 5 of dimension 1");
    CHECK_THROWS_AS(static_cast<void>(slice<1>(whole, -1, 2)), invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(slice<1>(whole, 0, -1)), invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(slice<1>(whole, 2, INT64_MAX)), invalid_argument);
}

TEST_CASE("slicing a view that has no memory gives one without memory")
{
    auto const whole = in(host{}, static_cast<float*>(nullptr), 2, 5, 3);
    CHECK(slice<1>(whole, 2, 3).data_handle() == nullptr);
}

TEST_CASE("16-bit types of other libraries are read as half or bfloat16 where they lie")
{
    std::uint16_t const bits[2] = {0x3c00, 0xc000};
    CHECK(widen(as_half(bits)[1]) == -2.0F);
    std::uint16_t upper[1]                             = {0x4000};
    as_bfloat16(static_cast<std::uint16_t*>(upper))[0] = narrow<bfloat16>(-2.0F);
    CHECK(upper[0] == 0xc000);
}
