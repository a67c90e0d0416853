/// \file measure.hpp: what prompt and reader do with the rows of a chunk while it is read: its losses, and rows kept for later (beyond arXiv 2603.20616).
#pragma once

#include <mdkv/prompt.hpp>

#include <mdkv/core/ground.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/replay/refit.hpp>
#include <mdkv/replay/replay.hpp>

#include <algorithm>
#include <optional>

namespace MDKV_NAMESPACE::detail
{

/// The last n rows of a dimension.
template <std::size_t Dim, class V, std::size_t Rank, space S>
[[nodiscard]] constexpr view<V, Rank, S> last(view<V, Rank, S> const& all, index_t n)
{
    return slice<Dim>(all, all.extent(Dim) - n, n);
}

/// Keeps the keys of the prompt's first tokens: `rows` are those of tokens from `first` on.
template <backend B, element T, element U>
void keep_sinks(B const& on, prompt_rows<B, T, U> const& rows, index_t first, out_view<T, 3, B> sinks)
{
    index_t const kept = (std::min)(sinks.extent(1) - first, rows.keys.extent(1));
    if (kept > 0) { run(on, copy_rows<B, T>{slice<1>(rows.keys, 0, kept), slice<1>(sinks, first, kept)}); }
}

/// Finds the losses of the first n tokens of `rows`, which begin at token `first`, by their own queries, in the preset's chunks.
/// \param loss  [H, R, n]
template <backend B, element T, element U>
void replay_chunks(B const& on, preset const& p, rotary_encoding<B> const& encoding, prompt_rows<B, T, U> const& rows,
    index_t first, index_t n, in_view<T, 3, B> sinks, out_view<float, 3, B> loss)
{
    index_t const chunk = p.replayed->chunk;
    for (index_t at = 0; at < n; at += chunk)
    {
        index_t const count   = (std::min)(chunk, n - at);
        auto options          = p.replay(encoding);
        options.lse_elsewhere = of_queries(rows.lse_elsewhere, at, count);
        mdkv::replay(on, slice<1>(rows.queries, at, count), slice<1>(rows.keys, at, count),
            slice<1>(rows.values, at, count), slice<1>(sinks, 0, (std::min)(first + at, sinks.extent(1))), p.ratios,
            options, slice<2>(loss, at, count));
    }
}

/// Keeps the queries of refit's last blocks: `queries` are those of tokens from `first` on.
/// \param kept  [H*G, kept() * each, D]
template <backend B, element U>
void keep_blocks(B const& on, refit_part const& part, index_t group, in_view<U, 3, B> const& queries, index_t first,
    out_view<U, 3, B> kept)
{
    index_t const each  = part.each(group);
    index_t const step  = part.step(group);
    index_t const count = queries.extent(1);
    for (index_t b = first / part.apart; part.first(b) < first + count; ++b)
    {
        index_t const begin = part.first(b);
        auto const before   = [&](index_t token) { // rows of the block before a token
            return token <= begin ? 0 : (std::min)((token - begin + step - 1) / step, each);
        };
        index_t const i = before(first);
        index_t const n = before(first + count) - i;
        if (n == 0) { continue; }
        in_view<U, 3, B> const rows{after(queries.data_handle(), (begin + i * step - first) * queries.stride(1)),
            {queries.extent(0), n, queries.extent(2)}, {queries.stride(0), step * queries.stride(1), 1}};
        run(on, copy_rows<B, U>{rows, slice<1>(kept, part.place(b) * each + i, n)});
    }
}

/// Puts the last rows of a call behind the first `held` rows of `latest`, of which the last ones stay as far as there is room.
/// \param moved  scratch for the rows that stay
template <class V, backend B>
void keep_last(B const& on, index_t held, in_view<V, 3, B> rows, out_view<V, 3, B> moved, out_view<V, 3, B> latest)
{
    index_t const fresh = (std::min)(rows.extent(1), latest.extent(1));
    index_t const stay  = moved.extent(1);
    if (stay < held)
    {
        run(on, copy_rows<B, V>{as_input(slice<1>(latest, held - stay, stay)), moved});
        run(on, copy_rows<B, V>{as_input(moved), slice<1>(latest, 0, stay)});
    }
    run(on, copy_rows<B, V>{last<1>(rows, fresh), slice<1>(latest, stay, fresh)});
}
template <backend B>
void keep_last(B const& on, index_t held, index_t n, in_view<float, 2, B> numbers, out_view<float, 3, B> moved,
    out_view<float, 2, B> latest)
{
    auto const rows = [&]<class V>(view<V, 2, B::memory_space> const& of, index_t count) {
        return view<V, 3, B::memory_space>{
            of.data_handle(), {of.extent(0), count, 1}, {of.stride(0), of.extent(1) > 1 ? 1 : 0, 1}};
    };
    keep_last<float>(on, held, rows(numbers, n), moved, rows(latest, latest.extent(1)));
}

} // namespace MDKV_NAMESPACE::detail
