/// \file rung_lists.cuh: every head's tokens counted and listed by rung, ascending inside a rung: a stable counting sort in chunks.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/launch.cuh>

#include <cstdint>

namespace mdkv::gpu
{

namespace kernels
{

/// What the three steps share. A token whose rung is not below R is at no rung: it is neither counted nor listed.
struct rung_lists
{
    static constexpr int threads        = 256;
    static constexpr int warps          = threads / device::warp_size;
    static constexpr index_t chunk      = 4096; ///< tokens of one block
    static constexpr index_t per_warp   = chunk / warps;
    static constexpr index_t most_rungs = 256; ///< a rung is a byte

    in_view<std::uint8_t, 2, backend> rung;       // [H, N]
    out_view<std::int32_t, 2, backend> positions; // [H, N]
    out_view<index_t, 2, backend> first;          // [H, R+1]
    std::int32_t*
        places; // [H, chunks, R]  the chunk's tokens at the rung; after the scan, where the first of them goes
    index_t chunks;
    int rungs; ///< R
    int bits;  ///< that say every number up to R

    rung_lists(in_view<std::uint8_t, 2, backend> rung_, out_view<std::int32_t, 2, backend> positions_,
        out_view<index_t, 2, backend> first_, std::int32_t* places_)
        : rung{rung_}
        , positions{positions_}
        , first{first_}
        , places{places_}
        , chunks{chunks_of(rung_.extent(1))}
        , rungs{static_cast<int>(first_.extent(1)) - 1}
        , bits{1}
    {
        while (rungs >> bits != 0) { ++bits; }
    }

    [[nodiscard]] static index_t chunks_of(index_t tokens) { return (tokens + chunk - 1) / chunk; }

    [[nodiscard]] index_t shared_bytes() const
    {
        device::shared_carver size{nullptr};
        static_cast<void>(size.take<int>(index_t{warps} * rungs));
        return size.bytes();
    }

    /// The number that follows the last one given out for this lane's rung, in the order of the lanes.
    [[nodiscard]] __device__ int next(int at, int* counters) const
    {
        bool const listed = at < rungs;
        unsigned same     = ~0U; // lanes at the same rung
        for (int b = 0; b < bits; ++b)
        {
            bool const one      = (at >> b & 1) != 0;
            unsigned const ones = device::ballot(one);
            same &= one ? ones : ~ones;
        }
        unsigned const before = same & ((1U << device::lane()) - 1);
        int const begin       = listed ? counters[at] : 0;
        device::sync_warp();
        if (listed && before == 0) { counters[at] = begin + device::count_bits(same); }
        device::sync_warp();
        return begin + device::count_bits(before);
    }

    /// Calls body(token, number) for every listed token of this warp's part of a chunk; counters [R] go on counting.
    template <class Body>
    __device__ void for_tokens(index_t h, index_t c, int* counters, Body const& body) const
    {
        index_t const begin = c * chunk + device::warp() * per_warp;
        index_t const end   = begin + per_warp < rung.extent(1) ? begin + per_warp : rung.extent(1);
        for (index_t i = begin; i < end; i += device::warp_size)
        {
            index_t const t  = i + device::lane();
            int const read   = t < end ? int{rung(h, t)} : rungs;
            int const at     = read < rungs ? read : rungs;
            int const number = next(at, counters);
            if (at < rungs) { body(t, number); }
        }
    }

    /// Of every warp, the chunk's tokens at each rung: counters [warps, R] in shared memory.
    [[nodiscard]] __device__ int* count(index_t h, index_t c) const
    {
        int* const counters = device::shared_carver{device::shared_memory()}.take<int>(index_t{warps} * rungs);
        for (int i = device::thread(); i < warps * rungs; i += threads) { counters[i] = 0; }
        device::sync();
        for_tokens(h, c, counters + device::warp() * rungs, [](index_t, int) {});
        device::sync();
        return counters;
    }

    [[nodiscard]] __device__ std::int32_t& place(index_t h, index_t c, int r) const
    {
        return places[(h * chunks + c) * rungs + r];
    }
};

/// One block a chunk.
struct count_rungs : rung_lists
{
    static constexpr char const* name = "count_rungs";

    __device__ void operator()() const
    {
        index_t const h           = device::block() / chunks;
        index_t const c           = device::block() % chunks;
        int const* const counters = count(h, c);
        for (int r = device::thread(); r < rungs; r += threads)
        {
            int sum = 0;
            for (int w = 0; w < warps; ++w) { sum += counters[w * rungs + r]; }
            place(h, c, r) = sum;
        }
    }
};

/// One block a head, one thread a rung: where each rung's list begins, and every chunk's part of it.
struct scan_rungs : rung_lists
{
    static constexpr char const* name = "scan_rungs";
    static_assert(threads >= most_rungs);

    [[nodiscard]] index_t shared_bytes() const { return index_t{warps} * index_t{sizeof(index_t)}; }

    __device__ void operator()() const
    {
        index_t const h = device::block();
        int const r     = device::thread();
        index_t mine    = 0;
        for (index_t c = 0; r < rungs && c < chunks; ++c) { mine += place(h, c, r); }
        auto const all =
            device::block_prefix(mine, device::shared_carver{device::shared_memory()}.take<index_t>(warps));
        if (r == 0) { first(h, rungs) = all.total; }
        if (r >= rungs) { return; }
        first(h, r) = all.before;
        auto at     = static_cast<std::int32_t>(all.before);
        for (index_t c = 0; c < chunks; ++c)
        {
            std::int32_t const here = place(h, c, r);
            place(h, c, r)          = at;
            at += here;
        }
    }
};

/// One block a chunk: every token to its place.
struct list_rungs : rung_lists
{
    static constexpr char const* name = "list_rungs";

    __device__ void operator()() const
    {
        index_t const h     = device::block() / chunks;
        index_t const c     = device::block() % chunks;
        int* const counters = count(h, c);
        for (int r = device::thread(); r < rungs; r += threads)
        {
            int at = place(h, c, r);
            for (int w = 0; w < warps; ++w)
            {
                int const here          = counters[w * rungs + r];
                counters[w * rungs + r] = at;
                at += here;
            }
        }
        device::sync();
        for_tokens(h, c, counters + device::warp() * rungs,
            [&](index_t t, int number) { positions(h, number) = static_cast<std::int32_t>(t); });
    }
};

} // namespace kernels

namespace detail
{

/// Fills `first` and leaves in `places` what list_rungs needs.
inline void count_rungs(backend const& on, kernels::rung_lists const& job)
{
    launch(on, kernels::count_rungs{job}, job.rung.extent(0) * job.chunks);
    launch(on, kernels::scan_rungs{job}, job.rung.extent(0));
}

/// Fills `first` and `positions`.
inline void list_rungs(backend const& on, kernels::rung_lists const& job)
{
    count_rungs(on, job);
    launch(on, kernels::list_rungs{job}, job.rung.extent(0) * job.chunks);
}

} // namespace detail

} // namespace mdkv::gpu
