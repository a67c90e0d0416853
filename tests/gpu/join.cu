#include <mdkv/replay/balance.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/gpu/backend.cuh>

#include "gpu/support/device.hpp"
#include "support/host.hpp"
#include "support/losses.hpp"

#include <cmath>
#include <cstddef>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using support::device_tensor;
using support::random_losses;
using support::tensor;

TEST_CASE("join on the GPU gives the CPU's losses, to rounding, in place or not")
{
    for (index_t const tokens : {1, 70, 5000})
    {
        for (bool const in_place : {false, true})
        {
            CAPTURE(tokens);
            auto const a = random_losses(3, 4, tokens, 1e-6F);
            auto const b = random_losses(3, 4, tokens, 1e+4F);
            tensor<float, 3> want{{3, 4, tokens}};
            support::run([&](cpu::backend const& on) { join(on, a.in(), b.in(), 0.7F, want.out()); });
            device_tensor<float, 3> first{a};
            device_tensor<float, 3> const second{b};
            device_tensor<float, 3> other{{3, 4, tokens}, {.slack = 3}};
            support::run_on_device([&](gpu::backend const& on) {
                if (in_place) { join(on, first.in(), second.in(), 0.7F, first.out()); }
                else { join(on, first.in(), second.in(), 0.7F, other.out()); }
            });
            std::vector<float> const got    = in_place ? first.elements() : other.elements();
            std::vector<float> const wanted = want.elements();
            int wrong                       = 0;
            for (std::size_t i = 0; i < got.size(); ++i)
            {
                wrong += std::fabs(got[i] - wanted[i]) <= 0x1p-21F * wanted[i] ? 0 : 1;
            }
            CHECK(wrong == 0);
        }
    }
}

} // namespace
