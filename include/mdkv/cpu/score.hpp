/// \file score.hpp: score on the CPU: two streamed sweeps over the keys, all rungs at once (arXiv 2603.20616, section 4.2, algorithm 1).
#pragma once

#include <mdkv/score.hpp>

#include <mdkv/basis.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/block.hpp>
#include <mdkv/cpu/detail/score_memory.hpp>
#include <mdkv/cpu/detail/score_sweeps.hpp>
#include <mdkv/cpu/detail/score_values.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>

namespace mdkv::cpu
{

namespace detail
{

/// Joins what the parts of one head left of every softmax in sweep one, into log-sum-exps that a query's weight is part of:
/// P times w is 2^(logit - (lse - log2 w)). `state(part, softmax, which, row)` is a maximum (which = 0) or a sum (1).
template <class State>
void join_parts(index_t parts, index_t head, index_t per_head, score_options<backend> const& options,
    score_sizes const& s, score_head const& h, State const& state)
{
    for (index_t row = 0; row < s.rows; ++row)
    {
        bool const padding = row >= s.query_rows;
        float const weight = padding                 ? 0.0F
                             : options.query_weights ? std::log2((*options.query_weights)(row % per_head))
                                                     : 0.0F;
        for (index_t i = 0; i < s.softmaxes; ++i)
        {
            float& lse = h.lse[i * s.rows + row];
            if (padding)
            {
                lse = -lowest_logit; // weighs nothing
                continue;
            }
            if (i == 0 && options.lse)
            {
                index_t const query_head = head * (s.query_rows / per_head) + row / per_head;
                lse = (*options.lse)(query_head, row % per_head) * std::numbers::log2e_v<float> - weight;
                continue;
            }
            float highest = lowest_logit;
            for (index_t part = 0; part < parts; ++part) { highest = std::max(highest, state(part, i, 0, row)); }
            float total = 0;
            for (index_t part = 0; part < parts; ++part)
            {
                total += state(part, i, 1, row) * std::exp2(state(part, i, 0, row) - highest);
            }
            lse = highest + std::log2(total) - weight;
        }
    }
}

} // namespace detail

template <element T, std::size_t R>
void score_impl(backend const& on, in_view<T, 3, backend> queries, in_view<T, 3, backend> keys,
    in_view<T, 3, backend> values, in_view<T, 3, backend> window_keys, key_bases<backend> const& key_basis,
    in_view<float, 3, backend> value_basis, ratio_set<R> const& ratios, score_options<backend> const& options,
    out_view<float, 3, backend> loss)
{
    index_t const heads  = keys.extent(0);
    index_t const tokens = keys.extent(1);
    index_t const window = window_keys.extent(1);
    index_t const group  = heads == 0 ? 1 : queries.extent(0) / heads;
    auto const rungs     = detail::score_rungs_of(ratios, keys.extent(2), values.extent(2), options.quantisation);
    detail::score_sizes const s{keys.extent(2), values.extent(2), group * queries.extent(1), rungs};

    // Sweep one is cut in a fixed number of parts a head, the window being one more; sweep two in pieces of fixed length.
    constexpr index_t block  = detail::score_sizes::block;
    index_t const parts      = std::clamp<index_t>(tokens / (8 * block), 1, 8);
    index_t const state_size = 2 * s.softmaxes * s.rows;
    index_t const piece      = 8 * block;
    index_t const pieces     = (tokens + piece - 1) / piece;
    index_t const slots      = on.slots(heads * std::max(parts + 1, pieces));

    workspace::frame frame{*on.scratch, "score"};
    float* const head_memory = frame.take<float>(checked_multiply(heads, s.head_floats()));
    float* const states      = frame.take<float>(checked_multiply(heads * (parts + 1), state_size));
    float* const slot_memory = frame.take<float>(checked_multiply(slots, s.slot_floats()));
    if (!frame.ready() || heads == 0 || tokens == 0) { return; }

    for (index_t i = 0; options.query_weights && i < queries.extent(1); ++i)
    {
        float const weight = (*options.query_weights)(i);
        expects(weight >= 0.0F && weight <= std::numeric_limits<float>::max(), "score: options.query_weights[", i,
            "] is ", weight, "; it must be finite and not negative");
    }

    float const scale = options.scale > 0.0F ? options.scale : 1.0F / std::sqrt(static_cast<float>(s.dim));
    detail::visibility const see{
        std::min(options.first_query.value_or(tokens + window - queries.extent(1)), tokens + window),
        queries.extent(1)};
    auto const head_at      = [&](index_t head) { return detail::score_head{head_memory + head * s.head_floats(), s}; };
    auto const slot_at      = [&](index_t slot) { return detail::score_slot{slot_memory + slot * s.slot_floats(), s}; };
    bool const exact_needed = !options.lse.has_value();

    on.for_each(heads, [&](index_t head, index_t) {
        detail::prepare_head(queries, key_basis, value_basis, head, scale, rungs, s, head_at(head));
    });

    // Sweep one.
    bool const sweep = exact_needed || s.softmaxes > 1;
    on.for_each(heads * (parts + 1), [&](index_t item, index_t slot_index) {
        index_t const head = item / (parts + 1);
        index_t const part = item % (parts + 1);
        float* const state = states + item * state_size;
        for (index_t i = 0; i < s.softmaxes; ++i)
        {
            std::fill_n(state + 2 * i * s.rows, s.rows, detail::lowest_logit);
            std::fill_n(state + (2 * i + 1) * s.rows, s.rows, 0.0F);
        }
        if (!sweep) { return; }
        bool const in_window = part == parts;
        index_t const begin  = in_window ? 0 : tokens * part / parts;
        index_t const end    = in_window ? window : tokens * (part + 1) / parts;
        index_t const offset = in_window ? tokens : 0;
        auto const h         = head_at(head);
        auto const slot      = slot_at(slot_index);
        for (index_t t = begin; t < end && !see.none_sees(offset + t); t += block)
        {
            index_t const count = std::min(block, end - t);
            read_block(in_window ? window_keys : keys, head, t, count, slot.rows);
            if (!in_window) { detail::prepare_block_keys(slot, count, rungs, s, h); }
            detail::add_block_lse(slot, offset + t, count, exact_needed, in_window, rungs, s, h, see, state);
        }
    });
    on.for_each(heads, [&](index_t head, index_t) {
        detail::join_parts(parts + 1, head, queries.extent(1), options, s, head_at(head),
            [&](index_t part, index_t softmax, index_t which, index_t row) {
                return states[(head * (parts + 1) + part) * state_size + (2 * softmax + which) * s.rows + row];
            });
    });

    // Sweep two.
    on.for_each(heads * pieces, [&](index_t item, index_t slot_index) {
        index_t const head = item / pieces;
        index_t const end  = std::min(tokens, (item % pieces + 1) * piece);
        auto const h       = head_at(head);
        auto const slot    = slot_at(slot_index);
        for (index_t t = item % pieces * piece; t < end; t += block)
        {
            index_t const count = std::min(block, end - t);
            read_block(keys, head, t, count, slot.rows);
            detail::prepare_block_keys(slot, count, rungs, s, h);
            detail::add_block_differences(slot, t, count, rungs, s, h, see);

            read_block(values, head, t, count, slot.rows);
            detail::prepare_block_values(slot, count, rungs, s, h);
            for (index_t i = 0; i < count; ++i)
            {
                detail::write_losses(slot, i, value_basis, head, ratios, rungs, s,
                    [&](std::size_t r) -> float& { return loss(head, static_cast<index_t>(r), t + i); });
            }
        }
    });
}

} // namespace mdkv::cpu
