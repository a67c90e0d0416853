/// \file attend_block.cuh: a block of attend_slice: its tokens, its shared memory, and the queries of a run as tensor cores take them (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/detail/attend.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/attend_batch.cuh>
#include <mdkv/gpu/detail/attend_numbers.cuh>
#include <mdkv/gpu/detail/attend_rows.cuh>
#include <mdkv/gpu/detail/attend_sums.cuh>
#include <mdkv/gpu/detail/attend_units.cuh>
#include <mdkv/gpu/device.cuh>

#include <algorithm>
#include <cmath>

namespace MDKV_NAMESPACE::gpu::kernels
{

/// Calls body(element) with a function that gives element i of a head's matrix at `begin`, by one load if elements lie at whole
/// addresses. A loop that loads several before it uses the first waits for memory once.
template <element T, class Body>
__device__ __forceinline__ void with_matrix(std::byte const* begin, Body const& body)
{
    if (reinterpret_cast<std::uintptr_t>(begin) % sizeof(T) == 0)
    {
        body([begin](int i) { return widen(device::load<T>(begin + index_t{i} * int{sizeof(T)})); });
    }
    else
    {
        body([begin](int i) { return widen(mdkv::detail::load_bytes<T>(begin + index_t{i} * int{sizeof(T)})); });
    }
}

/// All of attend_slice but the loop over tokens.
template <element T, element U, int Columns, int Most>
struct attend_block
{
    static constexpr int threads    = attend_threads;
    static constexpr int ring_bytes = attend_warps * attend_ring;
    static constexpr int sums_bytes = attend_warps * attend_queries * Columns * int{sizeof(float)};

    attend_batch<Most> batch;
    in_view<U, 3, backend> queries;
    attend_states states;
    float scale;    ///< factor of queries, for logits in base 2
    int tile_bytes; ///< most_tile_bytes

    /// A block's slice: tiles [first, end) of a run of a head, for some rows of the head and some columns of values. It lies in
    /// shared memory: registers are for sums.
    struct work
    {
        attend_sequence const* sequence;
        int head;
        int first_query;  ///< the block's first row of the head
        int queries;      ///< 1 to attend_queries
        int column_block; ///< columns [column_block * Columns, ...)
        int first;
        int end;
        stored_run run;
        bool masked; ///< queries of several tokens may not see all of the run, the tail
        attend_copies copies;
        int full_tiles;     ///< tiles of the run before this one are copied as they are
        int unmasked_tiles; ///< no query's mask cuts tiles before this one, and they are full
        bool fixed_dims;    ///< keys and values have as many coordinates as the block has columns
        bool words;         ///< tiles are copied, and only the last is gathered, if it is not full; else all are

        /// The run's coordinates of values among the block's columns.
        [[nodiscard]] __device__ int columns() const
        {
            int const n = run.values.coordinates - column_block * Columns;
            return n < 0 ? 0 : n < Columns ? n : Columns;
        }
    };

    /// A block's shared memory.
    struct scratch
    {
        std::byte* ring;   // [warps, attend_ring]; in the end, and into `tile`, [warps, attend_queries, Columns] sums
        std::byte* tile;   // attend_numbers; in its place queries lie before
        float* q;          // [attend_queries, row]: the queries
        float* latents;    // [attend_queries, row]: projected, if the run is
        float* tops;       // [warps, attend_queries]
        float* totals;     // [warps, attend_queries]
        float* factor;     // [attend_queries]: of products, for logits in base 2
        float* with_mean;  // [attend_queries]: products with the mean key, if the run is rotated
        float* value_mean; // [Columns]: the mean value, if the run is rotated
        work* task;
        fragments* to_tensors; // [steps * query_fragments, 32]: the queries for tensor cores
        float* query_sums;     // [groups, attend_queries]: sums of a group's coordinates, for minima of codes
    };

    [[nodiscard]] MDKV_HD int row() const { return states.sizes.keys; }
    [[nodiscard]] MDKV_HD int groups() const { return (row() + group - 1) / group; }

    [[nodiscard]] MDKV_HD scratch carve(mdkv::detail::carver& memory) const
    {
        constexpr int fragments_of_group = 4 * attend_rows<T, storage::plain>::query_fragments * device::warp_size;
        constexpr int rows               = attend_warps * attend_queries;
        auto* const ring                 = memory.take<std::byte>(ring_bytes);
        auto* const tile                 = memory.take<std::byte>(tile_bytes);
        auto* const q                    = reinterpret_cast<float*>(tile);
        return {ring, tile, q, q + attend_queries * row(), memory.take<float>(rows), memory.take<float>(rows),
            memory.take<float>(attend_queries), memory.take<float>(attend_queries), memory.take<float>(Columns),
            memory.take<work>(1), memory.take<fragments>(groups() * fragments_of_group),
            memory.take<float>(groups() * attend_queries)};
    }
    /// Bytes of queries, which a copied tile leaves room for.
    [[nodiscard]] MDKV_HD static int query_bytes(int keys, bool projected)
    {
        return attend_queries * keys * int{sizeof(float)} * (projected ? 2 : 1);
    }
    /// Bytes of gathered tiles, for any run of a layout, and of sums that the ring has no room for.
    [[nodiscard]] static int most_tile_bytes(attend_sizes const& sizes)
    {
        using plain            = attend_numbers<T, storage::plain>;
        using codes            = attend_numbers<T, storage::int8>;
        bool const projected   = sizes.key_latents > 0;
        auto const most_copied = [](int keys, int queries) {
            int const of_codes = codes::bytes(keys, Columns, queries, true);
            return sizeof(T) == 2 ? (std::max)(of_codes, plain::bytes(keys, Columns, queries, true)) : of_codes;
        };
        int const gathered =
            (std::max)(plain::bytes(sizes.keys, Columns, 0, false), codes::bytes(sizes.keys, Columns, 0, false));
        return (std::max)({gathered - ring_bytes, sums_bytes - ring_bytes, query_bytes(sizes.keys, projected),
            most_copied(sizes.keys, query_bytes(sizes.keys, false)),
            projected ? most_copied(sizes.key_latents, query_bytes(sizes.keys, true)) : 0});
    }
    /// The block's memory. Every function asks for it: addresses that are passed on are no longer known as shared.
    [[nodiscard]] __device__ scratch shared() const
    {
        mdkv::detail::carver memory{device::shared_memory()};
        return carve(memory);
    }

    /// Finds the block's slice, or none: task.first == task.end. For one warp.
    __device__ void find(work& task) const
    {
        attend_sequence const& sequence = batch.template at<&attend_sequence::first_block>(device::block());
        auto block                      = static_cast<int>(device::block()) - sequence.first_block;
        int before                      = 0; // first row of the head
        int column_block                = 0;
        if (block >= sequence.blocks)
        {
            int const replica = block / sequence.blocks;
            block -= replica * sequence.blocks;
            before       = replica / states.column_blocks() * attend_queries;
            column_block = replica % states.column_blocks();
        }
        if (device::lane() == 0)
        {
            task.sequence     = &sequence;
            task.column_block = column_block;
            task.first_query  = before;
            task.queries = sequence.head_rows - before < attend_queries ? sequence.head_rows - before : attend_queries;
            task.first = task.end = 0;
        }
        device::sync_warp();
        int const heads  = static_cast<int>(&sequence - batch.sequences.data()) * batch.heads; // before these
        bool const first = device::block() == sequence.first_block;                            // it tells the merge
        batch.cut(sequence, [&](int e, run_entry const& entry, int begin, int end) {
            int const head = batch.head_of(e < 0 ? 0 : e);
            int const i    = e - head * batch.runs;
            if (first && i == 0) { states.slices(heads + head)[0] = begin; }
            if (first && i == batch.runs - 1) { states.slices(heads + head)[1] = end; }
            if (block >= begin && block < end) { take(task, sequence, head, i, entry, block - begin, end - begin); }
        });
    }
    /// Takes slice `number` of all `count` of a run. For one thread.
    __device__ void take(work& task, attend_sequence const& sequence, int head, int i, run_entry const& entry,
        int number, int count) const
    {
        constexpr int unit      = sizeof(T);
        attend_run const& kind  = batch.run[static_cast<std::size_t>(i)];
        bool const tail         = kind.entry < 0;
        std::byte* const memory = tail ? sequence.tail : sequence.arena;
        index_t const stored    = tail ? sequence.tail_capacity : entry.tokens;
        run_rows const keys{memory + entry.keys, stored, kind.keys, kind.key_bytes, unit, kind.kind, false};
        run_rows const values{memory + entry.values, stored, kind.values, kind.value_bytes, unit, kind.kind, true};
        int const tiles = static_cast<int>(batch.tiles_of(entry.tokens));
        int const each  = tiles / count;
        int const more  = tiles - each * count; // the first slices have a tile more
        task.head       = head;
        task.run        = {keys, values, entry.tokens, kind.basis};
        task.first      = number * each + (number < more ? number : more);
        task.end        = task.first + each + (number < more ? 1 : 0);
        task.masked     = tail && sequence.tokens > 1;
        task.copies     = attend_copies::of(task.run, task.columns());
        // Full tiles are stored as 16 tokens, although the last tokens of a tail may not exist yet.
        int const full   = static_cast<int>(stored) / sixteen;
        int const seen   = static_cast<int>(entry.tokens) / sixteen;
        bool const coded = kind.kind != storage::plain;
        task.words =
            (coded || unit == 2) && task.copies.align >= 4 && kind.values % 8 == 0 && kind.keys % (coded ? 8 : 4) == 0;
        task.full_tiles     = !task.words ? task.first : full < task.end ? full : task.end;
        task.unmasked_tiles = task.masked ? 0 : seen < task.full_tiles ? seen : task.full_tiles;
        // Most models' keys and values have as many coordinates as a block has columns: constants cost no branches.
        task.fixed_dims = kind.keys == Columns && kind.values == Columns;
    }

    /// Loads the queries, scaled, brings them to the run's basis, and writes them for tensor cores.
    template <storage Kind>
    __device__ void prepare_queries() const
    {
        scratch const smem   = shared();
        work const& task     = *smem.task;
        bool const projected = task.run.basis == run_basis::projected;
        int const warp       = device::thread_again() / device::warp_size;
        MDKV_ROLLED
        for (int g = warp; g < task.queries; g += attend_warps)
        {
            load_query<Kind>(g);
            if (!projected) { write_fragments<Kind>(g, smem.q + g * row()); }
        }
        if (task.full_tiles < task.end) { device::copy_async_wait<0>(); }
        device::sync();
        if (!projected) { return; }
        project();
        device::sync();
        MDKV_ROLLED
        for (int g = warp; g < task.queries; g += attend_warps) { write_fragments<Kind>(g, smem.latents + g * row()); }
        device::sync();
    }

    /// Loads query g, scaled, and rotates it if the run is; with the first query, the mean value. For one warp.
    template <storage Kind>
    __device__ void load_query(int g) const
    {
        scratch const smem    = shared();
        work const& task      = *smem.task;
        int const lane        = device::thread_again() % device::warp_size;
        int const keys        = row();
        int const number      = task.head * task.sequence->head_rows + task.first_query + g;
        int const tokens      = task.sequence->tokens;
        int const head        = tokens == 1 ? number : number / tokens; // query head
        U const* const from   = queries.row(head, task.sequence->first_token + (number - head * tokens));
        float* const q        = smem.q + g * keys;
        constexpr int at_once = 4; // numbers of a lane whose loads are under way together
        constexpr int step    = at_once * device::warp_size;
        bool const rotated    = attend_rows<T, Kind>::coded && task.run.basis == run_basis::rotated;
        int const columns     = rotated && g == 0 ? task.columns() : 0; // coordinates of the mean value
        int const first_mean  = 2 * keys + task.column_block * Columns;
        float sum             = 0.0F;
        with_matrix<T>(task.sequence->arena + task.sequence->heads[task.head].channels, [&](auto const& element) {
            MDKV_ROLLED
            for (int d = lane; d < keys || d < columns; d += step)
            {
                float x[at_once];
                float mean[at_once];
                float factor[at_once];
                float value[at_once];
                MDKV_UNROLL
                for (int j = 0; j < at_once; ++j)
                {
                    int const c         = d + j * device::warp_size;
                    bool const in_range = c < keys;
                    x[j]                = in_range ? widen(from[c]) * scale : 0.0F;
                    mean[j]             = rotated && in_range ? element(c) : 0.0F;
                    factor[j]           = rotated && in_range ? element(keys + c) : 1.0F;
                    value[j]            = c < columns ? element(first_mean + c) : 0.0F;
                }
                MDKV_UNROLL
                for (int j = 0; j < at_once; ++j)
                {
                    int const c = d + j * device::warp_size;
                    sum += x[j] * mean[j];
                    if (c < keys) { q[c] = x[j] * factor[j]; }
                    if (c < columns) { smem.value_mean[c] = value[j]; }
                }
            }
        });
        device::sync_warp();
        if (!rotated) { return; }
        sum = device::sum_of_lanes(sum);
        if (lane == 0) { smem.with_mean[g] = sum; }
        rotate_by_warp(q, keys);
    }

    /// Multiplies the queries with the head's matrix, as far as the run has coordinates.
    __device__ void project() const
    {
        scratch const smem    = shared();
        work const& task      = *smem.task;
        int const thread      = device::thread_again();
        int const columns     = task.run.keys.coordinates;
        auto const& entry     = task.sequence->heads[task.head];
        auto const stride     = static_cast<int>(entry.key_columns);
        int const keys        = row();
        constexpr int at_once = sizeof(T) == 4 ? 16 : 24; // rows of the matrix whose loads are under way together
        int span              = device::warp_size / 2; // threads of a query: the more, the fewer queries a thread has
        while (span < columns && span < threads) { span *= 2; }
        int const each = threads / span;
        with_matrix<T>(task.sequence->arena + entry.key_projection, [&](auto const& element) {
            MDKV_ROLLED
            for (int c = thread % span; c < columns; c += span)
            {
                float x[attend_queries]{};
                MDKV_ROLLED
                for (int d = 0; d < keys; d += at_once)
                {
                    float m[at_once];
                    MDKV_UNROLL
                    for (int k = 0; k < at_once; ++k) { m[k] = d + k < keys ? element((d + k) * stride + c) : 0.0F; }
                    MDKV_UNROLL
                    for (int j = 0; j < attend_queries; ++j)
                    {
                        int const g = thread / span + j * each;
                        if (g >= task.queries) { break; }
                        MDKV_UNROLL
                        for (int k = 0; k < at_once; ++k)
                        {
                            if (d + k < keys) { x[j] += smem.q[g * keys + d + k] * m[k]; }
                        }
                    }
                }
                MDKV_UNROLL
                for (int j = 0; j < attend_queries; ++j)
                {
                    int const g = thread / span + j * each;
                    if (g < task.queries) { smem.latents[g * keys + c] = x[j]; }
                }
            }
        });
    }

    /// Writes query g's fragments, numbers times powers of two, so that the largest is from 256 to 512; `factor` takes that back.
    /// Nobody reads what comes of queries that the block does not have. For one warp.
    template <storage Kind>
    __device__ void write_fragments(int g, float const* q) const
    {
        scratch const smem         = shared();
        int const lane             = device::thread_again() % device::warp_size;
        int const coordinates      = smem.task->run.keys.coordinates;
        using rows                 = attend_rows<T, Kind>;
        constexpr float code_scale = rows::coded ? code_unit : 1.0F;
        int const steps =
            rows::coded ? (coordinates + group - 1) / group * rows::steps(group) : rows::steps(coordinates);
        float largest = 0.0F;
        MDKV_ROLLED
        for (int c = lane; c < coordinates; c += 4 * device::warp_size)
        {
            MDKV_UNROLL
            for (int at = c; at < c + 4 * device::warp_size; at += device::warp_size) // loaded at once
            {
                largest = fmaxf(largest, at < coordinates ? fabsf(q[at]) : 0.0F);
            }
        }
        largest = device::largest_of_lanes(largest);
        // The exponent alone, between limits that keep its inverse a normal number.
        auto const exponent = static_cast<int>(mdkv::detail::bits_of_float(largest) >> 23U);
        int const e         = exponent < 20 ? 20 : exponent > 230 ? 230 : exponent;
        float const unit    = mdkv::detail::float_of_bits(static_cast<std::uint32_t>(e - 8) << 23U);
        float const inverse = mdkv::detail::float_of_bits(static_cast<std::uint32_t>(254 + 8 - e) << 23U);
        if (lane == 0) { smem.factor[g] = unit / code_scale; }
        MDKV_ROLLED
        for (int k = 0; rows::coded && k * group < coordinates; k += 2)
        {
            float sum[2];
            MDKV_UNROLL
            for (int j = 0; j < 2; ++j)
            {
                int const c     = (k + j) * group + lane;
                float const low = c < coordinates ? q[c] : 0.0F;
                sum[j]          = low + (c + device::warp_size < coordinates ? q[c + device::warp_size] : 0.0F);
            }
            MDKV_UNROLL
            for (int step = device::warp_size / 2; step > 0; step /= 2)
            {
                MDKV_UNROLL
                for (int j = 0; j < 2; ++j) { sum[j] += device::shuffle_xor(sum[j], step); }
            }
            if (lane < 2 && (k + lane) * group < coordinates)
            {
                smem.query_sums[(k + lane) * attend_queries + g] = (lane == 0 ? sum[0] : sum[1]) * inverse * code_scale;
            }
        }
        MDKV_ROLLED
        for (int j = lane; j < 4 * steps; j += device::warp_size)
        {
            rows::write_fragment(q, coordinates, inverse, j / 4, j % 4,
                smem.to_tensors + (j / 4 * rows::query_fragments * device::warp_size + 4 * g + j % 4));
        }
    }
};

} // namespace MDKV_NAMESPACE::gpu::kernels
