// Compression of one layer of 8K, 32K and 128K tokens to a tenth (performance.md, G4), and its stages one by one. Each finds
// its tokens cold, as many layers take turns; what one stage leaves for the next (bases, losses) may be in the L2 cache,
// as it is between the stages of compress.
#include <mdkv/compress.hpp>
#include <mdkv/gpu/basis.cuh>
#include <mdkv/gpu/score.cuh>

#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/presets.hpp>
#include <mdkv/stages/allocate.hpp>
#include <mdkv/stages/basis.hpp>
#include <mdkv/stages/pack.hpp>
#include <mdkv/stages/pool.hpp>
#include <mdkv/stages/score.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "bench.cuh"
#include "layers.cuh"
#include "stopwatch.cuh"

namespace
{

using namespace bench;
using mdkv::as_input;
using mdkv::in;
using mdkv::out;

constexpr auto const& paper  = mdkv::presets::paper;
constexpr auto const& best   = mdkv::presets::by_window;
constexpr auto rungs         = static_cast<index_t>(paper.ratios.size());
constexpr mdkv::budget tenth = mdkv::budget::fraction(1, 10);

using on_device = gpu::backend const&;

/// A layer, and room for all that is made of it.
struct layer
{
    source_layer from;
    index_t tokens    = from.tokens;
    index_t budget    = tenth.in_bytes(from.shape());
    index_t spendable = budget - from.shape().window_bytes();
    device_array<float> bases{2 * heads * dim * dim};        // [2, H, D, D] of keys, of values
    device_array<float> energies{2 * heads * dim};           // [2, H, D]
    device_array<float> loss{heads * rungs * tokens};        // [H, R, N]
    device_array<float> loss_by_lse{heads * rungs * tokens}; // [H, R, N]
    device_array<float> pooled{heads * rungs * tokens};      // [H, R, N]
    device_array<std::uint8_t> rung{heads * tokens};         // [H, N]
    device_array<mdkv::allocation> report{1};
    device_array<index_t> limit = to_device(std::vector<index_t>{spendable});
    // Log-sum-exps of about the right size, as a prefill would hand over; what they are does not change the time.
    device_array<float> lse = to_device(std::vector<float>(
        static_cast<std::size_t>(heads * group * window), std::log(static_cast<float>(tokens)) + 3.0F));
    gpu::cache<element> packed{mdkv::cache_layout{paper.ratios, heads, window, dims}, budget, 0, stream(), memory()};
    gpu::cache<element> compressed{packed.layout(), budget, 0, stream(), memory()};
    gpu::cache<element> compressed_best{
        mdkv::cache_layout{best.ratios, heads, window, dims}, budget, 0, stream(), memory()};

    layer(index_t n, std::uint64_t seed)
        : from{n, seed}
    {}

    [[nodiscard]] auto basis(index_t which) const
    {
        return out(gpu::backend{}, bases.data() + which * heads * dim * dim, heads, dim, dim);
    }
    [[nodiscard]] auto energy(index_t which) const
    {
        return out(gpu::backend{}, energies.data() + which * heads * dim, heads, dim);
    }
    [[nodiscard]] auto losses(device_array<float> const& of) const
    {
        return out(gpu::backend{}, of.data(), heads, rungs, tokens);
    }
};

void fit_basis(on_device on, layer& x)
{
    mdkv::fit_basis(on, x.from.view().keys, x.basis(0), x.energy(0));
    mdkv::fit_basis(on, x.from.view().values, x.basis(1), x.energy(1));
}

void score(on_device on, layer& x, mdkv::score_options<gpu::backend> const& options, device_array<float> const& loss)
{
    auto const from = x.from.view();
    mdkv::score(on, from.queries, from.keys, from.values, from.window_keys, as_input(x.basis(0)), as_input(x.basis(1)),
        paper.ratios, options, x.losses(loss));
}

void score_by_lse(on_device on, layer& x)
{
    score(on, x, {.lse = in(on, x.lse.data(), heads * group, window)}, x.loss_by_lse);
}

void pool(on_device on, layer& x)
{
    mdkv::pool(on, as_input(x.losses(x.loss)), paper.pooling, x.losses(x.pooled));
}

void allocate(on_device on, layer& x)
{
    mdkv::allocate(on, as_input(x.losses(x.pooled)), mdkv::rung_costs{paper.ratios, dims, index_t{sizeof(element)}},
        in(on, x.limit.data(), 1), {}, out(on, x.rung.data(), heads, x.tokens), out(on, x.report.data(), 1));
}

void pack(on_device on, layer& x)
{
    auto const from = x.from.view();
    mdkv::pack(on, from.keys, from.values, from.window_keys, from.window_values, as_input(x.basis(0)),
        as_input(x.basis(1)), in(on, x.rung.data(), heads, x.tokens), x.packed.view());
}

void compress(on_device on, layer& x, mdkv::preset const& by, gpu::cache<element>& to)
{
    auto options          = by.options<gpu::backend>(tenth);
    options.on_non_finite = mdkv::non_finite::unchecked;
    mdkv::compressed_layer<element, mdkv::space::device> destination{to.view(), x.report.data()};
    mdkv::compress(on, x.from.view(), by.ratios, options, destination);
}

struct stage
{
    std::string name;
    std::function<void(on_device, layer&)> call;
    double bytes; ///< of a layer, that it has to read or write at least
};

/// In the order in which they need each other.
[[nodiscard]] std::vector<stage> stages_of(layer const& x)
{
    auto const tokens = static_cast<double>(x.from.keys.bytes() + x.from.values.bytes());
    auto const losses = static_cast<double>(x.loss.bytes());
    auto const kept   = static_cast<double>(x.budget);
    return {{"stage/fit_basis", fit_basis, tokens},
        {"stage/score", [](on_device on, layer& l) { score(on, l, {}, l.loss); }, 1.5 * tokens + losses},
        {"stage/score_by_lse", score_by_lse, 1.5 * tokens + losses}, {"stage/pool", pool, 2 * losses},
        {"stage/allocate", allocate, losses}, {"stage/pack", pack, 2 * kept},
        {"compress/paper", [](on_device on, layer& l) { compress(on, l, paper, l.compressed); }, 2.5 * tokens + kept},
        {"compress/best", [](on_device on, layer& l) { compress(on, l, best, l.compressed_best); },
            1.5 * tokens + kept}};
}

void measure_at(index_t tokens, stopwatch const& clock, record& results)
{
    std::deque<layer> layers;
    layers.emplace_back(tokens, std::uint64_t{1});
    index_t const count = layers_beyond_cache(layers[0].from.keys.bytes() + layers[0].from.values.bytes());
    for (index_t i = 1; i < count; ++i) { layers.emplace_back(tokens, static_cast<std::uint64_t>(i + 1)); }
    std::vector<stage> const stages = stages_of(layers[0]);
    std::vector<work> works{clock.copy()};
    for (stage const& one : stages)
    {
        works.push_back(
            recorded(count, [&](on_device on, index_t i) { one.call(on, layers[static_cast<std::size_t>(i)]); }));
    }
    auto const times       = clock.medians(works);
    double const bandwidth = 2 * static_cast<double>(clock.size()) / times[0];
    for (std::size_t i = 0; i < stages.size(); ++i)
    {
        fields ratios{{"of_copy", stages[i].bytes / times[i + 1] / bandwidth}};
        if (stages[i].name.starts_with("compress")) { ratios.emplace_back("ms_of_32_layers", 0.032 * times[i + 1]); }
        results.add({stages[i].name, {{"tokens", static_cast<double>(tokens)}, {"layers", static_cast<double>(count)}},
            times[i + 1], stages[i].bytes, ratios});
    }
    mdkv::allocation const chosen = first_of(layers[0].report);
    std::printf("%lld tokens: the last allocation has status %d and spent %lld of %lld bytes\n",
        static_cast<long long>(tokens), static_cast<int>(chosen.status),
        static_cast<long long>(chosen.token_bytes + chosen.charged_bytes), static_cast<long long>(chosen.limit));
}

void measure(record& results)
{
    stopwatch const clock;
    for (index_t const tokens : {8 * 1024, 32 * 1024, 128 * 1024}) { measure_at(tokens, clock, results); }
}

} // namespace

int main(int count, char** arguments)
{
    return run(count, arguments, measure);
}
