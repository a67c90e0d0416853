/// \file attend_numbers.cuh: tiles that cannot be copied as they are, gathered in the form of whole ones by all warps of a block: the last tile of a run, elements of 32 bits, rows that are no words (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/gpu/detail/attend_rows.cuh>
#include <mdkv/gpu/device.cuh>

namespace MDKV_NAMESPACE::gpu::kernels
{

/// A tile's units, gathered in a block's shared memory. If keys and values are words, they are copied first, while the block
/// prepares queries: a small cache waits for the last tile of a run in every call.
template <element T, storage Kind>
struct attend_numbers
{
    using rows = attend_rows<T, Kind>;

    stored_run const& run;
    std::byte* memory; ///< shared: the queries, which keys of elements overwrite; keys, values, copied words
    int queries;       ///< bytes of the queries
    bool words;        ///< keys and values are words, and copied before they are gathered
    index_t begin;     ///< first token
    int first_value;   ///< values' coordinates are [first_value, first_value + values)
    int values;

    /// Bytes of shared memory for runs with up to so many coordinates of keys and of values.
    [[nodiscard]] static int bytes(int keys, int values, int queries, bool words)
    {
        index_t const copied = coordinate_bytes(Kind, keys, 2) + (rows::coded ? coordinate_bytes(Kind, values, 2) : 0);
        return values_begin(keys, queries) + unit_bytes(values) + (words ? static_cast<int>(tile_tokens * copied) : 0);
    }

    /// Begins to copy words. For each thread of the block, which then waits for its copies before `device::sync`.
    __device__ void copy() const
    {
        if constexpr (rows::coded)
        {
            each_group([&](bool of_values, int k) { copy_group(of_values, k); });
        }
        else
        {
            int const thread = device::thread_again();
            MDKV_ROLLED
            for (int i = 4 * thread; i < width() * run.keys.token_bytes; i += 4 * attend_threads)
            {
                device::copy_async<4>(copied(false) + i, stored(false) + i);
            }
            MDKV_ROLLED
            for (int i = thread; i < values / 2 * sixteen; i += attend_threads)
            {
                int const t         = i % sixteen;
                int const c         = i / sixteen * 2;
                std::byte* const to = place(true, c, rows::smem_offset(true, t, c % rows::unit * 2));
                if (t < count()) { device::copy_async<4>(to, stored(true) + t * run.values.token_bytes + c * 2); }
                else { device::store(to, std::uint32_t{0}); }
            }
        }
        device::copy_async_commit();
    }
    /// Gathers all units, or what copies could not bring to its place. Values of tokens that do not exist are 0, or codes with the
    /// scale 0; their keys are anything. For each thread of the block.
    __device__ void gather() const
    {
        if constexpr (rows::coded)
        {
            each_group([&](bool of_values, int k) {
                if (words) { gather_group<true>(of_values, k); }
                else { gather_group<false>(of_values, k); }
            });
        }
        else if (words) { gather_elements<true>(false); }
        else
        {
            gather_elements<false>(false);
            gather_elements<false>(true);
        }
    }
    /// Byte `offset` of the unit of a key's coordinate c, or of a value's coordinate first_value + c.
    [[nodiscard]] __device__ std::byte* place(bool of_values, int c, int offset) const
    {
        int const before = of_values ? values_begin(run.keys.coordinates, queries) : rows::coded ? queries : 0;
        return memory + before + c / rows::unit * unit_size + offset;
    }

private:
    static constexpr int unit_size = rows::element_limbs * rows::buffer_bytes;

    [[nodiscard]] MDKV_HD static int unit_bytes(int n) { return (n + rows::unit - 1) / rows::unit * unit_size; }
    [[nodiscard]] MDKV_HD static int values_begin(int keys, int queries)
    {
        int const n = unit_bytes(keys);
        return rows::coded ? queries + n : n > queries ? n : queries;
    }
    [[nodiscard]] __device__ int width() const { return run.keys.width(begin); }
    [[nodiscard]] __device__ int count() const
    {
        index_t const left = run.tokens - begin;
        return static_cast<int>(left < tile_tokens ? left : tile_tokens);
    }
    [[nodiscard]] __device__ std::byte const* stored(bool of_values) const
    {
        run_rows const& from = of_values ? run.values : run.keys;
        index_t const before = of_values ? coordinate_bytes(Kind, first_value, int{sizeof(T)}) : 0;
        return from.begin + from.tile(begin) + before * (rows::coded ? width() : 1);
    }
    /// Where keys, or values, are copied to as they are stored.
    [[nodiscard]] __device__ std::byte* copied(bool of_values) const
    {
        return place(true, 0, unit_bytes(values)) + (of_values ? width() * run.keys.token_bytes : 0);
    }
    template <element V, bool Words>
    [[nodiscard]] __device__ static float number(std::byte const* from)
    {
        if constexpr (Words) { return widen(device::load<V>(from)); }
        else { return widen(mdkv::detail::load_bytes<V>(from)); }
    }

    template <bool Words>
    __device__ void gather_elements(bool of_values) const
    {
        constexpr int size          = int{sizeof(T)};
        constexpr int pairs         = sixteen / 2; // pairs of tokens in a key's coordinate
        std::byte const* const from = Words ? copied(of_values) : stored(of_values);
        int const n                 = of_values ? values : run.keys.coordinates;
        int const token_bytes       = of_values ? run.values.token_bytes : size;
        int const next              = of_values ? size : width() * size; // from a coordinate to the next
        int const tokens            = of_values ? count() : width();
        MDKV_ROLLED
        for (int i = device::thread_again(); i < (of_values ? (n + 1) / 2 * sixteen : n * pairs); i += attend_threads)
        {
            int const t          = of_values ? i % sixteen : i % pairs * 2;
            int const c          = of_values ? i / sixteen * 2 : i / pairs;
            bool const two       = of_values ? c + 1 < n : t + 1 < tokens;
            auto const* const at = from + t * token_bytes + c * next;
            float const first    = t < tokens ? number<T, Words>(at) : 0.0F;
            float const second   = t < tokens && two ? number<T, Words>(at + size) : 0.0F;
            int const in_unit    = c % rows::unit;
            std::byte* const to  = place(of_values, c,
                of_values ? rows::smem_offset(true, t, in_unit * 2)
                           : rows::smem_offset(false, in_unit / 4, in_unit % 4 * 32 + t * 2));
            std::uint32_t limbs[std::size_t{rows::element_limbs}];
            to_limbs<typename rows::limb, rows::element_limbs>(first, second, limbs);
            MDKV_UNROLL
            for (int j = 0; j < rows::element_limbs; ++j) { device::store(to + j * rows::image_bytes, limbs[j]); }
        }
    }

    /// Calls body(of values, k) for each group k of keys and of values, by a warp.
    __device__ void each_group(auto const& body) const
    {
        int const of_keys = (run.keys.coordinates + group - 1) / group;
        int const all     = of_keys + (values + group - 1) / group;
        MDKV_ROLLED
        for (int g = device::thread_again() / device::warp_size; g < all; g += attend_warps)
        {
            body(g >= of_keys, g >= of_keys ? g - of_keys : g);
        }
    }
    [[nodiscard]] __device__ mdkv::detail::coded_group codes_of(bool of_values, int k) const
    {
        return {of_values ? values : run.keys.coordinates, k, width(), of_values, Kind};
    }
    /// Where byte `byte` of a group lies in its unit.
    [[nodiscard]] __device__ static int in_unit(bool of_values, int k, int byte)
    {
        return rows::smem_offset(of_values, k % (rows::unit / group) * rows::group_bytes + byte);
    }
    /// Begins to copy a group: words that lie together in a unit, too, to their place, and the others behind all units.
    __device__ void copy_group(bool of_values, int k) const
    {
        constexpr int at_once                 = 4; // words of a lane: their addresses are computed side by side
        mdkv::detail::coded_group const codes = codes_of(of_values, k);
        auto const tokens                     = static_cast<unsigned>(codes.width);
        auto const bytes                      = static_cast<unsigned>(codes.bytes);
        unsigned const all                    = (bytes + 4) * tokens / 4; // scales and minima come first
        unsigned const end                    = tokens + (of_values ? tokens / 4 * bytes : tokens * bytes / 4);
        unsigned const by                     = 65536 / tokens + 1; // a product and a shift divide numbers below 256
        std::byte const* const from           = stored(of_values) + codes.scales;
        std::byte* const to                   = place(of_values, k * group, 0);
        auto const behind                     = static_cast<int>(copied(of_values) - to) + codes.scales;
        MDKV_ROLLED
        for (auto i = static_cast<unsigned>(device::lane()); i < all; i += at_once * device::warp_size)
        {
            MDKV_UNROLL
            for (unsigned n = i; n < i + at_once * device::warp_size; n += device::warp_size)
            {
                unsigned const j    = n - tokens;
                unsigned const word = of_values ? j : j + (j * by >> 16U) * (sixteen - tokens);
                int const at        = in_unit(of_values, k, rows::codes_begin + static_cast<int>(4 * word));
                bool const together = n >= tokens && n < end;
                if (n < all)
                {
                    device::copy_async<4>(to + (together ? at : behind + static_cast<int>(4 * n)), from + 4 * n);
                }
            }
        }
    }
    /// Writes a group's scales, minima and codes; if they are words, only the values of tokens behind the last four.
    template <bool Words>
    __device__ void gather_group(bool of_values, int k) const
    {
        mdkv::detail::coded_group const codes = codes_of(of_values, k);
        std::byte const* const from           = Words ? copied(of_values) : stored(of_values);
        std::byte* const to                   = place(of_values, k * group, 0);
        int const lane                        = device::lane();
        int const t                           = lane % sixteen;
        int const at  = codes.scales + (lane < sixteen ? t : codes.width + t) * int{sizeof(half)};
        float const x = t < count() ? number<half, Words>(from + at) : 0.0F;
        device::store(to + in_unit(of_values, k, 2 * lane), narrow<half>(x));
        if constexpr (Words)
        {
            int const first = codes.width / 4 * 4;
            int const rest  = of_values ? codes.width - first : 0;
            MDKV_UNROLL
            for (int b = lane; b < group; b += device::warp_size)
            {
                std::uint32_t word = 0;
                MDKV_UNROLL
                for (int i = 0; i < 3; ++i)
                {
                    bool const there    = i < rest && b < codes.bytes;
                    std::byte const one = there ? from[codes.codes + (first + i) * codes.bytes + b] : std::byte{0};
                    word |= static_cast<std::uint32_t>(one) << (8 * i);
                }
                int const here = rows::codes_begin + (first / 4 * codes.bytes + b) * 4;
                if (rest > 0 && b < codes.bytes) { device::store(to + in_unit(true, k, here), word); }
            }
        }
        else
        {
            int const second = (codes.coordinates + 1) / 2; // coordinate, or byte, of the second half
            int const middle = rows::middle(codes.coordinates);
            MDKV_ROLLED
            for (int i = lane; i < codes.bytes * sixteen; i += device::warp_size)
            {
                int const token = i % sixteen;
                int const b     = i / sixteen;
                int const c     = Kind == storage::int8 && b >= second ? middle + b - second : b;
                int const here  = of_values ? (token / 4 * rows::words(codes.coordinates) + c) * 4 + token % 4
                                            : (b / 4 * sixteen + token) * 4 + b % 4;
                to[in_unit(of_values, k, rows::codes_begin + here)] =
                    token < count() ? from[codes.code(token, b)] : std::byte{0};
            }
        }
    }
};

} // namespace MDKV_NAMESPACE::gpu::kernels
