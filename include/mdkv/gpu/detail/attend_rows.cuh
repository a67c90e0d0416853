/// \file attend_rows.cuh: how a warp brings 16 stored tokens to tensor cores: plain elements or codes, copied to its shared memory in units of some coordinates (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/gpu/device.cuh>

#include <cmath>
#include <concepts>
#include <type_traits>

#include <vector_types.h>

// A product of tensor cores (device::multiply_tile) is 16 x 16 times 16 x 8. Logits are keys times queries, with tokens in
// the rows and up to eight queries in the columns; sums are values times weights, with coordinates in the rows. The 16
// numbers that a product adds up may come in any order, and so may the rows: both orders are chosen for each storage so that
// a lane's words in memory are what it has to hold. With g = lane / 4 and p = lane % 4:
//
//   plain   row g is token, or coordinate, g: ldmatrix transposes keys [coordinate][token] and values [token][coordinate]
//   codes   keys: row g is token 2g, row g + 8 is token 2g + 1, and a lane's word is four codes of a token; values: the
//           word is one coordinate of tokens 4p to 4p + 3, and rows are coordinates of the word's neighbours
//
// A code without its scale is a subnormal number of 16 bits, code * 2^-24, which tensor cores multiply exactly (Fasi, Higham,
// Mikaitis, Pranesh, Numerical behavior of NVIDIA tensor cores, 2021): one AND, or one permutation of bytes, makes two codes two
// factors. Scales and minima are applied to logits and weights.

namespace MDKV_NAMESPACE::gpu::kernels
{

using mdkv::detail::run_basis;
using mdkv::detail::run_rows;
using mdkv::detail::stored_run;

inline constexpr int attend_threads = 128; ///< threads of a block
inline constexpr int attend_warps   = attend_threads / device::warp_size;
inline constexpr int attend_queries = 8; ///< query heads of a block at most
inline constexpr int group          = int{quantised_group};
inline constexpr int sixteen        = int{tile_tokens};
inline constexpr int copied_row     = 128;  ///< bytes copied as a row
inline constexpr int attend_ring    = 6912; ///< bytes of a warp's shared memory: the units that are on their way

/// Two fragments of queries, or two of weights: the second has what the first leaves by rounding, or, beside keys of 4 bits,
/// the coordinates of the high halves.
struct alignas(16) fragments
{
    std::uint32_t of[2][2];
};

/// A pair of numbers as sums of `Limbs` pairs of 16 bits.
template <element Limb, int Limbs>
__device__ __forceinline__ void to_limbs(float low, float high, std::uint32_t (&to)[std::size_t{Limbs}])
{
    MDKV_UNROLL
    for (int i = 0; i < Limbs; ++i)
    {
        to[i] = device::pair<Limb>(low, high);
        low -= widen(Limb{static_cast<std::uint16_t>(to[i] & 0xffffU)});
        high -= widen(Limb{static_cast<std::uint16_t>(to[i] >> 16U)});
    }
}

/// The weights of 16 tokens, as multiply_tile leaves logits, as factors of values in `Limbs` limbs.
template <element Limb, int Limbs>
__device__ __forceinline__ void transposed(float const (&w)[4], std::uint32_t (&to)[std::size_t{Limbs}][2])
{
    std::uint32_t first[std::size_t{Limbs}];
    std::uint32_t second[std::size_t{Limbs}];
    to_limbs<Limb, Limbs>(w[0], w[1], first);
    to_limbs<Limb, Limbs>(w[2], w[3], second);
    MDKV_UNROLL
    for (int i = 0; i < Limbs; ++i)
    {
        to[i][0] = device::transpose(first[i]);
        to[i][1] = device::transpose(second[i]);
    }
}

/// The low number of a pair of halves, and the high one.
[[nodiscard]] __device__ __forceinline__ float low_half(std::uint32_t pair)
{
    return widen(half{static_cast<std::uint16_t>(pair & 0xffffU)});
}
[[nodiscard]] __device__ __forceinline__ float high_half(std::uint32_t pair)
{
    return widen(half{static_cast<std::uint16_t>(pair >> 16U)});
}

/// Factor of codes in products.
inline constexpr float code_unit = 0x1p-24F;

/// Tokens of one storage. A unit is what is copied at once: up to `unit` coordinates of a tile. Full tiles have 16 tokens in rows
/// that allow words and asynchronous copies; others are gathered.
template <element T, storage Kind>
struct attend_rows
{
    static constexpr storage kind   = Kind;
    static constexpr bool coded     = Kind != storage::plain;
    static constexpr int unit       = coded ? 2 * group : group;
    static constexpr int plain_step = copied_row + 16; ///< between rows of plain numbers: lanes meet other banks

    /// The type of limbs; how many queries and weights have, and how many plain numbers.
    using limb                         = std::conditional_t<coded || std::same_as<T, half>, half, bfloat16>;
    static constexpr int limbs         = Kind == storage::int4 ? 1 : !coded && std::same_as<T, float> ? 3 : 2;
    static constexpr int element_limbs = limbs == 3 ? 3 : 1;
    /// `fragments` of each 16 coordinates of queries.
    static constexpr int query_fragments = (limbs + 1) / 2;

    /// Bytes from one limb of plain numbers to the next, where they have several.
    static constexpr int image_bytes = sixteen * plain_step;
    /// Bytes of a group of 16 tokens, with scales and minima.
    static constexpr int group_bytes         = coded ? sixteen * static_cast<int>(coordinate_bytes(Kind, group, 0)) : 0;
    static constexpr int codes_begin         = 2 * sixteen * int{sizeof(half)};
    static constexpr std::uint32_t low_codes = 0x000f000fU;
    static constexpr std::uint32_t high_codes = 0x00f000f0U;
    /// Bytes of a unit, whole rows; units in a warp's shared memory.
    static constexpr int buffer_bytes =
        coded ? (unit / group * group_bytes + copied_row - 1) / copied_row * copied_row : image_bytes;
    static constexpr int buffers = attend_ring / buffer_bytes;

    /// Words of four tokens in a row of a group's values, and those of the first half of its coordinates: multiples of 4.
    [[nodiscard]] MDKV_HD static constexpr int middle(int n) { return ((n + 1) / 2 + 3) / 4 * 4; }
    [[nodiscard]] MDKV_HD static constexpr int words(int n)
    {
        return Kind == storage::int8 ? 2 * middle(n) : middle(n);
    }

    /// Steps of a product, each 16 coordinates (of 4 bits: 16 bytes), of `n` coordinates from a group's first one on.
    [[nodiscard]] MDKV_HD static constexpr int steps(int n)
    {
        int const whole = n / group * (Kind == storage::int4 ? 2 : 4);
        int const rest  = Kind == storage::int4 ? (n % group + 1) / 2 : n % group;
        return whole + (rest + 15) / 16;
    }

    /// Writes the share of lane 4g + p, for a query g of n coordinates, of a step's fragments.
    __device__ static void write_fragment(float const* q, int n, float factor, int step, int p, fragments* to)
    {
        if constexpr (coded)
        {
            int const k       = step / steps(group);
            int const size    = n - k * group < group ? n - k * group : group;
            int const bytes   = Kind == storage::int4 ? (size + 1) / 2 : size;
            int const b       = step % steps(group) * 16 + 4 * p;
            auto const scaled = [&](int e, int first, int end) {
                return b + e < bytes && first + b + e < end ? q[k * group + first + b + e] * factor : 0.0F;
            };
            for (int j = 0; j < 2; ++j)
            {
                std::uint32_t parts[2];
                to_limbs<half, 2>(scaled(j, 0, size), scaled(j + 2, 0, size), parts);
                to->of[0][j] = parts[0];
                to->of[1][j] = Kind == storage::int8 ? parts[1]
                                                     : device::pair<half>(scaled(j, bytes, size) / 16.0F,
                                                         scaled(j + 2, bytes, size) / 16.0F);
            }
        }
        else
        {
            auto const scaled = [&](int c) { return c < n ? q[c] * factor : 0.0F; };
            for (int j = 0; j < 2; ++j)
            {
                int const c = 16 * step + 2 * p + 8 * j;
                std::uint32_t parts[std::size_t{limbs}];
                to_limbs<limb, limbs>(scaled(c), scaled(c + 1), parts);
                for (int i = 0; i < 2 * query_fragments; ++i)
                {
                    to[i / 2 * device::warp_size].of[i % 2][j] = i < limbs ? parts[i] : 0U;
                }
            }
        }
    }

    /// Bytes of 16 keys', or values', n coordinates, as they lie in a row.
    [[nodiscard]] MDKV_HD static constexpr int bytes(int n)
    {
        return sixteen * static_cast<int>(coordinate_bytes(Kind, n, 2));
    }

    /// Where byte `byte` of row `number` lies in a tile's shared memory. Rows of plain numbers are `plain_step` apart. In rows
    /// of codes, sectors of 32 bytes are swapped, so that words which lanes load at once lie in different banks: the words of
    /// lanes with p and p + 1 are 64 bytes apart in keys, 128 in values of 4 bits, 256 in values of 8.
    [[nodiscard]] MDKV_HD static constexpr int smem_offset(bool values, int number, int byte)
    {
        if constexpr (!coded) { return number * plain_step + byte; }
        auto const n          = static_cast<unsigned>(number);
        unsigned const sector = !values ? n % 2 : Kind == storage::int4 ? n % 4 : n / 2 % 4;
        return static_cast<int>(n * copied_row + (static_cast<unsigned>(byte) ^ sector * 32));
    }
    [[nodiscard]] MDKV_HD static constexpr int smem_offset(bool values, int offset)
    {
        auto const n = static_cast<unsigned>(offset); // divisions are shifts
        return smem_offset(values, static_cast<int>(n / copied_row), static_cast<int>(n % copied_row));
    }
    /// Where a lane's words of its two tokens lie in group k of keys.
    [[nodiscard]] MDKV_HD static constexpr int key_words(int lane, int k)
    {
        return smem_offset(false, k * group_bytes + codes_begin + lane % 4 * 64 + lane / 4 * 8);
    }
    /// Where a lane's words of four coordinates lie in group k of values, which has `in_row` words of each four tokens; the
    /// lanes' words begin with word `first`.
    [[nodiscard]] MDKV_HD static constexpr int value_words(int lane, int k, int in_row, int first)
    {
        return smem_offset(true, k * group_bytes + codes_begin + (lane % 4 * in_row + lane / 4 * 4 + first) * 4);
    }

    /// The scales of a lane's two tokens in group k of a tile, or (which = 1) their minima.
    [[nodiscard]] __device__ static std::uint32_t pair(int lane, std::byte const* tile, int k, int which, bool values)
    {
        int const begin = smem_offset(values, k * group_bytes + which * sixteen * int{sizeof(half)});
        return device::load<std::uint32_t>(tile + begin + lane / 4 * 4); // no sector of 32 bytes ends inside them
    }

    /// Clears bytes [begin, end) of plain numbers in a buffer: what is there may be no number, and is multiplied by 0.
    __device__ static void clear(std::byte* buffer, int begin, int end)
    {
        int const lane = device::thread_again() % device::warp_size;
        MDKV_ROLLED
        for (int i = begin + 2 * lane; i < end; i += 2 * device::warp_size)
        {
            MDKV_UNROLL
            for (int k = 0; k < element_limbs; ++k) { device::store(buffer + k * image_bytes + i, std::uint16_t{0}); }
        }
        device::sync_warp();
    }

    /// x += logits of a tile's 16 tokens over a unit's n coordinates.
    __device__ static void add_keys(
        int lane, std::byte* buffer, int n, fragments const* queries, float const* query_sums, float (&x)[4])
    {
        if constexpr (!coded)
        {
            // Coordinates 0 to 15 of a step; tokens 0 to 7, or 8 to 15.
            int const first =
                lane / 16 * 2 * plain_step + lane % 8 / 4 * plain_step + lane % 4 * 32 + lane / 8 % 2 * 16;
            if (n % 16 != 0) { clear(buffer, n / 4 * plain_step + n % 4 * 32, 4 * plain_step * ((n + 15) / 16)); }
            MDKV_UNROLL
            for (int i = 0; i < unit / 16; ++i)
            {
                if (16 * i >= n) { return; }
                fragments q[std::size_t{query_fragments}];
                MDKV_UNROLL
                for (int j = 0; j < query_fragments; ++j)
                {
                    // unwritten: queries that the block does not have
                    q[j] = queries[(i * query_fragments + j) * device::warp_size + lane];
                }
                MDKV_UNROLL
                for (int k = 0; k < element_limbs; ++k)
                {
                    std::uint32_t a[4];
                    device::load_transposed(a, buffer + k * image_bytes + i * 4 * plain_step + first);
                    MDKV_UNROLL
                    for (int j = 0; j + k < limbs; ++j) { device::multiply_tile<limb>(x, a, q[j / 2].of[j % 2]); }
                }
            }
        }
        else
        {
            MDKV_UNROLL
            for (int k = 0; k < unit / group; ++k)
            {
                if (k * group >= n) { return; }
                constexpr int all = steps(group);
                int const from    = key_words(lane, k);
                float sum[4]{};
                MDKV_UNROLL
                for (int i = 0; i < all; ++i) // coordinates beyond a group's are multiplied by 0
                {
                    // A step's two rows are swapped alike.
                    // unwritten: codes beyond a group's or a run's are numbers, too, and multiplied by 0 or not used
                    auto const word = device::load<uint2>(buffer + from + i * 2 * copied_row);
                    // unwritten: queries that the block does not have
                    fragments const q = queries[i * device::warp_size + lane];
                    multiply_codes(word.x, word.y, q.of[0], q.of[1], sum, sum);
                }
                queries += all * device::warp_size;
                // unwritten: queries that the block does not have
                auto const of_queries      = device::load<float2>(query_sums + k * attend_queries + lane % 4 * 2);
                std::uint32_t const scales = pair(lane, buffer, k, 0, false);
                std::uint32_t const minima = pair(lane, buffer, k, 1, false);
                float const scale[2]{low_half(scales), high_half(scales)};
                float const minimum[2]{low_half(minima), high_half(minima)};
                MDKV_UNROLL
                for (int i = 0; i < 4; ++i)
                {
                    x[i] = fmaf(
                        scale[i / 2], sum[i], fmaf(minimum[i / 2], i % 2 == 0 ? of_queries.x : of_queries.y, x[i]));
                }
            }
        }
    }

    /// Adds the products of two words' codes: codes of 8 bits with both limbs to `sum`; codes of 4 bits with `low` to `sum`, and
    /// the bytes' high halves, which are 16 times as large, with `high` to `above`.
    __device__ static void multiply_codes(std::uint32_t first, std::uint32_t second, std::uint32_t const (&low)[2],
        std::uint32_t const (&high)[2], float (&sum)[4], float (&above)[4])
    {
        if constexpr (Kind == storage::int8)
        {
            std::uint32_t const codes[4]{device::every_other_byte<0>(first), device::every_other_byte<0>(second),
                device::every_other_byte<1>(first), device::every_other_byte<1>(second)};
            device::multiply_tile<half>(sum, codes, low);
            device::multiply_tile<half>(sum, codes, high);
        }
        else
        {
            std::uint32_t const codes[4]{
                first & low_codes, second & low_codes, (first >> 8U) & low_codes, (second >> 8U) & low_codes};
            std::uint32_t const above_codes[4]{
                first & high_codes, second & high_codes, (first >> 8U) & high_codes, (second >> 8U) & high_codes};
            device::multiply_tile<half>(sum, codes, low);
            device::multiply_tile<half>(above, above_codes, high);
        }
    }

    /// sums += weighted plain values of a unit's n coordinates.
    __device__ static void add_values(
        int lane, std::byte const* buffer, int n, std::uint32_t const (&w)[std::size_t{limbs}][2], float (*sums)[4])
    {
        int const from = (lane / 16 * 8 + lane % 8) * plain_step + lane / 8 % 2 * 16;
        MDKV_UNROLL
        for (int m = 0; m < unit / 16; ++m)
        {
            if (16 * m >= n) { return; }
            MDKV_UNROLL
            for (int k = 0; k < element_limbs; ++k)
            {
                std::uint32_t a[4];
                // unwritten: coordinates from n on, whose sums nobody reads
                device::load_transposed(a, buffer + k * image_bytes + from + 32 * m);
                MDKV_UNROLL
                for (int i = 0; i + k < limbs; ++i) { device::multiply_tile<limb>(sums[m], a, w[i]); }
            }
        }
    }

    /// The same for a group of codes, number `k` of its unit, of `size` coordinates.
    __device__ static void add_codes(int lane, std::byte const* tile, int k, int size,
        std::uint32_t const (&w)[std::size_t{limbs}][2], float (*sums)[4])
    {
        auto const add = [&](int l, int in_row, int half) {
            MDKV_UNROLL
            for (int h = 0; h < (Kind == storage::int8 ? 2 : 1); ++h)
            {
                // Sums of the high halves of codes of 4 bits are two further on.
                // unwritten: codes of tokens without weight are multiplied by 0, coordinates beyond `size` not used
                auto const q          = device::load<uint4>(tile + value_words(l, k, in_row, h * half));
                auto const& last      = w[limbs - 1];
                float(*const here)[4] = sums + 2 * h;
                multiply_codes(q.x, q.y, w[0], last, here[0], here[Kind == storage::int8 ? 0 : 2]);
                multiply_codes(q.z, q.w, w[0], last, here[1], here[Kind == storage::int8 ? 1 : 3]);
            }
        };
        if (size == group) { add(lane, words(group), middle(group)); }
        else { add(device::thread_again() % device::warp_size, words(size), middle(size)); }
    }
};

} // namespace MDKV_NAMESPACE::gpu::kernels
