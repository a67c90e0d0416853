/// \file attend_numbers.cuh: tiles that cannot be copied as they are, gathered word by word or number by number in the form of whole ones: the last tile of a run, elements of 32 bits, rows that are no words (arXiv 2603.20616, section 5).
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

/// A unit of a tile of which `count` tokens exist. Other values are 0; the keys of tokens that do not exist are anything. Whole
/// words are gathered with several loads of a lane under way at once, since a run's last tile is waited for in every call;
/// other numbers are read one by one.
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

    /// Writes the unit to the beginning of the warp's ring.
    __device__ void write(bool values, std::byte* ring) const
    {
        int const lane            = device::thread_again() % device::warp_size; // nothing of this is kept in registers
        index_t const begin_token = index_t{tile} * tile_tokens;
        int const width           = stored.width(begin_token); // tokens stored
        int const readable        = values ? count : width;    // tokens read
        int const row_bytes       = stored.token_bytes;
        int const before = rows::coded ? static_cast<int>(coordinate_bytes(Kind, first, 0)) : first * int{sizeof(T)};
        std::byte const* const from =
            stored.begin + stored.tile(begin_token) + before * (values && !rows::coded ? 1 : width);
        if (rows::coded ? n % rows::group == 0 : sizeof(T) == 2 && n % 4 == 0 && (!values || row_bytes % 4 == 0))
        {
            if (reinterpret_cast<std::uintptr_t>(from) % 4 == 0)
            {
                if constexpr (rows::coded) { gather_codes(lane, from, width, readable, values, ring); }
                else if constexpr (sizeof(T) == 2) { gather_elements(lane, from, width, readable, values, ring); }
                device::sync_warp();
                return;
            }
        }
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

private:
    static constexpr int at_once = 4; ///< loads of a lane that are under way together: more would spill registers

    /// Words of elements of 16 bits.
    __device__ void gather_elements(
        int lane, std::byte const* from, int width, int readable, bool values, std::byte* ring) const
    {
        if (values)
        {
            MDKV_UNROLL
            for (int t = 0; t < rows::sixteen; t += at_once)
            {
                std::uint32_t word[at_once]{};
                MDKV_UNROLL
                for (int i = 0; i < at_once; ++i)
                {
                    bool const there = t + i < readable && 2 * lane < n;
                    if (there) { word[i] = device::load<std::uint32_t>(from + (t + i) * stored.token_bytes + 4 * lane); }
                }
                MDKV_UNROLL
                for (int i = 0; i < at_once; ++i)
                {
                    if (2 * lane < n) { device::store(ring + rows::smem_offset(true, t + i, 4 * lane), word[i]); }
                }
            }
            return;
        }
        int const pair = lane % 8; // a pair of tokens
        MDKV_ROLLED
        for (int c = lane / 8; c < n; c += 4 * at_once)
        {
            std::uint32_t word[at_once]{};
            MDKV_UNROLL
            for (int i = 0; i < at_once; ++i)
            {
                int const at                = ((c + 4 * i) * width + 2 * pair) * 2;
                std::byte const* const here = from + at / 4 * 4;
                if (c + 4 * i >= n || 2 * pair >= readable) { continue; }
                word[i] = device::load<std::uint32_t>(here) >> (at % 4 * 8);
                if (at % 4 != 0 && 2 * pair + 1 < width) { word[i] |= device::load<std::uint32_t>(here + 4) << 16U; }
            }
            MDKV_UNROLL
            for (int i = 0; i < at_once; ++i)
            {
                int const to = c + 4 * i;
                if (to < n) { device::store(ring + rows::smem_offset(false, to / 4, to % 4 * 32 + 4 * pair), word[i]); }
            }
        }
    }

    /// Words of whole groups of codes, their scales and minima.
    __device__ void gather_codes(
        int lane, std::byte const* from, int width, int readable, bool values, std::byte* ring) const
    {
        constexpr int bytes = rows::group_bytes / rows::sixteen - 2 * int{sizeof(half)}; // bytes of a token's codes
        int const t         = lane % rows::sixteen;
        MDKV_ROLLED
        for (int k = 0; k * rows::group < n; ++k)
        {
            std::byte const* const codes = from + k * width * (bytes + 4) + 4 * width;
            int const begin              = k * rows::group_bytes;
            std::uint16_t number         = 0;
            if (t < readable) { number = device::load<std::uint16_t>(codes + ((lane / 16 - 2) * width + t) * 2); }
            device::store(ring + rows::smem_offset(values, begin + lane * 2), number);
            MDKV_ROLLED
            for (int j = lane; j < bytes * rows::sixteen / 4; j += at_once * device::warp_size)
            {
                std::uint32_t word[at_once]{};
                MDKV_UNROLL
                for (int i = 0; i < at_once; ++i)
                {
                    int const w    = j + i * device::warp_size;
                    int const left = values ? width - w / bytes * 4 : 0; // tokens from the word's first one on
                    if (!values && t < width) { word[i] = device::load<std::uint32_t>(codes + (w / 16 * width + t) * 4); }
                    if (left >= 4) { word[i] = device::load<std::uint32_t>(codes + w * 4); }
                    MDKV_UNROLL
                    for (int b = 0; b < 3; ++b) // the last tokens lie one after the other
                    {
                        if (left >= 4 || b >= left) { continue; }
                        auto const byte = device::load<std::uint8_t>(codes + (w / bytes * 4 + b) * bytes + w % bytes);
                        word[i] |= std::uint32_t{byte} << (8 * b);
                    }
                }
                MDKV_UNROLL
                for (int i = 0; i < at_once; ++i)
                {
                    int const to = begin + rows::codes_begin + (j + i * device::warp_size) * 4;
                    device::store(ring + rows::smem_offset(values, to), word[i]);
                }
            }
        }
    }
};

} // namespace MDKV_NAMESPACE::gpu::kernels
