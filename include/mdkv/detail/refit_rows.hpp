/// \file refit_rows.hpp: rows of refit, a prompt's own queries in the place of later ones, and their outputs over the whole and the packed cache.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/panel.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/replay/advance.hpp>

#include <cmath>
#include <cstddef>

namespace MDKV_NAMESPACE::detail
{

/// The rows of refit: blocks of tokens by all query heads of a KV head, a block's rows after those of the block before, by query
/// head, then by token.
struct refit_blocks
{
    index_t begin  = 0; ///< the first token of the first block
    index_t apart  = 1; ///< tokens from one block to the next
    index_t blocks = 0;
    index_t last   = 0; ///< the first token of the last block
    index_t group  = 1; ///< G
    index_t each   = 1; ///< tokens of a block that have rows
    index_t step   = 0; ///< tokens from one of these to the next

    [[nodiscard]] constexpr index_t of_block() const noexcept { return group * each; }
    [[nodiscard]] constexpr index_t first(index_t block) const noexcept
    {
        return block == blocks - 1 ? last : begin + block * apart;
    }
};

/// Makes rows [H, R, D] of queries, times a factor, where they are and turned so that their block begins at token `end`.
/// \param turned  [H*G, each, D]  scratch
template <backend B, element U>
void turn_rows(B const& on, refit_blocks const& shape, in_view<U, 3, B> queries, index_t end,
    rotary_encoding<B> const& encoding, float factor, out_view<U, 3, B> turned, out_view<float, 3, B> own,
    out_view<float, 3, B> later)
{
    for (index_t b = 0; b < shape.blocks; ++b)
    {
        auto const here = slice<1>(queries, b * shape.each, shape.each);
        advance(on, here, end - shape.first(b), encoding, turned);
        for (index_t g = 0; g < shape.group; ++g)
        {
            auto const widen_to = [&](in_view<U, 3, B> const& from, out_view<float, 3, B> const& to) {
                in_view<U, 3, B> const of_head{after(from.data_handle(), g * from.stride(0)),
                    {to.extent(0), shape.each, from.extent(2)}, {shape.group * from.stride(0), from.stride(1), 1}};
                auto const rows = slice<1>(to, b * shape.of_block() + g * shape.each, shape.each);
                run(on, convert_rows<B, U>{of_head, factor, rows});
            };
            widen_to(here, own);
            widen_to(as_input(turned), later);
        }
    }
}

/// Softmaxes of rows over the keys that they saw so far: outputs are to be divided by the sums.
template <backend B>
struct row_states
{
    out_view<float, 3, B> outputs; // [H, R, Dv]
    out_view<float, 2, B> largest; // [H, R]  logit in base 2
    out_view<float, 2, B> sums;    // [H, R]  of 2^(logit - largest)
    out_view<float, 2, B> factors; // [H, R]  of the outputs before the last keys

    [[nodiscard]] row_states rows(index_t first, index_t count) const
    {
        return {slice<1>(outputs, first, count), slice<1>(largest, first, count), slice<1>(sums, first, count),
            slice<1>(factors, first, count)};
    }
    /// States of R rows of H heads in scratch memory.
    [[nodiscard]] static row_states take(B const& on, workspace::frame& frame, index_t H, index_t R, index_t Dv)
    {
        auto const numbers = [&] { return scratch_view<float>(on, frame, H, R); };
        return {scratch_view<float>(on, frame, H, R, Dv), numbers(), numbers(), numbers()};
    }
    /// No keys seen, and a largest logit below any; for all rows.
    void clear(B const& on) const
    {
        index_t const rows = sums.extent(0) * sums.extent(1);
        run(on, fill<float>{outputs.data_handle(), 0.0F, rows * outputs.extent(2)});
        run(on, fill<float>{sums.data_handle(), 0.0F, rows});
        run(on, fill<float>{largest.data_handle(), -1e30F, rows});
    }
};

/// Makes weights of rows' logits for more keys, and takes them into the rows' states. An item is a row of a head.
template <backend B>
struct soften_rows
{
    static constexpr char const* name = "refit_soften";
    static constexpr int threads      = 64;

    out_view<float, 3, B> logits; // [H, R, n]
    row_states<B> states;
    in_view<index_t, 1, B> counts; // [H]  keys of each head; or empty: all
    index_t from;                  // number of the first key
    refit_blocks shape;            // row r of a block sees keys up to its own, (r % each) * step; step 0: all

    [[nodiscard]] index_t items() const noexcept { return logits.extent(0) * logits.extent(1); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        constexpr int lanes = Team::lanes;
        index_t const h     = item / logits.extent(1);
        index_t const r     = item % logits.extent(1);
        float* const x      = logits.row(h, r);
        auto const keys     = static_cast<int>(logits.extent(2));
        index_t const last  = shape.step > 0   ? r % shape.each * shape.step + 1
                              : counts.empty() ? from + keys
                                               : counts(h);
        auto const seen     = static_cast<int>(last - from < keys ? last - from : keys);
        float const before  = states.largest(h, r);
        float part[std::size_t{lanes}];
        for (int l = 0; l < lanes; ++l) { part[l] = before; }
        for (int i = member(t) * lanes; i < seen; i += members(t) * lanes)
        {
            for (int l = 0; l < lanes; ++l) { part[l] = i + l < seen ? larger(part[l], x[i + l]) : part[l]; }
        }
        for (float const most : part) { part[0] = larger(part[0], most); }
        float const top = t.largest(part[0]);
        float sum[std::size_t{lanes}]{};
        for (int i = member(t) * lanes; i < keys; i += members(t) * lanes) // logits have room for weights of 0
        {
            float power[std::size_t{lanes}];
            for (int l = 0; l < lanes; ++l) { power[l] = i + l < seen ? x[i + l] - top : -1000.0F; }
            powers_of_two(t, power, x + i);
            for (int l = 0; l < lanes; ++l) { sum[l] += x[i + l]; }
        }
        float own = 0;
        for (float const part_of_all : sum) { own += part_of_all; }
        float const total = t.sum(own);
        if (t.rank() != 0) { return; }
        float const by       = exp2f(before - top);
        states.factors(h, r) = by;
        states.sums(h, r)    = states.sums(h, r) * by + total;
        states.largest(h, r) = top;
    }
};

/// Takes more keys and values into rows' states. See soften_rows.
/// \param logits  [H, R, panel_depth] or more  scratch
template <backend B, element T>
void attend_more(B const& on, in_view<float, 3, B> rows, in_view<T, 3, B> keys, in_view<T, 3, B> values,
    in_view<index_t, 1, B> counts, refit_blocks const& shape, out_view<float, 3, B> logits, row_states<B> const& states)
{
    for_pieces(keys.extent(1), [&](index_t at, index_t count) {
        auto const here = slice<2>(slice<1>(logits, 0, rows.extent(1)), 0, count);
        multiply<B, T, float>(on, {rows}, {slice<1>(keys, at, count)}, {here}, {counts, at});
        run(on, soften_rows<B>{here, states, counts, at, shape});
        multiply<B, T, float>(on, {as_input(here)}, {slice<1>(values, at, count), true},
            {.to = states.outputs, .add = true, .factors = as_input(states.factors)}, {counts, at, true});
    });
}

/// Takes the keys of each row's own block, up to its own, into rows' states.
template <backend B, element T>
void attend_beside(B const& on, refit_blocks const& shape, in_view<float, 3, B> rows, in_view<T, 3, B> keys,
    in_view<T, 3, B> values, index_t span, out_view<float, 3, B> logits, row_states<B> const& states)
{
    index_t const count = shape.of_block();
    for (index_t b = 0; b < shape.blocks; ++b)
    {
        attend_more<B, T>(on, slice<1>(rows, b * count, count), slice<1>(keys, shape.first(b), span),
            slice<1>(values, shape.first(b), span), {}, shape, logits, states.rows(b * count, count));
    }
}

/// Finds what rows' outputs over the packed cache lack to those over the whole one. The largest logits of the packed cache become
/// log-sum-exps, so that weights that soften_rows makes from then on are the rows' attention. An item is a row of a head.
template <backend B>
struct miss_rows
{
    static constexpr char const* name = "refit_miss";
    static constexpr int threads      = 64;

    row_states<B> whole, packed;
    out_view<float, 3, B> missing; // [H, R, Dv]

    [[nodiscard]] index_t items() const noexcept { return missing.extent(0) * missing.extent(1); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const h    = item / missing.extent(1);
        index_t const r    = item % missing.extent(1);
        float const of_all = 1 / whole.sums(h, r);
        float const kept   = 1 / packed.sums(h, r);
        for (index_t d = t.rank(); d < missing.extent(2); d += t.size())
        {
            missing(h, r, d) = whole.outputs(h, r, d) * of_all - packed.outputs(h, r, d) * kept;
        }
        if (t.rank() == 0) { packed.largest(h, r) += log2f(packed.sums(h, r)); }
    }
};

} // namespace MDKV_NAMESPACE::detail
