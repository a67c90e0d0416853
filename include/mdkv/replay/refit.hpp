/// \file refit.hpp: refit: values of kept tokens changed so that later rows have the outputs of the whole cache (beyond arXiv 2603.20616).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/panel.hpp>
#include <mdkv/detail/refit.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/detail/sort_slots.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/engine/unpack.hpp>
#include <mdkv/replay/leverage.hpp>
#include <mdkv/replay/replay.hpp>

#include <algorithm>
#include <type_traits>

namespace MDKV_NAMESPACE
{

/// The rows by which values are refitted, a prompt's own queries: those of the last tokens judge, and the last blocks before these
/// fit, block b ending with token (b + 1) * apart - 1.
struct refit_part
{
    index_t blocks = 5;     ///< most blocks of fitting rows
    index_t apart  = 157;   ///< tokens from one block to the next; a prime, lest blocks meet a repeating text alike
    index_t span   = 64;    ///< tokens of a block, at most `apart`
    index_t rows   = 32;    ///< rows of a block for each KV head, shared out among its query heads
    float ridge    = 0.05F; ///< weight of the changes' squares, in units of the mean square of a token's weights
    float most     = 1.0F;  ///< longest change of a value, in units of its length

    /// The tokens of a block that have rows, if a KV head has `group` query heads: the first and every so many after it.
    [[nodiscard]] constexpr index_t each(index_t group) const noexcept
    {
        index_t const share = rows / (group < 1 ? 1 : group);
        return share < 1 ? 1 : share > span ? span : share;
    }
    [[nodiscard]] constexpr index_t step(index_t group) const noexcept { return span / each(group); }
    /// The same for chunks of so many tokens: blocks side by side, of half the length and rows.
    [[nodiscard]] constexpr refit_part of_chunks(index_t chunk) const noexcept
    {
        refit_part part = *this;
        part.span       = (span + 1) / 2;
        part.apart      = part.span;
        part.rows       = (rows + 1) / 2;
        part.blocks     = chunk / part.span;
        return part;
    }
    /// The first token of block b.
    [[nodiscard]] constexpr index_t first(index_t block) const noexcept { return (block + 1) * apart - span; }
    /// Blocks whose queries are kept while a prompt is read: two more may have begun when the last ones are chosen.
    [[nodiscard]] constexpr index_t kept() const noexcept { return blocks + 2; }
    /// Where the queries of block b are kept.
    [[nodiscard]] constexpr index_t place(index_t block) const noexcept { return block % kept(); }
};

namespace detail
{

/// \throws invalid_argument   naming the stage and the option, whose name begins with `prefix`: it is out of its range
MDKV_OUTLINE constexpr void expects_refit(char const* stage, char const* prefix, refit_part const& part)
{
    auto const within = [&](char const* name, auto x, index_t least) {
        expects(x >= static_cast<decltype(x)>(least) && x <= decltype(x){1000000}, stage, ": ", prefix, name, " is ", x,
            "; it must be from ", least, " to 1000000");
    };
    within(".blocks", part.blocks, 1);
    within(".span", part.span, 1);
    within(".apart", part.apart, part.span);
    within(".rows", part.rows, 1);
    within(".ridge", part.ridge, 0);
    within(".most", part.most, 0);
}

} // namespace detail

template <backend B>
struct refit_options
{
    refit_part rows{};
    index_t first     = 0; ///< the first token of the first block of fitting rows
    index_t stand_ins = 0; ///< most stand-ins of a head of the cache

    rotary_encoding<B> encoding{}; ///< the model's
    float scale = 0.0F;            ///< factor of q.k; 0 means 1/sqrt(D)
};

namespace detail
{

/// Rows by which values are refitted, and the tokens that they see.
template <backend B, element T, element U>
struct refit_rows
{
    in_view<U, 3, B> queries;              // [H*G, Q, D]  see refit
    in_view<T, 3, B> keys, values;         // [H, n, D], [H, n, Dv]  of all tokens before the rows' places
    in_view<index_t, 1, B> counts;         // [H]  tokens of each head; or empty: all
    in_view<T, 3, B> own_keys, own_values; // [H, m, D], [H, m, Dv]  of the text's last m tokens, in order
    in_view<T, 3, B> packed;               // [H, N, Dv]  values from which the cache was packed
    index_t first;                         // token of these m that begins the first block; the last one ends with the m
    in_view<std::int32_t, 2, B> positions; // [H, N]  rows of values by rung
    in_view<index_t, 2, B> begins;         // [H, rungs + 1]  where each rung's positions begin
};

/// The body of refit, for checked operands.
/// \param changed  [H, N, Dv]  receives the values; may be `packed`
template <backend B, element T, element U>
void refit_values(B const& on, refit_rows<B, T, U> const& of, cache_view<T, B::memory_space> const& cache,
    refit_options<B> const& options, out_view<T, 3, B> changed)
{
    cache_layout const& layout = cache.layout;
    refit_part const& part     = options.rows;
    index_t const H            = layout.heads;
    index_t const most         = of.keys.extent(1) + options.stand_ins;
    auto const [D, Dv]         = layout.dims;
    index_t const query_heads  = of.queries.extent(0);
    index_t const group        = query_heads / H;
    index_t const each         = part.each(group);
    index_t const blocks       = of.queries.extent(1) / each;
    index_t const of_block     = group * each; // rows: by query head, then by token
    index_t const R            = blocks * of_block;
    index_t const fitting      = R - of_block;
    index_t const room         = most > 8192 ? 2048 : (std::max)(index_t{512}, (most + 15) / 16 * 16); // tokens at once
    index_t const kept         = layout.key_coordinates[0] == 0 ? 1 : 0; // the first rung that keeps tokens
    workspace::frame frame{on.scratch};
    auto const fitted        = scratch_view<index_t>(on, frame, H);
    auto const stored        = scratch_view<index_t>(on, frame, H);
    auto const turned        = scratch_view<U>(on, frame, query_heads, each, D);
    auto const own           = scratch_view<float>(on, frame, H, R, D);
    auto const later         = scratch_view<float>(on, frame, H, R, D);
    auto const stored_keys   = scratch_view<T>(on, frame, H, most, D);
    auto const stored_values = scratch_view<T>(on, frame, H, most, Dv);
    auto const numbers       = [&](auto... dim) { return scratch_view<float>(on, frame, H, R, dim...); };
    row_states<B> const whole{numbers(Dv), numbers(), numbers(), numbers()};
    row_states<B> const packed{numbers(Dv), numbers(), numbers(), numbers()};
    auto const weights  = scratch_view<float>(on, frame, H, R, room);
    auto const missing  = scratch_view<float>(on, frame, H, R, Dv);
    auto const gram     = scratch_view<double>(on, frame, H, fitting, fitting);
    auto const whitener = scratch_view<float>(on, frame, H, fitting, fitting);
    auto const whitened = scratch_view<float>(on, frame, H, fitting, Dv);
    auto const solved   = scratch_view<float>(on, frame, H, Dv, fitting);
    auto const changes  = scratch_view<float>(on, frame, H, Dv, most);
    auto const mended   = scratch_view<float>(on, frame, H, of_block, Dv);
    auto const factors  = scratch_view<float>(on, frame, H);
    float const factor  = scale_in_base_two(options.scale, D);
    auto const begin_of = [&](index_t b) {
        return b == blocks - 1 ? of.own_keys.extent(1) - part.span : of.first + b * part.apart;
    };
    for (index_t b = 0; b < blocks; ++b)
    {
        auto const here = slice<1>(of.queries, b * each, each);
        // A row's block begins behind the text.
        advance(on, here, of.own_keys.extent(1) - begin_of(b), options.encoding, turned);
        for (index_t g = 0; g < group; ++g)
        {
            auto const widen_to = [&](in_view<U, 3, B> const& from, out_view<float, 3, B> const& to) {
                in_view<U, 3, B> const of_head{after(from.data_handle(), g * from.stride(0)), {H, each, D},
                    {group * from.stride(0), from.stride(1), 1}};
                run(on, copy_rows<B, U, float>{of_head, slice<1>(to, b * of_block + g * each, each), factor});
            };
            widen_to(here, own);
            widen_to(as_input(turned), later);
        }
    }
    unpack_rows(on, cache, stored_keys, stored_values, stored);
    run(on, count_fitted<B>{of.begins, kept, static_cast<index_t>(layout.full_rung), fitted}, H);
    using rows = in_view<float, 3, B>;
    // Weights of rows for the keys from number `from` on, which their states take in.
    auto const weigh = [&](rows const& by, in_view<T, 3, B> const& k, index_t from,
                           in_view<index_t, 1, B> const& counts, index_t step, row_states<B> const& states) {
        auto const here = slice<2>(slice<1>(weights, 0, by.extent(1)), 0, k.extent(1));
        multiply<B, T, float>(on, {by}, {k}, {here}, {counts, from});
        run(on, soften_rows<B>{here, states, counts, from, each, step});
        return as_input(here);
    };
    auto const attend_more = [&](rows const& by, in_view<T, 3, B> const& k, in_view<T, 3, B> const& v,
                                 in_view<index_t, 1, B> const& counts, index_t step, row_states<B> const& states) {
        for_pieces(k.extent(1), room, [&](index_t at, index_t count) {
            rows const here = weigh(by, slice<1>(k, at, count), at, counts, step, states);
            multiply<B, T, float>(on, {here}, {slice<1>(v, at, count), true},
                {.to = states.outputs, .add = true, .factors = as_input(states.factors)}, {counts, at, true});
        });
    };
    auto const attend = [&](in_view<T, 3, B> const& k, in_view<T, 3, B> const& v, in_view<index_t, 1, B> const& counts,
                            row_states<B> const& states) {
        run(on, fill<float>{states.outputs.data_handle(), 0.0F, H * R * Dv});
        run(on, fill<float>{states.sums.data_handle(), 0.0F, H * R});
        run(on, fill<float>{states.largest.data_handle(), -1e30F, H * R}); // below any logit
        for (index_t b = 0; b < blocks; ++b) // keys of each row's own block, up to its own
        {
            attend_more(as_input(slice<1>(own, b * of_block, of_block)), slice<1>(of.own_keys, begin_of(b), part.span),
                slice<1>(of.own_values, begin_of(b), part.span), {}, part.step(group),
                states.rows(b * of_block, of_block));
        }
        attend_more(as_input(later), k, v, counts, 0, states);
    };
    attend(of.keys, of.values, of.counts, whole);
    attend(as_input(stored_keys), as_input(stored_values), as_input(stored), packed);
    bool const at_hand = most <= room; // whether `weights` are those of all stored keys, which came last
    run(on, miss_rows<B>{whole, packed, missing, slice<2>(weights, 0, at_hand ? most : 0)});
    auto const for_strips = [&](auto const& body) {
        for_pieces(most, room, [&](index_t from, index_t count) {
            auto const k    = slice<1>(stored_keys, from, count);
            rows const here = at_hand ? as_input(slice<2>(weights, 0, count))
                                      : weigh(as_input(later), k, from, as_input(fitted), 0, packed);
            body(from, count, slice<1>(here, 0, fitting), slice<1>(here, fitting, of_block));
        });
    };
    for_strips([&](index_t from, index_t, rows const& fit, rows const&) {
        multiply<B, float, double>(
            on, {fit}, {fit}, {.to = gram, .add = from > 0, .mirror = true}, {as_input(fitted), from, true});
    });
    run(on, whiten<B>{gram, whitener, double{part.ridge}, as_input(fitted)}, H);
    rows const white = as_input(whitener);
    multiply<B, float, float>(on, {white}, {as_input(slice<1>(missing, 0, fitting)), true}, {whitened});
    multiply<B, float, float>(on, {as_input(whitened), true}, {white, true}, {solved});
    for_strips([&](index_t from, index_t count, rows const& fit, rows const& judging) {
        auto const here = slice<2>(changes, from, count);
        multiply<B, float, float>(on, {as_input(solved)}, {fit, true}, {here}, {as_input(fitted), from});
        multiply<B, float, float>(
            on, {judging}, {as_input(here)}, {.to = mended, .add = from > 0}, {as_input(fitted), from, true});
    });
    run(on, judge_changes<B>{as_input(slice<1>(missing, fitting, of_block)), as_input(mended), factors}, H);
    if (changed.data_handle() != of.packed.data_handle()) { run(on, copy_rows<B, T>{of.packed, changed}); }
    run(on, change_values<B, T>{as_input(changes), as_input(factors), as_input(fitted), of.positions, of.begins, kept,
                part.most, changed});
}

} // namespace detail

/// Changes the values of a cache's tokens so that rows of the text that goes on have the outputs that they would have over all
/// tokens (docs/method.md, "Refitted values"): by A'(A A' + mu I)^-1 E, with A the attention of a prompt's own queries, in the
/// place of later ones, and E what their outputs lack. `pack` stores the changed values at the same rungs; all else stays.
///
/// \param on            backend: threads, scratch
/// \param[in]  queries  [H*G, Q, D]     of the rows, after position encoding, of any element type U: block by block the fitting
///                      ones, then those of the last `span` tokens; `options.rows.each(G)` of each block
/// \param[in]  keys     [H, N + W, D]   the whole prompt's, same encoding
/// \param[in]  values   [H, N + W, Dv]
/// \param[in]  rungs    [H, N]          by which the cache was packed
/// \param[in]  cache    from `pack`, of these keys and values, its tail empty
/// \param[in]  options  rows, position encoding, scale
/// \param[out] changed  [H, N, Dv]      values; those of dropped tokens, and of heads that drop and code nothing, are copied
/// \pre    queries, keys and values are finite
/// \cost   O(H*R*((N + n)*(D + Dv) + n*R)) multiply-adds for R rows of a head and n tokens that it keeps; scratch: the stored
///         keys and values, at most 32 KiB a row, and R*R doubles for each head
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads; in float, sums of squares and elimination in double
/// \throws invalid_argument        a shape disagrees, an output overlaps, or an option is out of its range
/// \see    tests/unit/replay/refit.cpp, docs/method.md
template <backend B, element T, element U>
void refit(B const& on, in_view<U, 3, B> queries, in_view<T, 3, B> keys, in_view<T, 3, B> values,
    in_view<std::uint8_t, 2, B> rungs, cache_view<T, B::memory_space> const& cache,
    std::type_identity_t<refit_options<B>> const& options, out_view<T, 3, B> changed)
{
    cache_layout const& layout = cache.layout;
    refit_part const& part     = options.rows;
    index_t const H            = layout.heads;
    index_t const N            = rungs.extent(1);
    index_t const all          = N + layout.window;
    auto const [D, Dv]         = layout.dims;
    index_t const query_heads  = queries.extent(0);
    using namespace detail;
    expects_refit("refit", "rows", part);
    expects_not_negative("refit", "scale", options.scale);
    expects(options.stand_ins >= 0, "refit: stand_ins is ", options.stand_ins, "; it must not be negative");
    expects(H == 0 || (query_heads % H == 0 && query_heads >= H), "refit: queries [H*G, Q, D] has ", query_heads,
        " query heads, which ", H, " KV heads do not divide");
    index_t const group = H == 0 ? 1 : query_heads / H;
    index_t const each  = part.each(group);
    index_t const Q     = queries.extent(1);
    expects(H == 0 || (Q >= 2 * each && Q % each == 0), "refit: queries [H*G, Q, D] has Q = ", Q,
        "; it must be a multiple of the ", each, " rows of a block, for two blocks or more");
    index_t const blocks = Q / each;
    index_t const last   = all - part.span; // the first token of the last block
    index_t const end    = options.first + (blocks - 2) * part.apart + part.span;
    expects(options.first >= 0 && (H == 0 || end <= last), "refit: first is ", options.first, "; the ", blocks - 1,
        " blocks from there on must end before the last ", part.span, " of ", all, " tokens");
    checks{on, "refit"}
        .rows("queries", queries, {query_heads, Q, D}, "H*G,Q,D")
        .rows("keys", keys, {H, all, D}, "H,N+W,D")
        .rows("values", values, {H, all, Dv}, "H,N+W,Dv")
        .in("rungs", rungs, {H, N}, "H,N")
        .bytes("cache.arena", cache.arena, cache.arena_bytes, false)
        .out("changed", changed, {H, N, Dv}, "H,N,Dv");
    if (H == 0) { return; }
    workspace::frame frame{on.scratch};
    auto const positions = scratch_view<std::int32_t>(on, frame, H, N);
    auto const first     = scratch_view<index_t>(on, frame, H, static_cast<index_t>(layout.rungs) + 1);
    run(on, sort_slots<B>{rungs, positions, first}, H);
    refit_values(on,
        refit_rows<B, T, U>{queries, keys, values, {}, keys, values, slice<1>(values, 0, N), options.first,
            as_input(positions), as_input(first)},
        cache, options, changed);
}

} // namespace MDKV_NAMESPACE
