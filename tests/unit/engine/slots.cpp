#include <mdkv/engine/slots.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdint>
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
    bool const held = rc::check("slots partition", [&](std::vector<std::uint8_t> const& random) {
        index_t const rungs = *rc::gen::inRange<index_t>(1, 17);
        auto const tokens   = static_cast<index_t>(random.size());
        tensor<std::uint8_t, 2> rung{{1, tokens}};
        for (index_t t = 0; t < tokens; ++t)
        {
            rung.set(static_cast<std::uint8_t>(random[static_cast<std::size_t>(t)] % rungs), 0, t);
        }
        auto const got = list(rung, rungs);
        RC_ASSERT(got.first.get(0, 0) == 0);
        RC_ASSERT(got.first.get(0, rungs) == tokens);
        index_t seen = 0;
        for (index_t r = 0; r < rungs; ++r)
        {
            for (index_t i = got.first.get(0, r); i < got.first.get(0, r + 1); ++i, ++seen)
            {
                RC_ASSERT(rung.get(0, got.positions.get(0, i)) == r);
                bool const first_of_rung = i == got.first.get(0, r); // RC_ASSERT evaluates both sides of ||
                if (!first_of_rung) { RC_ASSERT(got.positions.get(0, i) > got.positions.get(0, i - 1)); }
            }
        }
        RC_ASSERT(seen == tokens);
        RC_ASSERT(support::same_bits(list(rung, rungs, pool).positions.elements(), got.positions.elements()));
    });
    CHECK(held);
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

TEST_CASE("shapes that differ are refused by name")
{
    tensor<std::uint8_t, 2> const rung{{2, 5}};
    tensor<std::int32_t, 2> positions{{2, 4}};
    tensor<index_t, 2> first{{2, 3}};
    auto const refused = [&](tensor<std::int32_t, 2>& p, tensor<index_t, 2>& f) {
        return error_text<invalid_argument>(
            [&] { support::run([&](cpu::backend const& on) { list_slots(on, rung.in(), p.out(), f.out()); }); });
    };
    CHECK(refused(positions, first) == "list_slots: positions must be [H,N] = [2, 5], its extent 1 is 4");
    tensor<std::int32_t, 2> right{{2, 5}};
    tensor<index_t, 2> wrong{{1, 3}};
    CHECK(refused(right, wrong) == "list_slots: first must be [H,R+1] = [2, 3], its extent 0 is 1");
    tensor<index_t, 2> none{{2, 1}};
    CHECK(refused(right, none) == "list_slots: first [H, R+1] has R+1 = 1; it must be at least 2");
}

TEST_CASE("lists inside the workspace or over each other are refused")
{
    support::scratch_memory memory{1024};
    workspace scratch{memory.span()};
    cpu::backend const on{&scratch};
    std::vector<std::uint8_t> const rung(8, 0);
    std::vector<index_t> own(8);
    auto* const inside = memory.span().data();
    auto const refused = [&](std::int32_t* positions, index_t* first) {
        return error_text<invalid_argument>(
            [&] { list_slots(on, in(on, rung.data(), 2, 4), out(on, positions, 2, 4), out(on, first, 2, 3)); });
    };
    auto* const positions = reinterpret_cast<std::int32_t*>(own.data());
    CHECK(
        refused(reinterpret_cast<std::int32_t*>(inside), own.data()) == "list_slots: positions overlaps the workspace");
    CHECK(refused(positions, reinterpret_cast<index_t*>(inside)) == "list_slots: first overlaps the workspace");
    CHECK(refused(positions, own.data() + 1) == "list_slots: first overlaps positions");
}
