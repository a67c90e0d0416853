// Tolerance: logits and weights in float on both sides, of products added up in other orders, then a solution in double whose
// ridge bounds what becomes of their rounding; values are rounded to T.
#include <mdkv/replay/refit.hpp>

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/cache.cuh>

#include "gpu/support/device.hpp"
#include "gpu/support/device_packed.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/refits.hpp"

#include <array>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_tensor;
using support::tensor;

TEST_CASE_TEMPLATE("refit on the GPU makes the CPU's values, to rounding", T, float, half, bfloat16)
{
    for (auto const& [tokens, dim, value_dim, group, blocks, apart, span, rows, stand_ins] :
        std::vector<std::array<index_t, 9>>{{90, 24, 40, 3, 2, 25, 13, 15, 4}, {40, 8, 8, 1, 11, 3, 3, 3, 2}})
    {
        CAPTURE(tokens);
        support::refit_case<T> const given{{.heads        = 2,
                                               .tokens    = tokens,
                                               .window    = 5,
                                               .dims      = {dim, value_dim},
                                               .rungs     = {drop, full_int4, full_int8, full},
                                               .stand_ins = stand_ins},
            group, {.blocks = blocks, .apart = apart, .span = span, .rows = rows, .ridge = 0.3F, .most = 0.1F}, 1};
        auto cache = given.layer.packed();
        tensor<T, 3> want{{2, tokens, value_dim}};
        support::run([&](cpu::backend const& on) {
            refit(on, given.queries.in(), given.keys.in(), given.values.in(), given.layer.rung.in(), cache.view(),
                given.options, want.out());
        });
        support::device_resource memory;
        auto there = gpu::to_device(cache, nullptr, memory);
        device_tensor<T, 3> const queries{given.queries}, keys{given.keys}, values{given.values};
        device_tensor<std::uint8_t, 2> const rungs{given.layer.rung};
        device_tensor<T, 3> got{{2, tokens, value_dim}};
        support::run_on_device([&](gpu::backend const& on) {
            refit(on, queries.in(), keys.in(), values.in(), rungs.in(), there.view(),
                {.rows = given.options.rows, .first = 1, .stand_ins = stand_ins}, got.out());
        });
        auto const ours   = got.elements();
        auto const theirs = want.elements();
        support::worst_error error;
        for (std::size_t i = 0; i < ours.size(); ++i)
        {
            double const x{widen(theirs[i])};
            error.add(double{widen(ours[i])}, x, 1 + std::fabs(x), static_cast<std::int64_t>(i));
        }
        CHECK_MESSAGE(error.within(std::is_same_v<T, float> ? 1e-5 : std::is_same_v<T, half> ? 0x1p-9 : 0x1p-6), error);
    }
}

} // namespace
