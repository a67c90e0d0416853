#include <mdkv/core/ranks.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/leverage.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/thread_pool.hpp>
#include <mdkv/replay/balance.hpp>
#include <mdkv/replay/join.hpp>
#include <mdkv/stages/allocate.hpp>

#include "support/allocation.hpp"
#include "support/failing_resource.hpp"
#include "support/host.hpp"
#include "support/message.hpp"
#include "support/random.hpp"
#include "support/ranks.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace support;
using mdkv::allocate_options;
using mdkv::rank_heads;

outcome allocated(layer const& in, index_t limit, allocate_options options, mdkv::cpu::executor_ref threads = {},
    mdkv::ranks<mdkv::space::host> const* ranks = nullptr)
{
    outcome result{std::vector<std::uint8_t>(at(in.heads * in.tokens), 0xAA), std::vector<allocation>(1)};
    support::run([&](mdkv::cpu::backend on) {
        on.executor = threads;
        on.ranks    = ranks;
        mdkv::allocate(on, mdkv::in(on, in.loss.data(), in.heads, in.rungs(), in.tokens), in.costs(),
            mdkv::in(on, &limit, 1), options, mdkv::out(on, result.rung.data(), in.heads, in.tokens),
            mdkv::out(on, result.report.data(), 1));
    });
    return result;
}

/// Some heads of some layers, cut out of all heads of all layers.
layer cut(layer const& all, rank_heads const& place, index_t heads, index_t layers)
{
    layer part   = all;
    part.heads   = heads * layers;
    auto const n = all.rungs() * all.tokens;
    part.loss.resize(at(part.heads * n));
    for (index_t l = 0; l < layers; ++l)
    {
        auto const from = all.loss.begin() + ((place.first_layer + l) * place.heads + place.first_head) * n;
        std::copy_n(from, heads * n, part.loss.begin() + l * heads * n);
    }
    return part;
}

struct share
{
    rank_heads place;
    index_t heads; ///< of a layer
    index_t layers;
};

/// Heads of all layers over ranks at random; some ranks may have none.
std::vector<share> by_heads(source& random, int ranks, index_t layers, index_t heads)
{
    std::vector<index_t> cuts{0, heads};
    for (int i = 1; i < ranks; ++i) { cuts.push_back(random.below(heads + 1)); }
    std::sort(cuts.begin(), cuts.end());
    std::vector<share> shares;
    for (std::size_t r = 0; r + 1 < cuts.size(); ++r)
    {
        shares.push_back({{.first_head = cuts[r], .heads = heads, .layers = layers}, cuts[r + 1] - cuts[r], layers});
    }
    return shares;
}

/// What ranks with these shares choose, put together as one rank has it; every rank's report is compared with the first's.
outcome on_shares(layer const& in, index_t limit, allocate_options options, std::vector<share> const& shares, bool many,
    index_t* bytes = nullptr)
{
    rank_team team{static_cast<int>(shares.size())};
    outcome all{std::vector<std::uint8_t>(at(in.heads * in.tokens), 0xBB), std::vector<allocation>(1)};
    std::vector<outcome> parts(shares.size());
    mdkv::cpu::thread_pool pool{2};
    auto const errors = on_ranks(team, [&](thread_rank const& transport) {
        share const& own = shares[at(transport.number)];
        mdkv::ranks const ranks{transport, own.place};
        allocate_options mine       = options;
        mine.layers                 = many ? own.layers : 0;
        parts[at(transport.number)] = allocated(cut(in, own.place, own.heads, own.layers), limit, mine,
            transport.number == 0 ? mdkv::cpu::executor_ref{pool} : mdkv::cpu::executor_ref{}, &ranks);
    });
    for (std::string const& error : errors) { CHECK(error.empty()); }
    for (std::size_t r = 0; r < shares.size(); ++r)
    {
        share const& own = shares[r];
        CHECK(same(parts[r].one(), parts[0].one()));
        for (index_t h = 0; h < own.heads * own.layers; ++h)
        {
            index_t const number =
                (own.place.first_layer + h / own.heads) * own.place.heads + own.place.first_head + h % own.heads;
            std::copy_n(parts[r].rung.begin() + h * in.tokens, in.tokens, all.rung.begin() + number * in.tokens);
        }
    }
    all.report = parts[0].report;
    if (bytes != nullptr) { *bytes = team.bytes(); }
    return all;
}

void check_same(outcome const& got, outcome const& one)
{
    CHECK(same(got.one(), one.one()));
    CHECK(got.rung == one.rung);
}

} // namespace

TEST_CASE("allocate over 1, 2, 3 and 5 ranks with any numbers of heads chooses as one rank does, bit for bit")
{
    source random{"ranks allocate"};
    for (int round = 0; round < 120; ++round)
    {
        index_t const heads  = 1 + random.below(7);
        index_t const layers = 1 + random.below(3);
        index_t const tokens = random.below(2) == 0 ? random.below(12) : 1 + random.below(5000);
        layer in             = with_projections(random, heads * layers, tokens, 1 + random.below(6));
        if (random.below(4) == 0)
        {
            for (float& x : in.loss) { x = nasty(random); }
        }
        if (random.below(3) == 0)
        {
            in.channels       = random.below(50);
            in.rotated.back() = true;
        }
        index_t const limit = some_limit(random, in);
        allocate_options const options{.spend_leftover = random.below(5) > 0,
            .charge = random.below(2) == 0 ? mdkv::projection_charge::always : mdkv::projection_charge::by_use};
        CAPTURE(round);
        CAPTURE(tokens);
        outcome const one = allocated(in, limit, options);
        for (int const ranks : {1, 2, 3, 5})
        {
            CAPTURE(ranks);
            check_same(on_shares(in, limit, options, by_heads(random, ranks, layers, heads), true), one);
        }
    }
}

TEST_CASE("layers on other ranks are further heads; a grid of layers and heads has the order of one rank, too")
{
    source random{"ranks layers"};
    layer const in      = with_projections(random, 6 * 4, 700, 4);
    index_t const limit = in.most() / 5;
    outcome const one   = allocated(in, limit, {});
    rank_heads const all{.heads = 4, .layers = 6};
    auto const place = [&](index_t head, index_t heads, index_t layer, index_t layers) {
        share own{all, heads, layers};
        own.place.first_head  = head;
        own.place.first_layer = layer;
        return own;
    };
    check_same(on_shares(in, limit, {}, {place(0, 4, 0, 1), place(0, 4, 1, 4), place(0, 4, 5, 1)}, true), one);
    check_same(on_shares(in, limit, {}, {place(1, 3, 2, 4), place(0, 4, 0, 2), place(0, 1, 2, 4)}, true), one);
}

TEST_CASE("replicas do not count, and get the same rungs")
{
    source random{"ranks replicas"};
    layer const in      = with_projections(random, 2, 3000, 4);
    index_t const limit = in.most() / 6;
    share const first{{.first_head = 0, .heads = 2}, 1, 1};
    share const second{{.first_head = 1, .heads = 2}, 1, 1};
    auto const replica = [](share of) {
        of.place.replica = true;
        return of;
    };
    std::vector<share> const shares{first, replica(first), second, replica(second)};
    check_same(on_shares(in, limit, {}, shares, false), allocated(in, limit, {}));
}

TEST_CASE("a sample guesses the multiplier of all ranks alike, and ties of many ranks are one order")
{
    source random{"ranks sample"};
    layer in = heavy_tailed(random, 3, 20000, {0, 64, 128, 512});
    for (int const kind : {0, 1})
    {
        if (kind == 1)
        {
            for (float& x : in.loss) { x = static_cast<float>(random.below(4)); }
        }
        for (index_t const part : {3, 40})
        {
            outcome const one = allocated(in, in.most() / part, {});
            for (int const ranks : {2, 3, 5})
            {
                check_same(on_shares(in, in.most() / part, {}, by_heads(random, ranks, 1, 3), false), one);
            }
        }
    }
}

TEST_CASE("an argument of one rank that is refused, or differs, is an error on every rank that names the rank")
{
    source random{"ranks errors"};
    layer const in = heavy_tailed(random, 3, 100, {0, 8, 64});
    std::vector<std::uint8_t> rung(300);
    /// Each rank has one head; rank 1 changes one argument.
    auto const errors_with = [&](auto const& change) {
        rank_team team{3};
        return on_ranks(team, [&](thread_rank const& transport) {
            struct
            {
                layer part;
                index_t limit;
                allocate_options options{};
                rank_heads place;
                int rank;
                int size            = 3;
                support::failure scratch = support::failure::never;
            } mine{cut(in, {.first_head = transport.number, .heads = 3}, 1, 1), 3000, {},
                {.first_head = transport.number, .heads = 3}, transport.number};
            if (transport.number == 1) { change(mine); }
            claimed_rank const claimed{transport, mine.rank, mine.size};
            mdkv::ranks const ranks{claimed, mine.place};
            support::failing_resource memory{mine.scratch};
            mdkv::workspace scratch{mdkv::cpu::host_memory{&memory}};
            mdkv::cpu::backend const on{&scratch, {}, &ranks};
            outcome result{std::vector<std::uint8_t>(at(mine.part.tokens)), std::vector<allocation>(1)};
            mdkv::allocate(on, mdkv::in(on, mine.part.loss.data(), 1, mine.part.rungs(), mine.part.tokens),
                mine.part.costs(), mdkv::in(on, &mine.limit, 1), mine.options,
                mdkv::out(on, result.rung.data(), 1, mine.part.tokens), mdkv::out(on, result.report.data(), 1));
        });
    };
    auto const refused = [&](auto const& change, char const* own) {
        auto const errors = errors_with(change);
        says(errors[0], "allocate: rank 1 refuses its arguments");
        says(errors[1], own);
        says(errors[2], "allocate: rank 1 refuses its arguments");
    };
    auto const differs = [&](auto const& change, char const* what) {
        for (std::string const& error : errors_with(change)) { says(error, what); }
    };
    refused([](auto& mine) { mine.limit = -1; }, "limits[0] is -1");
    refused([](auto& mine) { mine.part.cost = {0, 8, 8}; }, "costs.bytes must ascend");
    refused([](auto& mine) { mine.scratch = support::failure::from_on; }, "bad_alloc");
    refused([](auto& mine) { mine.place.first_head = 3; },
        "this rank's 1 heads from 3 on are not among the 3 of all ranks");
    differs([](auto& mine) { mine.limit = 2999; }, "limits of rank 1 is not that of rank 0, 3000");
    differs([](auto& mine) { mine.part.cost = {0, 8, 65}; }, "costs of rank 1");
    differs([](auto& mine) { mine.options.spend_leftover = false; }, "options.spend_leftover of rank 1");
    differs([](auto& mine) { mine.part.tokens = 50; }, "number N of tokens of rank 1");
    differs([](auto& mine) { mine.place.heads = 4; }, "number of all heads of rank 1");
    differs([](auto& mine) { mine.place.layers = 2; }, "number of all layers of rank 1 is not that of rank 0, 1");
    differs([](auto& mine) { mine.options.layers = 1; }, "options.layers (0 or more) of rank 1 is not that of rank 0;");
    differs([](auto& mine) { mine.size = 4; }, "number of ranks of rank 1 is not that of rank 0, 3");
    differs([](auto& mine) { mine.rank = 2; }, "two ranks have one number; each of 3 ranks must have another");
    differs([](auto& mine) { mine.place.first_head = 0; }, "not every one of 3 heads is on one rank");
    constexpr auto last = std::numeric_limits<index_t>::max();
    refused(
        [](auto& mine) { mine.place.first_head = last; }, "1 heads from 9223372036854775807 on are not among the 3");
    refused([](auto& mine) { mine.place.heads = -last - 1; }, "are not among the -9223372036854775808 of all ranks");
    refused([](auto& mine) { mine.place.first_layer = last; }, "1 layers from 9223372036854775807 on are not among");
}

TEST_CASE("stages over ranks name the number that differs as it is, and the ranks that make another call")
{
    std::vector<float> losses(2 * 3 * 40, 1.0F);
    std::vector<mdkv::leverage_sum> sums(40);
    struct call
    {
        float weight = 0.5F, depth = 1.5F, leverage_power = 0.25F;
        index_t reach = 8, rungs = 3, tokens = 40;
        int stage;
    };
    auto const errors_with = [&](int stage, auto const& change) {
        rank_team team{3};
        return on_ranks(team, [&](thread_rank const& transport) {
            call mine{.stage = stage};
            if (transport.number == 2) { change(mine); }
            mdkv::ranks const ranks{transport, {.first_head = 2 * transport.number, .heads = 6}};
            mdkv::workspace scratch{nan_memory{}};
            mdkv::cpu::backend const on{&scratch, {}, &ranks};
            auto own       = losses;
            auto const all = mdkv::out(on, own.data(), 2, mine.rungs, mine.tokens);
            auto const in  = mdkv::in(on, losses.data(), 2, mine.rungs, mine.tokens);
            if (mine.stage == 0) { mdkv::join(on, in, in, mine.weight, all); }
            else
            {
                mdkv::balance(on, mdkv::out(on, own.data(), 1, 2, mine.rungs, mine.tokens),
                    {.depth             = mine.depth,
                        .leverage_power = mine.leverage_power,
                        .leverages      = mdkv::in(on, sums.data(), mine.tokens),
                        .reach          = mine.reach});
            }
        });
    };
    auto const differs = [&](int stage, auto const& change, std::string const& what) {
        for (std::string const& error : errors_with(stage, change))
        {
            says(error, (what + "; it must be the same on all ranks").c_str());
        }
    };
    for (int const stage : {0, 1})
    {
        for (std::string const& error : errors_with(stage, [](call&) {})) { CHECK(error == ""); }
    }
    differs(
        0, [](call& mine) { mine.weight = 2; }, "join: weight of rank 2 is not that of rank 0, 0.5");
    differs(
        0, [](call& mine) { mine.rungs = 2; }, "join: number R of rungs of rank 2 is not that of rank 0, 3");
    differs(
        0, [](call& mine) { mine.tokens = 39; }, "join: number N of tokens of rank 2 is not that of rank 0, 40");
    differs(
        1, [](call& mine) { mine.depth = -1; }, "balance: options.depth of rank 2 is not that of rank 0, 1.5");
    differs(
        1, [](call& mine) { mine.leverage_power = 0; },
        "balance: options.leverage_power of rank 2 is not that of rank 0, 0.25");
    differs(
        1, [](call& mine) { mine.reach = 7; }, "balance: options.reach of rank 2 is not that of rank 0, 8");
    differs(
        0, [](call& mine) { mine.stage = 1; }, ": call of rank 2 is not that of rank 0");
    differs(
        1, [](call& mine) { mine.stage = 0; }, ": call of rank 2 is not that of rank 0");
    differs(
        0, [](call& mine) { mine.weight = 0.5F + 1e-7F; }, "join: weight of rank 2 is not that of rank 0, 0.5");
}
