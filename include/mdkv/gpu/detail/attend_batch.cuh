/// \file attend_batch.cuh: the sequences that attend's kernels serve in one launch, as kernel parameters.
#pragma once

#include <mdkv/attend.hpp>

#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/detail/attend_rows.cuh>

#include <algorithm>
#include <cstddef>
#include <span>

namespace MDKV_NAMESPACE::gpu::kernels
{

/// Sequences of one launch: their parameters fit its 4,096 bytes, with all that they share.
inline constexpr int attend_most_sequences = 48;
/// Slices are at most 32 KiB, unless that makes more than 528 blocks of a sequence: four on each of 132 multiprocessors, one wave.
inline constexpr index_t attend_slice_bytes = 32 * 1024;
inline constexpr index_t attend_blocks      = 528;

/// Blocks that share a head's rows, up to eight each.
[[nodiscard]] MDKV_HD constexpr index_t query_blocks(index_t rows)
{
    return (rows + attend_queries - 1) / attend_queries;
}

/// One sequence: its cache but for the layout, its queries, and how it is cut.
struct attend_sequence
{
    std::byte* arena;
    head_entry const* heads;
    std::byte* tail;
    index_t tail_capacity;
    index_t const* appended;
    index_t first_token; ///< first of its queries' tokens in the call
    int tokens;          ///< n: tokens of its queries
    int head_rows;       ///< rows of a head: row g is its query head g / n at token g % n of the last n
    int slices;          ///< most slices of a head
    int first_block;     ///< first block of attend_slice: [H, query blocks, column blocks, slices]
    int first_item;      ///< first item, which is merged at once: [H, query blocks]

    [[nodiscard]] MDKV_HD int query_blocks() const { return (head_rows + attend_queries - 1) / attend_queries; }
    /// Slices that a head with so many bytes is cut into: none of them is small while others wait.
    [[nodiscard]] MDKV_HD int slices_of(index_t bytes) const
    {
        index_t const wanted = (bytes + attend_slice_bytes - 1) / attend_slice_bytes;
        return wanted < 1 ? 1 : wanted < slices ? static_cast<int>(wanted) : slices;
    }
};

/// Sequences whose caches are laid out alike.
template <int Most>
struct attend_batch
{
    cache_layout layout;
    int count  = 0;
    int tokens = 0; ///< tokens of all queries
    int blocks = 0; ///< blocks of attend_slice
    int items  = 0;
    array<attend_sequence, Most> sequences{};

    /// Takes up to `Most` sequences from number `next` on, whose queries begin at token `first_token`, and moves both on
    /// to the first sequence left. Takes none if no sequence is left.
    template <element T, std::size_t N>
    attend_batch(std::span<sequence_view<T, space::device> const, N> all, std::size_t& next, index_t& first_token,
        index_t query_heads, int column_blocks)
        : layout{next < all.size() ? all[next].cache.layout : cache_layout{}}
    {
        for (; next < all.size() && count < Most; ++next)
        {
            index_t const n = all[next].queries;
            if (n == 0) { continue; }
            auto const cache = mdkv::detail::without_const(all[next].cache);
            cache_layout own = cache.layout;
            own.window       = layout.window; // attend ignores where a window begins
            if (count > 0 && own != layout) { break; }
            layout = own;
            // Slices for the bytes that arena and tail could hold: the launch must not depend on the device's data.
            index_t const held   = cache.arena_bytes / layout.heads + cache.tail_head_bytes();
            int const head_rows  = static_cast<int>(query_heads / layout.heads * n);
            index_t const merged = layout.heads * kernels::query_blocks(head_rows);
            index_t const uncut  = merged * column_blocks;
            index_t const slices = std::clamp<index_t>(
                (held + attend_slice_bytes - 1) / attend_slice_bytes, 1, std::max<index_t>(1, attend_blocks / uncut));
            sequences[static_cast<std::size_t>(count)] = {cache.arena, cache.heads, cache.tail, cache.tail_capacity,
                cache.appended, first_token, static_cast<int>(n), head_rows, static_cast<int>(slices), blocks, items};
            attend_sequence const& added               = sequences[static_cast<std::size_t>(count++)];
            index_t const sum                          = blocks + checked_multiply(uncut, slices);
            expects(sum <= INT32_MAX, "attend: ", sum, " blocks are more than a grid may have");
            blocks = static_cast<int>(sum);
            items += static_cast<int>(merged);
            tokens += added.tokens;
            first_token += n;
        }
    }

    /// The last sequence that begins at or before block, or item, `number`.
    template <class Begin>
    [[nodiscard]] MDKV_HD attend_sequence const& at(index_t number, Begin const& begin) const
    {
        int low = 0;
        for (int high = Most == 1 ? 1 : count; high - low > 1;)
        {
            int const middle                                                            = (low + high) / 2;
            (begin(sequences[static_cast<std::size_t>(middle)]) <= number ? low : high) = middle;
        }
        return sequences[static_cast<std::size_t>(low)];
    }
};

} // namespace MDKV_NAMESPACE::gpu::kernels
