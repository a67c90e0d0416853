/// \file pack.hpp: pack: writes a layer's tokens into the packed cache, each at its rung (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/packing.hpp>
#include <mdkv/detail/team.hpp>

#include <vector>

namespace MDKV_NAMESPACE
{

/// Bytes the arena of a cache needs for these rungs: exactly the bytes that pack fills.
///
/// \param on          backend
/// \param[in] rung    [H, N]
/// \param[in] layout  layout of the cache, in element type T
/// \param stand_ins   stand-ins of each head, at most: a head has no more than it drops tokens
/// \cost   reads rung once, on the host; no scratch. On a GPU the rungs are copied to host memory that this call allocates
/// \sync   returns when done, on a GPU too: it waits for the device
/// \order  deterministic
/// \throws invalid_argument         a rung is outside the layout's rungs (naming head and token), or stand_ins is negative
/// \throws size_overflow            N is 2^31 or more
/// \see    tests/unit/stages/pack.cpp
template <element T, backend B>
[[nodiscard]] index_t packed_bytes(
    B const& on, in_view<std::uint8_t, 2, B> rung, cache_layout const& layout, index_t stand_ins = 0)
{
    detail::checks{on, "packed_bytes"}.in("rung", rung, {layout.heads, rung.extent(1)}, "H,N");
    expects(stand_ins >= 0, "packed_bytes: stand_ins is ", stand_ins, "; it must not be negative");
    expects<size_overflow>(
        rung.extent(1) <= INT32_MAX, "packed_bytes: N = ", rung.extent(1), " is beyond the limit of ", INT32_MAX);
    std::uint8_t const* rungs = rung.data_handle();
    std::vector<std::uint8_t> copy;
    if constexpr (B::memory_space != space::host)
    {
        copy.resize(static_cast<std::size_t>(rung.required_span_size()));
        fetch(on, rungs, copy.data(), rung.required_span_size());
        rungs = copy.data();
    }
    return detail::bytes_of_rungs<T>("packed_bytes", rung, rungs, layout, true, stand_ins);
}

/// Writes projections, tokens at their rungs, window, stand-ins and the directory; empties the tail. Uncompressed vectors stay bit
/// for bit, others are coordinates in the basis, or codes of centred and rotated vectors (docs/method.md); codes of a group with
/// a NaN or an infinity are NaN. Stand-ins are further tokens, to which every query attends: a head that drops n tokens stores
/// its first min(M, n) ones at the end of the run that the layout names. They have no slots.
///
/// \param on                 backend: threads, scratch
/// \param[in]  keys          [H, N, D]
/// \param[in]  values        [H, N, Dv]
/// \param[in]  window_keys   [H, W, D]   never compressed; W = layout.window
/// \param[in]  window_values [H, W, Dv]
/// \param[in]  key_basis     [H, D, D]   orthonormal rows; may be [0, 0, 0] when no projected rung is in use
/// \param[in]  value_basis   [H, Dv, Dv] likewise
/// \param[in]  rung          [H, N]
/// \param      cache         arena of at least packed_bytes(rung, layout, M); directory [H]
/// \param[in]  channels      [H, 3, D]   from fit_channels for the same queries; or empty: fitted to the kept keys (all if none is
///                           kept), with worse codes if queries differ much from channel to channel
/// \param[in]  stand_in_keys    [H, M, D]   from stand_in for the same rungs; or empty
/// \param[in]  stand_in_values  [H, M, Dv]
/// \pre    N < 2^31
/// \cost   reads kept rows once; O(D*r) multiply-adds per projected token; scratch: a list of all positions, a tile
/// \sync   returns when done (cpu); enqueued on the stream, fit for graph capture (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument         a shape disagrees, a rung is outside the layout (gpu: such a token is dropped), a basis
///                                  is missing, memory overlaps, or (gpu) rows are not aligned to elements
/// \throws insufficient_workspace   the arena is too small, naming both sizes; nothing was changed. (gpu: neither this nor a
///                                  missing basis is seen: heads then hold no tokens, not even the window's)
/// \see    tests/unit/stages/pack.cpp
template <backend B, element T>
void pack(B const& on, in_view<T, 3, B> keys, in_view<T, 3, B> values, in_view<T, 3, B> window_keys,
    in_view<T, 3, B> window_values, in_view<float, 3, B> key_basis, in_view<float, 3, B> value_basis,
    in_view<std::uint8_t, 2, B> rung, cache_view<T, B::memory_space> const& cache, in_view<float, 3, B> channels = {},
    in_view<float, 3, B> stand_in_keys = {}, in_view<float, 3, B> stand_in_values = {})
{
    cache_layout const& layout = cache.layout;
    index_t const dim          = layout.dims.keys;
    index_t const value_dim    = layout.dims.values;
    index_t const heads        = layout.heads;
    index_t const tokens       = keys.extent(1);
    expects<size_overflow>(tokens <= INT32_MAX, "pack: N = ", tokens, " is beyond the limit of ", INT32_MAX);
    expects(layout.stand_ins_fit(), "pack: layout.stand_in_run is ", layout.stand_in_run, "; it must be ", layout.rungs,
        " (the exact run) or a rung that stores whole vectors in a run of its own");
    detail::checks arguments{on, "pack"};
    arguments.rows("keys", keys, {heads, tokens, dim}, "H,N,D")
        .rows("values", values, {heads, tokens, value_dim}, "H,N,Dv")
        .rows("window_keys", window_keys, {heads, layout.window, dim}, "H,W,D")
        .rows("window_values", window_values, {heads, layout.window, value_dim}, "H,W,Dv")
        .in("rung", rung, {heads, tokens}, "H,N");
    if (!key_basis.empty()) { arguments.in("key_basis", key_basis, {heads, dim, dim}, "H,D,D"); }
    if (!value_basis.empty()) { arguments.in("value_basis", value_basis, {heads, value_dim, value_dim}, "H,Dv,Dv"); }
    if (!channels.empty()) { arguments.in("channels", channels, {heads, 3, dim}, "H,3,D"); }
    index_t const stand_ins = stand_in_keys.extent(1);
    if (stand_ins > 0 || !stand_in_values.empty())
    {
        arguments.in("stand_in_keys", stand_in_keys, {heads, stand_ins, dim}, "H,M,D")
            .in("stand_in_values", stand_in_values, {heads, stand_ins, value_dim}, "H,M,Dv");
    }
    arguments.bytes("cache.arena", cache.arena, cache.arena_bytes, true)
        .bytes("cache.heads", cache.heads, heads * index_t{sizeof(head_entry)}, true)
        .bytes("cache.appended", cache.appended, cache.appended == nullptr ? 0 : index_t{sizeof(index_t)}, true);
    if constexpr (B::memory_space == space::host)
    {
        index_t const bytes = detail::bytes_of_rungs<T>(
            "pack", rung, rung.data_handle(), layout, !key_basis.empty() && !value_basis.empty(), stand_ins);
        expects<insufficient_workspace>(
            bytes <= cache.arena_bytes, "pack: the arena holds ", cache.arena_bytes, " bytes, ", bytes, " are needed");
    }
    workspace::frame frame{on.scratch};
    auto const positions = detail::scratch_view<std::int32_t>(on, frame, heads, tokens);
    auto const first     = detail::scratch_view<index_t>(on, frame, heads, static_cast<index_t>(layout.rungs) + 1);
    run(on, detail::sort_slots<B>{rung, positions, first}, heads);
    detail::pack_tokens<B, T>(on,
        {keys, values, window_keys, window_values, key_basis, value_basis, channels, {}, as_input(positions),
            as_input(first), stand_in_keys, stand_in_values},
        cache);
}

} // namespace MDKV_NAMESPACE
