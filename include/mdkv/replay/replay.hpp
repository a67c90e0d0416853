/// \file replay.hpp: replay: a chunk of a prompt scored by its own queries, rotated to their positions in a later reading.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/score_options.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/replay/advance.hpp>
#include <mdkv/stages/score.hpp>

#include <optional>
#include <type_traits>

namespace MDKV_NAMESPACE
{

template <backend B>
struct replay_options
{
    /// Positions by which the chunk's queries are rotated: the chunk's length if it were read again at once, more if later.
    /// The prompt's length need not be known (docs/lab/2026-11/quality.md compares distances).
    index_t ahead = 256;

    /// If true, replayed queries also attend, causally, to the replayed copies of sinks and chunk. Better for questions,
    /// worse for text that goes on.
    bool own = false;

    rotary_encoding<B> encoding{}; ///< the model's encoding

    /// [H*G, C]  see score_options: sink logits, or keys kept elsewhere.
    std::optional<in_view<float, 2, B>> lse_elsewhere = std::nullopt;

    float scale   = 0.0F;                ///< see score_options
    row_norm norm = row_norm::euclidean; ///< see score_options
};

/// Losses of a chunk of a prompt's tokens by the queries of a second reading, which stand for any later question. The
/// chunk's own queries, rotated to later positions, approximate the queries of that reading: each sees all of the chunk's
/// keys, later ones, too. Call it during prefill, for one chunk of about 256 tokens after another, while their queries are
/// in memory. It calls `advance`, then `score`.
///
/// \param on            backend: threads, scratch
/// \param[in]  queries  [H*G, C, D]  queries of the chunk, after position encoding, of any element type U
/// \param[in]  keys     [H, C, D]    same encoding
/// \param[in]  values   [H, C, Dv]
/// \param[in]  sinks    [H, S, D]    keys of the prompt's first few tokens, seen from every chunk; S = 0 for the first, which has them
/// \param[in]  ratios   the rungs, none of them projected: bases are fitted to a whole prompt
/// \param[in]  options  how far ahead, position encoding, norm
/// \param[out] loss     [H, R, C]  the chunk's slice of the prompt's losses
/// \cost   score with C queries of C tokens, with `own` its first sweep twice; scratch of score, rotated queries and keys
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument   a rung is projected, or an argument of advance or score is refused; nothing was changed
/// \see    tests/unit/replay/replay.cpp, docs/method.md
template <backend B, element T, element U>
void replay(B const& on, in_view<U, 3, B> queries, in_view<T, 3, B> keys, in_view<T, 3, B> values,
    in_view<T, 3, B> sinks, ratio_set const& ratios, std::type_identity_t<replay_options<B>> const& options,
    out_view<float, 3, B> loss)
{
    expects(!ratios.any_projected(),
        "replay: the ratio set has a projected rung, whose basis is not known before the prompt's end");
    index_t const heads = keys.extent(0);
    index_t const chunk = queries.extent(1);
    index_t const dim   = queries.extent(2);
    index_t const first = sinks.extent(1);
    detail::checks{on, "replay"}
        .rows("queries", queries, queries.extents(), "H*G,C,D")
        .rows("keys", keys, {heads, chunk, dim}, "H,C,D")
        .rows("values", values, {heads, chunk, values.extent(2)}, "H,C,Dv")
        .rows("sinks", sinks, {heads, first, dim}, "H,S,D")
        .in("options.lse_elsewhere", options.lse_elsewhere, {{queries.extent(0), chunk}}, "H*G,C")
        .out("loss", loss, {heads, static_cast<index_t>(ratios.size()), chunk}, "H,R,C");
    index_t const own = options.own ? first + chunk : 0;
    in_view<float, 3, B> const none{};
    score_options<B> const choice{.scale = options.scale,
        .first_query                     = chunk + first, // rows see chunk and sinks, and own keys up to their position
        .lse_elsewhere                   = options.lse_elsewhere,
        .norm                            = options.norm};
    detail::expects_score(on, queries, keys, values, sinks, none, none, ratios, choice, loss);
    workspace::frame frame{*on.scratch};
    auto const ahead  = detail::scratch_view<U>(on, frame, queries.extent(0), chunk, dim);
    auto const others = detail::scratch_view<T>(on, frame, heads, own, dim);
    advance(on, queries, options.ahead, options.encoding, ahead);
    if (options.own)
    {
        advance(on, sinks, options.ahead, options.encoding, slice<1>(others, 0, first));
        advance(on, keys, options.ahead, options.encoding, slice<1>(others, first, chunk));
    }
    score_impl(
        on, as_input(ahead), keys, values, options.own ? as_input(others) : sinks, none, none, ratios, choice, loss);
}

} // namespace MDKV_NAMESPACE
