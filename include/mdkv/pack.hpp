/// \file pack.hpp: contract of pack: writes a layer's tokens into the packed cache, each at its rung (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/basis.hpp>
#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/contract.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace mdkv
{

/// Bytes the arena of a cache needs for these rungs: exactly what pack will fill.
///
/// \param on          backend: threads
/// \param[in] rung    [H, N]
/// \param[in] layout  of the cache, in element type T
/// \cost   reads rung once; gpu: a little scratch
/// \sync   returns when done, on a GPU too: it waits for the device
/// \order  deterministic
/// \throws invalid_argument   a rung is outside the layout's rungs (naming head and token)
/// \see    tests/pack.cpp
template <element T, backend B>
[[nodiscard]] index_t packed_bytes(B const& on, in_view<std::uint8_t, 2, B> rung, cache_layout const& layout)
{
    detail::argument const r{"packed_bytes", "rung", rung};
    r.shape({layout.heads, rung.extent(1)}, "H,N").data(false);
    return packed_bytes_impl(on, rung, layout, T{});
}

/// Writes projections, projected tokens, full tokens and window, and the directory; empties the tail. Stored values are
/// the originals (full rung, window: bit for bit), or k U_r, v U_r, or all coordinates, rounded to the element type or to
/// codes (those of original coordinates turned before, see cache.hpp). A group of coordinates that holds a NaN or an
/// infinity is stored as NaN where its storage has codes.
///
/// \param on                 backend: threads
/// \param[in]  keys          [H, N, D]
/// \param[in]  values        [H, N, Dv]
/// \param[in]  window_keys   [H, W, D]   kept as they are; W = layout.window
/// \param[in]  window_values [H, W, Dv]
/// \param[in]  key_basis     [H, D, D]   what tokens are brought to, and what queries will be; may be [0, 0, 0] when no
///                                       projected rung is in use
/// \param[in]  value_basis   [H, Dv, Dv] likewise
/// \param[in]  rung          [H, N]
/// \param      cache         arena of at least packed_bytes(rung, layout); directory [H]
/// \cost   kept rows are read once; O(D*r) multiply-adds per projected token; no scratch (gpu: see a dry run)
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument         a shape disagrees, a rung is outside the layout, memory overlaps
/// \throws insufficient_workspace   the arena is too small, naming both sizes; nothing was changed in any case. gpu: of the
///                                  two data errors a rung outside the layout is dropped, and where tokens do not fit the
///                                  arena none is stored
/// \see    tests/pack.cpp
template <backend B, element T>
void pack(B const& on, in_view<T, 3, B> keys, in_view<T, 3, B> values, in_view<T, 3, B> window_keys,
    in_view<T, 3, B> window_values, std::type_identity_t<key_bases<B>> key_basis, in_view<float, 3, B> value_basis,
    in_view<std::uint8_t, 2, B> rung, cache_view<T, B::memory_space> const& cache)
{
    static_assert(
        requires { pack_impl(on, keys, values, window_keys, window_values, key_basis, value_basis, rung, cache); },
        MDKV_DETAIL_NO_IMPLEMENTATION(pack, pack));
    bool const dry             = detail::dry_run(on);
    cache_layout const& layout = cache.layout;
    index_t const heads        = layout.heads;
    index_t const tokens       = keys.extent(1);
    detail::argument const k{"pack", "keys", keys};
    detail::argument const v{"pack", "values", values};
    detail::argument const wk{"pack", "window_keys", window_keys};
    detail::argument const wv{"pack", "window_values", window_values};
    detail::argument const uk{"pack", "key_basis", key_basis.of_keys};
    detail::argument const uq{"pack", "key_basis.of_queries", key_basis.of_queries};
    detail::argument const uv{"pack", "value_basis", value_basis};
    detail::argument const r{"pack", "rung", rung};
    k.shape({heads, tokens, layout.dims.keys}, "H,N,D").data(dry);
    v.shape({heads, tokens, layout.dims.values}, "H,N,Dv").data(dry);
    wk.shape({heads, layout.window, layout.dims.keys}, "H,W,D").data(dry);
    wv.shape({heads, layout.window, layout.dims.values}, "H,W,Dv").data(dry);
    r.shape({heads, tokens}, "H,N").data(dry);
    if (!uk.empty()) { uk.shape({heads, layout.dims.keys, layout.dims.keys}, "H,D,D").data(dry).aligned(); }
    if (!uq.empty()) { uq.shape({heads, layout.dims.keys, layout.dims.keys}, "H,D,D").data(dry).aligned(); }
    if (!uv.empty()) { uv.shape({heads, layout.dims.values, layout.dims.values}, "H,Dv,Dv").data(dry).aligned(); }
    expects(dry || heads == 0 || cache.heads != nullptr, "pack: cache.heads is null");
    expects(dry || cache.arena_bytes == 0 || cache.arena != nullptr, "pack: cache.arena is null");
    auto const arena = cache.arena_bytes_view();
    detail::argument const a{"pack", "cache.arena", arena};
    a.apart_from(k).apart_from(v).apart_from(wk).apart_from(wv).apart_from(uk).apart_from(uq).apart_from(uv).apart_from(
        r);
    pack_impl(on, keys, values, window_keys, window_values, key_basis, value_basis, rung, cache);
}

} // namespace mdkv
