#include "policies/model_budget.hpp"

#include <mdkv/allocate.hpp>
#include <mdkv/balance.hpp>
#include <mdkv/core/allocation.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/cpu/basis.hpp>
#include <mdkv/leverage.hpp>
#include <mdkv/presets.hpp>

#include "policies/prompt_layer.hpp"
#include "runner/scratch_memory.hpp"
#include "support/random.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using mdkv::index_t;
using host = mdkv::cpu::backend;

constexpr index_t layers = 2, heads = 2, past = 300, dim = 8, rungs = 2;

std::vector<float> random_floats(char const* name, index_t count, double least)
{
    support::source random{name};
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& x : values) { x = static_cast<float>(random.uniform(least, 1)); }
    return values;
}

runner::prompt_layer<float> layer_of(std::vector<float> const& keys, index_t l)
{
    runner::prompt_layer<float> layer;
    layer.layer     = l;
    layer.layers    = layers;
    layer.heads     = heads;
    layer.tokens    = past;
    layer.key_dim   = dim;
    layer.value_dim = dim;
    layer.keys      = keys.data() + l * heads * past * dim;
    layer.values    = layer.keys;
    return layer;
}

void hold(
    runner::model_budget<float>& budget, std::vector<float> const& keys, std::vector<float> const& losses, index_t l)
{
    auto const each = static_cast<std::size_t>(heads * rungs * past);
    budget.hold(layer_of(keys, l), std::span{losses}.subspan(static_cast<std::size_t>(l) * each, each));
}

} // namespace

TEST_CASE("one budget weighs odd surroundings by the power for as many tokens as the prompt has")
{
    auto keys         = random_floats("model budget, keys", layers * heads * past * dim, -1);
    auto const losses = random_floats("model budget, losses", layers * heads * rungs * past, 0);
    for (index_t l = 0; l < layers * heads; ++l) // the last tenth of every head is unlike the rest
    {
        for (index_t i = 0; i < past * dim; ++i)
        {
            float& x = keys[static_cast<std::size_t>(l * past * dim + i)];
            if (i / dim < past * 9 / 10) { x = x * 0.1F + (i % dim == 0 ? 1.0F : 0.0F); }
        }
    }
    mdkv::ratio_set const& ratios = mdkv::evict_ratios;
    mdkv::rung_costs const costs{ratios, {dim, dim}, index_t{sizeof(float)}};
    index_t const limit = layers * heads * past / 20 * costs.bytes[1];
    runner::scratch_memory scratch;
    auto const chosen_by = [&](double odd) {
        runner::model_budget<float> budget;
        for (index_t l = 0; l < layers; ++l)
        {
            hold(budget, keys, losses, l);
            budget.compare_keys(layer_of(keys, l), {}, scratch);
        }
        static_cast<void>(budget.allocate({}, scratch, ratios, costs, limit, 1.0, odd));
        std::vector<std::uint8_t> all;
        for (std::size_t l = 0; l < layers; ++l)
        {
            all.insert(all.end(), budget.rungs(l).begin(), budget.rungs(l).end());
        }
        return all;
    };
    auto const expected = [&](float power) {
        auto balanced = losses;
        std::vector<float> leverages(past);
        std::vector<std::uint8_t> all(layers * heads * past);
        mdkv::allocation report;
        scratch.run({}, [&](host on) {
            using mdkv::in;
            using mdkv::out;
            for (index_t l = 0; l < layers; ++l)
            {
                mdkv::add_leverage(on, in(on, std::as_const(keys).data() + l * heads * past * dim, heads, past, dim),
                    out(on, leverages.data(), past));
            }
            return 0;
        });
        scratch.run({}, [&](host on) {
            using mdkv::in;
            mdkv::balance_options<host> options{.depth = 1.0F, .odd = power};
            options.leverages = in(on, std::as_const(leverages).data(), past);
            mdkv::balance(on, mdkv::out(on, balanced.data(), layers, heads, rungs, past), options);
            return 0;
        });
        scratch.run({}, [&](host on) {
            using mdkv::in;
            using mdkv::out;
            mdkv::allocate(on, in(on, std::as_const(balanced).data(), layers * heads, rungs, past), costs,
                in(on, &limit, 1), {}, out(on, all.data(), layers * heads, past), out(on, &report, 1));
            return 0;
        });
        return all;
    };
    CHECK(chosen_by(16) == expected(mdkv::odd_power(16, past)));
    CHECK(chosen_by(16) != expected(16));
    CHECK(chosen_by(0) == expected(0));
}

TEST_CASE("bytes are set aside from one budget only if a token is dropped")
{
    auto const keys               = random_floats("model budget, keys", layers * heads * past * dim, -1);
    auto const losses             = random_floats("model budget, losses", layers * heads * rungs * past, 0);
    mdkv::ratio_set const& ratios = mdkv::evict_ratios;
    mdkv::rung_costs const costs{ratios, {dim, dim}, index_t{sizeof(float)}};
    index_t const all = layers * heads * past * costs.bytes[1];
    runner::scratch_memory scratch;
    auto const dropped = [&](index_t limit, index_t aside) {
        runner::model_budget<float> budget;
        for (index_t l = 0; l < layers; ++l) { hold(budget, keys, losses, l); }
        static_cast<void>(budget.allocate({}, scratch, ratios, costs, limit, 0, 0, aside));
        index_t count = 0;
        for (std::size_t l = 0; l < layers; ++l)
        {
            for (std::uint8_t const rung : budget.rungs(l)) { count += rung == 0 ? 1 : 0; }
        }
        return count;
    };
    CHECK(dropped(all, 10 * costs.bytes[1]) == 0);
    CHECK(dropped(all / 2, 0) < layers * heads * past / 2 + 50);
    CHECK(dropped(all / 2, 50 * costs.bytes[1]) >= layers * heads * past / 2 + 50);
}
