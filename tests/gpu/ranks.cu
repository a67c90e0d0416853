#include <mdkv/core/ranks.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/stages/allocate.hpp>

#include "gpu/support/device.hpp"
#include "support/allocation.hpp"
#include "support/host.hpp"
#include "support/random.hpp"
#include "support/ranks.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace support;

template <class V>
std::vector<V> part_of(std::vector<V> const& all, index_t first, index_t count)
{
    return {all.begin() + first, all.begin() + first + count};
}

template <class T, std::size_t Rank>
device_tensor<T, Rank> on_device(std::array<index_t, Rank> extents, std::vector<T> const& values)
{
    tensor<T, Rank> copy{extents};
    copy.assign(values);
    return device_tensor<T, Rank>{copy};
}

} // namespace

TEST_CASE("GPUs as ranks, of some heads or none, choose the CPU's rungs, bit for bit")
{
    source random{"gpu ranks"};
    for (int round = 0; round < 3; ++round)
    {
        index_t const heads  = 3;
        index_t const tokens = round == 2 ? 11000 : 1 + random.below(2500); // the last ones are sampled
        layer const in       = round == 1 ? with_projections(random, heads, tokens, 4)
                                          : heavy_tailed(random, heads, tokens, {0, 64, 128, 512});
        index_t const limit  = some_limit(random, in);
        outcome one{std::vector<std::uint8_t>(at(heads * tokens)), std::vector<allocation>(1)};
        support::run([&](mdkv::cpu::backend const& on) {
            mdkv::allocate(on, {mdkv::in(on, in.loss.data(), heads, in.rungs(), tokens), mdkv::out(on, one.rung.data(), heads, tokens)}, in.costs(), mdkv::in(on, &limit, 1), {}, mdkv::out(on, one.report.data(), 1));
        });
        std::vector<index_t> const cuts{0, 1, 1, 3};
        rank_team team{3};
        auto const errors = on_ranks(team, [&](thread_rank const& transport) {
            index_t const first = cuts[at(transport.number)];
            index_t const count = cuts[at(transport.number + 1)] - first;
            index_t const row   = in.rungs() * tokens;
            auto const loss =
                on_device<float, 3>({count, in.rungs(), tokens}, part_of(in.loss, first * row, count * row));
            auto const bytes = on_device<index_t, 1>({1}, {limit});
            device_tensor<std::uint8_t, 2> rung{{count, tokens}};
            device_tensor<allocation, 1> report{{1}};
            mdkv::ranks const all = transport.with(first, heads);
            run_on_device_now([&](mdkv::gpu::backend const& on) {
                mdkv::allocate(on, {loss.in(), rung.out()}, in.costs(), bytes.in(), {.ranks = &all}, report.out());
            });
            if (rung.elements() != part_of(one.rung, first * tokens, count * tokens)) { throw mdkv::error{"rungs"}; }
            if (!same(report.elements().front(), one.one())) { throw mdkv::error{"report"}; }
        });
        for (std::string const& error : errors) { CHECK(error == ""); }
    }
}
