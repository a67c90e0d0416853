// Compression of one layer of 8K, 32K and 128K tokens to a tenth, and its stages one by one. Each finds
// its tokens cold, as many layers take turns; what one stage leaves for the next (bases, losses) may be in the L2 cache,
// as it is between the stages of compress.
#include <mdkv/core/allocation.hpp>
#include <mdkv/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "bench.cuh"
#include "layers.cuh"
#include "stages.cuh"
#include "stopwatch.cuh"

namespace
{

using namespace bench;

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
        {"compress/paper", compress, 2.5 * tokens + kept}, {"compress/by_window", compress_coded, 1.5 * tokens + kept}};
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
