/// \file channels.hpp: fit_channels: what the keys of a head have in common, channel by channel, so that codes store the rest.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/detail/channels.hpp>
#include <mdkv/detail/check.hpp>

namespace MDKV_NAMESPACE
{

/// Mean and scale of every channel of a head's keys, one of their D coordinates over all tokens. Codes of whole vectors
/// store (k - mean) / scale, rotated; queries are multiplied by the scale, and their product with the mean is added to the
/// logits. The scale is sqrt(rms(k - mean) / rms(q)): of all scales it leaves the least error of q.k after a rotation, which
/// spreads the error of all channels evenly.
///
/// Both come from all keys and queries, or from one of every few, at uneven distances, if there are more than 512. A scale lies in
/// [2^-10, 2^10], and is 1 if all keys are equal in a channel, but for the rounding of float. NaNs and infinities count as 0, and a
/// mean is 0 if differences of its rows leave float's range.
///
/// \param on             backend
/// \param[in]  queries   [H*G, Q, D]  after position encoding, of any element type U; if Q = 0, every query coordinate counts as 1
/// \param[in]  keys      [H, N, D]    same encoding
/// \param[out] channels  [H, 3, D]    means, scales, and root mean squares of the queries (1 if Q = 0)
/// \cost   reads up to 512 keys of a head and as many queries; no scratch
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument   a shape disagrees, or an output overlaps
/// \see    tests/unit/stages/channels.cpp, docs/numerics.md
template <backend B, element T, element U>
void fit_channels(B const& on, in_view<U, 3, B> queries, in_view<T, 3, B> keys, out_view<float, 3, B> channels)
{
    index_t const heads = keys.extent(0);
    index_t const rows  = queries.extent(0);
    index_t const dim   = keys.extent(2);
    expects(heads == 0 || rows % heads == 0, "fit_channels: queries [H*G, Q, D] has ", rows, " query heads, which ",
        heads, " KV heads do not divide");
    detail::checks{on, "fit_channels"}
        .rows("queries", queries, {rows, queries.extent(1), dim}, "H*G,Q,D")
        .rows("keys", keys, {heads, keys.extent(1), dim}, "H,N,D")
        .out("channels", channels, {heads, 3, dim}, "H,3,D");
    run(on, detail::fit_key_channels<T, U, B>{queries, keys, channels}, heads);
}

} // namespace MDKV_NAMESPACE
