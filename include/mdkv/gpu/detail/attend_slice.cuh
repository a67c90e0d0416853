/// \file attend_slice.cuh: the kernel that attends slices of heads' bytes and leaves mergeable states (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/attend_batch.cuh>
#include <mdkv/gpu/detail/attend_block.cuh>
#include <mdkv/gpu/detail/attend_merge.cuh>
#include <mdkv/gpu/detail/attend_numbers.cuh>
#include <mdkv/gpu/detail/attend_pairs.cuh>
#include <mdkv/gpu/detail/attend_rows.cuh>
#include <mdkv/gpu/detail/attend_sums.cuh>
#include <mdkv/gpu/detail/attend_units.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstddef>
#include <cstdint>

// How it works. A head's stored bytes, over all its runs, are cut into slices of equal size; a block attends one slice for
// up to eight query heads at once, so that every stored byte is read once for any G, and for up to `Columns` coordinates of
// values. Each warp takes every fourth tile of 16 tokens, of codes every fourth pair of tiles as long as there are pairs for
// all warps, and has a softmax and sums of its own, in registers. Its tiles come by asynchronous copies of units
// (attend_units.cuh, attend_pairs.cuh) into a ring in shared memory that no other warp touches: inside a run no warp waits
// for another. At a run's end the block's warps are joined into the block's state of the run's basis.
// Nothing is projected or rotated back here. If there are counters, the last block of an item (up to eight rows of a head)
// to end merges all slices of them at once (attend_merge.cuh), each row by a warp.

namespace MDKV_NAMESPACE::gpu::kernels
{

template <element T, element U, int Columns, int Most>
struct attend_slice : attend_block<T, U, Columns, Most>
{
    using block = attend_block<T, U, Columns, Most>;
    using block::batch;
    using block::shared;
    using block::states;
    using typename block::scratch;
    using typename block::work;

    // Registers are scarce here. Inside a block everything is counted in int. Facts that the loop over tiles does not need
    // lie in shared memory, and every function reads its thread's number again: otherwise nvcc hoists address computations
    // of all storages out of the loop over runs and spills them.
    static constexpr char const* name              = "attend_slice";
    static constexpr int threads                   = attend_threads;
    static constexpr int blocks_per_multiprocessor = Columns > 128 ? 2 : sizeof(T) == 4 ? 3 : 4;
    static constexpr int most_queries              = attend_queries;
    static constexpr int group_size                = int{quantised_group};
    static constexpr int sixteen                   = int{tile_tokens};
    using sums                                     = attend_sums<Columns>;

    attend_outputs<U> outputs;
    std::uint32_t* arrivals; ///< [items]: blocks that have ended; null: another kernel merges

    __device__ void operator()() const
    {
        static_assert(attend_warps * attend_ring >= attend_warps * most_queries * Columns * int{sizeof(float)});
        work& task = *shared().task;
        if (device::thread() == 0) { this->begin(task); }
        device::sync();
        if (device::thread_again() < device::warp_size) { this->cut(task); }
        device::sync();
        if (task.slice >= task.slices) { return; } // the merge knows
        while (true)
        {
            if (device::thread_again() < device::warp_size) { this->next_run(task); }
            device::sync();
            if (task.first == task.end) { break; }
            this->load_queries();
            sums all;
            all.clear();
            storage const kind = task.run.keys.kind;
            if (kind == storage::plain) { attend_run<storage::plain>(all); }
            else if (kind == storage::int8) { attend_run<storage::int8>(all); }
            else { attend_run<storage::int4>(all); }
            leave(all);
        }
        states.clear_others(task.block, task.visited);
        if (arrivals != nullptr) { merge_if_last(); }
    }

    /// Merges the queries of the block if all other blocks of their slices and columns have ended.
    __device__ void merge_if_last() const
    {
        work& task = *shared().task;
        device::sync(); // all of the block's states are written
        if (device::thread_again() == 0)
        {
            index_t const item = task.head * task.sequence->query_blocks() + task.first_query / most_queries;
            task.last =
                last_to_arrive(arrivals + (task.sequence->first_item + item), states.column_blocks() * task.slices);
        }
        device::sync();
        for (int g = device::thread_again() / device::warp_size; task.last && g < task.queries; g += attend_warps)
        {
            merge_slices<T>(states, outputs, *task.sequence, task.head, task.first_query + g, task.slices);
        }
    }

    /// Attends the tokens of the run.
    template <storage Kind>
    __device__ void attend_run(sums& all) const
    {
        scratch const smem = shared();
        work& task         = *smem.task;
        using rows         = attend_rows<T, Kind>;
        if (device::thread() == 0)
        {
            task.copies = attend_units<T, Kind>::copies_of(task.run, task.columns());
            // Full tiles are stored as 16 tokens, although the last tokens of a tail may not exist yet.
            int const stored    = static_cast<int>(task.run.keys.stored) / sixteen;
            int const some      = (task.end + sixteen - 1) / sixteen;
            task.tiles          = some;
            task.full_tiles     = !rows::regular(task.run.keys, task.run.values, task.copies.align) ? 0
                                  : stored < some                                                   ? stored
                                                                                                    : some;
            task.unmasked_tiles = task.masked                            ? 0
                                  : task.end / sixteen < task.full_tiles ? task.end / sixteen
                                                                         : task.full_tiles;
            // Most models' keys and values have as many coordinates as a block has columns: constants cost no branches.
            task.fixed_dims = task.run.keys.coordinates == Columns && task.run.values.coordinates == Columns;
            task.rounds     = 0;
            if (int const tiles = task.unmasked_tiles - task.first / sixteen;
                rows::coded && task.fixed_dims && tiles > 0)
            {
                task.rounds = tiles / attend_pairs_stride;
            }
        }
        this->template write_fragments<Kind>(); // all threads meet before and after
        if constexpr (rows::coded)
        {
            if (task.rounds > 0) { attend_rounds<Kind>(all); }
        }
        int const thread      = device::thread_again();
        int const lane        = thread % device::warp_size;
        int const warp        = thread / device::warp_size;
        int tile              = task.first / sixteen + task.rounds * attend_pairs_stride + warp;
        std::byte* const ring = smem.ring + warp * attend_ring;
        auto const factor     = device::load<float2>(smem.factor + lane % 4 * 2);
        attend_units<T, Kind> arriving{
            lane, task.run, task.copies, task.column_block * Columns, ring, tile, task.full_tiles};
        if (!rows::coded && task.fixed_dims)
        {
            for (int const end = task.unmasked_tiles; tile < end; tile += attend_warps)
            {
                attend_tile<Kind, true>(arriving, tile, lane, factor, all);
            }
        }
        for (int const end = task.tiles; tile < end; tile += attend_warps)
        {
            attend_tile<Kind, false>(arriving, tile, lane, factor, all);
        }
        arriving.drain();
    }

    /// Attends the run's full rounds of pairs of tiles.
    template <storage Kind>
    __device__ void attend_rounds(sums& all) const
    {
        using pairs        = attend_pairs<T, Kind, Columns>;
        scratch const smem = shared();
        work& task         = *smem.task;
        int const thread   = device::thread_again();
        int const lane     = thread % device::warp_size;
        int const warp     = thread / device::warp_size;
        pairs arriving{
            lane, task.run, task.copies, smem.ring + warp * attend_ring, task.first / sixteen + 2 * warp, task.rounds};
        while (arriving.more()) { attend_pair<Kind>(arriving, lane, all); }
        arriving.drain();
    }

    /// Attends a pair of full, unmasked tiles of codes.
    template <storage Kind>
    __device__ void attend_pair(attend_pairs<T, Kind, Columns>& arriving, int lane, sums& all) const
    {
        using pairs             = attend_pairs<T, Kind, Columns>;
        using rows              = typename pairs::rows;
        constexpr int groups    = rows::unit / group_size;
        scratch const smem      = shared();
        fragments const* q      = smem.to_tensors;
        float const* query_sums = smem.query_sums;
        float x[pairs::tiles][4]{};
        MDKV_UNROLL
        for (int u = 0; u < pairs::units; ++u)
        {
            rows::add_keys(lane, arriving.next(u), rows::unit, q, query_sums, x);
            q += rows::steps(rows::unit) * device::warp_size;
            query_sums += groups * attend_queries;
        }
        all.soften(x, device::load<float2>(smem.factor + lane % 4 * 2));
        MDKV_UNROLL
        for (int u = 0; u < pairs::units; ++u)
        {
            std::byte const* const now = arriving.next(pairs::units + u);
            MDKV_UNROLL
            for (int k = 0; k < groups; ++k)
            {
                int const g = u * groups + k;
                MDKV_UNROLL
                for (int t = 0; t < pairs::tiles; ++t)
                {
                    std::byte const* const tile = now + t * rows::tile_bytes;
                    std::uint32_t w[std::size_t{rows::weight_limbs}][2];
                    all.template weigh<rows::weight_limbs>(
                        x[t], rows::pair(lane, tile, k, 0, true), rows::pair(lane, tile, k, 1, true), g, w);
                    rows::add_codes(lane, tile, k, group_size, w, all.of + 4 * g);
                }
            }
        }
    }

    /// Attends one tile. `Unmasked` tiles are full, and all queries see them.
    template <storage Kind, bool Unmasked>
    __device__ void attend_tile(attend_units<T, Kind>& arriving, int tile, int lane, float2 factor, sums& all) const
    {
        using rows                = attend_rows<T, Kind>;
        constexpr int unit        = rows::unit;
        constexpr int unit_groups = (unit < Columns ? unit : Columns) / group_size;
        scratch const smem        = shared();
        work const& task          = *smem.task;
        int const keys            = Unmasked ? Columns : task.run.keys.coordinates;
        int const values          = Unmasked ? Columns : task.columns();
        bool is_full              = true;
        int count                 = sixteen;
        if (!Unmasked && tile >= task.unmasked_tiles)
        {
            is_full = tile < task.full_tiles;
            count   = tile * sixteen + sixteen <= task.end ? sixteen : task.end - tile * sixteen;
        }
        auto const next = [&](bool of_values, int first, int n) -> std::byte* {
            if (is_full) { return arriving.next(); }
            device::sync_warp(); // all lanes have read what was here
            std::byte* const ring = smem.ring + device::thread_again() / device::warp_size * attend_ring;
            attend_numbers<T, Kind>{of_values ? task.run.values : task.run.keys, tile, count, n, first}.write(
                of_values, ring);
            return ring;
        };
        fragments const* q      = smem.to_tensors;
        float const* query_sums = smem.query_sums;
        float x[1][4]{};
        MDKV_ROLLED
        for (int first = 0; first < keys; first += unit)
        {
            int const n = keys - first < unit ? keys - first : unit;
            rows::add_keys(lane, next(false, first, n), n, q, query_sums, x);
            q += rows::steps(unit) * rows::query_fragments * device::warp_size;
            query_sums += unit / group_size * attend_queries;
        }
        if (!Unmasked && tile >= task.unmasked_tiles) { hide<Kind>(tile, count, x[0]); }
        all.soften(x, factor);
        std::uint32_t w[std::size_t{rows::weight_limbs}][2];
        if constexpr (!rows::coded) { transposed<typename rows::limb, rows::weight_limbs>(x[0], w); }
        MDKV_UNROLL
        for (int v = 0; v < (Columns + unit - 1) / unit; ++v)
        {
            if (v > 0 && v * unit >= values) { break; }
            int const n          = values - v * unit < unit ? values - v * unit : unit;
            std::byte* const now = next(true, task.column_block * Columns + v * unit, n);
            if constexpr (!rows::coded)
            {
                if (is_full && count < sixteen)
                {
                    rows::clear(now, count * rows::plain_step, sixteen * rows::plain_step);
                }
                rows::add_values(lane, now, n, w, all.of + v * (unit / sixteen));
            }
            else
            {
                MDKV_UNROLL
                for (int k = 0; k < unit_groups; ++k)
                {
                    if (k * group_size >= n) { break; }
                    int const g   = v * (unit / group_size) + k;
                    int const own = n - k * group_size < group_size ? n - k * group_size : group_size;
                    all.template weigh<rows::weight_limbs>(
                        x[0], rows::pair(lane, now, k, 0, true), rows::pair(lane, now, k, 1, true), g, w);
                    rows::add_codes(lane, now, k, own, w, all.of + 4 * g);
                }
            }
        }
    }

    /// Hides tokens of the tail that a query is before, and tokens beyond `count`.
    template <storage Kind>
    __device__ void hide(int tile, int count, float (&x)[4]) const
    {
        int const lane   = device::thread_again() % device::warp_size;
        work const& task = *shared().task;
        int const n      = task.sequence->tokens;
        for (int i = 0; i < 4; ++i)
        {
            int const g     = task.first_query + lane % 4 * 2 + i % 2;
            int const token = attend_rows<T, Kind>::coded ? lane / 4 * 2 + i / 2 : lane / 4 + i / 2 * 8;
            int const seen =
                task.masked ? static_cast<int>(task.run.tokens) - (n - 1 - g % n) - tile * sixteen : sixteen;
            if (token >= count || token >= seen) { x[i] = mdkv::detail::empty_lse; }
        }
    }

    /// Joins the warps' softmaxes and sums of a run into the block's state of its basis, and clears them.
    __device__ void leave(sums all) const
    {
        scratch const smem = shared();
        work& task         = *smem.task;
        int const thread   = device::thread_again();
        int const lane     = thread % device::warp_size;
        int const warp     = thread / device::warp_size;
        auto* const joined = reinterpret_cast<float*>(smem.ring); // [warps, most_queries, Columns]
        int const number   = states.basis(task.run.basis);
        all.join_lanes();
        device::sync(); // no warp reads its ring any more
        if (lane < 4)
        {
            for (int i = 0; i < 2; ++i)
            {
                smem.tops[warp * most_queries + 2 * lane + i]   = all.top_of(i);
                smem.totals[warp * most_queries + 2 * lane + i] = all.total[i];
            }
        }
        device::sync();
        float factor[2];
        for (int i = 0; i < 2; ++i)
        {
            int const g     = lane % 4 * 2 + i;
            float const top = largest_of(smem.tops, g);
            factor[i]       = all.total[i] == 0.0F ? 0.0F : device::exp2(all.top_of(i) - top);
        }
        float* const to = joined + warp * most_queries * Columns;
        all.write(lane, to, factor, task.run.values.kind, task.columns());
        device::sync();
        // A query's softmax in the run, and in the runs before it.
        auto const softmax = [&](int g) {
            mdkv::detail::softmax_state now{largest_of(smem.tops, g), 0.0F};
            for (int w = 0; w < attend_warps; ++w)
            {
                float const own = smem.totals[w * most_queries + g];
                if (own != 0.0F) { now.sum += own * device::exp2(smem.tops[w * most_queries + g] - now.largest); }
            }
            if (task.run.basis == run_basis::rotated) { now.largest += smem.with_mean[g]; } // keys are centred
            return now;
        };
        if (thread < task.queries)
        {
            float* const state = states.state(task.block, number, thread);
            auto all_of_basis =
                task.visited[number] ? mdkv::detail::softmax_state{state[0], state[1]} : mdkv::detail::softmax_state{};
            auto const by              = all_of_basis.merge(softmax(thread));
            smem.joins[2 * thread]     = by.first;
            smem.joins[2 * thread + 1] = by.second;
            state[0]                   = all_of_basis.largest;
            state[1]                   = all_of_basis.sum;
        }
        device::sync();
        for (int i = thread; i < task.queries * Columns; i += threads)
        {
            int const g      = i / Columns;
            float* const sum = states.state(task.block, number, g) + 2 + i % Columns;
            float now        = 0.0F;
            for (int w = 0; w < attend_warps; ++w) { now += joined[w * most_queries * Columns + i]; }
            *sum = (task.visited[number] ? *sum * smem.joins[2 * g] : 0.0F) + now * smem.joins[2 * g + 1];
        }
        device::sync(); // all threads have read what the next run writes
        if (thread == 0) { task.visited[number] = true; }
    }

    [[nodiscard]] __device__ static float largest_of(float const* tops, int g)
    {
        float top = tops[g];
        for (int w = 1; w < attend_warps; ++w)
        {
            float const other = tops[w * most_queries + g];
            top               = other > top ? other : top;
        }
        return top;
    }
};

} // namespace MDKV_NAMESPACE::gpu::kernels
