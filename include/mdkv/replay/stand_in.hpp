/// \file stand_in.hpp: stand_in: a few tokens that take the place of all dropped ones of a head (beyond arXiv 2603.20616).
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/panel.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/detail/stand_in.hpp>
#include <mdkv/detail/team.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace MDKV_NAMESPACE
{

struct stand_in_options
{
    float scale = 0.0F; ///< factor of q.k; 0 means 1/sqrt(D)

    /// See score_options: query i sees the tokens up to first_query + i. Unset: the queries are the last ones of `tokens`.
    std::optional<index_t> first_query = std::nullopt;
};

namespace detail
{

/// The body of mdkv::stand_in, with its checks.
/// \param seeds_of   how many of a head's seeds are among the last rows, if these are no tokens but present stand-ins
template <backend B, element T, element U>
void make_stand_ins(B const& on, in_view<U, 3, B> queries, in_view<T, 3, B> keys, in_view<T, 3, B> values,
    in_view<std::uint8_t, 2, B> rungs, in_view<float, 2, B> lse, index_t tokens, stand_in_options const& options,
    seed_shares const& seeds_of, out_view<float, 3, B> stand_in_keys, out_view<float, 3, B> stand_in_values)
{
    index_t const heads       = keys.extent(0);
    index_t const past        = keys.extent(1);
    index_t const dim         = keys.extent(2);
    index_t const query_heads = queries.extent(0);
    index_t const per_head    = queries.extent(1);
    index_t const clusters    = stand_in_keys.extent(1);
    expects(heads == 0 || (query_heads % heads == 0 && query_heads >= heads), "stand_in: queries [H*G, Q, D] has ",
        query_heads, " query heads, which ", heads, " KV heads do not divide");
    expects(heads == 0 || (dim >= 1 && values.extent(2) >= 1), "stand_in: head dimensions are ", dim, " and ",
        values.extent(2), "; they must be at least 1");
    expects(heads == 0 || per_head >= 1, "stand_in: queries [H*G, Q, D] has Q = 0");
    expects_not_negative("stand_in", "scale", options.scale);
    expects(tokens >= past, "stand_in: tokens is ", tokens, ", below N = ", past);
    expects(!options.first_query || *options.first_query >= 0, "stand_in: first_query is ",
        options.first_query.value_or(0), "; it must not be negative");
    expects(options.first_query || per_head <= tokens, "stand_in: ", per_head, " queries are more than the ", tokens,
        " tokens; say where they start (first_query)");
    checks{on, "stand_in"}
        .rows("queries", queries, {query_heads, per_head, dim}, "H*G,Q,D")
        .rows("keys", keys, {heads, past, dim}, "H,N,D")
        .rows("values", values, {heads, past, values.extent(2)}, "H,N,Dv")
        .in("rungs", rungs, {heads, past}, "H,N")
        .in("lse", lse, {query_heads, per_head}, "H*G,Q")
        .out("stand_in_keys", stand_in_keys, {heads, clusters, dim}, "H,M,D")
        .out("stand_in_values", stand_in_values, {heads, clusters, values.extent(2)}, "H,M,Dv");
    if (heads == 0 || clusters == 0) { return; }
    index_t const rows = query_heads / heads * per_head;
    using work         = attend_dropped<B>;
    workspace::frame frame{*on.scratch};
    auto const widened    = scratch_view<float>(on, frame, query_heads, per_head, dim);
    auto const seed_slots = scratch_view<index_t>(on, frame, heads, clusters);
    auto const seeds      = scratch_view<float>(on, frame, heads, clusters, dim + 1);
    auto const products   = scratch_view<float>(on, frame, heads, clusters, panel_depth);
    auto const attention  = scratch_view<float>(on, frame, heads, rows + 1, panel_depth);
    auto const cluster    = scratch_view<std::int32_t>(on, frame, heads, panel_depth);
    auto const shares     = scratch_view<float>(on, frame, heads, work::strips(past), clusters, rows + 1);
    auto const lacking    = scratch_view<float>(on, frame, heads, clusters, 2, rows);
    in_view<float, 3, B> const scaled{widened.data_handle(), {heads, rows, dim}, {rows * dim, dim, 1}};
    run(on, convert_rows<B, U>{queries, scale_in_base_two(options.scale, dim), widened});
    run(on, choose_seeds<B, T>{keys, rungs, seeds_of, seed_slots, seeds}, heads);
    for_pieces(past, [&](index_t at, index_t count) {
        auto const part   = slice<1>(keys, at, count);
        auto const logits = slice<2>(attention, 0, count);
        auto const seed   = slice<2>(products, 0, count);
        multiply<B, T, float>(on, {as_input(slice<2>(seeds, 0, dim))}, {part}, {seed});
        multiply<B, T, float>(on, {scaled}, {part}, {slice<1>(logits, 0, rows)});
        run(on, work{seed, logits, slice<1>(rungs, at, count), as_input(seed_slots), as_input(seeds), lse, at,
                    options.first_query.value_or(tokens - per_head), slice<1>(cluster, 0, count),
                    slice<1>(shares, work::strips(at), work::strips(count))});
        auto const add_up = [&](in_view<T, 3, B> const& of, out_view<float, 3, B> const& to) {
            multiply<B, T, float>(on, {as_input(seed)}, {slice<1>(of, at, count), true}, {.to = to, .add = at > 0});
        };
        add_up(keys, stand_in_keys);
        add_up(values, stand_in_values);
    });
    run(on, place_stand_in<B>{
                as_input(seed_slots), as_input(shares), scaled, lse, lacking, stand_in_keys, stand_in_values});
}

} // namespace detail

/// Up to M extra tokens per head that approximate the joint attention of the dropped tokens (rung 0), which `attend`
/// otherwise ignores; `pack` stores them behind the head's window. Dropped tokens form clusters by the nearest of evenly
/// spaced seeds; a cluster's token has the mean value and key, weighted by the rows' attention, and one step of the key along
/// the queries towards the cluster's log-sum-exp (docs/method.md). A head that drops n tokens has min(M, n) of them, because
/// one that stands for none would draw attention from kept tokens.
///
/// \param on            backend: threads, scratch
/// \param[in]  queries  [H*G, Q, D]  the prompt's last ones, after position encoding, of any element type U;
///                      few are better than many (`stand_in_queries`)
/// \param[in]  keys     [H, N, D]    the tokens that may be dropped, same encoding
/// \param[in]  values   [H, N, Dv]
/// \param[in]  rungs    [H, N]       from `allocate`: 0 for dropped tokens, if the ratio set can drop
/// \param[in]  lse      [H*G, Q]     see score_options: over all keys that each query sees, keys kept elsewhere included
/// \param[in]  tokens   number of the prompt's tokens, N + W: the N, and the W after them, which are never compressed
/// \param[in]  options  scale, positions of the queries
/// \param[out] stand_in_keys    [H, M, D]   zeros beyond a head's last stand-in
/// \param[out] stand_in_values  [H, M, Dv]
/// \pre    queries, keys, values and lse are finite; an attention above 1, of a log-sum-exp too low, counts as 1
/// \cost   O(H*N*(D*(G*Q + M) + Dv*M)) multiply-adds, keys read three times, values once; scratch
///         O(H*(G*Q*(D + M*N/256) + M*D))
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads; logits and sums over a cluster's tokens in
///         float, all others in double
/// \throws invalid_argument        a shape disagrees, an output overlaps, or an option is out of its range
/// \see    tests/unit/replay/stand_in.cpp, docs/method.md, docs/lab/2026-11/quality.md
template <backend B, element T, element U>
void stand_in(B const& on, in_view<U, 3, B> queries, in_view<T, 3, B> keys, in_view<T, 3, B> values,
    in_view<std::uint8_t, 2, B> rungs, in_view<float, 2, B> lse, index_t tokens, stand_in_options const& options,
    out_view<float, 3, B> stand_in_keys, out_view<float, 3, B> stand_in_values)
{
    detail::make_stand_ins(on, queries, keys, values, rungs, lse, tokens, options, {}, stand_in_keys, stand_in_values);
}

} // namespace MDKV_NAMESPACE
