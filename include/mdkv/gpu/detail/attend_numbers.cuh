/// \file attend_numbers.cuh: tiles that cannot be copied as they are, written number by number in the form of whole ones: the last tile of a run, elements of 32 bits, rows that are no words (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/gpu/detail/attend_rows.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstddef>
#include <cstdint>

namespace MDKV_NAMESPACE::gpu::kernels
{

/// Copies bytes from any address by the lanes of a warp.
__device__ inline void copy_by_warp(int lane, std::byte const* from, int bytes, std::byte* to)
{
    auto const together = reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to);
    int const words     = together % 4 == 0 ? bytes / 4 : 0;
    for (int i = lane; i < words; i += device::warp_size)
    {
        device::store(to + 4 * i, device::load<std::uint32_t>(from + 4 * i));
    }
    MDKV_ROLLED
    for (int i = 4 * words + lane; i < bytes; i += device::warp_size) { to[i] = from[i]; }
}

/// A unit of a tile of which `count` tokens exist. Other values are 0; the keys of tokens that are stored and do not exist
/// are anything.
template <element T, storage Kind>
struct attend_numbers
{
    using rows = attend_rows<T, Kind>;
    using limb = typename rows::limb;

    run_rows const& stored; ///< the keys, or the values
    int tile;
    int count;
    int n;     ///< coordinates
    int first; ///< coordinate

    /// Writes the unit to the beginning of the warp's ring. Its bytes are copied to the ring's second half first, if they fit.
    __device__ void write(bool values, std::byte* ring) const
    {
        int const lane            = device::thread_again() % device::warp_size; // nothing of this is kept in registers
        index_t const begin_token = index_t{tile} * tile_tokens;
        int const width           = stored.width(begin_token); // tokens stored
        int const readable        = values ? count : width;    // tokens read
        std::byte const* from     = stored.begin + stored.tile(begin_token);
        // Where the unit lies among what is copied: from its beginning, but for plain values, whose rows are put together.
        int row_bytes = stored.token_bytes;
        if constexpr (rows::coded || sizeof(T) == 2)
        {
            std::byte* const copy = ring + attend_ring / 2;
            if constexpr (rows::coded)
            {
                copy_by_warp(lane, from + width * static_cast<int>(coordinate_bytes(Kind, first, 0)),
                    width * static_cast<int>(coordinate_bytes(Kind, n, 0)), copy);
            }
            else if (values)
            {
                MDKV_ROLLED
                for (int t = 0; t < readable; ++t)
                {
                    copy_by_warp(lane, from + t * row_bytes + first * 2, n * 2, copy + t * n * 2);
                }
                row_bytes = n * 2;
            }
            else { copy_by_warp(lane, from + first * width * 2, n * width * 2, copy); }
            from = copy;
            device::sync_warp();
        }
        else { from += values ? first * int{sizeof(T)} : first * width * int{sizeof(T)}; }
        if constexpr (!rows::coded)
        {
            MDKV_ROLLED
            for (int i = lane; i < n * rows::sixteen; i += device::warp_size)
            {
                int const t         = values ? i / n : i % rows::sixteen;
                int const c         = values ? i % n : i / rows::sixteen;
                int const at        = values ? t * row_bytes + c * int{sizeof(T)} : (c * width + t) * int{sizeof(T)};
                std::byte* const to = ring
                                      + (values ? rows::smem_offset(true, t, c * 2)
                                                : rows::smem_offset(false, c / 4, c % 4 * 32 + t * 2));
                float x = t < readable ? widen(mdkv::detail::load_bytes<T>(from + at)) : 0.0F;
                MDKV_UNROLL
                for (int j = 0; j < rows::element_limbs; ++j)
                {
                    limb const rounded = narrow<limb>(x);
                    device::store(to + j * rows::image_bytes, rounded);
                    x -= widen(rounded);
                }
            }
        }
        else
        {
            MDKV_ROLLED
            for (int k = 0; k * rows::group < n; ++k)
            {
                mdkv::detail::coded_group const codes{n, k, width, values, Kind};
                int const begin   = k * rows::group_bytes;
                auto const number = [&](int offset, std::uint16_t bits) {
                    device::store(ring + rows::smem_offset(values, begin + offset), bits);
                };
                {
                    int const t          = lane % rows::sixteen;
                    bool const of_scale  = lane < rows::sixteen;
                    auto const* const at = from + (of_scale ? codes.scale(t) : codes.minimum(t));
                    half const x         = t < readable ? mdkv::detail::load_bytes<half>(at) : half{};
                    number(lane * 2, x.bits);
                }
                int const second = (codes.coordinates + 1) / 2; // coordinate, or byte, of the second half
                int const middle = rows::middle(codes.coordinates);
                MDKV_ROLLED
                for (int i = lane; i < codes.bytes * rows::sixteen; i += device::warp_size)
                {
                    int const t  = i % rows::sixteen;
                    int const b  = i / rows::sixteen;
                    int const c  = Kind == storage::int8 && b >= second ? middle + b - second : b;
                    int const at = values ? (t / 4 * rows::words(codes.coordinates) + c) * 4 + t % 4
                                          : (b / 4 * rows::sixteen + t) * 4 + b % 4;
                    ring[rows::smem_offset(values, begin + rows::codes_begin + at)] =
                        t < readable ? from[codes.code(t, b)] : std::byte{0};
                }
            }
        }
        device::sync_warp();
    }
};

} // namespace MDKV_NAMESPACE::gpu::kernels
