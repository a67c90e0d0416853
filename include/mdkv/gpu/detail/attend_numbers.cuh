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
/// words are brought to shared memory as they are and gathered there, since a run's last tile is waited for in every call; other
/// numbers are read one by one.
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
                if constexpr (rows::coded) { copy_codes(lane, from, width, values, ring); }
                else if constexpr (sizeof(T) == 2)
                {
                    if (values) { copy_values(lane, from, readable, ring); }
                    else { gather_keys(lane, staged(lane, from, n * width * 2, ring), width, readable, ring); }
                }
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
    static constexpr int at_once = 4; ///< words that a lane has at once

    /// The bytes of a unit as they are stored, in shared memory behind the unit's place: all of them are under way at once.
    [[nodiscard]] __device__ static std::byte const* staged(int lane, std::byte const* from, int bytes, std::byte* ring)
    {
        std::byte* const to = ring + rows::buffer_bytes;
        static_assert(rows::buffers >= 2 || sizeof(T) == 4);
        MDKV_ROLLED
        for (int i = 4 * lane; i < bytes; i += 4 * device::warp_size) { device::copy_async<4>(to + i, from + i); }
        device::copy_async_commit();
        device::copy_async_wait<0>();
        device::sync_warp();
        return to;
    }

    /// Words of values of 16 bits.
    __device__ void copy_values(int lane, std::byte const* from, int readable, std::byte* ring) const
    {
        MDKV_ROLLED
        for (int t = 0; 2 * lane < n && t < rows::sixteen; ++t)
        {
            std::byte* const to = ring + rows::smem_offset(true, t, 4 * lane);
            if (t < readable) { device::copy_async<4>(to, from + t * stored.token_bytes + 4 * lane); }
            else { device::store(to, std::uint32_t{0}); }
        }
        device::copy_async_commit();
        device::copy_async_wait<0>();
    }

    /// Words of keys of 16 bits.
    __device__ void gather_keys(int lane, std::byte const* from, int width, int readable, std::byte* ring) const
    {
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

    /// Words of whole groups of codes, and their scales and minima, all of them under way at once. Codes of tokens that do not
    /// exist are not written.
    __device__ void copy_codes(int lane, std::byte const* from, int width, bool values, std::byte* ring) const
    {
        constexpr int bytes  = rows::group_bytes / rows::sixteen - 2 * int{sizeof(half)}; // bytes of a token's codes
        constexpr int groups = rows::unit / rows::group;
        int const fours      = width / 4; // fours of tokens
        int const rest       = width % 4; // tokens behind them
        auto const by_width =
            static_cast<unsigned>(65536 / width + 1); // a product and a shift divide numbers below 256
        std::uint16_t number[groups];
        std::uint32_t last[groups][bytes / device::warp_size]; // words of the rest
        MDKV_UNROLL
        for (int k = 0; k < groups; ++k)
        {
            if (k * rows::group >= n) { break; }
            std::byte const* const codes = from + k * width * (bytes + 4) + 4 * width;
            int const begin              = k * rows::group_bytes + rows::codes_begin;
            int const words              = values ? fours * bytes : bytes / 4 * width;
            MDKV_ROLLED
            for (int j = lane; j < words; j += device::warp_size)
            {
                auto const four =
                    static_cast<int>(static_cast<unsigned>(j) * by_width >> 16U); // number of a four of coordinates
                int const to = values ? j : four * rows::sixteen + j - four * width;
                device::copy_async<4>(ring + rows::smem_offset(values, begin + 4 * to), codes + 4 * j);
            }
            int const t = lane % rows::sixteen;
            number[k]   = 0;
            if (t < width) { number[k] = device::load<std::uint16_t>(codes + ((lane / 16 - 2) * width + t) * 2); }
            MDKV_UNROLL
            for (int i = 0; i < bytes / device::warp_size; ++i)
            {
                last[k][i] = 0;
                MDKV_UNROLL
                for (int b = 0; b < 3; ++b) // they lie one after the other
                {
                    if (!values || b >= rest) { continue; }
                    int const at = (4 * fours + b) * bytes + lane + i * device::warp_size;
                    last[k][i] |= std::uint32_t{device::load<std::uint8_t>(codes + at)} << (8 * b);
                }
            }
        }
        device::copy_async_commit();
        MDKV_UNROLL
        for (int k = 0; k < groups; ++k)
        {
            if (k * rows::group >= n) { break; }
            int const begin = k * rows::group_bytes;
            device::store(ring + rows::smem_offset(values, begin + lane * 2), number[k]);
            MDKV_UNROLL
            for (int i = 0; i < bytes / device::warp_size; ++i)
            {
                int const to = begin + rows::codes_begin + 4 * (fours * bytes + lane + i * device::warp_size);
                if (values && rest > 0) { device::store(ring + rows::smem_offset(true, to), last[k][i]); }
            }
        }
        device::copy_async_wait<0>();
    }
};

} // namespace MDKV_NAMESPACE::gpu::kernels
