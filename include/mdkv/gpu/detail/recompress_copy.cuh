/// \file recompress_copy.cuh: what a new cache takes from the old one as it is written there.
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/stored_slots.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/detail/pack_rows.cuh>
#include <mdkv/gpu/detail/run_side.cuh>
#include <mdkv/gpu/detail/stored_run.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstddef>
#include <cstdint>

namespace mdkv::gpu::kernels
{

/// Tokens whose rung is as it was, and plain coordinates that some have been cut off from, to their places in the runs of
/// the new cache. A block takes sixteen of a head's list by rung: of keys, sixteen threads write neighbours.
template <element T>
struct copy_stored
{
    static constexpr char const* name = "copy_stored";
    static constexpr int threads      = 128;
    static constexpr int strip        = 16;

    mdkv::detail::stored_slots slots; ///< over the old directory in device memory
    cache_view<T, space::device> from;
    cache_view<T, space::device> to;             ///< laid out
    in_view<std::int32_t, 2, backend> positions; // [H, M]    by rung, ascending
    in_view<index_t, 2, backend> first;          // [H, R+1]  where each rung's positions begin

    /// A token to copy.
    struct move
    {
        run_side from[2]; ///< keys, values
        run_side to[2];
        index_t source; ///< place in the old run
        index_t target; ///< and in the new one
        bool wanted;
    };

    [[nodiscard]] MDKV_HD index_t strips() const { return (slots.most + strip - 1) / strip; }
    [[nodiscard]] index_t blocks() const { return slots.layout.heads * strips(); }
    [[nodiscard]] index_t shared_bytes() const
    {
        device::shared_carver size{nullptr};
        static_cast<void>(size.take<move>(strip));
        return size.bytes();
    }

    __device__ void operator()() const
    {
        move* const moves   = device::shared_carver{device::shared_memory()}.take<move>(strip);
        index_t const h     = device::block() / strips();
        index_t const begin = device::block() % strips() * strip;
        if (device::thread() < strip) { find(h, begin + device::thread(), moves[device::thread()]); }
        device::sync();
        move const& own = moves[device::thread() % strip];
        for (int unit = device::thread() / strip; unit < units(own, 0); unit += threads / strip) { copy(own, 0, unit); }
        for (int i = device::warp(); i < strip; i += threads / device::warp_size)
        {
            int const count = units(moves[i], 1);
            for (int unit = device::lane(); unit < count; unit += device::warp_size) { copy(moves[i], 1, unit); }
        }
    }

private:
    /// Token i of the head's list.
    __device__ void find(index_t h, index_t i, move& found) const
    {
        cache_layout const& layout = slots.layout;
        std::size_t r              = 0;
        while (r < layout.rungs && i >= first(h, static_cast<index_t>(r) + 1)) { ++r; }
        found.wanted = r < layout.rungs && layout.own_run(r);
        if (!found.wanted) { return; }
        stored_token const token = token_at(from, h, positions(h, i));
        found.wanted = token.rung < from.layout.rungs && (slots.same[token.rung] == r || cut(token.rung, r));
        if (!found.wanted) { return; }
        stored_run const run = run_of(to, h, r);
        for (bool const of_values : {false, true})
        {
            found.from[of_values ? 1 : 0] = run_side{token.run, of_values};
            found.to[of_values ? 1 : 0]   = run_side{run, of_values};
        }
        found.source = token.place;
        found.target = i - first(h, static_cast<index_t>(r));
    }

    /// Whether rung r is the beginning of what the old one stores.
    [[nodiscard]] __device__ bool cut(std::size_t old, std::size_t r) const
    {
        return from.layout.in_basis[old] && slots.layout.in_basis[r] && from.layout.kinds[old] == storage::plain
               && slots.layout.kinds[r] == storage::plain;
    }

    /// What a token is copied in: elements, or bytes of codes.
    [[nodiscard]] __device__ static int units(move const& what, int side)
    {
        if (!what.wanted) { return 0; }
        run_side const& b = what.to[side];
        return b.kind == storage::plain ? b.coordinates : b.token_bytes;
    }

    __device__ void copy(move const& what, int side, int unit) const
    {
        run_side const& a      = what.from[side];
        run_side const& b      = what.to[side];
        std::byte* const begin = to.arena + (b.begin - to.arena);
        if (b.kind == storage::plain)
        {
            store_at(begin + b.element(what.target, unit) * index_t{sizeof(T)},
                element_at<T>(a.begin, a.element(what.source, unit)));
            return;
        }
        begin[b.coded_byte(what.target, unit)] = a.begin[a.coded_byte(what.source, unit)];
    }
};

} // namespace mdkv::gpu::kernels
