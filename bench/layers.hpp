/// \file layers.hpp: packed layers of Llama-3-8B's shape for the benchmarks: 8 KV heads, 4 query heads each, D = 128, f16
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/stages/pack.hpp>

#include "bench.hpp"

namespace bench
{

using mdkv::index_t;

inline constexpr index_t heads = 8;
inline constexpr index_t group = 4;
inline constexpr index_t dim   = 128;

using layer = mdkv::cpu::cache<mdkv::half>;

inline huge_page_resource& memory()
{
    static huge_page_resource resource;
    return resource;
}

/// Tokens at 16, 32 and 128 coordinates take 25, 15 and 60 % of a head's bytes; kv_size 0 keeps every token whole.
[[nodiscard]] inline std::vector<std::uint8_t> rungs_of(index_t tokens, index_t kv_size)
{
    std::mt19937 random{5};
    std::vector<std::uint8_t> rung(static_cast<std::size_t>(heads * tokens), std::uint8_t{3});
    if (kv_size == 0) { return rung; }
    auto const room  = static_cast<double>(kv_size - 32); // a projection of 32 columns takes as much as 32 whole tokens
    auto const share = [&](double part, double coordinates) {
        return static_cast<index_t>(room * part * dim / coordinates);
    };
    index_t const counts[]{0, share(0.25, 16), share(0.15, 32), share(0.60, 128)};
    for (index_t h = 0; h < heads; ++h)
    {
        auto const row = rung.begin() + h * tokens;
        auto at        = row;
        for (std::uint8_t r = 1; r < 4; ++r) { at = std::fill_n(at, counts[r], r); }
        std::fill(at, row + tokens, std::uint8_t{0});
        std::shuffle(row, row + tokens, random);
    }
    return rung;
}

/// Calls body(backend), whose scratch grows and lives on for the next call.
template <class Body>
void with_scratch(Body const& body, mdkv::cpu::executor_ref executor = {})
{
    static mdkv::workspace scratch{mdkv::cpu::host_memory{}};
    body(mdkv::cpu::backend{&scratch, executor});
}

/// Vectors and bases near a normal distribution, drawn from 4,096 of its numbers, because tens of millions of
/// std::normal_distribution's take longer than what is measured. What pack and attend do depends on rungs and sizes; of the
/// numbers they need no more than an ordinary spread.
template <class V>
[[nodiscard]] std::vector<V> normal_numbers(index_t count, float deviation = 1.0F)
{
    std::mt19937 random{7};
    std::normal_distribution<float> normal{0.0F, deviation};
    std::vector<V> drawn(4096);
    for (V& v : drawn) { v = mdkv::narrow<V>(normal(random)); }
    std::vector<V> all(static_cast<std::size_t>(count));
    std::uint64_t state = 1;
    for (V& v : all)
    {
        state = state * 6364136223846793005U + 1442695040888963407U;
        v     = drawn[state >> 52U];
    }
    return all;
}

/// One layer's uncompressed keys and values, and bases, the same for every head, whose rows have about unit length.
struct source_layer
{
    index_t tokens;
    std::vector<mdkv::half> vectors; // [N, D], keys and values
    std::vector<float> basis;        // [D, D]
    std::vector<std::uint8_t> rung;  // [H, N]
    mdkv::cache_layout layout{mdkv::paper_ratios, heads, 0, {dim, dim}};

    source_layer(index_t n, index_t kv_size)
        : tokens{n}
        , vectors{normal_numbers<mdkv::half>(heads * n * dim)}
        , basis{normal_numbers<float>(dim * dim, 1.0F / std::sqrt(static_cast<float>(dim)))}
        , rung{rungs_of(n, kv_size)}
    {}

    [[nodiscard]] index_t bytes() const
    {
        index_t bytes = 0;
        with_scratch([&](mdkv::cpu::backend const& on) {
            bytes = mdkv::packed_bytes<mdkv::half>(on, mdkv::in(on, rung.data(), heads, tokens), layout);
        });
        return bytes;
    }

    void pack_into(layer& cache, mdkv::cpu::executor_ref executor = {}) const
    {
        with_scratch(
            [&](mdkv::cpu::backend const& on) {
                auto const kv     = mdkv::in(on, vectors.data(), heads, tokens, dim);
                auto const window = mdkv::in(on, static_cast<mdkv::half const*>(nullptr), heads, 0, dim);
                auto const u      = mdkv::in(on, basis.data(), {heads, dim, dim}, {index_t{0}, dim, index_t{1}});
                mdkv::pack(on, kv, kv, window, window, u, u, mdkv::in(on, rung.data(), heads, tokens), cache.view());
            },
            executor);
    }

    [[nodiscard]] layer packed(mdkv::cpu::executor_ref executor = {}) const
    {
        layer made{layout, bytes(), 0, &memory()};
        pack_into(made, executor);
        return made;
    }
};

} // namespace bench
