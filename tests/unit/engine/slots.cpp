#include <mdkv/engine/slots.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <cstdint>
#include <doctest/doctest.h>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::index_t;
using support::tensor;

struct lists
{
    tensor<std::int32_t, 2> positions;
    tensor<index_t, 2> first;
};

lists list(tensor<std::uint8_t, 2> const& rung, index_t rungs, cpu::executor_ref threads = {})
{
    lists made{
        tensor<std::int32_t, 2>{{rung.extent(0), rung.extent(1)}}, tensor<index_t, 2>{{rung.extent(0), rungs + 1}}};
    support::run(
        [&](cpu::backend const& on) { list_slots(on, rung.in(), made.positions.out(), made.first.out()); }, threads);
    return made;
}

} // namespace

TEST_CASE("positions are listed by rung, ascending inside a rung")
{
    tensor<std::uint8_t, 2> rung{{2, 6}};
    rung.assign(std::vector<std::uint8_t>{2, 0, 2, 1, 0, 2, 0, 0, 0, 0, 0, 0});
    auto const got = list(rung, 4);
    CHECK(got.positions.elements() == std::vector<std::int32_t>{1, 4, 3, 0, 2, 5, 0, 1, 2, 3, 4, 5});
    CHECK(got.first.elements() == std::vector<index_t>{0, 2, 3, 6, 6, 0, 6, 6, 6, 6});
}

TEST_CASE("the lists partition the positions for any rungs and any number of threads")
{
    cpu::thread_pool pool{3};
    for (int round = 0; round < 100; ++round)
    {
        CAPTURE(round);
        support::source random{"slots partition", round};
        index_t const rungs  = 1 + random.below(16);
        index_t const tokens = random.below(1 + round);
        tensor<std::uint8_t, 2> rung{{1, tokens}};
        for (index_t t = 0; t < tokens; ++t) { rung.set(static_cast<std::uint8_t>(random.below(rungs)), 0, t); }
        auto const got = list(rung, rungs);
        REQUIRE(got.first.get(0, 0) == 0);
        REQUIRE(got.first.get(0, rungs) == tokens);
        index_t seen = 0;
        for (index_t r = 0; r < rungs; ++r)
        {
            for (index_t i = got.first.get(0, r); i < got.first.get(0, r + 1); ++i, ++seen)
            {
                REQUIRE(rung.get(0, got.positions.get(0, i)) == r);
                REQUIRE((i == got.first.get(0, r) || got.positions.get(0, i) > got.positions.get(0, i - 1)));
            }
        }
        REQUIRE(seen == tokens);
        REQUIRE(support::same_bits(list(rung, rungs, pool).positions.elements(), got.positions.elements()));
    }
}

TEST_CASE("no tokens and no heads give empty lists")
{
    auto const none = list(tensor<std::uint8_t, 2>{{2, 0}}, 3);
    CHECK(none.first.elements() == std::vector<index_t>(8, 0));
    CHECK(list(tensor<std::uint8_t, 2>{{0, 5}}, 3).first.count() == 0);
}

TEST_CASE("an unknown rung is refused by head and token before anything is written")
{
    tensor<std::uint8_t, 2> rung{{2, 300}};
    rung.assign(std::vector<std::uint8_t>(600, 1));
    rung.set(4, 1, 271);
    tensor<std::int32_t, 2> positions{{2, 300}};
    tensor<index_t, 2> first{{2, 5}};
    auto const before = positions.memory();
    auto const text   = error_text<invalid_argument>([&] {
        support::run([&](cpu::backend const& on) { list_slots(on, rung.in(), positions.out(), first.out()); });
    });
    CHECK(text == "list_slots: rung of head 1, token 271 is 4; it must be below 4");
    CHECK(positions.memory() == before);
}
