#include <mdkv/cpu/backend.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/stages/allocate.hpp>

#include <mdkv/core/types.hpp>

#include "gpu/support/device.hpp"
#include "support/allocation.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace support;
using mdkv::allocate_options;
using mdkv::allocation_status;

template <class T, std::size_t Rank>
tensor<T, Rank> as_tensor(std::array<index_t, Rank> extents, std::vector<T> const& values, placement how = {})
{
    tensor<T, Rank> result{extents, how};
    result.assign(values);
    return result;
}

outcome on_cpu(layer const& in, std::vector<index_t> const& limits, allocate_options options)
{
    outcome result{std::vector<std::uint8_t>(at(in.heads * in.tokens)), std::vector<allocation>(limits.size())};
    support::run([&](mdkv::cpu::backend const& on) {
        mdkv::allocate(on,
            {mdkv::in(on, in.loss.data(), in.heads, in.rungs(), in.tokens),
                mdkv::out(on, result.rung.data(), in.heads, in.tokens)},
            in.costs(), mdkv::in(on, limits.data(), static_cast<index_t>(limits.size())), options,
            mdkv::out(on, result.report.data(), static_cast<index_t>(limits.size())));
    });
    return result;
}

outcome on_gpu(layer const& in, std::vector<index_t> const& limits, allocate_options options, placement how = {})
{
    device_tensor<float, 3> const loss{as_tensor<float, 3>({in.heads, in.rungs(), in.tokens}, in.loss, how)};
    device_tensor<index_t, 1> const bytes{as_tensor<index_t, 1>({static_cast<index_t>(limits.size())}, limits)};
    device_tensor<std::uint8_t, 2> rung{{in.heads, in.tokens}, {.slack = how.slack}};
    device_tensor<allocation, 1> report{{static_cast<index_t>(limits.size())}};
    run_on_device([&](mdkv::gpu::backend const& on) {
        mdkv::allocate(on, {loss.in(), rung.out()}, in.costs(), bytes.in(), options, report.out());
    });
    return {rung.elements(), report.elements()};
}

/// Whether the GPU gives the CPU's bits, with every option.
bool same_everywhere(layer const& in, std::vector<index_t> const& limits, placement how = {})
{
    bool all = true;
    for (mdkv::projection_charge const charge : {mdkv::projection_charge::if_better, mdkv::projection_charge::always})
    {
        all = all && same(on_cpu(in, limits, {charge}), on_gpu(in, limits, {charge}, how));
    }
    return all;
}

} // namespace

TEST_CASE("allocate on the GPU gives the CPU's bits, whatever the losses, the rungs, the projections and the limit")
{
    source random{"gpu/allocate"};
    for (int repeat = 0; repeat < 24; ++repeat)
    {
        CAPTURE(repeat);
        index_t const heads = 1 + random.below(5);
        layer in = repeat % 2 == 0 ? with_projections(random, heads, 1 + random.below(900), 1 + random.below(16))
                                   : heavy_tailed(random, heads, 2000 + random.below(3000), {0, 16, 32, 64});
        if (repeat % 4 == 1)
        {
            in.project({1}, 4096);
            in.project({2}, 8192);
        }
        if (repeat % 8 > 5)
        {
            for (float& x : in.loss) { x = random.below(3) == 0 ? nasty(random) : x; }
        }
        CHECK(same_everywhere(in, {some_limit(random, in)}, {.swapped = repeat % 3 == 0, .slack = repeat % 3}));
    }
}

TEST_CASE("allocate on the GPU gives every head its own limit, and tells of limits that are too low")
{
    source random{"gpu/allocate limits"};
    layer in = heavy_tailed(random, 5, 700, {8, 16, 32, 64});
    in.project({1}, 500);
    in.project({2}, 1000);
    std::vector<index_t> const limits{1 << 20, 700 * 20, 700 * 8 + 100, 0, 700 * 64};
    CHECK(same_everywhere(in, limits));
    std::vector<index_t> negative = limits;
    negative[1]                   = std::numeric_limits<index_t>::min();
    outcome const got             = on_gpu(in, negative, {});
    CHECK(got.report[0].status == allocation_status::optimal);
    CHECK(got.report[1].status == allocation_status::over_limit);
    CHECK(got.report[2].status == allocation_status::unprojected_only);
    CHECK(got.report[3].status == allocation_status::over_limit);
}

TEST_CASE("allocate on the GPU serves plateaus over many pieces, wide steps, and no tokens")
{
    source random{"gpu/allocate plateau"};
    layer flat{2, 5000, {0, 16, 24, 64}};
    for (index_t h = 0; h < 2; ++h)
    {
        for (index_t r = 0; r < 4; ++r)
        {
            for (index_t i = 0; i < flat.tokens; ++i) { flat.of(h, r, i) = static_cast<float>(64 - flat.cost[at(r)]); }
        }
    }
    for (index_t const part : {1, 40, 77, 99}) { CHECK(same_everywhere(flat, {flat.most() / 100 * part + 7})); }
    layer const wide = heavy_tailed(random, 2, 500, {3, 5, (index_t{1} << 32) + 2, index_t{1} << 40});
    for (index_t const part : {10, 2}) { CHECK(same_everywhere(wide, {wide.most() / part})); }
    CHECK(same_everywhere(layer{3, 0, {0, 4}}, {7}));
    CHECK(same_everywhere(layer{0, 3, {0, 4}}, {7}));
}
