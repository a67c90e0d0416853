/// \file attend_batch.cuh: the sequences that attend's kernels serve in one launch, as kernel parameters, and how their tokens are cut into slices (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/attend.hpp>

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/gpu/detail/attend_rows.cuh>
#include <mdkv/gpu/device.cuh>

#include <algorithm>
#include <span>

namespace MDKV_NAMESPACE::gpu::kernels
{

/// Sequences of one launch: their parameters fit its 4,096 bytes, with all that they share.
inline constexpr int attend_most_sequences = 48;
/// Bytes that a slice has at least, if its run has as many; a sequence is cut into about 528 slices at most: four on each of
/// 132 multiprocessors, one wave. No number depends on the GPU, so that no result does.
inline constexpr index_t attend_slice_bytes = 8 * 1024;
inline constexpr index_t attend_slices      = 528;
/// A projected token takes as long as its bytes and these.
inline constexpr int attend_projected_bytes = 48;

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
    int blocks;          ///< blocks for all slices: enough for any lengths of the runs
    int first_block;     ///< first block of attend_slice: [query blocks, column blocks, blocks]
};

/// A run that heads of the launch may have.
struct attend_run
{
    int entry; ///< first byte of its run_entry in a head_entry; negative: the tail
    storage kind;
    run_basis basis;
    int keys;        ///< coordinates
    int values;      ///< coordinates
    int key_bytes;   ///< bytes of a token
    int value_bytes; ///< bytes of a token
    int cost;        ///< bytes that take as long as a token, so units of 16 bytes that take as long as a tile
};

/// Sequences whose caches are laid out alike.
template <int Most>
struct attend_batch
{
    int heads        = 0; ///< H
    int count        = 0;
    int tokens       = 0; ///< tokens of all queries
    int blocks       = 0; ///< blocks of attend_slice
    int most_slices  = 0; ///< the sequence with most has so many
    int runs         = 0;
    unsigned by_runs = 0; ///< 2^20 / runs, rounded up: a product and a shift divide
    array<attend_run, max_rungs + 2> run{};
    array<attend_sequence, Most> sequences{};

    /// Takes up to `Most` sequences from number `next` on, whose queries begin at token `first_token`, and moves both on
    /// to the first sequence left. Takes none if no sequence is left.
    template <element T, std::size_t N>
    attend_batch(std::span<sequence_view<T, space::device> const, N> all, std::size_t& next, index_t& first_token,
        index_t query_heads, int column_blocks)
    {
        cache_layout layout;
        index_t dearest = 1; // times its bytes that a tile of some run costs at most, rounded up
        for (; next < all.size() && count < Most; ++next)
        {
            index_t const n = all[next].queries;
            if (n == 0) { continue; }
            auto const cache = mdkv::detail::without_const(all[next].cache);
            cache_layout own = cache.layout;
            own.window       = 0; // attend ignores where a window begins
            if (count > 0 && own != layout) { break; }
            if (count == 0) { dearest = list_runs<T>(layout = own); }
            // Blocks for the bytes that arena and tail could hold: the launch must not depend on the device's data.
            index_t const held      = cache.arena_bytes + layout.heads * cache.tail_head_bytes();
            index_t const most_held = (index_t{32} << 30U) / dearest; // cut counts in 32 bits
            expects(held <= most_held, "attend: a cache has ", held, " bytes; on a GPU it may have ", most_held);
            int const head_rows    = static_cast<int>(query_heads / layout.heads * n);
            index_t const replicas = (head_rows + attend_queries - 1) / attend_queries * column_blocks;
            expects(layout.heads <= 4095 / runs, "attend: ", layout.heads, " heads with ", runs,
                " runs each are more than 4095 in all");
            index_t const cut  = most_cut(cache.tail_capacity);
            index_t const room = attend_slices / replicas;
            // An eighth more, for tiles that are not whole: small caches are cut in one go.
            index_t const wanted     = dearest * (held + held / 8) / attend_slice_bytes + 1;
            index_t const own_blocks = std::min(wanted + cut, std::max(room, cut + 1 + room / 2));
            attend_sequence& added   = sequences[static_cast<std::size_t>(count++)];
            added             = {cache.arena, cache.heads, cache.tail, cache.tail_capacity, cache.appended, first_token,
                            static_cast<int>(n), head_rows, static_cast<int>(own_blocks), blocks};
            index_t const sum = blocks + checked_multiply(replicas, own_blocks);
            expects(sum <= INT32_MAX, "attend: ", sum, " blocks are more than a grid may have");
            blocks      = static_cast<int>(sum);
            most_slices = (std::max)(most_slices, added.blocks);
            tokens += added.tokens;
            first_token += n;
        }
    }

    /// The last sequence whose `Begin`, its first block or token, is at or before `number`.
    template <auto Begin>
    [[nodiscard]] MDKV_HD attend_sequence const& at(index_t number) const
    {
        int low = 0;
        for (int high = Most == 1 ? 1 : count; high - low > 1;)
        {
            int const middle                                                            = (low + high) / 2;
            (sequences[static_cast<std::size_t>(middle)].*Begin <= number ? low : high) = middle;
        }
        return sequences[static_cast<std::size_t>(low)];
    }

    /// The head of run e, counted over all heads.
    [[nodiscard]] __device__ int head_of(int e) const
    {
        return static_cast<int>(static_cast<unsigned>(e) * by_runs >> 20U);
    }
    /// Run e: its tokens, and where they begin in the arena, or in the tail.
    [[nodiscard]] __device__ run_entry entry_of(attend_sequence const& s, int e) const
    {
        int const head       = head_of(e);
        attend_run const& of = run[static_cast<std::size_t>(e - head * runs)];
        if (of.entry >= 0)
        {
            return *reinterpret_cast<run_entry const*>(reinterpret_cast<std::byte const*>(s.heads + head) + of.entry);
        }
        // race: move_tail lets the count fall to the capacity, which is the minimum before and after
        index_t const appended = s.tail_capacity > 0 ? *s.appended : 0;
        index_t const begin    = head * s.tail_capacity * (of.key_bytes + of.value_bytes);
        return {appended < s.tail_capacity ? appended : s.tail_capacity, begin, begin + s.tail_capacity * of.key_bytes};
    }

    [[nodiscard]] __device__ static unsigned tiles_of(index_t tokens)
    {
        return (static_cast<unsigned>(tokens) + unsigned{tile_tokens} - 1) / unsigned{tile_tokens};
    }

    /// Cuts every run of every head of a sequence into slices of nearly equal bytes, whole tiles each. Calls
    /// body(e, entry, begin, end) for each run e, that is run e % runs of head e / runs, in their order, with its slices
    /// [begin, end): a run without tokens has none. For one warp; lanes without a run call it with e = -1.
    __device__ void cut(attend_sequence const& s, auto const& body) const
    {
        constexpr auto least = static_cast<unsigned>(attend_slice_bytes / tile_tokens);
        int const lane       = device::lane();
        int const all        = heads * runs;
        auto const blocks    = static_cast<unsigned>(s.blocks);
        unsigned total       = 0;                     // bytes, in units of 16
        unsigned held        = 0;                     // runs of the lane that have tokens
        constexpr int step   = 4 * device::warp_size; // a lane's loads of four runs are under way together
        MDKV_ROLLED
        for (int first = lane; first < all; first += step)
        {
            MDKV_UNROLL
            for (int e = first; e < first + step; e += device::warp_size)
            {
                unsigned const tiles = e < all ? tiles_of(entry_of(s, e).tokens) : 0;
                total += e < all ? tiles * cost_of(e) : 0;
                held += tiles > 0 ? 1 : 0;
            }
        }
        total             = device::sum_of_lanes(total);
        auto const share  = [&](unsigned n) { return (total + n - 1) / n < least ? least : (total + n - 1) / n; };
        unsigned of_slice = share(blocks);
        // They may be a few too many, because runs end inside slices.
        if (total > (blocks - static_cast<unsigned>(most_cut(s.tail_capacity))) * of_slice)
        {
            of_slice = share(blocks - device::sum_of_lanes(held));
        }
        unsigned begin = 0;
        MDKV_ROLLED
        for (int first = 0; first < all; first += device::warp_size)
        {
            int const e           = first + lane;
            run_entry const entry = e < all ? entry_of(s, e) : run_entry{};
            unsigned const tiles  = tiles_of(entry.tokens);
            unsigned const wanted = (tiles * cost_of(e < all ? e : 0) + of_slice - 1) / of_slice;
            unsigned const own    = wanted < tiles ? wanted : tiles;
            unsigned end          = own;
            MDKV_UNROLL
            for (int step = 1; step < device::warp_size; step *= 2)
            {
                unsigned const before = device::shuffle(end, (lane - step) & (device::warp_size - 1));
                end += lane >= step ? before : 0;
            }
            body(e < all ? e : -1, entry, static_cast<int>(begin + end - own), static_cast<int>(begin + end));
            begin += device::shuffle(end, device::warp_size - 1);
        }
    }

private:
    /// Runs that may have tokens: each one's last slice may be short.
    [[nodiscard]] MDKV_HD int most_cut(index_t tail_capacity) const
    {
        return heads * (tail_capacity > 0 ? runs : runs - 1);
    }
    [[nodiscard]] __device__ unsigned cost_of(int e) const
    {
        return static_cast<unsigned>(run[static_cast<std::size_t>(e - head_of(e) * runs)].cost);
    }
    /// Returns how many times its bytes a tile of some run costs at most, rounded up.
    template <element T>
    index_t list_runs(cache_layout const& layout)
    {
        heads          = static_cast<int>(layout.heads);
        index_t most   = 1;
        auto const add = [&](std::size_t entry, head_dims dims, storage kind, run_basis basis) {
            auto const bytes = [&](index_t n) {
                return static_cast<int>(coordinate_bytes(kind, n, index_t{sizeof(T)}));
            };
            int const keys   = bytes(dims.keys);
            int const values = bytes(dims.values);
            int const cost   = keys + values + (basis == run_basis::projected ? attend_projected_bytes : 0);
            run[static_cast<std::size_t>(runs++)] = {static_cast<int>(entry), kind, basis, static_cast<int>(dims.keys),
                static_cast<int>(dims.values), keys, values, cost};
            most                                  = (std::max)(most, index_t{(cost - 1) / (keys + values) + 1});
        };
        for (std::size_t r = 0; r < layout.rungs; ++r)
        {
            if (!layout.own_run(r)) { continue; }
            run_basis const basis = layout.projected(r) ? run_basis::projected
                                    : layout.rotated(r) ? run_basis::rotated
                                                        : run_basis::original;
            add(offsetof(head_entry, runs) + r * sizeof(run_entry),
                {layout.key_coordinates[r], layout.value_coordinates[r]}, layout.kinds[r], basis);
        }
        add(offsetof(head_entry, exact), layout.dims, storage::plain, run_basis::original);
        add(0, layout.dims, storage::plain, run_basis::original);
        run[static_cast<std::size_t>(runs - 1)].entry = -1;
        by_runs = ((1U << 20U) + static_cast<unsigned>(runs) - 1) / static_cast<unsigned>(runs);
        return most;
    }
};

} // namespace MDKV_NAMESPACE::gpu::kernels
