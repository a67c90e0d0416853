/// \file score.hpp: score on the CPU: two streamed sweeps over the keys, all rungs at once (arXiv 2603.20616, section 4.2, algorithm 1).
#pragma once

#include <mdkv/score.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/block.hpp>
#include <mdkv/cpu/detail/score_sweeps.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>

namespace mdkv::cpu
{

template <element T, std::size_t R>
void score_impl(backend const& on, in_view<T, 3, backend> queries, in_view<T, 3, backend> keys,
    in_view<T, 3, backend> values, in_view<T, 3, backend> window_keys, in_view<float, 3, backend> key_basis,
    in_view<float, 3, backend> value_basis, ratio_set<R> const& ratios, score_options<backend> const& options,
    out_view<float, 3, backend> loss)
{
    index_t const heads  = keys.extent(0);
    index_t const tokens = keys.extent(1);
    index_t const window = window_keys.extent(1);
    index_t const group  = heads == 0 ? 1 : queries.extent(0) / heads;
    auto const rungs     = detail::projected_rungs(ratios, keys.extent(2), values.extent(2));
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
    bool const sweep = exact_needed || rungs.count > 0;
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
            if (!in_window && rungs.count > 0)
            {
                multiply_block(slot.rows, s.dim, h.key_basis, s.latent, slot.latents);
            }
            detail::add_block_lse(slot, offset + t, count, exact_needed, in_window, rungs, s, h, see, state);
        }
    });
    on.for_each(heads, [&](index_t head, index_t) {
        auto const h = head_at(head);
        for (index_t i = 0; i < s.softmaxes; ++i)
        {
            for (index_t row = 0; row < s.rows; ++row)
            {
                float& lse = h.lse[i * s.rows + row];
                if (row >= s.query_rows)
                {
                    lse = -detail::lowest_logit; // rows of padding weigh nothing
                    continue;
                }
                if (i == 0 && !exact_needed)
                {
                    index_t const per_head = queries.extent(1);
                    lse = (*options.lse)(head * group + row / per_head, row % per_head) * std::numbers::log2e_v<float>;
                    continue;
                }
                auto const state = [&](index_t part, index_t which) {
                    return states[(head * (parts + 1) + part) * state_size + (2 * i + which) * s.rows + row];
                };
                float highest = detail::lowest_logit;
                for (index_t part = 0; part <= parts; ++part) { highest = std::max(highest, state(part, 0)); }
                float total = 0;
                for (index_t part = 0; part <= parts; ++part)
                {
                    total += state(part, 1) * std::exp2(state(part, 0) - highest);
                }
                lse = highest + std::log2(total);
            }
        }
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
            if (rungs.count > 0) { multiply_block(slot.rows, s.dim, h.key_basis, s.latent, slot.latents); }
            detail::add_block_differences(slot, t, count, rungs, s, h, see);

            read_block(values, head, t, count, slot.rows);
            if (rungs.count > 0)
            {
                multiply_block(slot.rows, s.value_dim, h.value_basis, s.value_latent, slot.latents);
            }
            for (index_t i = 0; i < count; ++i)
            {
                auto const total = [&](index_t softmax) {
                    return simd::sum(simd::load(slot.sums + (softmax * block + i) * simd::lanes));
                };
                float const mass    = total(0);
                float const squared = tile::sum_of_squares(slot.rows + i * s.value_dim, s.value_dim);
                float const norm    = std::sqrt(squared);
                for (std::size_t r = 0; r < ratios.size(); ++r)
                {
                    if (ratios[r].dropped()) { loss(head, static_cast<index_t>(r), t + i) = 2 * mass * norm; }
                    if (ratios[r].full()) { loss(head, static_cast<index_t>(r), t + i) = 0.0F; }
                }
                float kept   = 0;
                index_t done = 0;
                for (index_t j = 0; j < rungs.count; ++j)
                {
                    auto const r      = static_cast<std::size_t>(j);
                    float const* from = slot.latents + i * s.value_latent + done;
                    kept += tile::sum_of_squares(from, rungs.values[r] - done);
                    done                = rungs.values[r];
                    float const missing = detail::distance(slot.rows + i * s.value_dim, squared, kept,
                        slot.latents + i * s.value_latent, value_basis, head, done);
                    loss(head, static_cast<index_t>(rungs.index[r]), t + i) = total(1 + j) * norm + mass * missing;
                }
            }
        }
    });
}

} // namespace mdkv::cpu
