/// \file pack_lay_out.cuh: the directory of a cache, written where the tokens were counted: on the device (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstddef>

#include <cuda/std/array>

namespace mdkv::gpu::kernels
{

using rung_tokens = ::cuda::std::array<index_t, max_rungs>;

/// What laying out told of itself.
struct packed_size
{
    index_t bytes;    ///< of the arena
    index_t unlisted; ///< tokens at no rung
};

/// One block, one thread a head: entries, the heads one after another. What does not fit, or has no basis, makes every
/// entry one without tokens, so that nothing is written to the arena or read from it.
template <element T>
struct lay_out_heads
{
    static constexpr char const* name = "lay_out_heads";
    static constexpr int threads      = 256;

    cache_layout layout;
    index_t arena_bytes;
    index_t tokens;       // N
    bool bases;           ///< there are some
    index_t const* first; // [H, R+1]
    rung_tokens* counts;  // [H]
    head_entry* heads;    // [H]
    index_t* appended;    // [1]  set to 0; may be null
    packed_size* size;    // [1]  may be null

    [[nodiscard]] index_t shared_bytes() const { return threads / device::warp_size * index_t{sizeof(index_t)}; }

    /// Fills counts[h]; the number of tokens that cannot be stored for want of a basis.
    [[nodiscard]] __device__ index_t count(index_t h) const
    {
        index_t const* const begin = first + h * (static_cast<index_t>(layout.rungs) + 1);
        index_t without            = 0;
        for (std::size_t r = 0; r < max_rungs; ++r)
        {
            counts[h][r] = r < layout.rungs ? begin[r + 1] - begin[r] : 0;
            if (!bases && layout.projected(r)) { without += counts[h][r]; }
        }
        return without;
    }

    __device__ void operator()() const
    {
        auto* const part = device::shared_carver{device::shared_memory()}.take<index_t>(threads / device::warp_size);
        index_t used     = 0;
        index_t without  = 0;
        index_t listed   = 0;
        for (index_t before = 0; before < layout.heads; before += threads)
        {
            index_t const h    = before + device::thread();
            bool const is_head = h < layout.heads;
            index_t bytes      = 0;
            if (is_head)
            {
                without += count(h);
                listed += first[(h + 1) * (static_cast<index_t>(layout.rungs) + 1) - 1];
                bytes = lay_out_head<T>(layout, counts[h], 0, heads[h]);
            }
            auto const all = device::block_prefix(bytes, part);
            if (is_head) { static_cast<void>(lay_out_head<T>(layout, counts[h], used + all.before, heads[h])); }
            used += all.total;
        }
        without = device::block_sum(without, part);
        listed  = device::block_sum(listed, part);
        for (index_t h = device::thread(); (used > arena_bytes || without > 0) && h < layout.heads; h += threads)
        {
            heads[h] = head_entry{};
        }
        if (device::thread() != 0) { return; }
        if (appended != nullptr) { *appended = 0; }
        if (size != nullptr) { *size = {used, layout.heads * tokens - listed}; }
    }
};

} // namespace mdkv::gpu::kernels
