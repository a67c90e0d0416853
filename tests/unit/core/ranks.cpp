#include <mdkv/core/ranks.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/thread_pool.hpp>
#include <mdkv/stages/allocate.hpp>

#include "support/allocation.hpp"
#include "support/host.hpp"
#include "support/random.hpp"
#include "support/ranks.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace support;
using mdkv::allocate_options;

outcome allocated(layer const& in, index_t limit, allocate_options const& options, mdkv::cpu::executor_ref threads = {})
{
    outcome result{std::vector<std::uint8_t>(at(in.heads * in.tokens), 0xAA), std::vector<allocation>(1)};
    support::run(
        [&](mdkv::cpu::backend const& on) {
            mdkv::allocate(on,
                {mdkv::in(on, in.loss.data(), in.heads, in.rungs(), in.tokens),
                    mdkv::out(on, result.rung.data(), in.heads, in.tokens)},
                in.costs(), mdkv::in(on, &limit, 1), options, mdkv::out(on, result.report.data(), 1));
        },
        threads);
    return result;
}

/// What ranks choose that have the heads from one cut to the next of each layer, put together as one rank has it; every rank's
/// report is compared with the first's.
outcome on_ranks_of(
    layer const& in, index_t limit, allocate_options const& options, index_t layers, std::vector<index_t> const& cuts)
{
    rank_team team{static_cast<int>(cuts.size()) - 1};
    outcome all{std::vector<std::uint8_t>(at(in.heads * in.tokens), 0xBB), std::vector<allocation>(1)};
    std::vector<outcome> parts(cuts.size() - 1);
    mdkv::cpu::thread_pool pool{2};
    index_t const heads = in.heads / layers;
    auto const errors   = on_ranks(team, [&](thread_rank const& rank) {
        index_t const first     = cuts[at(rank.number)];
        index_t const own       = cuts[at(rank.number) + 1] - first;
        mdkv::ranks const ranks = rank.with(first, heads);
        layer part              = in;
        part.heads              = own * layers;
        part.loss.clear();
        for (index_t l = 0; l < layers; ++l)
        {
            auto const from = in.loss.begin() + (l * heads + first) * in.rungs() * in.tokens;
            part.loss.insert(part.loss.end(), from, from + own * in.rungs() * in.tokens);
        }
        allocate_options mine = options;
        mine.ranks            = &ranks;
        mine.layers           = layers;
        parts[at(rank.number)] =
            allocated(part, limit, mine, rank.number == 0 ? mdkv::cpu::executor_ref{pool} : mdkv::cpu::executor_ref{});
    });
    for (std::string const& error : errors) { CHECK(error.empty()); }
    for (std::size_t r = 0; r < parts.size(); ++r)
    {
        CHECK(same(parts[r].one(), parts[0].one()));
        index_t const own = cuts[r + 1] - cuts[r];
        for (index_t h = 0; h < own * layers; ++h)
        {
            index_t const number = h / own * heads + cuts[r] + h % own;
            std::copy_n(parts[r].rung.begin() + h * in.tokens, in.tokens, all.rung.begin() + number * in.tokens);
        }
    }
    all.report = parts[0].report;
    return all;
}

/// Heads over ranks at random; some ranks may have none.
std::vector<index_t> cuts_of(source& random, int ranks, index_t heads)
{
    std::vector<index_t> cuts{0, heads};
    for (int i = 1; i < ranks; ++i) { cuts.push_back(random.below(heads + 1)); }
    std::sort(cuts.begin(), cuts.end());
    return cuts;
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
        allocate_options const options{
            .charge = random.below(2) == 0 ? mdkv::projection_charge::always : mdkv::projection_charge::if_better};
        CAPTURE(round);
        CAPTURE(tokens);
        outcome const one = allocated(in, limit, options);
        for (int const ranks : {1, 2, 3, 5})
        {
            CAPTURE(ranks);
            check_same(on_ranks_of(in, limit, options, layers, cuts_of(random, ranks, heads)), one);
        }
    }
}

TEST_CASE("ties of many ranks are one order")
{
    source random{"ranks ties"};
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
                check_same(on_ranks_of(in, in.most() / part, {}, 1, cuts_of(random, ranks, 3)), one);
            }
        }
    }
}
