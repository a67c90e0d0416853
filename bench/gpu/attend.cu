// Decode attention at 128K tokens: the full cache against the machine's copy bandwidth, and
// compressed caches against the full one, each beside the ratio of their bytes. Which token is at which rung is forced:
// 25, 15 and 60 % of a head's bytes at 16, 32 and 128 coordinates (paper), 60, 25 and 15 % at 4, 8 and 16 bits (bits),
// all tokens at 8 or at 4 bits (int8, int4). With 1 and 8 query heads per KV head: full, int8, int4 and 10 %; with 4, all of
// them.
#include <mdkv/gpu/attend.cuh>

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/stages/pack.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "bench.cuh"
#include "layers.cuh"
#include "stopwatch.cuh"

namespace
{

using namespace bench;

constexpr index_t tokens = 128 * 1024;
constexpr index_t most   = 8; // query heads per KV head

using packed_layer = gpu::cache<element>;

/// What all layers are packed from.
struct prompt
{
    device_array<element> keys   = normal_numbers<element>(heads * tokens * dim, 1, 1.0F); // [H, N, D]
    device_array<element> values = normal_numbers<element>(heads * tokens * dim, 2, 1.0F); // [H, N, D]
    device_array<float> basis    = normal_numbers<float>(heads * dim * dim, 3, 0.088F);    // [H, D, D]
};

/// Layers of one size, and what one decode step writes.
struct rotation
{
    std::string name;
    index_t kv_size;
    std::vector<packed_layer> layers;
    device_array<element> queries = normal_numbers<element>(heads * most * dim, 4, 1.0F); // [H*G, D]
    device_array<element> output{heads * most * dim};                                     // [H*G, D]
    device_array<float> lse{heads * most};                                                // [H*G]

    template <std::size_t R>
    rotation(std::string called, prompt const& from, mdkv::ratio_set const& ratios, std::array<double, R> const& shares,
        index_t kv)
        : name{std::move(called)}
        , kv_size{kv}
    {
        mdkv::cache_layout const layout{ratios, heads, 0, dims};
        auto const chosen = forced_rungs(ratios, shares, tokens, kv);
        gpu::backend const any;
        auto const rung   = mdkv::in(any, chosen.data(), heads, tokens);
        auto const keys   = mdkv::in(any, from.keys.data(), heads, tokens, dim);
        auto const values = mdkv::in(any, from.values.data(), heads, tokens, dim);
        auto const none   = mdkv::in(any, from.keys.data(), heads, 0, dim);
        auto const basis  = mdkv::in(any, from.basis.data(), heads, dim, dim);
        index_t bytes     = 0;
        enqueue([&](gpu::backend const& on) { bytes = mdkv::packed_bytes<element>(on, rung, layout); });
        index_t const count = std::max<index_t>(2, layers_beyond_cache(bytes));
        for (index_t i = 0; i < count; ++i)
        {
            packed_layer& made = layers.emplace_back(layout, bytes, 0, stream(), memory());
            enqueue([&](gpu::backend const& on) {
                mdkv::pack(on, keys, values, none, none, basis, basis, rung, made.view());
            });
        }
    }

    [[nodiscard]] double bytes() const { return static_cast<double>(layers[0].arena_bytes()); }

    /// A decode step of all layers with G query heads per KV head.
    [[nodiscard]] work steps(index_t of_head) const
    {
        index_t const rows = heads * of_head;
        return recorded(static_cast<index_t>(layers.size()), [&, rows](gpu::backend const& on, index_t i) {
            mdkv::attend(on, mdkv::in(on, queries.data(), rows, dim), layers[static_cast<std::size_t>(i)].view(), {},
                mdkv::out(on, output.data(), rows, dim), mdkv::out(on, lse.data(), rows));
        });
    }
};

void measure(record& results)
{
    stopwatch const clock;
    prompt const from;
    std::deque<rotation> caches;
    // A share beyond all tokens: none is left to drop.
    caches.emplace_back("attend/full", from, mdkv::paper_ratios, std::array{0.0, 0.0, 0.0, 2.0}, tokens);
    for (index_t const kv : {index_t{512}, index_t{1024}, tokens / 20, tokens / 10})
    {
        caches.emplace_back("attend/paper", from, mdkv::paper_ratios, std::array{0.0, 0.25, 0.15, 0.60}, kv);
        caches.emplace_back("attend/bits", from, mdkv::bit_ratios, std::array{0.0, 0.60, 0.25, 0.15}, kv);
    }
    caches.emplace_back("attend/int8", from, mdkv::bit_ratios, std::array{0.0, 0.0, 2.0, 0.0}, tokens);
    caches.emplace_back("attend/int4", from, mdkv::bit_ratios, std::array{0.0, 2.0, 0.0, 0.0}, tokens);
    struct step
    {
        rotation const& cache;
        index_t of_head;
    };
    std::vector<step> steps;
    std::vector<work> works{clock.copy()};
    for (index_t const of_head : {group, index_t{1}, most})
    {
        for (rotation const& cache : caches)
        {
            if (of_head != group && cache.kv_size < tokens / 10) { continue; }
            steps.push_back({cache, of_head});
        }
    }
    for (auto const& [cache, of_head] : steps) { works.push_back(cache.steps(of_head)); }

    auto const times       = clock.medians(works);
    double const bandwidth = 2 * static_cast<double>(clock.size()) / times[0];
    double full            = 0; // time of the full cache with as many query heads
    for (std::size_t i = 0; i < steps.size(); ++i)
    {
        auto const& [cache, of_head] = steps[i];
        double const time            = times[i + 1];
        if (cache.name == "attend/full") { full = time; }
        double const speedup    = full / time;
        double const byte_ratio = caches[0].bytes() / cache.bytes();
        fields ratios{{"of_copy", cache.bytes() / time / bandwidth}};
        if (cache.name != "attend/full")
        {
            ratios.insert(
                ratios.end(), {{"over_full", speedup}, {"byte_ratio", byte_ratio}, {"of_ideal", speedup / byte_ratio}});
        }
        results.add({cache.name,
            {{"tokens", tokens}, {"kv_size", static_cast<double>(cache.kv_size)},
                {"group", static_cast<double>(of_head)}, {"layers", static_cast<double>(cache.layers.size())}},
            time, cache.bytes(), ratios});
    }
}

} // namespace

int main(int count, char** arguments)
{
    return run(count, arguments, measure);
}
