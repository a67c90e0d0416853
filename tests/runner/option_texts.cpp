#include "runner/option_texts.hpp"

#include <doctest/doctest.h>

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>

#include <array>
#include <cstdint>
#include <string_view>

namespace
{

constexpr mdkv::layer_shape layer{2, 3, 1000, 24, {64, 64}, 2};

void refuses_rung(char const* text, char const* message)
{
    CHECK_THROWS_WITH_AS(static_cast<void>(runner::parse_rung(text)), message, mdkv::invalid_argument);
}

} // namespace

TEST_CASE("a rung reads as it is written: its fraction, its storage, and whether all coordinates lie in the basis")
{
    using enum mdkv::storage;
    CHECK(runner::parse_rung("0") == mdkv::drop);
    CHECK(runner::parse_rung("1/4") == mdkv::fraction(1, 4));
    CHECK(runner::parse_rung("1") == mdkv::full);
    CHECK(runner::parse_rung("1:plain") == mdkv::full);
    CHECK(runner::parse_rung("1:int4") == mdkv::full_int4);
    CHECK(runner::parse_rung("1/4:int8") == mdkv::fraction(1, 4).as(int8));
}

TEST_CASE("the text of every rung a ratio set may hold reads as that rung")
{
    for (auto const& [num, den] : std::array<std::array<std::int32_t, 2>, 5>{{{0, 1}, {1, 8}, {3, 4}, {4, 4}, {1, 1}}})
    {
        for (mdkv::storage const kind : {mdkv::storage::plain, mdkv::storage::int8, mdkv::storage::int4})
        {
            if (num == 0 && kind != mdkv::storage::plain) { continue; } // no rung
            mdkv::rung const rung{num, den, kind};
            CAPTURE(runner::text_of(rung));
            CHECK(runner::parse_rung(runner::text_of(rung)) == rung);
        }
    }
    CHECK(runner::text_of(mdkv::fraction(1, 4).as(mdkv::storage::int8)) == "1/4:int8");
}

TEST_CASE("a rung that cannot be read is refused by its text, with what is allowed")
{
    refuses_rung("1/x", "ratios: rung \"1/x\": \"x\" is not a whole number in range");
    refuses_rung("", "ratios: rung \"\": \"\" is not a whole number in range");
    refuses_rung("1/2/3", "ratios: rung \"1/2/3\" is not a fraction");
    refuses_rung("1/0", "ratios: rung \"1/0\" is not within 0 and 1");
    refuses_rung("-1/4", "ratios: rung \"-1/4\" is not within 0 and 1");
    refuses_rung("3/2:int4", "ratios: rung \"3/2:int4\" is not within 0 and 1");
    refuses_rung("99999999999", "ratios: rung \"99999999999\": \"99999999999\" is not a whole number in range");
    refuses_rung("1:int2", "ratios: rung \"1:int2\" names an unknown storage; there are plain, int8, int4");
    refuses_rung("1:", "ratios: rung \"1:\" names an unknown storage; there are plain, int8, int4");
    refuses_rung("1:basis", "ratios: rung \"1:basis\" names an unknown storage; there are plain, int8, int4");
    refuses_rung("0:int8", "ratios: rung \"0:int8\" drops the token; it has no storage");
    refuses_rung("1:int4:basis", "ratios: rung \"1:int4:basis\" has more than a storage after its fraction");
}

TEST_CASE("a ratio set reads as it is written, plain or mixed with storages")
{
    for (std::string_view const text :
        {"0,1/16,1/2,1", "0,1:int4,1:int8,1", "0,1/4:int8,1:int4", "0,1/8:int8,3/4:int8,1", "1:int4"})
    {
        CHECK(runner::text_of(runner::parse_ratios(text)) == text);
    }
    CHECK(runner::text_of(runner::parse_ratios("0,1/4:plain,1:plain")) == "0,1/4,1");
}

TEST_CASE("a ratio set that cannot be read is refused")
{
    CHECK_THROWS_WITH_AS(static_cast<void>(runner::parse_ratios("0,1/x,1")),
        "ratios: rung \"1/x\": \"x\" is not a whole number in range", mdkv::invalid_argument);
    for (char const* const text : {"1,0", "", "0,,1", "0,1:int4,1:int4", "0,1/4:int8,1/8:int8", "0,1/4:int4,1"})
    {
        CAPTURE(text);
        CHECK_THROWS_AS(static_cast<void>(runner::parse_ratios(text)), mdkv::invalid_argument);
    }
}

TEST_CASE("a budget reads as a percentage, a fraction or bytes, exactly")
{
    std::int64_t const whole = layer.full_bytes();
    CHECK(runner::parse_budget("10%").in_bytes(layer) == whole / 10);
    CHECK(runner::parse_budget("12.5%").in_bytes(layer) == whole / 8);
    CHECK(runner::parse_budget("1/16").in_bytes(layer) == whole / 16);
    CHECK(runner::parse_budget("4096").in_bytes(layer) == 4096);
    CHECK(runner::parse_budget("100%").in_bytes(layer) == whole);
}

TEST_CASE("a budget that cannot be read or leaves the cache is refused")
{
    CHECK_THROWS_WITH_AS(static_cast<void>(runner::parse_budget("101%")), "budget: 101% is not within 0% and 100%",
        mdkv::invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(runner::parse_budget("ten")), mdkv::invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(runner::parse_budget("1/0")), mdkv::invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(runner::parse_budget("-5")), mdkv::invalid_argument);
    CHECK_THROWS_AS(static_cast<void>(runner::parse_budget("1.2.3%")), mdkv::invalid_argument);
}
