// Where a call of attend spends its time: blocks stamp the multiprocessor's clock and the GPU's timer at points of the kernel.
// Each case has numbers of tokens beside the next multiples of 16, which have no last tile to gather; a cold L2 cache; code of the
// same storage is warm from the call before. Says the 50th, 90th and 100th percentile of cycles since a block's begin, and the
// microseconds from the first block's begin to the last one's end.
#define MDKV_STAMPS
#include <mdkv/gpu/attend.cuh>

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/stages/pack.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include "bench.cuh"
#include "layers.cuh"
#include "stopwatch.cuh"

namespace
{

using namespace bench;

constexpr int points = 6;
constexpr std::array<char const*, points> names{"begin", "slice", "copies", "queries", "sums", "end"};

struct stamped_case
{
    char const* name;
    mdkv::ratio_set ratios;
    std::array<index_t, 4> tokens; // of a head at each rung
};

/// A layer with so many tokens of each rung in every head.
[[nodiscard]] gpu::cache<element> packed(stamped_case const& of)
{
    index_t all = 0;
    for (index_t const n : of.tokens) { all += n; }
    std::vector<std::uint8_t> chosen;
    for (index_t h = 0; h < heads; ++h)
    {
        for (std::size_t r = 0; r < of.tokens.size(); ++r)
        {
            chosen.insert(chosen.end(), static_cast<std::size_t>(of.tokens[r]), static_cast<std::uint8_t>(r));
        }
    }
    auto const rungs  = to_device(chosen);
    auto const keys   = normal_numbers<element>(heads * all * dim, 1, 1.0F);
    auto const values = normal_numbers<element>(heads * all * dim, 2, 1.0F);
    auto const basis  = normal_numbers<float>(heads * dim * dim, 3, 0.088F);
    mdkv::cache_layout const layout{of.ratios, heads, 0, dims};
    gpu::backend const any;
    auto const rung = mdkv::in(any, rungs.data(), heads, all);
    index_t bytes   = 0;
    enqueue([&](gpu::backend const& on) { bytes = mdkv::packed_bytes<element>(on, rung, layout); });
    gpu::cache<element> made{layout, bytes, 0, stream(), memory()};
    enqueue([&](gpu::backend const& on) {
        auto const none = mdkv::in(on, keys.data(), heads, 0, dim);
        auto const turn = mdkv::in(on, basis.data(), heads, dim, dim);
        mdkv::pack(on, mdkv::in(on, keys.data(), heads, all, dim), mdkv::in(on, values.data(), heads, all, dim), none,
            none, turn, turn, rung, made.view());
    });
    return made;
}

void measure(record& results)
{
    constexpr index_t most_blocks = 4096;
    stopwatch const clock;
    device_array<long long> const memory_of{most_blocks * gpu::device::stamps * 2};
    device_array<element> const queries = normal_numbers<element>(heads * group * dim, 4, 1.0F);
    device_array<element> const output{heads * group * dim};
    device_array<float> const lse{heads * group};
    std::vector<stamped_case> const cases{{"bits .4 %", mdkv::bit_ratios, {0, 1092, 241, 77}},
        {"bits .4 %, whole tiles", mdkv::bit_ratios, {0, 1104, 256, 80}},
        {"paper .4 %", mdkv::paper_ratios, {0, 955, 285, 285}}, {"16 bits", mdkv::bit_ratios, {0, 0, 0, 523}},
        {"16 bits, whole tiles", mdkv::bit_ratios, {0, 0, 0, 528}}, {"4 bits", mdkv::bit_ratios, {0, 1835, 0, 0}},
        {"4 bits, whole tiles", mdkv::bit_ratios, {0, 1840, 0, 0}},
        {"bits 10 %", mdkv::bit_ratios, {0, 27961, 6169, 1965}},
        {"bits 10 %, whole tiles", mdkv::bit_ratios, {0, 27968, 6176, 1968}},
        {"4 bits of 131,072", mdkv::bit_ratios, {0, 131072, 0, 0}},
        {"16 bits of 131,072", mdkv::bit_ratios, {0, 0, 0, 131072}}};
    for (stamped_case const& one : cases)
    {
        gpu::cache<element> cache = packed(one);
        auto const call           = recorded(1, [&](gpu::backend const& on, index_t) {
            mdkv::attend(on, mdkv::in(on, queries.data(), heads * group, dim), cache.view(), {},
                          mdkv::out(on, output.data(), heads * group, dim), mdkv::out(on, lse.data(), heads * group));
        });
        double const time         = clock.medians({call})[0]; // without stamps
        std::vector<long long> stamps(static_cast<std::size_t>(memory_of.size()));
        long long* to = memory_of.data();
        expects_success(cudaMemcpyToSymbol(gpu::device::stamp_memory, &to, sizeof to), "cudaMemcpyToSymbol");
        expects_success(cudaMemsetAsync(to, 0, stamps.size() * sizeof(long long), stream()), "cudaMemsetAsync");
        static_cast<void>(clock.medians({call}));
        to = nullptr;
        expects_success(cudaMemcpyToSymbol(gpu::device::stamp_memory, &to, sizeof to), "cudaMemcpyToSymbol");
        gpu::copy(gpu::backend{stream(), nullptr}, memory_of.data(), stamps.data(), memory_of.bytes());
        std::array<std::vector<double>, points> cycles;
        long long first = INT64_MAX, last = 0;
        for (std::size_t b = 0; b < most_blocks; ++b)
        {
            auto const at = [&](std::size_t point, std::size_t which) {
                return stamps[(b * gpu::device::stamps + point) * 2 + which];
            };
            if (at(points - 1, 0) == 0) { continue; } // no slice was left for it
            first = std::min(first, at(0, 1));
            last  = std::max(last, at(points - 1, 1));
            for (std::size_t p = 0; p < points; ++p) { cycles[p].push_back(static_cast<double>(at(p, 0) - at(0, 0))); }
        }
        double const slices = static_cast<double>(last - first) / 1e3;
        fields figures{{"slices_us", slices}, {"blocks", static_cast<double>(cycles[0].size())}};
        for (std::size_t p = 1; p < points; ++p)
        {
            std::sort(cycles[p].begin(), cycles[p].end());
            for (std::size_t const hundredth : {50, 90, 100})
            {
                figures.push_back({std::string{names[p]} + "_" + std::to_string(hundredth),
                    cycles[p][(cycles[p].size() - 1) * hundredth / 100]});
            }
        }
        results.add({std::string{"stamps/"} + one.name, {{"tokens", static_cast<double>(one.tokens[1])}}, time,
            static_cast<double>(cache.arena_bytes()), figures});
    }
}

} // namespace

int main(int count, char** arguments)
{
    return run(count, arguments, measure);
}
