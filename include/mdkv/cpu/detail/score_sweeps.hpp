/// \file score_sweeps.hpp: what score does to one block of tokens: both sweeps, all rungs nested, in register tiles (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/block.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numbers>

// How it works. Query rows lie in vector lanes, tokens are broadcast: a row's softmax state then never crosses lanes, and
// keys are read as they come. Because bases nest, the logits of a wider rung continue the sum of the narrower one. Both
// softmaxes need their normaliser before the first loss, so the keys are read twice: sweep one finds the log-sum-exps of
// the exact softmax (unless the caller has them) and of every projected rung, sweep two adds up the losses. Nothing of
// size rows x tokens exists outside a register tile. Logits are kept in units of log2, with the scale folded into the
// queries.

namespace mdkv::cpu
{

namespace detail
{

/// The rungs as the kernel sees them: which are projected, and where each ends.
struct score_rungs
{
    std::array<std::size_t, max_rungs> index{}; // of the projected rung in the ratio set
    std::array<index_t, max_rungs> keys{};      // coordinates
    std::array<index_t, max_rungs> values{};
    index_t count = 0;

    [[nodiscard]] index_t widest_key() const noexcept
    {
        return count == 0 ? 0 : keys[static_cast<std::size_t>(count - 1)];
    }
    [[nodiscard]] index_t widest_value() const noexcept
    {
        return count == 0 ? 0 : values[static_cast<std::size_t>(count - 1)];
    }
};

template <std::size_t R>
[[nodiscard]] score_rungs projected_rungs(ratio_set<R> const& ratios, index_t key_dim, index_t value_dim) noexcept
{
    score_rungs rungs;
    for (std::size_t r = 0; r < ratios.size(); ++r)
    {
        if (!ratios[r].projected()) { continue; }
        auto const j    = static_cast<std::size_t>(rungs.count++);
        rungs.index[j]  = r;
        rungs.keys[j]   = ratios.coordinates(r, key_dim);
        rungs.values[j] = ratios.coordinates(r, value_dim);
    }
    return rungs;
}

/// Sizes of one call, and where things lie in a head's share of the scratch.
struct score_sizes
{
    static constexpr index_t block = block_rows;

    index_t dim, value_dim, latent, value_latent, query_rows, rows, panels, softmaxes;

    score_sizes(index_t dim_, index_t value_dim_, index_t query_rows_, score_rungs const& rungs) noexcept
        : dim{dim_}
        , value_dim{value_dim_}
        , latent{tile::round_up(rungs.widest_key(), simd::lanes)}
        , value_latent{tile::round_up(rungs.widest_value(), simd::lanes)}
        , query_rows{query_rows_}
        , rows{tile::round_up(query_rows_, tile::width)}
        , panels{rows / tile::width}
        , softmaxes{1 + rungs.count}
    {}

    // Prepared once a head: queries and their latents by panel, transposed bases, visibility, log-sum-exps.
    [[nodiscard]] index_t query_floats() const noexcept { return rows * dim; }
    [[nodiscard]] index_t latent_floats() const noexcept { return rows * latent; }
    [[nodiscard]] index_t key_basis_floats() const noexcept { return dim * latent; }
    [[nodiscard]] index_t value_basis_floats() const noexcept { return value_dim * value_latent; }
    [[nodiscard]] index_t head_floats() const noexcept
    {
        return tile::round_up(
            query_floats() + latent_floats() + key_basis_floats() + value_basis_floats() + softmaxes * rows,
            simd::lanes);
    }

    // Working set of one thread: a block of keys, of their latents, of a value's coordinates, and sums per token.
    [[nodiscard]] index_t sums() const noexcept { return softmaxes * block * simd::lanes; }
    [[nodiscard]] index_t slot_floats() const noexcept
    {
        index_t const widest = std::max(dim, value_dim);
        return tile::round_up(block * widest + block * std::max(latent, value_latent) + sums(), simd::lanes);
    }
};

/// A head's prepared operands.
struct score_head
{
    float* queries;     // [panels, dim, width]     scaled
    float* latents;     // [panels, latent, width]  queries in the key basis
    float* key_basis;   // [dim, latent]            transposed, zero-padded
    float* value_basis; // [value_dim, value_latent]
    float* lse;         // [softmaxes, rows]        log2; exact first, then each projected rung

    score_head(float* memory, score_sizes const& s) noexcept
        : queries{memory}
        , latents{queries + s.query_floats()}
        , key_basis{latents + s.latent_floats()}
        , value_basis{key_basis + s.key_basis_floats()}
        , lse{value_basis + s.value_basis_floats()}
    {}
};

/// One thread's working set.
struct score_slot
{
    float* rows;    // [block, dim or value_dim]
    float* latents; // [block, latent or value_latent]
    float* sums;    // [softmaxes, block, lanes]

    score_slot(float* memory, score_sizes const& s) noexcept
        : rows{memory}
        , latents{rows + score_sizes::block * std::max(s.dim, s.value_dim)}
        , sums{latents + score_sizes::block * std::max(s.latent, s.value_latent)}
    {}
};

template <element T>
void prepare_head(in_view<T, 3, backend> const& queries, in_view<float, 3, backend> const& key_basis,
    in_view<float, 3, backend> const& value_basis, index_t head, float scale, score_rungs const& rungs,
    score_sizes const& s, score_head const& h) noexcept
{
    index_t const per_head = queries.extent(1); // Q
    std::fill_n(h.key_basis, s.key_basis_floats(), 0.0F);
    for (index_t c = 0; c < rungs.widest_key(); ++c)
    {
        for (index_t d = 0; d < s.dim; ++d) { h.key_basis[d * s.latent + c] = key_basis(head, c, d); }
    }
    std::fill_n(h.value_basis, s.value_basis_floats(), 0.0F);
    for (index_t c = 0; c < rungs.widest_value(); ++c)
    {
        for (index_t d = 0; d < s.value_dim; ++d) { h.value_basis[d * s.value_latent + c] = value_basis(head, c, d); }
    }
    float const to_log2 = scale * std::numbers::log2e_v<float>;
    std::fill_n(h.queries, s.query_floats(), 0.0F);
    index_t const group = s.query_rows / per_head;
    for (index_t row = 0; row < s.query_rows; ++row)
    {
        T const* const q =
            queries.data_handle() + queries.mapping()(head * group + row / per_head, row % per_head, index_t{0});
        float* const panel = h.queries + row / tile::width * s.dim * tile::width + row % tile::width;
        for (index_t d = 0; d < s.dim; ++d)
        {
            T value; // from any address
            std::memcpy(&value, q + d, sizeof value);
            panel[d * tile::width] = widen(value) * to_log2;
        }
    }
    for (index_t p = 0; p < s.panels; ++p)
    {
        float const* const panel = h.queries + p * s.dim * tile::width;
        float* const latent      = h.latents + p * s.latent * tile::width;
        for (index_t c = 0; c < s.latent; c += tile::rows)
        {
            tile::accumulators<tile::vectors> acc;
            tile::clear(acc);
            tile::multiply_add(h.key_basis + c, 1, s.latent, panel, tile::width, s.dim, acc);
            tile::unroll<tile::rows>([&](auto i) {
                tile::unroll<tile::vectors>(
                    [&](auto v) { simd::store(latent + (c + i) * tile::width + v * simd::lanes, acc[i][v]); });
            });
        }
    }
}

/// Last token each query row may see, and what follows from it. Rows that only pad the last panel see everything; their
/// log-sum-exp is set so high that they weigh nothing.
class visibility
{
public:
    visibility(index_t first_query, index_t per_head) noexcept
        : first_query_{first_query}
        , per_head_{per_head}
    {}

    /// Every row sees tokens below this.
    [[nodiscard]] bool all_see(index_t last_token) const noexcept { return last_token <= first_query_; }
    [[nodiscard]] bool none_sees(index_t first_token) const noexcept
    {
        return first_token > first_query_ + per_head_ - 1;
    }

    /// Puts -infinity where a row may not see tokens token, token + 1, ... of the tile, and past its `count` tokens.
    [[gnu::always_inline]] void apply(
        index_t token, index_t count, index_t panel, tile::accumulators<tile::vectors>& logits) const noexcept
    {
        if (all_see(token + tile::rows - 1) && count >= tile::rows) [[likely]] { return; }
        tile::accumulators<tile::vectors> memory; // a copy, so that the logits themselves may stay in registers
        tile::copy<tile::vectors>(logits, memory);
        hide(token, panel, memory);
        hide_from(count, memory);
        tile::copy<tile::vectors>(memory, logits);
    }

private:
    [[gnu::noinline]] void hide(index_t token, index_t panel, tile::accumulators<tile::vectors>& logits) const noexcept
    {
        for (int v = 0; v < tile::vectors; ++v)
        {
            simd::floats last; // relative to `token`, so that it is small enough for float and int
            for (int lane = 0; lane < simd::lanes; ++lane)
            {
                index_t const row = panel * tile::width + v * simd::lanes + lane;
                index_t const see = first_query_ + row % per_head_ - token;
                last[lane]        = static_cast<float>(std::clamp<index_t>(see, -1, tile::rows));
            }
            for (int i = 0; i < tile::rows; ++i)
            {
                logits[i][v] = last < simd::broadcast(static_cast<float>(i))
                                   ? simd::broadcast(-std::numeric_limits<float>::infinity())
                                   : logits[i][v];
            }
        }
    }

    [[gnu::noinline]] static void hide_from(index_t count, tile::accumulators<tile::vectors>& logits) noexcept
    {
        for (int i = static_cast<int>(std::max<index_t>(count, 0)); i < tile::rows; ++i)
        {
            for (auto& vector : logits[i]) { vector = simd::broadcast(-std::numeric_limits<float>::infinity()); }
        }
    }

    index_t first_query_;
    index_t per_head_; // Q
};

/// Running maximum and sum of one softmax for the rows of one panel; the sum is of 2^(logit - maximum).
struct lse_state
{
    float* maximum; // [rows]
    float* sum;     // [rows]

    [[gnu::always_inline]] void add(index_t panel, tile::accumulators<tile::vectors> const& logits) const noexcept
    {
        tile::unroll<tile::vectors>([&](auto v) {
            float* const at_maximum = maximum + panel * tile::width + v * simd::lanes;
            float* const at_sum     = sum + panel * tile::width + v * simd::lanes;
            simd::floats m          = simd::load(at_maximum);
            simd::floats highest    = logits[0][v];
            tile::unroll<tile::rows - 1>([&](auto i) { highest = simd::max(highest, logits[i + 1][v]); });
            simd::floats total = simd::load(at_sum);
            if (simd::any(highest > m)) // rare once the first blocks are past
            {
                simd::floats const raised = simd::max(highest, m);
                total *= simd::exp2(m - raised);
                m = raised;
                simd::store(at_maximum, m);
            }
            tile::unroll<tile::rows>([&](auto i) { total += simd::exp2(logits[i][v] - m); });
            simd::store(at_sum, total);
        });
    }
};

/// Starting maximum: lower than any logit, and finite so that differences are numbers.
inline constexpr float lowest_logit = -1e30F;

/// Sweep one over the tokens of one block: adds to the softmaxes' states. `state` is [softmaxes] pairs of [rows].
/// With whole = true the block's keys are stored as they are at every rung (the window).
inline void add_block_lse(score_slot const& slot, index_t first, index_t count, bool exact_needed, bool whole,
    score_rungs const& rungs, score_sizes const& s, score_head const& h, visibility const& see, float* state) noexcept
{
    for (index_t p = 0; p < s.panels; ++p)
    {
        float const* const queries = h.queries + p * s.dim * tile::width;
        float const* const latents = h.latents + p * s.latent * tile::width;
        for (index_t t = 0; t < count; t += tile::rows)
        {
            auto const softmax = [&](index_t i) {
                return lse_state{state + 2 * i * s.rows, state + (2 * i + 1) * s.rows};
            };
            tile::accumulators<tile::vectors> acc;
            if (exact_needed || whole)
            {
                tile::clear(acc);
                tile::multiply_add(slot.rows + t * s.dim, s.dim, 1, queries, tile::width, s.dim, acc);
                see.apply(first + t, count - t, p, acc);
                if (exact_needed) { softmax(0).add(p, acc); }
            }
            if (whole)
            {
                for (index_t j = 0; j < rungs.count; ++j) { softmax(1 + j).add(p, acc); }
                continue;
            }
            tile::clear(acc);
            index_t done = 0;
            for (index_t j = 0; j < rungs.count; ++j)
            {
                index_t const end = rungs.keys[static_cast<std::size_t>(j)];
                tile::multiply_add(slot.latents + t * s.latent + done, s.latent, 1, latents + done * tile::width,
                    tile::width, end - done, acc);
                done = end;
                tile::accumulators<tile::vectors> shown; // the wider rung goes on from the unhidden sums
                tile::copy<tile::vectors>(acc, shown);
                see.apply(first + t, count - t, p, shown);
                softmax(1 + j).add(p, shown);
            }
        }
    }
}

/// Sweep two over the tokens of one block: slot.sums[0] = sum over rows of P, slot.sums[1 + j] = sum of |P' - P| at
/// projected rung j, per token in `lanes` parts.
inline void add_block_differences(score_slot const& slot, index_t first, index_t count, score_rungs const& rungs,
    score_sizes const& s, score_head const& h, visibility const& see) noexcept
{
    auto const at = [&](index_t softmax, index_t token) {
        return slot.sums + (softmax * score_sizes::block + token) * simd::lanes;
    };
    std::fill_n(slot.sums, s.sums(), 0.0F);
    for (index_t p = 0; p < s.panels; ++p)
    {
        float const* const queries = h.queries + p * s.dim * tile::width;
        float const* const latents = h.latents + p * s.latent * tile::width;
        float const* const lse     = h.lse + p * tile::width;
        for (index_t t = 0; t < count; t += tile::rows)
        {
            tile::accumulators<tile::vectors> exact; // logits, then probabilities
            tile::clear(exact);
            tile::multiply_add(slot.rows + t * s.dim, s.dim, 1, queries, tile::width, s.dim, exact);
            see.apply(first + t, tile::rows, p, exact);
            tile::unroll<tile::rows>([&](auto i) {
                simd::floats total = simd::load(at(0, t + i));
                tile::unroll<tile::vectors>([&](auto v) {
                    exact[i][v] = simd::exp2(exact[i][v] - simd::load(lse + v * simd::lanes));
                    total += exact[i][v];
                });
                simd::store(at(0, t + i), total);
            });
            tile::accumulators<tile::vectors> acc;
            tile::clear(acc);
            index_t done = 0;
            for (index_t j = 0; j < rungs.count; ++j)
            {
                index_t const end = rungs.keys[static_cast<std::size_t>(j)];
                tile::multiply_add(slot.latents + t * s.latent + done, s.latent, 1, latents + done * tile::width,
                    tile::width, end - done, acc);
                done = end;
                tile::accumulators<tile::vectors> shown;
                tile::copy<tile::vectors>(acc, shown);
                see.apply(first + t, tile::rows, p, shown);
                float const* const rung_lse = lse + (1 + j) * s.rows;
                tile::unroll<tile::rows>([&](auto i) {
                    simd::floats total = simd::load(at(1 + j, t + i));
                    tile::unroll<tile::vectors>([&](auto v) {
                        total +=
                            simd::abs(simd::exp2(shown[i][v] - simd::load(rung_lse + v * simd::lanes)) - exact[i][v]);
                    });
                    simd::store(at(1 + j, t + i), total);
                });
            }
        }
    }
}

/// |v - v'|, v' being v's leading coordinates in the basis. |v|^2 - |v'|^2, because the basis is orthonormal; but where
/// the two nearly cancel (a thousandth leaves four digits of float's seven) from the difference itself.
[[nodiscard]] inline float distance(float const* value, float squared, float kept, float const* coordinates,
    in_view<float, 3, backend> const& basis, index_t head, index_t count) noexcept
{
    float const missing = squared - kept;
    if (missing > 1e-3F * squared) [[likely]] { return std::sqrt(missing); }
    index_t const dim = basis.extent(2);
    float total       = 0;
    index_t d         = 0;
    for (; d + simd::lanes <= dim; d += simd::lanes)
    {
        simd::floats rest = simd::load(value + d);
        for (index_t c = 0; c < count; ++c)
        {
            rest -= simd::broadcast(coordinates[c]) * simd::load(basis.data_handle() + basis.mapping()(head, c, d));
        }
        total += simd::sum(rest * rest);
    }
    for (; d < dim; ++d)
    {
        float rest = value[d];
        for (index_t c = 0; c < count; ++c) { rest -= coordinates[c] * basis(head, c, d); }
        total += rest * rest;
    }
    return std::sqrt(total);
}

} // namespace detail

} // namespace mdkv::cpu
