/// \file recompress_slots.cuh: what recompress does slot by slot on the GPU: rungs as they are, losses as they count, sources, what stays.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/stored_slots.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstddef>
#include <cstdint>

namespace mdkv::gpu::kernels
{

/// A thread takes a slot [H, M] of the cache that is there; slots beyond a head's tokens pad it.
struct each_slot
{
    static constexpr int threads = 256;

    mdkv::detail::stored_slots slots; ///< over the directory in device memory

    [[nodiscard]] index_t blocks() const { return (slots.layout.heads * slots.most + threads - 1) / threads; }

protected:
    struct place
    {
        index_t h;
        index_t t;
    };
    /// Head H where there is no slot for the thread.
    [[nodiscard]] __device__ place mine() const
    {
        index_t const i = device::block() * threads + device::thread();
        return {i / slots.most, i % slots.most};
    }
};

/// Every token's rung as it is stored now.
struct stored_rungs : each_slot
{
    static constexpr char const* name = "stored_rungs";

    out_view<std::uint8_t, 2, backend> rung; // [H, M]

    __device__ void operator()() const
    {
        auto const [h, t] = mine();
        if (h >= slots.layout.heads) { return; }
        rung(h, t) = static_cast<std::uint8_t>(t < slots.tokens(h) ? slots.own_rung(h, t) : 0);
    }
};

/// 0 where a token stays as it is, and at every rung of what pads a head. A rung above a token's own, or one that its head
/// cannot read, loses as much as none, so that nobody pays for it.
struct mask_losses : each_slot
{
    static constexpr char const* name = "mask_losses";

    in_view<float, 3, backend> pooled; // [H, R, M]  may be `loss` itself
    out_view<float, 3, backend> loss;  // [H, R, M]

    __device__ void operator()() const
    {
        auto const [h, t] = mine();
        if (h >= slots.layout.heads) { return; }
        bool const padding       = t >= slots.tokens(h);
        bool const exact         = t >= slots.first_exact(h);
        std::size_t const own    = padding ? 0 : slots.own_rung(h, t);
        float const when_dropped = padding ? 0.0F : pooled(h, 0, t);
        for (std::size_t r = 0; r < slots.layout.rungs; ++r)
        {
            auto const i      = static_cast<index_t>(r);
            bool const kept   = padding || (exact ? r == slots.layout.full_rung : r == own);
            bool const closed = r > own || !slots.open(h, r);
            loss(h, i, t)     = kept ? 0.0F : closed ? when_dropped : pooled(h, i, t);
        }
    }
};

/// How many tokens are what they were, bit for bit.
struct count_kept : each_slot
{
    static constexpr char const* name = "count_kept";

    in_view<std::uint8_t, 2, backend> rung; // [H, M]
    index_t* kept;                          // [1]  0 before

    [[nodiscard]] index_t shared_bytes() const { return threads / device::warp_size * index_t{sizeof(int)}; }

    __device__ void operator()() const
    {
        auto const [h, t] = mine();
        bool const token  = h < slots.layout.heads && t < slots.tokens(h);
        int const stays   = token && slots.stays(h, t, rung(h, t)) ? 1 : 0;
        int const sum     = device::block_sum(stays, reinterpret_cast<int*>(device::shared_memory()));
        if (device::thread() == 0) { device::atomic_add(kept, index_t{sum}); }
    }
};

/// The old slot of every new one: the lists by rung, then the window; -1 where there is none.
struct list_sources
{
    static constexpr char const* name = "list_sources";
    static constexpr int threads      = 256;

    mdkv::detail::stored_slots slots;            ///< over the directory in device memory
    in_view<std::int32_t, 2, backend> positions; // [H, M]    by rung, ascending
    in_view<index_t, 2, backend> first;          // [H, R+1]  where each rung's positions begin
    out_view<std::int32_t, 2, backend> sources;  // [H, S]

    [[nodiscard]] index_t blocks() const { return (sources.extent(0) * sources.extent(1) + threads - 1) / threads; }

    [[nodiscard]] __device__ index_t source(index_t h, index_t slot) const
    {
        cache_layout const& layout = slots.layout;
        for (std::size_t i = 0; i <= layout.rungs; ++i) // those with runs of their own, then the full one
        {
            std::size_t const r = i < layout.rungs ? i : layout.full_rung;
            if (i < layout.rungs ? !layout.own_run(r) : r == layout.rungs) { continue; }
            index_t const begin = first(h, static_cast<index_t>(r));
            index_t const count = first(h, static_cast<index_t>(r) + 1) - begin;
            if (slot < count) { return positions(h, begin + slot); }
            slot -= count;
        }
        return slot < layout.window ? slots.tokens(h) + slot : -1;
    }

    __device__ void operator()() const
    {
        index_t const i = device::block() * threads + device::thread();
        index_t const h = i / sources.extent(1);
        if (h >= sources.extent(0)) { return; }
        sources(h, i % sources.extent(1)) = static_cast<std::int32_t>(source(h, i % sources.extent(1)));
    }
};

} // namespace mdkv::gpu::kernels
