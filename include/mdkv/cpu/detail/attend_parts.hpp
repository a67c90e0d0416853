/// \file attend_parts.hpp: how attend cuts a packed cache: the runs of a head, parts of equal bytes, what each part leaves (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/detail/attention_kernels.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/cpu/width.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/softmax.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH::detail
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

/// Tokens attended at a time.
[[nodiscard]] inline index_t block_tokens(mdkv::detail::stored_run const& run) noexcept
{
    if (run.keys.kind != storage::plain) { return quantised_block_tokens; }
    return std::clamp(
        most_block_bytes / run.token_bytes() / part_tokens * part_tokens, least_block_tokens, most_block_tokens);
}

/// The runs of one head that hold tokens, in their order.
struct attend_head
{
    std::array<mdkv::detail::stored_run, max_rungs + 2> runs{};
    std::size_t count = 0;
    index_t bytes     = 0;

    template <element T>
    attend_head(cache_view<T, space::host> const& cache, index_t h)
    {
        for (std::size_t i = 0; i < mdkv::detail::most_runs(cache.layout); ++i)
        {
            runs[count] = mdkv::detail::run_of_head(cache, h, i);
            bytes += runs[count].tokens * runs[count].token_bytes();
            count += runs[count].tokens > 0 ? 1 : 0;
        }
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

/// to = to * by + from * from_by, over n coordinates.
[[gnu::noinline]] inline void combine(float* to, float by, float const* from, float from_by, index_t n) noexcept
{
    for (index_t c = 0; c < n; ++c) { to[c] = to[c] * by + from[c] * from_by; }
}

[[gnu::noinline]] inline void multiply_by(float factor, float* x, index_t n) noexcept
{
    for (index_t c = 0; c < n; ++c) { x[c] *= factor; }
}

/// What one part leaves: per query the softmax state, the sum of full values, that of rotated ones and that of projected
/// ones.
struct attend_state
{
    mdkv::detail::softmax_state* softmax; // [G]
    float* sums;                          // [G, Dv]
    float* rotated;                       // [G, rotated_step]
    float* latent;                        // [G, latent_step]
    index_t value_step;
    index_t rotated_step; // Dv, or 0 where no rung is rotated
    index_t latent_step;

    attend_state(float* memory, index_t group, index_t values, index_t rotated_values, index_t latents)
        : softmax{reinterpret_cast<mdkv::detail::softmax_state*>(memory)}
        , sums{memory + 2 * group}
        , rotated{sums + group * values}
        , latent{rotated + group * rotated_values}
        , value_step{values}
        , rotated_step{rotated_values}
        , latent_step{latents}
    {}

    static_assert(sizeof(mdkv::detail::softmax_state) == 2 * sizeof(float));

    [[nodiscard]] static index_t floats(index_t group, index_t values, index_t rotated_values, index_t latents)
    {
        return tile::round_up(group * (2 + values + rotated_values + latents), 16);
    }

    void clear(index_t group) const
    {
        std::uninitialized_fill_n(softmax, group, mdkv::detail::softmax_state{});
        std::fill_n(sums, group * (value_step + rotated_step + latent_step), 0.0F);
    }

    void scale(index_t g, float factor) const
    {
        multiply_by(factor, sums + g * value_step, value_step);
        multiply_by(factor, rotated + g * rotated_step, rotated_step);
        multiply_by(factor, latent + g * latent_step, latent_step);
    }

    /// Adds another part of the same head.
    void merge(attend_state const& other, index_t group) const
    {
        for (index_t g = 0; g < group; ++g)
        {
            auto const [by, other_by] = softmax[g].merge(other.softmax[g]);
            combine(sums + g * value_step, by, other.sums + g * value_step, other_by, value_step);
            combine(rotated + g * rotated_step, by, other.rotated + g * rotated_step, other_by, rotated_step);
            combine(latent + g * latent_step, by, other.latent + g * latent_step, other_by, latent_step);
        }
    }
};

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH::detail
