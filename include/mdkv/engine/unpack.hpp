/// \file unpack.hpp: unpack: a packed cache as plain keys and values, for engines whose attention reads nothing else.
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/read_tokens.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/stored_slots.hpp>
#include <mdkv/detail/team.hpp>

#include <type_traits>

namespace MDKV_NAMESPACE
{

namespace detail
{

/// The body of unpack, for checked arguments. Nothing waits.
template <backend B, element T>
void unpack_rows(B const& on, cache_view<T, B::memory_space> const& cache, out_view<T, 3, B> keys,
    out_view<T, 3, B> values, out_view<index_t, 1, B> kept)
{
    constexpr space S  = B::memory_space;
    index_t const H    = cache.layout.heads;
    index_t const rows = keys.extent(1);
    auto const [D, Dv] = cache.layout.dims;
    bool projected     = false;
    for (std::size_t r = 0; r < cache.layout.rungs; ++r) { projected = projected || cache.layout.projected(r); }
    workspace::frame frame{on.scratch};
    auto const key_basis   = scratch_view<float>(on, frame, projected ? H : 0, D, D);
    auto const value_basis = scratch_view<float>(on, frame, projected ? H : 0, Dv, Dv);
    stored_slots<T, S> by_slot{cache, cache.layout, rows};
    by_slot.layout.window = 0; // all tokens are read alike
    run(on, read_projections<T, S>{cache, key_basis, value_basis}, key_basis.extent(0));
    run(on, read_tokens<T, S>{{cache, as_input(key_basis), as_input(value_basis), most_runs(cache.layout), rows, true},
                by_slot, keys, values, {}, {}, kept});
}

} // namespace detail

/// The most rows that `unpack` writes for a head: its slots and its stand-ins. Only the directory is read.
template <class T>
[[nodiscard]] index_t most_rows(cache_view<T, space::host> const& cache) noexcept
{
    index_t most = 0;
    for (index_t h = 0; h < cache.layout.heads; ++h)
    {
        index_t const rows = detail::tokens_of_head(detail::without_const(cache), h) + cache.heads[h].stand_ins;
        most               = rows > most ? rows : most;
    }
    return most;
}

/// Reads all tokens of a cache back as vectors of the original dimension, with what their rungs left of them: exact tokens
/// bit for bit, codes as numbers, projected ones with zeros in the coordinates that were dropped. Rows of a head are its
/// slots in the order of the cache (the runs by rung, the exact run, the tail), then its stand-ins, then zeros. Softmax
/// attention over the first kept[h] rows is that of `attend`, but for rounding.
///
/// \param on           backend: threads, scratch
/// \param[in]  cache   read only, e.g. from stored_caches::layer, whose positions are those of the rows
/// \param[out] keys    [H, S, D]   S at least `most_rows`
/// \param[out] values  [H, S, Dv]
/// \param[out] kept    [H]         rows of each head
/// \cost   reads the cache once and writes S rows a head; scratch for the bases of projected rungs
/// \sync   returns when done (cpu); gpu: waits for the stream once, then enqueued. A copy of the directory is allocated
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument   a shape disagrees or an output overlaps; nothing was changed
/// \see    tests/unit/engine/unpack.cpp
template <backend B, class T>
void unpack(B const& on, cache_view<T, B::memory_space> const& cache, out_view<std::remove_const_t<T>, 3, B> keys,
    out_view<std::remove_const_t<T>, 3, B> values, out_view<index_t, 1, B> kept)
{
    using E            = std::remove_const_t<T>;
    auto const from    = detail::without_const(cache);
    index_t const H    = cache.layout.heads;
    index_t const rows = keys.extent(1);
    auto const [D, Dv] = cache.layout.dims;
    detail::checks{on, "unpack"}
        .bytes("cache.arena", cache.arena, cache.arena_bytes, false)
        .bytes("cache.tail", cache.tail, H * cache.tail_head_bytes(), false)
        .out("keys", keys, {H, rows, D}, "H,S,D")
        .out("values", values, {H, rows, Dv}, "H,S,Dv")
        .out("kept", kept, {H}, "H");
    if (H == 0) { return; }
    expects(cache.heads != nullptr && cache.appended != nullptr, "unpack: cache has no directory");
    index_t const most = most_rows(detail::host_directory<E>{on, from}.view);
    expects(rows >= most, "unpack: keys [H, S, D] has S = ", rows, "; a head has ", most, " rows");
    detail::unpack_rows(on, from, keys, values, kept);
}

} // namespace MDKV_NAMESPACE
