/// \file attend_slice.cuh: the kernel that attends slices of heads' bytes and leaves mergeable states (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/gpu/detail/attend_batch.cuh>
#include <mdkv/gpu/detail/attend_block.cuh>
#include <mdkv/gpu/detail/attend_numbers.cuh>
#include <mdkv/gpu/detail/attend_rows.cuh>
#include <mdkv/gpu/detail/attend_sums.cuh>
#include <mdkv/gpu/detail/attend_units.cuh>
#include <mdkv/gpu/device.cuh>

#include <vector_types.h>

// How it works. Every run of every head is cut into slices of nearly equal bytes, so that no block waits for a long head; a
// block attends one slice for up to eight query heads at once, so that every stored byte is read once for any G, and for up to
// `Columns` coordinates of values. Each warp takes every fourth tile of 16 tokens and has a softmax and sums of its own, in
// registers. Its tiles come by asynchronous copies of units (attend_units.cuh) into a ring in shared memory that no other warp
// touches, and the first of them are asked for before anything else is done: queries are prepared while they fly. A run's last
// tile, if it is not full, is copied then, too, and gathered by all warps (attend_numbers.cuh). In the end the warps are joined,
// rotated sums are rotated back, and the block leaves one state for each query.
// Nothing is projected back here: a second kernel merges a row's slices (attend_merge.cuh).

namespace MDKV_NAMESPACE::gpu::kernels
{

template <element T, element U, int Columns, int Most>
struct attend_slice : attend_block<T, U, Columns, Most>
{
    using block = attend_block<T, U, Columns, Most>;
    using block::shared;
    using block::states;
    using typename block::scratch;
    using typename block::work;

    // Registers are scarce here. Inside a block everything is counted in int. Facts that the loop over tiles does not need
    // lie in shared memory, and every function reads its thread's number again: otherwise nvcc hoists address computations
    // of all storages out of the loop over tiles and spills them.
    static constexpr char const* name              = "attend_slice";
    static constexpr int blocks_per_multiprocessor = Columns > 128 ? 2 : sizeof(T) == 4 ? 3 : 4;
    using sums                                     = attend_sums<Columns>;

    __device__ void operator()() const
    {
        work& task = *shared().task;
        device::stamp(0);
        if (device::thread() < device::warp_size) { this->find(task); }
        device::sync();
        if (task.first == task.end) { return; }
        device::stamp(1); // the slice is known
        storage const kind = task.run.keys.kind;
        if (kind == storage::plain) { attend_tiles<storage::plain>(); }
        else if (kind == storage::int8) { attend_tiles<storage::int8>(); }
        else { attend_tiles<storage::int4>(); }
        leave();
        device::stamp(5);
    }

    /// Attends the slice's tiles, and writes each warp's softmax and sums to shared memory.
    template <storage Kind>
    __device__ void attend_tiles() const
    {
        scratch const smem     = shared();
        work& task             = *smem.task;
        int const thread       = device::thread_again();
        int const lane         = thread % device::warp_size;
        int const warp         = thread / device::warp_size;
        int tile               = task.first + warp;
        std::byte* const ring  = smem.ring + warp * attend_ring;
        bool const copies_last = task.words && task.full_tiles < task.end;
        if (copies_last) { gathered<Kind>(task.end - 1).copy(); }
        attend_units<T, Kind, Columns> arriving{
            lane, task.run, task.copies, task.column_block * Columns, ring, tile, task.full_tiles};
        device::stamp(2); // the first tiles are asked for
        this->template prepare_queries<Kind>();
        if (copies_last)
        {
            gathered<Kind>(task.end - 1).gather();
            device::sync();
        }
        device::stamp(3); // queries are prepared
        sums all{};
        // unwritten: queries that the block does not have
        auto const factor = device::load<float2>(smem.factor + lane % 4 * 2);
        if (task.fixed_dims)
        {
            for (int const end = task.unmasked_tiles; tile < end; tile += attend_warps)
            {
                attend_tile<Kind, true>(arriving, tile, lane, factor, all);
            }
        }
        bool const alone = task.words; // each warp has tiles of its own
        MDKV_ROLLED
        for (int now = alone ? tile : task.first; now < task.end; now += alone ? attend_warps : 1)
        {
            if (!alone)
            {
                gathered<Kind>(now).gather();
                device::sync();
            }
            if (alone || (now - tile) % attend_warps == 0)
            {
                attend_tile<Kind, false>(arriving, now, lane, factor, all);
            }
            if (!alone) { device::sync(); }
        }
        arriving.drain();
        device::stamp(4); // the first warp has its sums
        join<Kind>(all);
    }

    /// Attends one tile. `Unmasked` tiles are full, and all queries see them.
    template <storage Kind, bool Unmasked>
    __device__ void attend_tile(
        attend_units<T, Kind, Columns>& arriving, int tile, int lane, float2 factor, sums& all) const
    {
        using rows                = attend_rows<T, Kind>;
        constexpr int unit        = rows::unit;
        constexpr int unit_groups = (unit < Columns ? unit : Columns) / group;
        scratch const smem        = shared();
        work const& task          = *smem.task;
        int const keys            = Unmasked ? Columns : task.run.keys.coordinates;
        int const values          = Unmasked ? Columns : task.columns();
        bool is_full              = true;
        int count                 = sixteen;
        if (!Unmasked && tile >= task.unmasked_tiles)
        {
            is_full          = tile < task.full_tiles;
            int const tokens = static_cast<int>(task.run.tokens);
            count            = tile * sixteen + sixteen <= tokens ? sixteen : tokens - tile * sixteen;
        }
        auto const next = [&](bool of_values, int first) -> std::byte* {
            if (is_full) { return arriving.template next<Unmasked>(); }
            return gathered<Kind>(tile).place(of_values, first, 0);
        };
        fragments const* q      = smem.to_tensors;
        float const* query_sums = smem.query_sums;
        float x[4]{};
        MDKV_ROLLED
        for (int first = 0; first < keys; first += unit)
        {
            int const n = keys - first < unit ? keys - first : unit;
            rows::add_keys(lane, next(false, first), n, q, query_sums, x);
            q += rows::steps(unit) * rows::query_fragments * device::warp_size;
            query_sums += unit / group * attend_queries;
        }
        if (!Unmasked && tile >= task.unmasked_tiles) { hide<Kind>(tile, count, x); }
        all.soften(x, factor);
        std::uint32_t w[std::size_t{rows::limbs}][2];
        if constexpr (!rows::coded) { transposed<typename rows::limb, rows::limbs>(x, w); }
        MDKV_UNROLL
        for (int v = 0; v < (Columns + unit - 1) / unit; ++v)
        {
            if (v > 0 && v * unit >= values) { break; }
            int const n          = values - v * unit < unit ? values - v * unit : unit;
            std::byte* const now = next(true, v * unit);
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
                    if (k * group >= n) { break; }
                    int const g   = v * (unit / group) + k;
                    int const own = n - k * group < group ? n - k * group : group;
                    all.template weigh<rows::limbs>(
                        x, rows::pair(lane, now, k, 0, true), rows::pair(lane, now, k, 1, true), g, w);
                    rows::add_codes(lane, now, k, own, w, all.of + 4 * g);
                }
            }
        }
    }

    /// A tile that the block gathers.
    template <storage Kind>
    [[nodiscard]] __device__ attend_numbers<T, Kind> gathered(int tile) const
    {
        scratch const smem = shared();
        work const& task   = *smem.task;
        // Where no tile is copied, the ring is free, too.
        return {task.run, task.words ? smem.tile : smem.ring,
            task.words ? this->query_bytes(this->row(), task.run.basis == run_basis::projected) : 0, task.words,
            index_t{tile} * sixteen, task.column_block * Columns, task.columns()};
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

    /// Writes the warps' softmaxes and sums to shared memory, the sums in units of the block's largest logits.
    template <storage Kind>
    __device__ void join(sums& all) const
    {
        scratch const smem = shared();
        int const lane     = device::thread_again() % device::warp_size;
        int const warp     = device::thread_again() / device::warp_size;
        all.join_lanes();
        if (lane < 4)
        {
            MDKV_UNROLL
            for (int i = 0; i < 2; ++i)
            {
                smem.tops[warp * attend_queries + 2 * lane + i]   = all.top_of(i);
                smem.totals[warp * attend_queries + 2 * lane + i] = all.total[i];
            }
        }
        device::sync(); // and no warp reads its ring any more
        float factor[2];
        MDKV_UNROLL
        for (int i = 0; i < 2; ++i)
        {
            float const top = largest_of(smem.tops, lane % 4 * 2 + i);
            factor[i]       = all.total[i] == 0.0F ? 0.0F : device::exp2(all.top_of(i) - top);
        }
        auto* const to = reinterpret_cast<float*>(smem.ring) + warp * attend_queries * Columns;
        if (smem.task->fixed_dims) { all.template write<Kind>(lane, to, factor, Columns); }
        else { all.template write<Kind>(lane, to, factor, smem.task->columns()); }
        device::sync();
    }

    /// Adds up the warps' softmaxes and sums, and writes the block's.
    __device__ void leave() const
    {
        scratch const smem = shared();
        work const& task   = *smem.task;
        int const lane     = device::thread_again() % device::warp_size;
        int const warp     = device::thread_again() / device::warp_size;
        auto* const joined = reinterpret_cast<float*>(smem.ring); // [warps, attend_queries, Columns]
        int const columns  = task.columns();
        bool const rotated = task.run.basis == run_basis::rotated;
        auto const block   = static_cast<int>(device::block());
        MDKV_ROLLED
        for (int g = warp; g < task.queries; g += attend_warps)
        {
            float const top = largest_of(smem.tops, g);
            float total     = 0.0F;
            MDKV_UNROLL
            for (int w = 0; w < attend_warps; ++w)
            {
                float const own = smem.totals[w * attend_queries + g];
                total += own == 0.0F ? 0.0F : own * device::exp2(smem.tops[w * attend_queries + g] - top);
            }
            float* const sum = joined + g * Columns;
            MDKV_UNROLL
            for (int c = lane; c < Columns; c += device::warp_size)
            {
                float now = 0.0F;
                MDKV_UNROLL
                for (int w = 0; w < attend_warps; ++w) { now += sum[w * attend_queries * Columns + c]; }
                sum[c] = now;
            }
            device::sync_warp();
            if (rotated) { rotate_by_warp(sum, columns); }
            float* const to = states.sums(block, g);
            MDKV_ROLLED
            for (int c = lane; c < Columns; c += device::warp_size)
            {
                to[c] = rotated && c < columns ? sum[c] + total * smem.value_mean[c] : sum[c]; // values are centred
            }
            float const with_mean = rotated ? smem.with_mean[g] : 0.0F; // and so are keys
            float const projected = task.run.basis == run_basis::projected ? 1.0F : 0.0F;
            if (lane == 0) { device::store(states.softmax(block, g), float4{top + with_mean, total, projected, 0.0F}); }
        }
    }

    [[nodiscard]] __device__ static float largest_of(float const* tops, int g)
    {
        float top = tops[g];
        for (int w = 1; w < attend_warps; ++w)
        {
            float const other = tops[w * attend_queries + g];
            top               = other > top ? other : top;
        }
        return top;
    }
};

} // namespace MDKV_NAMESPACE::gpu::kernels
