/// \file score_block.hpp: both of score's sweeps over one block of tokens on the CPU, all rungs, in register tiles (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/coded_rows.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/team.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

// How it works. Query rows lie in vector lanes and tokens are broadcast: a row's softmax state then never crosses lanes,
// and keys are read as they are stored. Because bases nest, the logits of a wider projected rung continue the sums of the
// narrower one; codes of whole vectors need no product. Every softmax needs its normaliser before the first loss, so the
// keys are read twice: sweep one finds the log-sum-exps of the exact softmax (unless the caller has them) and of every
// projected one, sweep two adds up the losses. Nothing of size rows x tokens exists outside one tile, except for few
// tokens, whose exact logits sweep one leaves for sweep two. Logits are in units of log2; the scale is folded into the
// queries, and a query's weight into its log-sum-exps.

namespace MDKV_NAMESPACE::cpu::detail
{

using mdkv::detail::score_head;
using mdkv::detail::score_plan;
using mdkv::detail::score_rung;
using mdkv::detail::score_states;

/// The working set of a thread: a block of tokens and what is computed from it.
struct score_scratch
{
    float* rows;    // [block, dim or value_dim]
    float* rotated; // [block, dim or value_dim]              rows, rotated
    float* latents; // [block, key_columns or value_columns]  coordinates in the basis
    float* sums;    // [softmaxes, block, lanes]              totals over rows of P, then of |P' - P|
    float* spread;  // [rungs, block]                         variance of a logit, if codes were a whole range apart

    score_scratch(mdkv::detail::carver& memory, score_plan const& plan) noexcept
        : rows{memory.take<float>(tile::block * (std::max)(plan.dim, plan.value_dim))}
        , rotated{memory.take<float>(plan.rotates ? tile::block * (std::max)(plan.dim, plan.value_dim) : 0)}
        , latents{memory.take<float>(tile::block * (std::max)(plan.key_columns(), plan.value_columns()))}
        , sums{memory.take<float>(plan.softmaxes * tile::block * simd::lanes)}
        , spread{memory.take<float>(plan.count * tile::block)}
    {}

    [[nodiscard]] float* sum(index_t softmax, index_t token) const noexcept
    {
        return sums + (softmax * tile::block + token) * simd::lanes;
    }
};

using score_tile = tile::accumulators<tile::vectors>; // [tokens][vectors of rows]

/// Adds logits of one panel to its rows' running largest logits and sums of 2^(logit - largest).
inline void add_to_state(float* largest_logits, float* sums, score_tile const& logits) noexcept
{
    for (int v = 0; v < tile::vectors; ++v)
    {
        float* const at_largest = largest_logits + v * simd::lanes;
        float* const at_sum     = sums + v * simd::lanes;
        simd::floats largest    = simd::load(at_largest);
        simd::floats highest    = logits[0][v];
        for (int i = 1; i < tile::rows; ++i) { highest = simd::larger(highest, logits[i][v]); }
        simd::floats total = simd::load(at_sum);
        if (simd::any(highest > largest)) // rare once the first blocks are past
        {
            simd::floats const raised = simd::larger(highest, largest);
            total *= simd::exp2(largest - raised);
            largest = raised;
            simd::store(at_largest, largest);
        }
        for (int i = 0; i < tile::rows; ++i) { total += simd::exp2(logits[i][v] - largest); }
        simd::store(at_sum, total);
    }
}

/// Adds |P' - P| of one tile to its tokens' totals [tile::rows, lanes], from logits and log-sum-exps of P'. If `is_exact`,
/// both belong to P itself: then P is added, and stored in `exact`.
template <row_norm Norm>
void add_differences(score_tile const& logits, float const* lse, bool is_exact, score_tile& exact, float* sums) noexcept
{
    for (int i = 0; i < tile::rows; ++i)
    {
        simd::floats total = simd::load(sums + i * simd::lanes);
        for (int v = 0; v < tile::vectors; ++v)
        {
            // A NaN log-sum-exp gives a NaN; one that is far too low gives infinity.
            simd::floats const power = logits[i][v] - simd::load(lse + v * simd::lanes);
            simd::floats const p     = simd::exp2(simd::smaller(simd::broadcast(128.0F), power));
            total = mdkv::detail::with_row<Norm>(total, is_exact ? p : simd::magnitude(p - exact[i][v]));
            if (is_exact) { exact[i][v] = p; }
        }
        simd::store(sums + i * simd::lanes, total);
    }
}

/// Multiplies a head's queries with its key basis.
inline void multiply_queries(score_plan const& plan, score_head const& h) noexcept
{
    index_t const columns = plan.key_columns();
    for (index_t p = 0; p * tile::width < plan.rows; ++p)
    {
        for (index_t c = 0; c < columns; c += tile::rows)
        {
            score_tile latents{};
            tile::multiply_add<tile::vectors>(
                h.key_basis + c, 1, columns, h.queries + p * plan.dim * tile::width, tile::width, plan.dim, latents);
            std::memcpy(h.latents + (p * columns + c) * tile::width, latents, sizeof latents);
        }
    }
}

/// |v - v'|^2, v' having v's leading coordinates in the basis; their squares add up to `kept`.
[[nodiscard]] MDKV_OUTLINE inline float squared_rest(float const* value, float squared, float kept,
    float const* coordinates, in_view<float, 3, backend> const& basis, index_t head, index_t count) noexcept
{
    float const missing = squared - kept;
    if (!mdkv::detail::cancels(missing, squared)) [[likely]] { return missing; }
    index_t const dim = basis.extent(2);
    float total       = 0;
    for (index_t d = 0; d < dim; d += tile::block)
    {
        index_t const n = (std::min)(tile::block, dim - d);
        float rest[tile::block];
        std::copy_n(value + d, n, rest);
        for (index_t c = 0; c < count; ++c)
        {
            float const* const direction = basis.row(head, c) + d;
            for (index_t i = 0; i < n; ++i) { rest[i] -= coordinates[c] * direction[i]; }
        }
        total += tile::dot(rest, rest, n);
    }
    return total;
}

/// A block of a head's tokens, multiplied with the head's queries tile by tile.
struct score_block
{
    score_scratch const& scratch;
    score_plan const& plan;
    score_head const& head;
    index_t first; ///< first token
    index_t count;

    /// Finds the basis coordinates of the keys in scratch.rows: once a block, for any number of queries.
    void project_keys() const noexcept
    {
        if (plan.latent == 0) { return; }
        tile::multiply_block(scratch.rows, plan.dim, head.key_basis, plan.key_columns(), scratch.latents);
    }

    /// Sweep one: adds the logits to the states of a head's split, to the exact softmax's only if `exact_needed`. If
    /// `exact_keys`, all rungs store the block's keys as they are (the window).
    void add_states(
        bool exact_needed, bool exact_keys, score_states const& states, index_t of, index_t split) const noexcept
    {
        int const begin = exact_needed ? 0 : 1;
        for_each_tile([&](index_t t, index_t p) {
            score_tile sums;
            score_tile shown;
            score_tile const* exact = exact_keys ? &multiply(0, t, p, sums, shown) : nullptr;
            for (int i = begin; i < plan.softmaxes; ++i)
            {
                score_tile const& logits = exact_keys ? *exact : multiply(i, t, p, sums, shown);
                if (i == 0 && !exact_keys && plan.more > 0) { std::memcpy(kept_logits(t, p), logits, sizeof logits); }
                add_to_state(
                    states.largest(of, split, i) + p * tile::width, states.sum(of, split, i) + p * tile::width, logits);
            }
        });
    }

    /// Sweep two: scratch.sums[0] = total of P over the rows, scratch.sums[i] = total of |P' - P| of softmax i, per token in
    /// `lanes` partial sums.
    void add_losses() const noexcept
    {
        std::fill_n(scratch.sums, scratch.sum(plan.softmaxes, 0) - scratch.sums, 0.0F);
#if !defined(__CUDA_ARCH__) // nvcc reads this for the device, too, which knows no vectors
        for_each_tile([&](index_t t, index_t p) {
            score_tile exact{};
            score_tile sums;
            score_tile shown;
            for (int i = 0; i < plan.softmaxes; ++i)
            {
                score_tile const* logits = &shown;
                if (i == 0 && plan.more > 0) { std::memcpy(shown, kept_logits(t, p), sizeof shown); }
                else { logits = &multiply(i, t, p, sums, shown); }
                mdkv::detail::with_norm(plan.norm, [&](auto norm) {
                    add_differences<norm>(
                        *logits, head.lse + i * plan.rows + p * tile::width, i == 0, exact, scratch.sum(i, t));
                });
            }
        });
#endif
    }

    /// Sweep two: finds scratch.spread of the keys, of those in scratch.rows rotated the way pack rotates them, and of their
    /// coordinates in scratch.latents.
    void add_noise() const noexcept
    {
        index_t const dim         = plan.dim;
        float const* const mean   = head.channels;
        float const* const factor = mean + dim;
        for (index_t i = 0; i < count; ++i)
        {
            float const* const key = scratch.rows + i * dim;
            float* const x         = scratch.rotated;
            for (index_t d = 0; plan.rotates && d < dim; ++d) { x[d] = (key[d] - mean[d]) * factor[d]; }
            if (plan.rotates) { hadamard_row(x, dim); }
            float const spread = plan.rotates ? spread_of(x, dim, factor + 2 * dim) : 0.0F;
            for (int r = 0; r < plan.count; ++r)
            {
                score_rung const& u                 = plan.rungs[r];
                float const* const latents          = scratch.latents + i * plan.key_columns();
                scratch.spread[r * tile::block + i] = !u.projected ? spread
                                                      : !u.quantised()
                                                          ? 0.0F
                                                          : spread_of(latents, u.keys, head.noise + r * plan.groups());
            }
        }
    }

    /// Writes the losses of the block's tokens at every rung, from scratch.sums and the values in scratch.rows. Rotation keeps
    /// lengths, so rotated values are compared without rotating them back.
    void write_losses(
        in_view<float, 3, backend> const& basis, index_t of, out_view<float, 3, backend> const& loss) const noexcept
    {
        index_t const columns = plan.value_columns();
        if (columns > 0)
        {
            tile::multiply_block(scratch.rows, plan.value_dim, head.value_basis, columns, scratch.latents);
        }
        for (index_t i = 0; plan.rotates && i < count; ++i)
        {
            float const* const value = scratch.rows + i * plan.value_dim;
            float* const x           = scratch.rotated + i * plan.value_dim;
            for (index_t d = 0; d < plan.value_dim; ++d) { x[d] = value[d] - head.means[d]; }
            hadamard_row(x, plan.value_dim);
        }
        auto const total = [&](int softmax, index_t i) {
            auto const join = [&](simd::floats a, [[maybe_unused]] simd::floats b) {
#if !defined(__CUDA_ARCH__)
                a = mdkv::detail::joined_rows(plan.norm, a, b);
#endif
                return a;
            };
            return simd::over_lanes(simd::load(scratch.sum(softmax, i)), join);
        };
        float mass[tile::block];
        float squared[tile::block]; // |v|^2
        float length[tile::block];  // |v|
        float kept[tile::block]{};  // part of |v|^2 in the coordinates of the rung before
        for (index_t i = 0; i < count; ++i)
        {
            mass[i] = mdkv::detail::mass_of(plan, total(0, i));
            squared[i] =
                tile::dot(scratch.rows + i * plan.value_dim, scratch.rows + i * plan.value_dim, plan.value_dim);
            length[i] = std::sqrt(squared[i]);
            if (plan.terms != nullptr) { plan.term(of, 0)[first + i] = mass[i]; }
            if (plan.dropped >= 0)
            {
                loss(of, plan.dropped, first + i) = mdkv::detail::dropped_loss(mass[i], length[i]);
            }
            if (plan.full >= 0) { loss(of, plan.full, first + i) = 0.0F; }
        }
        for (int r = 0; r < plan.count; ++r)
        {
            score_rung const& u     = plan.rungs[r];
            float const* const from = u.projected ? scratch.latents : scratch.rotated;
            index_t const step      = u.projected ? columns : plan.value_dim;
            float roundings[tile::block]{}; // |v - v'|^2 by codes
            if (u.quantised()) { find_roundings(from, count, step, u.values, u.kind, roundings); }
            for (index_t i = 0; i < count; ++i)
            {
                float const* const x = from + i * step;
                float missing        = roundings[i];
                if (u.projected)
                {
                    kept[i] = u.kept(kept[i], tile::dot(x + u.kept_from, x + u.kept_from, u.values - u.kept_from));
                    missing +=
                        squared_rest(scratch.rows + i * plan.value_dim, squared[i], kept[i], x, basis, of, u.values);
                }
                mdkv::detail::write_loss(plan, r, loss, of, first + i, total(u.softmax, i), mass[i], length[i], missing,
                    scratch.spread[r * tile::block + i]);
            }
        }
    }

private:
    /// Weighted sum of the squared ranges of the groups of n coordinates.
    [[nodiscard]] static float spread_of(float const* x, index_t n, float const* weights) noexcept
    {
        float sum = 0;
        for (index_t begin = 0; begin < n; begin += quantised_group)
        {
            auto const [low, high] = bounds_of(x + begin, (std::min)(quantised_group, n - begin));
            sum += (high - low) * (high - low) * weights[begin / quantised_group];
        }
        return sum;
    }

    template <class Body>
    void for_each_tile(Body const& body) const noexcept
    {
        for (index_t p = 0; p * tile::width < plan.rows; ++p)
        {
            for (index_t t = 0; t < count && !plan.none_sees(first + t, p); t += tile::rows) { body(t, p); }
        }
    }

    /// Exact logits of a tile, left by sweep one for sweep two if plan.more makes room: [panels, tokens, width].
    [[nodiscard]] float* kept_logits(index_t t, index_t p) const noexcept
    {
        return head.more + (p * (plan.more / plan.rows) + first + t) * tile::width;
    }

    /// Logits of softmax i, of panel p with the block's tokens from t on. Because bases nest, those of a projected softmax
    /// continue the sums of the one before it: `sums` comes in with the logits of softmax i - 1. The result is `sums`, or
    /// `shown` if some logits are hidden.
    [[nodiscard]] score_tile const& multiply(
        int i, index_t t, index_t p, score_tile& sums, score_tile& shown) const noexcept
    {
        index_t const begin   = i == 0 ? 0 : plan.columns[i - 1];
        index_t const end     = i == 0 ? plan.dim : plan.columns[i];
        index_t const step    = i == 0 ? plan.dim : plan.key_columns();
        float const* queries  = (i == 0 ? head.queries : head.latents) + (p * step + begin) * tile::width;
        float const* const at = (i == 0 ? scratch.rows : scratch.latents) + t * step + begin;
        if (begin == 0) { std::memset(sums, 0, sizeof sums); }
        tile::multiply_add<tile::vectors>(at, step, 1, queries, tile::width, end - begin, sums);
        if (plan.all_see(first + t + tile::rows - 1) && count - t >= tile::rows) { return sums; }
        hide(t, p, sums, shown);
        return shown;
    }

    /// Copies logits, with -infinity for missing tokens and for tokens that a row may not see.
    void hide(index_t t, index_t panel, score_tile const& logits, score_tile& shown) const noexcept
    {
        for (int v = 0; v < tile::vectors; ++v)
        {
            simd::floats end{}; // counted from token t, so that it is small enough for float
            for (int lane = 0; lane < simd::lanes; ++lane)
            {
                int const row     = static_cast<int>(panel) * tile::width + v * simd::lanes + lane;
                index_t const see = plan.end_of(row) - first;
                end[lane]         = static_cast<float>(std::clamp<index_t>((std::min)(see, count) - t, 0, tile::rows));
            }
            for (int i = 0; i < tile::rows; ++i)
            {
                shown[i][v] = simd::broadcast(static_cast<float>(i)) < end
                                  ? logits[i][v]
                                  : simd::broadcast(-std::numeric_limits<float>::infinity());
            }
        }
    }
};

} // namespace MDKV_NAMESPACE::cpu::detail
