#include <mdkv/engine/slots.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/gpu/backend.cuh>

#include "gpu/support/device.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using mdkv::index_t;
using support::device_tensor;
using support::source;
using support::tensor;

struct lists
{
    std::vector<std::int32_t> positions;
    std::vector<index_t> first;

    friend bool operator==(lists const&, lists const&) = default;
};

lists on_cpu(tensor<std::uint8_t, 2> const& rung, index_t rungs)
{
    tensor<std::int32_t, 2> positions{{rung.extent(0), rung.extent(1)}};
    tensor<index_t, 2> first{{rung.extent(0), rungs + 1}};
    support::run([&](mdkv::cpu::backend const& on) { mdkv::list_slots(on, rung.in(), positions.out(), first.out()); });
    return {positions.elements(), first.elements()};
}

lists on_gpu(tensor<std::uint8_t, 2> const& rung, index_t rungs, support::placement how = {})
{
    device_tensor<std::uint8_t, 2> const from{rung};
    device_tensor<std::int32_t, 2> positions{{rung.extent(0), rung.extent(1)}, how};
    device_tensor<index_t, 2> first{{rung.extent(0), rungs + 1}, how};
    support::run_on_device(
        [&](mdkv::gpu::backend const& on) { mdkv::list_slots(on, from.in(), positions.out(), first.out()); });
    return {positions.elements(), first.elements()};
}

tensor<std::uint8_t, 2> random_rungs(
    source& random, index_t heads, index_t tokens, index_t rungs, support::placement how = {})
{
    tensor<std::uint8_t, 2> rung{{heads, tokens}, how};
    for (index_t h = 0; h < heads; ++h)
    {
        for (index_t t = 0; t < tokens; ++t)
        {
            rung.set(static_cast<std::uint8_t>(random.below(1 + random.below(rungs))), h, t); // some rungs are rare
        }
    }
    return rung;
}

} // namespace

TEST_CASE("the lists of the GPU are those of the CPU, for any number of tokens, heads and rungs")
{
    source random{"gpu/slots"};
    for (index_t const tokens : {0, 1, 31, 32, 33, 511, 512, 513, 4095, 4096, 4097, 9000})
    {
        for (index_t const rungs : {1, 2, 4, 16, 17})
        {
            if (tokens > 4000 && rungs > 4) { continue; }
            CAPTURE(tokens);
            CAPTURE(rungs);
            auto const rung = random_rungs(random, tokens > 4000 ? 1 : 3, tokens, rungs, {.slack = 5});
            CHECK(on_gpu(rung, rungs, {.slack = 2}) == on_cpu(rung, rungs));
        }
    }
    auto const many = random_rungs(random, 2, 700, 256);
    CHECK(on_gpu(many, 256) == on_cpu(many, 256));
    CHECK(on_gpu(tensor<std::uint8_t, 2>{{0, 5}}, 3) == on_cpu(tensor<std::uint8_t, 2>{{0, 5}}, 3));
}

TEST_CASE("the lists of tokens that are all at one rung are the positions themselves")
{
    tensor<std::uint8_t, 2> rung{{2, 700}};
    rung.assign(std::vector<std::uint8_t>(1400, 2));
    auto const got = on_gpu(rung, 4);
    CHECK(got == on_cpu(rung, 4));
    CHECK(got.first == std::vector<index_t>{0, 0, 0, 700, 700, 0, 0, 0, 700, 700});
}

TEST_CASE("a token at no rung is in no list, and the end of the lists tells of it")
{
    tensor<std::uint8_t, 2> rung{{1, 6}};
    rung.assign(std::vector<std::uint8_t>{1, 3, 0, 255, 1, 2});
    device_tensor<std::uint8_t, 2> const from{rung};
    device_tensor<std::int32_t, 2> positions{{1, 6}};
    device_tensor<index_t, 2> first{{1, 4}};
    support::run_on_device(
        [&](mdkv::gpu::backend const& on) { mdkv::list_slots(on, from.in(), positions.out(), first.out()); });
    CHECK(first.elements() == std::vector<index_t>{0, 1, 3, 4});
    CHECK(positions.elements() == std::vector<std::int32_t>{2, 0, 4, 5, -1, -1});
}

TEST_CASE("more rungs than a byte can say are refused by their number")
{
    tensor<std::uint8_t, 2> const rung{{1, 3}};
    CHECK(support::error_text<mdkv::invalid_argument>([&] { static_cast<void>(on_gpu(rung, 257)); })
          == "list_slots: first [H, R+1] has R = 257; a rung is a byte, so R is at most 256");
}
