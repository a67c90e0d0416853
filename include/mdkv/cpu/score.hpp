/// \file score.hpp: score on the CPU: two streamed sweeps over the keys, all rungs at once, in register tiles (arXiv 2603.20616, section 4.2, algorithm 1).
#pragma once

#include <mdkv/stages/score.hpp>

#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/team.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/detail/score_losses.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/score_prepare.hpp>
#include <mdkv/detail/team.hpp>

#include <algorithm>
#include <cstring>
#include <limits>

// How it works. Query rows lie in vector lanes and tokens are broadcast: a row's softmax state then never crosses lanes, and keys
// are read as they are stored. Because bases nest, the logits of a wider projected rung continue the sums of the narrower one;
// codes of whole vectors need no product. Every softmax needs its normaliser before the first loss, so the keys are read twice:
// sweep one finds the log-sum-exps of the exact softmax (unless the caller has them) and of every projected one, sweep two adds up
// the losses. Nothing of size rows x tokens exists outside one tile, except for few tokens, whose exact logits sweep one leaves for
// sweep two. Logits are in units of log2; the scale is folded into the queries, and a query's weight into its log-sum-exps.

namespace MDKV_NAMESPACE::cpu
{

namespace detail
{

using mdkv::detail::score_plan;

using score_tile = tile::accumulators<tile::vectors>; // [tokens][vectors of rows]

/// Adds logits of one panel to its rows' running largest logits and, `step` floats behind them, sums of 2^(logit - largest).
inline void add_to_state(float* state, index_t step, score_tile const& logits) noexcept
{
    for (int v = 0; v < tile::vectors; ++v)
    {
        float* const at_largest = state + v * simd::lanes;
        float* const at_sum     = at_largest + step;
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
            simd::floats const x     = is_exact ? p : simd::magnitude(p - exact[i][v]);
            total                    = mdkv::detail::joined_rows(Norm, total, Norm == row_norm::euclidean ? x * x : x);
            if (is_exact) { exact[i][v] = p; }
        }
        simd::store(sums + i * simd::lanes, total);
    }
}

/// A block of a head's tokens, and its products with the head's queries tile by tile, in a thread's scratch.
struct score_block
{
    mdkv::detail::carver& cut;
    score_plan const& plan;
    index_t of; ///< number of the head
    mdkv::detail::score_head head = plan.head(of);

    float* rows    = cut.take<float>(tile::block * plan.dim);                     // [block, dim]  keys
    float* latents = cut.take<float>(tile::block * plan.key_columns());           // [block, key_columns]  in the basis
    float* sums    = cut.take<float>(plan.softmaxes * tile::block * simd::lanes); // [softmaxes, block, lanes]

    index_t first = 0; ///< first token
    index_t count = 0;

    /// Sweep one: adds the logits to the states of a split, to the exact softmax's only if `exact_needed`. In the window all rungs
    /// store keys as they are.
    void add_states(index_t split, bool exact_needed, bool in_window) const noexcept
    {
        for_each_tile([&, this](index_t t, index_t p) {
            score_tile products;
            score_tile shown;
            score_tile const* logits = nullptr;
            for (int i = exact_needed || in_window ? 0 : 1; i < plan.softmaxes; ++i)
            {
                if (i == 0 || !in_window) { logits = &multiply(i, t, p, products, shown); }
                if (i == 0 && !exact_needed) { continue; }
                if (i == 0 && !in_window && plan.more > 0) { std::memcpy(kept_logits(t, p), *logits, sizeof *logits); }
                add_to_state(plan.state(of, split, i) + p * tile::width, plan.rows, *logits);
            }
        });
    }

    /// Sweep two: the totals of P over the rows, and of |P' - P| of every other softmax.
    void find_totals() const noexcept
    {
        std::fill_n(sums, sum(plan.softmaxes, 0) - sums, 0.0F);
#if !defined(__CUDA_ARCH__) // nvcc reads this for the device, too, which knows no vectors
        for_each_tile([&](index_t t, index_t p) {
            score_tile exact{};
            score_tile products;
            score_tile shown;
            for (int i = 0; i < plan.softmaxes; ++i)
            {
                score_tile const* logits = &shown;
                if (i == 0 && plan.more > 0) { std::memcpy(shown, kept_logits(t, p), sizeof shown); }
                else { logits = &multiply(i, t, p, products, shown); }
                mdkv::detail::with_norm(plan.norm, [&, this](auto norm) {
                    add_differences<norm>(
                        *logits, head.lse + i * plan.rows + p * tile::width, i == 0, exact, sum(i, t));
                });
            }
        });
        auto const join = [&](simd::floats a, simd::floats b) { return mdkv::detail::joined_rows(plan.norm, a, b); };
        for (int i = 0; i < plan.softmaxes; ++i)
        {
            float* const to = plan.total(of, i) + first;
            for (index_t t = 0; t < count; ++t) { to[t] = simd::over_lanes(simd::load(sum(i, t)), join); }
        }
#endif
    }

private:
    [[nodiscard]] float* sum(index_t softmax, index_t token) const noexcept
    {
        return sums + (softmax * tile::block + token) * simd::lanes;
    }

    /// Calls body(token, panel) for the tiles that some row of the panel sees.
    void for_each_tile(auto const& body) const noexcept
    {
        for (index_t p = 0; p * tile::width < plan.rows; ++p)
        {
            auto const row    = static_cast<int>(p * tile::width % plan.per_head);
            int const last    = row + tile::width <= plan.per_head ? row + tile::width - 1 : plan.per_head - 1;
            index_t const end = (std::min)(plan.end_of(last) - first, count);
            for (index_t t = 0; t < end; t += tile::rows) { body(t, p); }
        }
    }

    /// Exact logits of a tile, left by sweep one for sweep two if plan.more makes room: [panels, tokens, width].
    [[nodiscard]] float* kept_logits(index_t t, index_t p) const noexcept
    {
        return head.more + (p * (plan.more / plan.rows) + first + t) * tile::width;
    }

    /// Logits of softmax i, of panel p with the block's tokens from t on. Because bases nest, those of a projected softmax
    /// continue the sums of the one before it: `products` comes in with the logits of softmax i - 1. The result is `products`, or
    /// `shown` with -infinity for missing tokens and for tokens that a row may not see.
    [[nodiscard]] score_tile const& multiply(
        int i, index_t t, index_t p, score_tile& products, score_tile& shown) const noexcept
    {
        index_t const begin = i == 0 ? 0 : plan.columns[i - 1];
        index_t const end   = i == 0 ? plan.dim : plan.columns[i];
        index_t const step  = i == 0 ? plan.dim : plan.key_columns();
        float const* queries =
            i == 0 ? head.queries + p * plan.dim * tile::width : head.latents + (p * plan.latent + begin) * tile::width;
        float const* const at = (i == 0 ? rows : latents) + t * step + begin;
        if (begin == 0) { std::memset(products, 0, sizeof products); }
        tile::multiply_add<tile::vectors>(at, step, 1, queries, tile::width, end - begin, products);
        if (plan.all_see(first + t + tile::rows - 1) && count - t >= tile::rows) { return products; }
        std::memcpy(shown, products, sizeof shown);
        for (int lane = 0; lane < tile::width; ++lane)
        {
            index_t const see = plan.end_of(static_cast<int>(p) * tile::width + lane) - first;
            for (index_t row = (std::max)((std::min)(see, count) - t, index_t{0}); row < tile::rows; ++row)
            {
                shown[row][lane / simd::lanes][lane % simd::lanes] = -std::numeric_limits<float>::infinity();
            }
        }
        return shown;
    }
};

/// A sweep over a head's tokens. An item is a part of them; sweep one has the window for its last part.
template <element T>
struct score_sweep
{
    in_view<T, 3, backend> keys;
    in_view<T, 3, backend> window_keys;
    score_plan plan;
    bool second;
    index_t parts;
    index_t part_size;
    bool exact_needed; ///< sweep one finds the exact softmax, too

    [[nodiscard]] index_t items() const noexcept { return keys.extent(0) * parts; }
    [[nodiscard]] index_t scratch_bytes() const noexcept
    {
        return mdkv::detail::bytes_of<score_block>(plan, index_t{0});
    }

    void operator()(team const& t, index_t item) const
    {
        index_t const part       = item % parts;
        bool const in_window     = !second && part + 1 == parts;
        auto const& from         = in_window ? window_keys : keys;
        index_t const begin      = in_window ? 0 : part * part_size;
        index_t const end        = in_window ? from.extent(1) : (std::min)(from.extent(1), begin + part_size);
        index_t const offset     = in_window ? keys.extent(1) : 0;
        mdkv::detail::carver cut = t.scratch();
        score_block block{cut, plan, item / parts};
        for (int i = 0; !second && i < plan.softmaxes; ++i)
        {
            std::fill_n(plan.state(block.of, part, i), plan.rows, mdkv::detail::lowest_logit);
            std::fill_n(plan.state(block.of, part, i) + plan.rows, plan.rows, 0.0F);
        }
        for (index_t at = begin; at < end && (second || !plan.none_sees(offset + at)); at += tile::block)
        {
            block.first = offset + at;
            block.count = (std::min)(tile::block, end - at);
            // Sweep one may have left all that sweep two needs.
            if (!second || plan.more == 0 || plan.softmaxes > 1)
            {
                tile::read_block(from, block.of, at, block.count, block.rows);
                if (!in_window && plan.latent > 0)
                {
                    tile::multiply_block(block.rows, plan.dim, block.head.key_basis, plan.key_columns(), block.latents);
                }
            }
            if (second) { block.find_totals(); }
            else { block.add_states(part, exact_needed, in_window); }
        }
    }
};

} // namespace detail

/// The backend's part of score.
template <element T, element U>
void score_impl(backend const& on, in_view<U, 3, backend> queries, in_view<T, 3, backend> keys,
    in_view<T, 3, backend> values, in_view<T, 3, backend> window_keys, in_view<float, 3, backend> key_basis,
    in_view<float, 3, backend> value_basis, ratio_set const& ratios, score_options<backend> const& options,
    out_view<float, 3, backend> loss)
{
    index_t const heads  = keys.extent(0);
    index_t const tokens = keys.extent(1);
    if (heads == 0) { return; }
    detail::score_plan plan{ratios, {keys.extent(2), values.extent(2)}, queries.extent(0) / heads, queries.extent(1),
        tokens + window_keys.extent(1), options, tile::width};

    // Few tokens, as a replay's chunk has: their exact logits stay in cache from one sweep to the other.
    constexpr index_t most_kept = 1 << 18;
    index_t const logits        = checked_multiply(plan.rows, tile::round_up(tokens, tile::block));
    if (logits <= most_kept && !options.lse) { plan.more = logits; }

    // Sweep one is cut into at most 8 splits a head and one more for the window; sweep two is cut into pieces of fixed length.
    constexpr index_t block = tile::block;
    constexpr index_t piece = 2 * block;
    index_t const splits    = std::clamp<index_t>(tokens / piece, 1, 8);
    plan.splits             = splits + 1;
    workspace::frame frame{on.scratch};
    plan.take_memory(frame, loss);
    detail::score_sweep<T> const one{keys, window_keys, plan, false, splits + 1,
        tile::round_up((tokens + splits - 1) / splits, block), !options.lse.has_value()};
    detail::score_sweep<T> const two{keys, window_keys, plan, true, (tokens + piece - 1) / piece, piece, true};
    mdkv::detail::score_losses<T, backend> const last{keys, values, key_basis, value_basis, plan, loss};
    reserve(on, one, one.items());
    reserve(on, two, two.items());
    reserve(on, last, last.items());
    if (tokens == 0) { return; }
    mdkv::detail::score_by(
        on, last, queries, options, [&] { run(on, one, one.items()); }, [&] { run(on, two, two.items()); });
}

} // namespace MDKV_NAMESPACE::cpu
