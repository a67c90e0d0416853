/// \file score.hpp: score on the CPU: two streamed sweeps over the keys, all rungs at once (arXiv 2603.20616, section 4.2, algorithm 1).
#pragma once

#include <mdkv/stages/score.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/score_block.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/detail/score_losses.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/score_prepare.hpp>

#include <algorithm>
#include <cstddef>
#include <limits>

namespace MDKV_NAMESPACE::cpu
{

/// The backend's part of score.
template <element T, element U>
void score_impl(backend const& on, in_view<U, 3, backend> queries, in_view<T, 3, backend> keys,
    in_view<T, 3, backend> values, in_view<T, 3, backend> window_keys, in_view<float, 3, backend> key_basis,
    in_view<float, 3, backend> value_basis, ratio_set const& ratios, score_options<backend> const& options,
    out_view<float, 3, backend> loss)
{
    using detail::score_scratch;
    index_t const heads  = keys.extent(0);
    index_t const tokens = keys.extent(1);
    index_t const window = window_keys.extent(1);
    if (heads == 0) { return; }
    detail::score_plan plan{ratios, {keys.extent(2), values.extent(2)}, queries.extent(0) / heads, queries.extent(1),
        tokens + window, options, tile::width, simd::lanes};

    // Few tokens, as a replay's chunk has: their exact logits stay in cache from one sweep to the other.
    constexpr index_t most_kept = 1 << 18;
    index_t const logits        = checked_multiply(plan.rows, tile::round_up(tokens, tile::block));
    if (logits <= most_kept && !options.lse) { plan.more = logits; }

    // Sweep one is cut into at most 8 splits a head and one more for the window; sweep two is cut into pieces of fixed
    // length.
    constexpr index_t block  = tile::block;
    index_t const splits     = std::clamp<index_t>(tokens / (2 * block), 1, 8);
    index_t const split_size = tile::round_up((tokens + splits - 1) / splits, block);
    index_t const piece      = 2 * block;
    index_t const pieces     = (tokens + piece - 1) / piece;
    index_t const workers    = on.workers(heads * (std::max)(splits + 1, pieces));
    index_t const per_worker = tile::round_up(mdkv::detail::bytes_of<score_scratch>(plan), workspace::alignment);
    mdkv::detail::score_states states{nullptr, splits + 1, plan.softmaxes, plan.rows};

    workspace::frame frame{*on.scratch};
    plan.take_memory(frame, loss, states);
    std::byte* const rooms = frame.take<std::byte>(checked_multiply(workers, per_worker));
    mdkv::detail::score_losses<T, backend> const last{keys, values, key_basis, value_basis, plan, loss};
    reserve(on, last, last.items());
    if (tokens == 0) { return; }

    for (index_t i = 0; options.query_weights && i < queries.extent(1); ++i)
    {
        float const weight = (*options.query_weights)(i);
        expects(weight >= 0.0F && weight <= (std::numeric_limits<float>::max)(), "score: options.query_weights[", i,
            "] is ", weight, "; it must be finite and not negative");
    }

    auto const scratch_of = [&](index_t worker) {
        mdkv::detail::carver carved{rooms + worker * per_worker};
        return score_scratch{carved, plan};
    };
    mdkv::detail::prepare_score(on, plan, queries, keys, values, key_basis, options,
        [&] { on.for_each(heads, [&](index_t head, index_t) { detail::multiply_queries(plan, plan.head(head)); }); });

    // Sweep one.
    bool const exact_needed = !options.lse.has_value();
    bool const sweep        = exact_needed || plan.softmaxes > 1;
    on.for_each(sweep ? heads * states.splits : 0, [&](index_t item, index_t worker) {
        index_t const head               = item / states.splits;
        index_t const split              = item % states.splits;
        bool const in_window             = split == splits;
        index_t const begin              = in_window ? 0 : split * split_size;
        index_t const end                = in_window ? window : (std::min)(tokens, begin + split_size);
        index_t const offset             = in_window ? tokens : 0;
        score_scratch const scratch      = scratch_of(worker);
        mdkv::detail::score_head const h = plan.head(head);
        for (int i = 0; i < plan.softmaxes; ++i)
        {
            std::fill_n(states.largest(head, split, i), plan.rows, mdkv::detail::lowest_logit);
            std::fill_n(states.sum(head, split, i), plan.rows, 0.0F);
        }
        for (index_t t = begin; t < end && !plan.none_sees(offset + t); t += block)
        {
            index_t const count = (std::min)(block, end - t);
            detail::score_block const here{scratch, plan, h, offset + t, count};
            tile::read_block(in_window ? window_keys : keys, head, t, count, scratch.rows);
            if (!in_window) { here.project_keys(); }
            here.add_states(exact_needed, in_window, states, head, split);
        }
    });
    mdkv::detail::score_join<backend>::run_for(on, options, plan, states, heads);

    // Sweep two.
    on.for_each(heads * pieces, [&](index_t item, index_t worker) {
        index_t const head               = item / pieces;
        index_t const end                = (std::min)(tokens, (item % pieces + 1) * piece);
        score_scratch const scratch      = scratch_of(worker);
        mdkv::detail::score_head const h = plan.head(head);
        for (index_t t = item % pieces * piece; t < end; t += block)
        {
            index_t const count = (std::min)(block, end - t);
            detail::score_block const here{scratch, plan, h, t, count};
            if (plan.more == 0 || plan.softmaxes > 1) // otherwise sweep one has left all that is needed
            {
                tile::read_block(keys, head, t, count, scratch.rows);
                here.project_keys();
            }
            here.add_totals();
            here.write_totals(head);
        }
    });
    mdkv::detail::score_by_totals(on, last);
}

} // namespace MDKV_NAMESPACE::cpu
