// Tolerance against the CPU backend: that of score (tests/gpu/score.cu), and a rounding of the turned rows besides, of which a
// few may differ in their last bit.
#include <mdkv/gpu/score.cuh>
#include <mdkv/replay/replay.hpp>

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/score.hpp>

#include "gpu/support/device.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"

#include <cstddef>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_tensor;
using support::layer;
using support::tensor;

TEST_CASE("replay on the GPU gives the CPU's losses, with a reading's own tokens and without")
{
    for (bool const own : {false, true})
    {
        CAPTURE(own);
        layer<half> const x{{.queries = 100, .tokens = 100, .window = 4}};
        tensor<float, 3> want{{2, 4, 100}};
        support::run([&](cpu::backend const& on) {
            replay(on, x.queries.in(), x.keys.in(), x.values.in(), x.window_keys.in(), bit_ratios, {.own = own},
                want.out());
        });
        device_tensor<half, 3> const queries{x.queries}, keys{x.keys}, values{x.values}, sinks{x.window_keys};
        device_tensor<float, 3> loss{{2, 4, 100}};
        support::run_on_device([&](gpu::backend const& on) {
            replay(on, queries.in(), keys.in(), values.in(), sinks.in(), bit_ratios, {.own = own}, loss.out());
        });
        std::vector<float> const got    = loss.elements();
        std::vector<float> const wanted = want.elements();
        support::worst_error error;
        for (std::size_t i = 0; i < got.size(); ++i)
        {
            long double const dropped = wanted[i / 400 * 400 + i % 100];
            error.add(got[i], wanted[i], dropped + 1e-6L, static_cast<index_t>(i));
        }
        CAPTURE(error);
        CHECK(error.within(2e-3));
    }
}

} // namespace
