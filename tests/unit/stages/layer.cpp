#include <mdkv/stages/layer.hpp>

#include <mdkv/cpu/backend.hpp>

#include "support/host.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::tensor;
using host = cpu::backend;

} // namespace

TEST_CASE("a prompt no longer than the window is all window, and the rest is split in order")
{
    tensor<float, 3> const queries{{2, 4, 8}};
    for (index_t const tokens : {0, 1, 5, 6, 20})
    {
        CAPTURE(tokens);
        tensor<float, 3> kv{{2, tokens, 8}};
        kv.assign(std::vector<float>(static_cast<std::size_t>(kv.count()), 1.0F));
        for (index_t t = 0; t < tokens; ++t) { kv.set(static_cast<float>(t), 1, t, 0); }
        auto const split = split_window(host{}, queries.in(), kv.in(), kv.in(), 6);
        CHECK(split.keys.extent(1) == std::max<index_t>(0, tokens - 6));
        CHECK(split.window_keys.extent(1) == std::min<index_t>(6, tokens));
        if (tokens > 0)
        {
            CHECK(split.window_values(1, split.window_values.extent(1) - 1, 0) == static_cast<float>(tokens - 1));
        }
        if (tokens > 6) { CHECK(split.values(1, tokens - 7, 0) == static_cast<float>(tokens - 7)); }
    }
    tensor<float, 3> const kv{{2, 9, 8}};
    tensor<float, 3> const other{{2, 8, 8}};
    CHECK(error_text<invalid_argument>([&] {
        static_cast<void>(split_window(host{}, queries.in(), kv.in(), kv.in(), -1));
    }) == "split_window: window is -1; it must not be negative");
    CHECK(error_text<invalid_argument>([&] {
        static_cast<void>(split_window(host{}, queries.in(), kv.in(), other.in(), 4));
    }) == "split_window: values have 8 tokens, keys 9");
}
