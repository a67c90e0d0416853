/// \file attend_block.cuh: a block of attend_slice: its tokens, its shared memory, and the queries of a run as tensor cores take them (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/attend.hpp>
#include <mdkv/detail/hadamard.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/attend_batch.cuh>
#include <mdkv/gpu/detail/attend_fragments.cuh>
#include <mdkv/gpu/detail/attend_rows.cuh>
#include <mdkv/gpu/detail/attend_sums.cuh>
#include <mdkv/gpu/detail/attend_units.cuh>
#include <mdkv/gpu/device.cuh>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace MDKV_NAMESPACE::gpu::kernels
{

/// x := H x / sqrt(n) by the lanes of a warp, block by block: what detail/hadamard.hpp does.
__device__ inline void rotate_by_warp(float* x, int group)
{
    while (group > 0)
    {
        int const n        = static_cast<int>(mdkv::detail::hadamard_block(group));
        int const lane     = device::lane();
        bool const both    = n > device::warp_size; // a lane has two numbers
        float const factor = mdkv::detail::hadamard_factor(n);
        float low          = lane < n ? x[lane] : 0.0F;
        float high         = both ? x[lane + device::warp_size] : 0.0F;
        MDKV_ROLLED
        for (int step = 1; step < n && step < device::warp_size; step *= 2)
        {
            bool const second   = (lane & step) != 0;
            float const other   = device::shuffle_xor(low, step);
            float const another = device::shuffle_xor(high, step);
            low                 = second ? other - low : low + other;
            high                = second ? another - high : high + another;
        }
        if (lane < n) { x[lane] = (both ? low + high : low) * factor; }
        if (both) { x[lane + device::warp_size] = (low - high) * factor; }
        device::sync_warp();
        x += n;
        group -= n;
    }
}

/// The sum of a warp's lanes, the same in each of them.
[[nodiscard]] __device__ inline float sum_of_lanes(float x)
{
    for (int step = device::warp_size / 2; step > 0; step /= 2) { x += device::shuffle_xor(x, step); }
    return x;
}

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
    static constexpr int threads      = attend_threads;
    static constexpr int most_queries = attend_queries;
    static constexpr int group_size   = int{quantised_group};

    attend_batch<Most> batch;
    in_view<U, 3, backend> queries;
    attend_states states;
    float scale; ///< factor of queries, for logits in base 2

    /// Work of one block: some rows of a head, and some columns of values, over one slice; and the run that it is at. It lies
    /// in shared memory: registers are for sums.
    struct work
    {
        attend_sequence const* sequence;
        index_t head;
        index_t block;
        int slice;
        int slices;
        int first_query;  ///< the block's first row of the head
        int queries;      ///< 1 to most_queries
        int column_block; ///< columns [column_block * Columns, ...)
        bool visited[attend_bases];
        bool last; ///< the block is the last one of its item, and merges all of them

        mdkv::array<stored_run, max_rungs + 2> runs;
        mdkv::array<index_t, max_rungs + 2> bytes; ///< bytes of each run
        mdkv::array<int, max_rungs + 2> firsts;    ///< first token of each run in the slice
        mdkv::array<int, max_rungs + 2> ends;      ///< first token behind them
        int next;                                  ///< number of the run after this one
        stored_run run;
        int first; ///< tokens [first, end) of the run
        int end;
        std::byte const* key_projection; ///< the head's
        std::byte const* channels;
        int key_columns;
        bool masked; ///< queries of several tokens may not see all of the run, the tail
        attend_copies copies;
        int tiles; ///< the run's tiles: the first `full_tiles` of them are copied as they are
        int full_tiles;
        bool fixed_dims;    ///< keys and values have as many coordinates as the block has columns
        int rounds;         ///< pairs of tiles that each warp takes first
        int unmasked_tiles; ///< first full tiles that no query's mask cuts

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
        std::byte* ring;  // [warps, attend_ring]; after a run [warps, most_queries, Columns] sums
        float* tops;      // [warps, most_queries]
        float* totals;    // [warps, most_queries]
        float* factor;    // [most_queries]: of products, for logits in base 2
        float* with_mean; // [most_queries]: products with the mean key, for heads with rotated tokens
        float* joins;     // [most_queries, 2]: factors of sums of the runs before, and of a run
        work* task;
        fragments* to_tensors; // [steps * query_fragments, 32]: the queries of a run for tensor cores
        float* query_sums;     // [groups, most_queries]: sums of a group's coordinates, for minima of codes
        float* q; // [1 or 2, most_queries, row]: queries in the basis of the run, then, if that is projected, in
                  // the original one; where the ring is, if they fit
    };

    [[nodiscard]] MDKV_HD int row() const { return states.sizes.keys; }
    [[nodiscard]] MDKV_HD int groups() const { return (row() + group_size - 1) / group_size; }

    [[nodiscard]] MDKV_HD scratch carve(mdkv::detail::carver& memory) const
    {
        constexpr int query_fragments = attend_rows<T, storage::plain>::query_fragments;
        scratch smem{memory.take<std::byte>(attend_warps * attend_ring),
            memory.take<float>(attend_warps * most_queries), memory.take<float>(attend_warps * most_queries),
            memory.take<float>(most_queries), memory.take<float>(most_queries), memory.take<float>(2 * most_queries),
            memory.take<work>(1), memory.take<fragments>(index_t{groups()} * 4 * query_fragments * device::warp_size),
            memory.take<float>(groups() * most_queries), nullptr};
        index_t const floats = index_t{most_queries} * row() * (states.sizes.key_latents > 0 ? 2 : 1);
        bool const fits      = floats * index_t{sizeof(float)} <= attend_warps * attend_ring;
        smem.q               = fits ? reinterpret_cast<float*>(smem.ring) : memory.take<float>(floats);
        return smem;
    }
    /// The block's memory. Every function asks for it: addresses that are passed on are no longer known as shared.
    [[nodiscard]] __device__ scratch shared() const
    {
        mdkv::detail::carver memory{device::shared_memory()};
        return carve(memory);
    }
    [[nodiscard]] index_t shared_bytes() const
    {
        mdkv::detail::carver count;
        static_cast<void>(carve(count));
        return count.bytes();
    }

    /// Finds the block's tokens.
    __device__ void begin(work& task) const
    {
        attend_sequence const& sequence =
            batch.at(device::block(), [](attend_sequence const& s) { return s.first_block; });
        auto const block  = static_cast<int>(device::block() - sequence.first_block);
        int const item    = block / sequence.slices / states.column_blocks();
        int const before  = item % sequence.query_blocks() * most_queries;
        task.sequence     = &sequence;
        task.block        = device::block();
        task.head         = item / sequence.query_blocks();
        task.slice        = block % sequence.slices;
        task.column_block = block / sequence.slices % states.column_blocks();
        task.first_query  = before;
        task.queries      = sequence.head_rows - before < most_queries ? sequence.head_rows - before : most_queries;
        task.next         = 0;
        head_entry const& entry = sequence.heads[task.head];
        task.key_projection     = sequence.arena + entry.key_projection;
        task.channels           = sequence.arena + entry.channels;
        task.key_columns        = static_cast<int>(entry.key_columns);
        for (bool& visited : task.visited) { visited = false; }
    }
    /// Finds the head's runs, and cuts its bytes into slices: a lane for each run. For one warp.
    __device__ void cut(work& task) const
    {
        static_assert(max_rungs + 2 <= std::size_t{device::warp_size});
        int const lane    = device::lane();
        auto const runs   = static_cast<int>(mdkv::detail::most_runs(batch.layout));
        auto const number = static_cast<std::size_t>(lane);
        if (lane < runs)
        {
            task.runs[number]  = mdkv::detail::run_of_head<T>(batch.layout, *task.sequence, task.head, number);
            task.bytes[number] = task.runs[number].tokens * task.runs[number].token_bytes();
        }
        device::sync_warp();
        index_t begin = 0;
        index_t total = 0;
        for (int i = 0; i < runs; ++i)
        {
            begin += i < lane ? task.bytes[static_cast<std::size_t>(i)] : 0;
            total += task.bytes[static_cast<std::size_t>(i)];
        }
        int const slices = task.sequence->slices_of(total);
        if (lane < runs)
        {
            stored_run const& run = task.runs[number];
            auto const cut        = [&](int slice) {
                return run.tokens == 0 ? 0 : static_cast<int>(cut_run(run, begin, total * slice / slices));
            };
            task.firsts[number] = cut(task.slice);
            task.ends[number]   = cut(task.slice + 1);
        }
        if (lane == 0) { task.slices = slices; }
    }

    /// Goes on to the next run with tokens in the slice, or to none. For one warp.
    __device__ void next_run(work& task) const
    {
        auto const runs = static_cast<int>(mdkv::detail::most_runs(batch.layout));
        int i           = task.next;
        while (i < runs && task.firsts[static_cast<std::size_t>(i)] == task.ends[static_cast<std::size_t>(i)]) { ++i; }
        device::sync_warp(); // all lanes have read what the first one writes
        bool const in_range = i < runs;
        auto const number   = static_cast<std::size_t>(in_range ? i : 0);
        auto const* from    = reinterpret_cast<std::byte const*>(&task.runs[number]);
        auto* const to      = reinterpret_cast<std::byte*>(&task.run);
        for (int word = device::lane(); in_range && word < int{sizeof(stored_run)} / 4; word += device::warp_size)
        {
            // unwritten: padding between members, which nobody reads
            device::store(to + 4 * word, device::load<std::uint32_t>(from + 4 * word));
        }
        if (device::lane() == 0)
        {
            task.first  = in_range ? task.firsts[number] : 0;
            task.end    = in_range ? task.ends[number] : 0;
            task.next   = i + 1;
            task.masked = task.next == runs && task.sequence->tokens > 1;
        }
    }

    /// Loads the queries, scaled, in a basis; rows past `at.queries` are zero.
    __device__ void load_queries() const
    {
        scratch const smem        = shared();
        int const thread          = device::thread_again();
        int const lane            = thread % device::warp_size;
        int const warp            = thread / device::warp_size;
        work const& task          = *smem.task;
        run_basis const basis     = task.run.basis;
        attend_sizes const& sizes = states.sizes;
        bool const projected      = basis == run_basis::projected;
        int const columns         = task.key_columns;
        constexpr int at_once     = 4; // numbers of a lane whose loads are under way together
        constexpr int step        = at_once * device::warp_size;
        device::sync(); // the sums of the run before have been read
        float* const original = projected ? smem.q + most_queries * row() : smem.q;
        for (int g = warp; g < most_queries; g += attend_warps)
        {
            index_t const query_row = task.head * task.sequence->head_rows + task.first_query + g;
            index_t const token     = task.sequence->first_token + query_row % task.sequence->tokens;
            bool const in_range     = g < task.queries;
            U const* const from     = in_range ? queries.row(query_row / task.sequence->tokens, token) : nullptr;
            for (int d = lane; d < sizes.keys; d += step)
            {
                float x[at_once];
                MDKV_UNROLL
                for (int j = 0; j < at_once; ++j)
                {
                    int const c = d + j * device::warp_size;
                    x[j]        = in_range && c < sizes.keys ? widen(from[c]) * scale : 0.0F;
                }
                MDKV_UNROLL
                for (int j = 0; j < at_once; ++j)
                {
                    int const c = d + j * device::warp_size;
                    if (c < sizes.keys) { original[g * row() + c] = x[j]; }
                }
            }
        }
        device::sync();
        if (projected)
        {
            with_matrix<T>(task.key_projection, [&](auto const& element) {
                constexpr int rows = 16; // rows whose loads are under way together
                MDKV_ROLLED
                for (int i = thread; i < most_queries * columns; i += threads)
                {
                    int const g = i / columns;
                    int const c = i % columns;
                    float x     = 0.0F;
                    MDKV_ROLLED
                    for (int d = 0; d < sizes.keys; d += rows)
                    {
                        float m[rows];
                        MDKV_UNROLL
                        for (int j = 0; j < rows; ++j)
                        {
                            m[j] = d + j < sizes.keys ? element((d + j) * columns + c) : 0.0F;
                        }
                        MDKV_UNROLL
                        for (int j = 0; j < rows; ++j)
                        {
                            if (d + j < sizes.keys) { x += original[g * row() + d + j] * m[j]; }
                        }
                    }
                    smem.q[g * row() + c] = x;
                }
            });
        }
        if (basis != run_basis::rotated) { return; }
        for (int g = warp; g < task.queries; g += attend_warps)
        {
            float* const q = smem.q + g * row();
            float sum      = 0.0F;
            with_matrix<T>(task.channels, [&](auto const& element) {
                MDKV_ROLLED
                for (int d = lane; d < sizes.keys; d += step)
                {
                    float mean[at_once];
                    float factor[at_once];
                    MDKV_UNROLL
                    for (int j = 0; j < at_once; ++j)
                    {
                        int const c = d + j * device::warp_size;
                        mean[j]     = c < sizes.keys ? element(c) : 0.0F;
                        factor[j]   = c < sizes.keys ? element(sizes.keys + c) : 0.0F;
                    }
                    MDKV_UNROLL
                    for (int j = 0; j < at_once; ++j)
                    {
                        int const c = d + j * device::warp_size;
                        if (c >= sizes.keys) { break; }
                        sum += q[c] * mean[j];
                        q[c] *= factor[j];
                    }
                }
            });
            sum = sum_of_lanes(sum);
            if (lane == 0) { smem.with_mean[g] = sum; }
            device::sync_warp();
            for (int d = 0; d < sizes.keys; d += group_size)
            {
                rotate_by_warp(q + d, sizes.keys - d < group_size ? sizes.keys - d : group_size);
            }
        }
        device::sync();
    }

    /// Writes the queries' fragments for a run. They are multiplied by powers of two, so that their largest coordinates are
    /// from 256 to 512; `factor` takes that back.
    template <storage Kind>
    __device__ void write_fragments() const
    {
        scratch const smem         = shared();
        int const thread           = device::thread_again();
        int const lane             = thread % device::warp_size;
        int const warp             = thread / device::warp_size;
        int const coordinates      = smem.task->run.keys.coordinates;
        using rows                 = attend_rows<T, Kind>;
        constexpr float code_scale = rows::coded ? code_unit : 1.0F;
        device::sync(); // all queries are there, and the fragments before these have been read
        for (int g = warp; g < most_queries; g += attend_warps)
        {
            float* const q = smem.q + g * row();
            float largest  = 0.0F;
            for (int c = lane; c < coordinates; c += device::warp_size) { largest = fmaxf(largest, fabsf(q[c])); }
            for (int step = device::warp_size / 2; step > 0; step /= 2)
            {
                largest = fmaxf(largest, device::shuffle_xor(largest, step));
            }
            // The exponent alone, between limits that keep its inverse a normal number.
            auto const exponent = static_cast<int>(mdkv::detail::bits_of_float(largest) >> 23U);
            int const e         = exponent < 20 ? 20 : exponent > 230 ? 230 : exponent;
            float const unit    = mdkv::detail::float_of_bits(static_cast<std::uint32_t>(e - 8) << 23U);
            float const inverse = mdkv::detail::float_of_bits(static_cast<std::uint32_t>(254 + 8 - e) << 23U);
            if (lane == 0) { smem.factor[g] = unit / code_scale; }
            for (int k = 0; rows::coded && k * group_size < coordinates; ++k)
            {
                int const c     = k * group_size + lane;
                float const low = c < coordinates ? q[c] : 0.0F;
                float const sum =
                    sum_of_lanes(low + (c + device::warp_size < coordinates ? q[c + device::warp_size] : 0.0F));
                if (lane == 0) { smem.query_sums[k * most_queries + g] = sum * inverse * code_scale; }
            }
            int const steps = rows::coded ? (coordinates + group_size - 1) / group_size * rows::steps(group_size)
                                          : rows::steps(coordinates);
            for (int j = lane; j < 4 * steps; j += device::warp_size)
            {
                rows::write_fragment(q, coordinates, inverse, j / 4, j % 4,
                    smem.to_tensors + (j / 4 * rows::query_fragments * device::warp_size + 4 * g + j % 4));
            }
        }
        device::sync();
    }
};

} // namespace MDKV_NAMESPACE::gpu::kernels
