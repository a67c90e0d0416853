// Tolerance: logits in float on both sides, of products added up in other orders; 2^x of two kinds. The rest is double.
#include <mdkv/replay/stand_in.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/gpu/backend.cuh>

#include "gpu/support/device.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/stand_ins.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_tensor;
using support::tensor;
using support::worst_error;

worst_error error_of(std::vector<float> const& got, std::vector<float> const& want)
{
    float largest = 0;
    for (float const x : want) { largest = std::fmax(largest, std::fabs(x)); }
    worst_error worst;
    for (std::size_t i = 0; i < got.size(); ++i) { worst.add(got[i], want[i], largest, static_cast<std::int64_t>(i)); }
    return worst;
}

TEST_CASE_TEMPLATE("stand_in on the GPU makes the CPU's tokens, to rounding", T, float, half, bfloat16)
{
    for (auto const& [heads, group, queries, tokens, dim, clusters] :
        std::vector<std::array<index_t, 6>>{{1, 1, 1, 4, 1, 1}, {2, 2, 5, 40, 7, 3}, {1, 3, 64, 600, 64, 4},
            {2, 1, 8, 300, 80, 8}, {1, 1, 2, 70, 8, 40}})
    {
        CAPTURE(tokens);
        CAPTURE(dim);
        support::stand_in_case<T> const given{{.heads = heads,
            .group                                    = group,
            .queries                                  = queries,
            .tokens                                   = tokens,
            .window                                   = queries,
            .dim                                      = dim,
            .value_dim                                = dim}};
        tensor<float, 3> keys{{heads, clusters, dim}};
        tensor<float, 3> values{{heads, clusters, dim}};
        keys.assign(std::vector<float>(static_cast<std::size_t>(heads * clusters * dim), 0.0F));
        values.assign(keys.elements());
        device_tensor<float, 3> got_keys{keys};
        device_tensor<float, 3> got_values{values};
        device_tensor<T, 3> const there_queries{given.prompt.queries};
        device_tensor<T, 3> const there_keys{given.prompt.keys};
        device_tensor<T, 3> const there_values{given.prompt.values};
        device_tensor<std::uint8_t, 2> const rungs{given.rungs};
        device_tensor<float, 2> const lse{given.lse};
        support::run([&](cpu::backend const& on) {
            stand_in(on, given.prompt.queries.in(), given.prompt.keys.in(), given.prompt.values.in(), given.rungs.in(),
                given.lse.in(), tokens + queries, {}, keys.out(), values.out());
        });
        support::run_on_device([&](gpu::backend const& on) {
            stand_in(on, there_queries.in(), there_keys.in(), there_values.in(), rungs.in(), lse.in(), tokens + queries,
                {}, got_keys.out(), got_values.out());
        });
        auto const worst = error_of(got_keys.elements(), keys.elements());
        auto const rest  = error_of(got_values.elements(), values.elements());
        CHECK_MESSAGE(worst.within(0x1p-13), worst);
        CHECK_MESSAGE(rest.within(0x1p-16), rest);
    }
}

TEST_CASE("on the GPU, too, a head that drops fewer tokens than others has fewer stand-ins, and zeros beyond")
{
    support::stand_in_case<float> given{{.heads = 2, .group = 1, .queries = 4, .tokens = 50, .window = 4, .dim = 8}};
    std::vector<std::uint8_t> rungs(100, 0);
    std::fill(rungs.begin() + 2, rungs.begin() + 50, std::uint8_t{1}); // head 0 drops two tokens, head 1 all
    given.rungs.assign(rungs);
    index_t const values = given.prompt.sizes.value_dim;
    tensor<float, 3> room_for_keys{{2, 3, 8}}, room_for_values{{2, 3, values}};
    device_tensor<float, 3> got_keys{room_for_keys}, got_values{room_for_values};
    device_tensor<float, 3> const there_queries{given.prompt.queries}, there_keys{given.prompt.keys},
        there_values{given.prompt.values};
    device_tensor<std::uint8_t, 2> const there_rungs{given.rungs};
    device_tensor<float, 2> const lse{given.lse};
    support::run_on_device([&](gpu::backend const& on) {
        stand_in(on, there_queries.in(), there_keys.in(), there_values.in(), there_rungs.in(), lse.in(), 54, {},
            got_keys.out(), got_values.out());
    });
    auto const all_keys = got_keys.elements(), all_values = got_values.elements();
    for (std::size_t i = 0; i < all_keys.size(); ++i) { CHECK((all_keys[i] == 0) == (i >= 2 * 8 && i < 3 * 8)); }
    for (std::size_t i = 0; i < all_values.size(); ++i)
    {
        auto const row = static_cast<index_t>(i) / values;
        CHECK((all_values[i] == 0) == (row == 2));
    }
}

} // namespace
