/// \file attend_parts.hpp: how attend cuts a packed cache: the runs of a head, parts of equal bytes, what each part leaves (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/detail/softmax.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>

namespace mdkv::cpu::detail
{

/// Below this many bytes, waking other threads costs more than they save.
inline constexpr index_t serial_bytes = index_t{1} << 20;

/// Smallest piece of work, and the most pieces a cache is cut into (apart from one a head): parts depend on what the
/// cache holds and never on the number of threads, so that results do not either.
inline constexpr index_t part_bytes = index_t{1} << 20;
inline constexpr index_t most_parts = 512;

/// Parts begin at multiples of this many tokens of a run.
inline constexpr index_t part_tokens = 64;

/// Tokens attended at a time: their logits and their rows stay in the nearest cache.
inline constexpr index_t most_block_tokens  = 256;
inline constexpr index_t most_block_bytes   = index_t{1} << 15;
inline constexpr index_t least_block_tokens = 64;

/// Of codes, whose sums have more to finish at the end of a block; their bytes come from the second-level cache.
inline constexpr index_t quantised_block_tokens = 128;

/// Tokens of one head stored alike. Untyped: codes leave what follows them at any address.
struct attend_run
{
    std::byte const* keys     = nullptr;
    std::byte const* values   = nullptr;
    index_t tokens            = 0;
    index_t stored            = 0; // tokens its tiles are laid out for
    index_t key_coordinates   = 0;
    index_t value_coordinates = 0;
    index_t key_bytes         = 0; // of a token
    index_t value_bytes       = 0;
    storage kind              = storage::plain;
    bool projected            = false;
    bool turned               = false;

    [[nodiscard]] index_t token_bytes() const { return key_bytes + value_bytes; }

    [[nodiscard]] index_t block_tokens() const
    {
        if (kind != storage::plain) { return quantised_block_tokens; }
        return std::clamp(
            most_block_bytes / token_bytes() / part_tokens * part_tokens, least_block_tokens, most_block_tokens);
    }
};

/// The runs of one head: those of its rungs, then the exact one, then the tail.
struct attend_head
{
    std::array<attend_run, max_rungs + 2> runs{};
    std::size_t count = 0;
    index_t bytes     = 0;

    template <element T>
    attend_head(cache_view<T, space::host> const& cache, index_t h)
    {
        constexpr index_t element_bytes = sizeof(T);
        cache_layout const& layout      = cache.layout;
        head_entry const& entry         = cache.heads[h];
        for (std::size_t r = 0; r < layout.rungs; ++r)
        {
            if (!layout.own_run(r)) { continue; }
            run_entry const& run = entry.runs[r];
            add({cache.arena + run.keys, cache.arena + run.values, run.tokens, run.tokens, layout.key_coordinates[r],
                layout.value_coordinates[r], layout.key_bytes(r, element_bytes), layout.value_bytes(r, element_bytes),
                layout.kinds[r], layout.projected(r), layout.turned(r)});
        }
        auto const [keys, values] = layout.dims;
        auto const add_exact      = [&](std::byte const* at, std::byte const* value, index_t tokens, index_t stored) {
            add({at, value, tokens, stored, keys, values, keys * element_bytes, values * element_bytes, storage::plain,
                false, false});
        };
        run_entry const& exact = entry.exact;
        add_exact(cache.arena + exact.keys, cache.arena + exact.values, exact.tokens, exact.tokens);
        if (*cache.appended > 0)
        {
            std::byte const* const tail = cache.tail + h * cache.tail_head_bytes();
            add_exact(tail, tail + cache.tail_capacity * keys * element_bytes, *cache.appended, cache.tail_capacity);
        }
    }

private:
    void add(attend_run const& run)
    {
        if (run.tokens == 0) { return; }
        runs[count++] = run;
        bytes += run.tokens * run.token_bytes();
    }
};

/// How the cache's bytes are cut.
struct attend_cut
{
    index_t bytes = 0; ///< stored bytes
    index_t part  = 0; ///< bytes of a part

    explicit attend_cut(index_t total)
        : bytes{total}
        , part{std::max(part_bytes, (total + most_parts - 1) / most_parts)}
    {}

    /// An empty head is one part too: it has a result to write.
    [[nodiscard]] index_t parts(index_t head_bytes) const
    {
        return std::max<index_t>((head_bytes + part - 1) / part, 1);
    }
};

/// What one part leaves: per query the softmax state, the sum of full values, that of turned ones and that of projected
/// ones.
struct attend_state
{
    mdkv::detail::softmax_state* softmax; // [G]
    float* sums;                          // [G, Dv]
    float* turned;                        // [G, turned_step]
    float* latent;                        // [G, latent_step]
    index_t value_step;
    index_t turned_step; // Dv, or 0 where no rung is turned
    index_t latent_step;

    attend_state(float* memory, index_t group, index_t values, index_t turned_values, index_t latents)
        : softmax{reinterpret_cast<mdkv::detail::softmax_state*>(memory)}
        , sums{memory + 2 * group}
        , turned{sums + group * values}
        , latent{turned + group * turned_values}
        , value_step{values}
        , turned_step{turned_values}
        , latent_step{latents}
    {}

    static_assert(sizeof(mdkv::detail::softmax_state) == 2 * sizeof(float));

    [[nodiscard]] static index_t floats(index_t group, index_t values, index_t turned_values, index_t latents)
    {
        return tile::round_up(group * (2 + values + turned_values + latents), 16);
    }

    void clear(index_t group) const
    {
        std::uninitialized_fill_n(softmax, group, mdkv::detail::softmax_state{});
        std::fill_n(sums, group * (value_step + turned_step + latent_step), 0.0F);
    }

    void scale(index_t g, float factor) const
    {
        for (index_t c = 0; c < value_step; ++c) { sums[g * value_step + c] *= factor; }
        for (index_t c = 0; c < turned_step; ++c) { turned[g * turned_step + c] *= factor; }
        for (index_t c = 0; c < latent_step; ++c) { latent[g * latent_step + c] *= factor; }
    }

    /// Adds another part of the same head.
    void merge(attend_state const& other, index_t group) const
    {
        for (index_t g = 0; g < group; ++g)
        {
            auto const by  = softmax[g].merge(other.softmax[g]);
            auto const add = [&](float* to, float const* from, index_t n) {
                for (index_t c = 0; c < n; ++c) { to[c] = to[c] * by.first + from[c] * by.second; }
            };
            add(sums + g * value_step, other.sums + g * value_step, value_step);
            add(turned + g * turned_step, other.turned + g * turned_step, turned_step);
            add(latent + g * latent_step, other.latent + g * latent_step, latent_step);
        }
    }
};

} // namespace mdkv::cpu::detail
