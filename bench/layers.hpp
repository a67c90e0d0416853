/// \file layers.hpp: packed layers of Llama-3-8B's shape for the benchmarks: 8 KV heads, 4 query heads each, D = 128, f16
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/pack.hpp>

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

/// One layer's uncompressed keys and values, the same for every head, and bases whose rows have about unit length.
struct source_layer
{
    index_t tokens;
    std::vector<mdkv::half> vectors; // [N, D], keys and values
    std::vector<float> basis;        // [D, D]
    std::vector<std::uint8_t> rung;  // [H, N]
    mdkv::cache_layout layout{mdkv::paper_ratios, heads, 0, {dim, dim}};

    source_layer(index_t n, index_t kv_size)
        : tokens{n}
        , vectors(static_cast<std::size_t>(heads * n * dim))
        , basis(static_cast<std::size_t>(dim * dim))
        , rung{rungs_of(n, kv_size)}
    {
        std::mt19937 random{7};
        std::normal_distribution<float> normal;
        for (mdkv::half& v : vectors) { v = mdkv::narrow<mdkv::half>(normal(random)); }
        for (float& v : basis) { v = normal(random) / std::sqrt(static_cast<float>(dim)); }
    }

    [[nodiscard]] index_t bytes() const
    {
        mdkv::cpu::backend const on;
        return mdkv::packed_bytes<mdkv::half>(on, mdkv::in(on, rung.data(), heads, tokens), layout);
    }

    void pack_into(layer& cache, mdkv::cpu::executor_ref executor = {}) const
    {
        alignas(mdkv::workspace::alignment) std::byte nothing[mdkv::workspace::alignment];
        mdkv::workspace scratch{nothing};
        mdkv::cpu::backend const on{&scratch, executor};
        auto const kv     = mdkv::in(on, vectors.data(), heads, tokens, dim);
        auto const window = mdkv::in(on, static_cast<mdkv::half const*>(nullptr), heads, 0, dim);
        auto const u      = mdkv::in(on, basis.data(), {heads, dim, dim}, {index_t{0}, dim, index_t{1}});
        mdkv::pack(on, kv, kv, window, window, u, u, mdkv::in(on, rung.data(), heads, tokens), cache.view());
    }

    [[nodiscard]] layer packed() const
    {
        layer made{layout, bytes(), 0, &memory()};
        pack_into(made);
        return made;
    }
};

} // namespace bench
