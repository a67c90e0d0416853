/// \file dequantise.cpp: weights come out of their blocks bit for bit as PyPI `gguf` gives them
#include "runner/dequantise.hpp"

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include "runner/dequantise_steps.hpp"
#include "runner/ggml_type.hpp"
#include "support/guarded_buffer.hpp"

namespace
{

constexpr runner::ggml_type all_types[] = {runner::ggml_type::f32, runner::ggml_type::f16, runner::ggml_type::bf16,
    runner::ggml_type::q4_0, runner::ggml_type::q4_1, runner::ggml_type::q5_0, runner::ggml_type::q5_1,
    runner::ggml_type::q8_0, runner::ggml_type::q4_k, runner::ggml_type::q5_k, runner::ggml_type::q6_k};

/// What PyPI `gguf` made of some blocks of one format.
struct recorded
{
    std::vector<std::byte> blocks;
    std::vector<std::uint32_t> values; // the bits of the floats
};

std::vector<std::byte> from_hex(std::string_view hex)
{
    std::vector<std::byte> out;
    for (std::size_t i = 0; i + 1 < hex.size(); i += 2)
    {
        out.push_back(static_cast<std::byte>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16)));
    }
    return out;
}

/// By name of the format; see tests/tools/make_dequantise_vectors.py.
std::map<std::string, recorded> read_recorded()
{
    std::ifstream in(std::string(MDKV_TEST_DATA_DIR) + "/dequantise.txt");
    std::map<std::string, recorded> out;
    for (std::string line; std::getline(in, line);)
    {
        if (line.starts_with("#")) { continue; }
        std::istringstream words(line);
        std::string name;
        std::string block;
        std::string values;
        words >> name >> block >> values;
        recorded& one = out[name];
        for (std::byte const b : from_hex(block)) { one.blocks.push_back(b); }
        std::vector<std::byte> const bytes = from_hex(values);
        std::size_t const before           = one.values.size();
        one.values.resize(before + bytes.size() / 4);
        std::memcpy(one.values.data() + before, bytes.data(), bytes.size());
    }
    return out;
}

std::vector<std::uint32_t> bits_of(std::vector<float> const& values)
{
    std::vector<std::uint32_t> out;
    for (float const value : values) { out.push_back(std::bit_cast<std::uint32_t>(value)); }
    return out;
}

template <class Steps>
void check_recorded()
{
    auto const all = read_recorded();
    REQUIRE(all.size() == std::size(all_types));
    for (runner::ggml_type const type : all_types)
    {
        CAPTURE(runner::name_of(type));
        recorded const& one = all.at(std::string(runner::name_of(type)));
        std::vector<float> out(one.values.size());
        runner::detail::dequantise_by<Steps>(
            type, one.blocks.data(), static_cast<std::int64_t>(out.size()), out.data());
        CHECK(bits_of(out) == one.values);
    }
}

} // namespace

TEST_CASE("dequantise: every format gives the recorded bits by plain loops")
{
    check_recorded<runner::detail::plain_steps>();
}

TEST_CASE("dequantise: every format gives the recorded bits by the fastest steps of this build")
{
    check_recorded<runner::detail::fastest_steps>();
}

TEST_CASE("dequantise: every half becomes the float of the same value")
{
    std::size_t wrong = 0;
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits)
    {
        auto const half = static_cast<std::uint16_t>(bits);
        std::byte bytes[2];
        std::memcpy(bytes, &half, sizeof half);
        float const plain  = runner::detail::plain_steps::half(bytes);
        float const fast   = runner::detail::fastest_steps::half(bytes);
        int const exponent = (half >> 10) & 31;
        int const fraction = half & 1023;
        if (exponent == 31 && fraction != 0)
        {
            wrong += std::isnan(plain) && std::isnan(fast) ? 0U : 1U;
            continue;
        }
        double expected          = exponent == 31  ? HUGE_VAL
                                   : exponent == 0 ? std::ldexp(fraction, -24)
                                                   : std::ldexp(1024 + fraction, exponent - 25);
        expected                 = (half & 0x8000) != 0 ? -expected : expected;
        auto const bits_expected = std::bit_cast<std::uint32_t>(static_cast<float>(expected));
        wrong += std::bit_cast<std::uint32_t>(plain) == bits_expected ? 0U : 1U;
        wrong += std::bit_cast<std::uint32_t>(fast) == bits_expected ? 0U : 1U;
    }
    CHECK(wrong == 0);
}

TEST_CASE("dequantise: rows of any number of blocks touch nothing beyond their ends")
{
    auto const all = read_recorded();
    for (runner::ggml_type const type : all_types)
    {
        recorded const& one          = all.at(std::string(runner::name_of(type)));
        std::int64_t const per_block = runner::block_elements(type);
        auto const blocks            = static_cast<std::int64_t>(one.values.size()) / per_block;
        for (std::int64_t count = 0; count <= blocks; ++count)
        {
            CAPTURE(runner::name_of(type));
            CAPTURE(count);
            auto const values = static_cast<std::size_t>(count * per_block);
            auto const bytes  = static_cast<std::size_t>(count * runner::block_bytes(type));
            for (support::guard const where : {support::guard::after, support::guard::before})
            {
                support::guarded_buffer in(bytes, where);
                support::guarded_buffer out(values * sizeof(float), where);
                if (bytes != 0) { std::memcpy(in.data(), one.blocks.data(), bytes); }
                std::vector<float> copy(values);
                runner::dequantise(type, in.data(), count * per_block, reinterpret_cast<float*>(out.data()));
                if (values != 0) { std::memcpy(copy.data(), out.data(), values * sizeof(float)); }
                CHECK(bits_of(copy)
                      == std::vector<std::uint32_t>(
                          one.values.begin(), one.values.begin() + static_cast<std::ptrdiff_t>(values)));
            }
        }
    }
}

TEST_CASE("dequantise: blocks may begin at any address")
{
    auto const all = read_recorded();
    for (runner::ggml_type const type : all_types)
    {
        CAPTURE(runner::name_of(type));
        recorded const& one = all.at(std::string(runner::name_of(type)));
        std::vector<std::byte> shifted(one.blocks.size() + 1);
        std::memcpy(shifted.data() + 1, one.blocks.data(), one.blocks.size());
        std::vector<float> out(one.values.size());
        runner::dequantise(type, shifted.data() + 1, static_cast<std::int64_t>(out.size()), out.data());
        CHECK(bits_of(out) == one.values);
    }
}

TEST_CASE("dequantise: a count that is no whole number of blocks is refused before anything is written")
{
    std::vector<std::byte> const in(34 * 4);
    std::vector<float> out(128, 7.0F);
    CHECK_THROWS_WITH_AS(runner::dequantise(runner::ggml_type::q8_0, in.data(), 33, out.data()),
        "dequantise: count is 33, no multiple of 32, the block of Q8_0", std::invalid_argument);
    CHECK_THROWS_AS(runner::dequantise(runner::ggml_type::q6_k, in.data(), 32, out.data()), std::invalid_argument);
    CHECK_THROWS_AS(runner::dequantise(runner::ggml_type::f32, in.data(), -1, out.data()), std::invalid_argument);
    CHECK(out == std::vector<float>(128, 7.0F));
}

TEST_CASE("dequantise: block sizes are found for supported formats alone")
{
    for (runner::ggml_type const type : all_types)
    {
        auto const layout = runner::find_block_layout(static_cast<std::uint32_t>(type));
        REQUIRE(layout.has_value());
        CHECK(layout->elements == runner::block_elements(type));
        CHECK(layout->bytes == runner::block_bytes(type));
    }
    for (std::uint32_t const number : {4U, 5U, 9U, 10U, 11U, 15U, 16U, 29U, 31U, 1000U, 0xFFFFFFFFU})
    {
        CHECK_FALSE(runner::find_block_layout(number).has_value());
    }
    CHECK_THROWS_WITH_AS(static_cast<void>(runner::block_bytes(static_cast<runner::ggml_type>(9))),
        "ggml_type: no such format: 9", std::invalid_argument);
}
