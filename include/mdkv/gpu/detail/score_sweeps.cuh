/// \file score_sweeps.cuh: score's two sweeps: the log-sum-exp of every query in every softmax, then the totals of every token's probabilities and of their differences (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/score_prepare.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/score_block.cuh>
#include <mdkv/gpu/detail/score_products.cuh>
#include <mdkv/gpu/device.cuh>

#include <cmath>
#include <cstdint>

#include <vector_types.h>

namespace MDKV_NAMESPACE::gpu::detail
{

/// Raises `top` to the rows' largest logits so far. Returns whether any has grown, which is rare once the first tiles are
/// past.
[[nodiscard]] __device__ inline bool raise(score_products const& logits, unsigned hidden, float (&top)[4])
{
    bool raised = false;
    float here[4];
    for (int j = 0; j < 4; ++j)
    {
        here[j] = top[j];
        for (int i = 0; i < 4; ++i)
        {
            float const x = shown(logits[i][j], hidden, i, j);
            here[j]       = x > here[j] ? x : here[j];
        }
        raised = raised || here[j] > top[j];
    }
    if (device::ballot(raised) == 0) { return false; }
    for (int j = 0; j < 4; ++j)
    {
        for (int step = 4; step < device::warp_size; step *= 2)
        {
            float const other = device::shuffle_xor(here[j], step);
            here[j]           = other > here[j] ? other : here[j];
        }
        top[j] = here[j];
    }
    return true;
}

/// Adds a lane's logits of a panel to the state of its rows: the largest logits, and `step` floats after them the sums. A
/// warp reads only what it has written itself.
__device__ inline void add_to_state(float* largest, int step, score_products const& logits, unsigned hidden)
{
    auto const before = device::load<float4>(largest);
    float top[4]{before.x, before.y, before.z, before.w};
    // Eight lanes have the same four rows. Lane bits 16 and 8 choose the row whose sum a lane keeps, if its bit 4 is
    // unset.
    int const lane  = device::lane();
    int const which = (lane & 16) / 8 + (lane & 8) / 8;
    bool const mine = (lane & 4) == 0;
    float& sum      = largest[step + which];
    if (raise(logits, hidden, top) && mine)
    {
        float const new_top = which == 0 ? top[0] : which == 1 ? top[1] : which == 2 ? top[2] : top[3];
        sum *= exp2f(largest[which] - new_top);
        // race: the vote in raise() needs what every lane has read before
        largest[which] = new_top;
    }
    float sums[4] = {};
    for (int j = 0; j < 4; ++j)
    {
        for (int i = 0; i < 4; ++i) { sums[j] += exp2f(shown(logits[i][j], hidden, i, j) - top[j]); }
    }
    float total = fold4(sums, 16, 8);
    total += device::shuffle_xor(total, 4);
    if (mine) { sum += total; }
    device::sync_warp();
}

/// Adds |P' - P| of a lane's rows to its tokens' totals, from logits and log-sum-exps of P'. If `is_exact`, both belong to
/// P itself: then P is added, and stored in `exact`.
template <row_norm Norm>
__device__ __forceinline__ void add_differences(score_products const& logits, float const (&lse)[4], unsigned hidden,
    bool is_exact, score_products& exact, float (&totals)[4])
{
    for (int i = 0; i < 4; ++i)
    {
        for (int j = 0; j < 4; ++j)
        {
            float const probability = exp2f(shown(logits[i][j], hidden, i, j) - lse[j]);
            totals[i]               = mdkv::detail::with_row<Norm>(totals[i], fabsf(probability - exact[i][j]));
            if (is_exact) { exact[i][j] = probability; }
        }
    }
}

} // namespace MDKV_NAMESPACE::gpu::detail

namespace MDKV_NAMESPACE::gpu::kernels
{

/// Sweep one: one block for each head and split of its tokens; the window is one more split.
template <element T>
struct score_sums
{
    static constexpr char const* name              = "score_sums";
    static constexpr int threads                   = detail::score_threads;
    static constexpr int blocks_per_multiprocessor = 2;

    detail::token_rows<T> keys;
    detail::token_rows<T> window_keys;
    detail::score_plan plan;
    detail::score_tiling tiling;
    detail::score_states states; // one split for each split of a head and warp of tokens
    index_t splits;              // splits of a head, without the window
    bool exact;                  ///< the exact softmax is wanted

    [[nodiscard]] index_t shared_bytes() const { return tiling.keys; }

    __device__ void operator()() const
    {
        index_t const head   = device::block() / (splits + 1);
        index_t const split  = device::block() % (splits + 1);
        bool const in_window = split == splits;
        auto const& from     = in_window ? window_keys : keys;
        index_t const tokens = from.view.extent(1);
        index_t const tiles  = tiling.tiles(tokens);
        index_t const offset = in_window ? keys.view.extent(1) : 0;
        index_t const end    = in_window ? tiles : tiles * (split + 1) / splits;
        mdkv::detail::carver memory{device::shared_memory()};
        detail::score_block const block{plan, tiling, head, memory};
        clear();
        for (index_t i = in_window ? 0 : tiles * split / splits; i < end; ++i)
        {
            index_t const t = i * tiling.tokens();
            if (plan.none_sees(offset + t)) { return; }
            int const count = tiling.count(tokens, t);
            device::sync(); // the tile before may still be read, and states be cleared
            block.read(from, t, count);
            if (!in_window) { block.project_keys(); }
            add_tile(block, split, offset + t, count, in_window);
        }
    }

private:
    __device__ void clear() const
    {
        index_t const size = states.per_split() * tiling.token_warps();
        for (index_t i = device::thread(); i < size; i += threads)
        {
            states.memory[device::block() * size + i] = i / plan.rows % 2 == 0 ? mdkv::detail::lowest_logit : 0.0F;
        }
    }

    /// Adds a tile's logits to the states. If `exact_keys`, all rungs store the tile's keys as they are (the window).
    __device__ void add_tile(
        detail::score_block const& block, index_t split, index_t first, int count, bool exact_keys) const
    {
        index_t const warp_split = split * tiling.token_warps() + device::warp() % tiling.token_warps();
        for (int p = tiling.share(); p * detail::score_panel < plan.rows; p += tiling.shares())
        {
            int const row         = p * detail::score_panel + block.row;
            unsigned const hidden = block.hidden(first, count, row);
            detail::score_products logits;
            for (int i = exact || exact_keys ? 0 : 1; i < plan.softmaxes; ++i)
            {
                if (i == 0 || !exact_keys) { block.template multiply<T>(logits, i, p); }
                if (i == 0 && !exact) { continue; }
                detail::add_to_state(states.largest(block.head, warp_split, i) + row, plan.rows, logits, hidden);
            }
        }
    }
};

/// Sweep two: one block a head and tile.
template <element T>
struct score_totals
{
    static constexpr char const* name              = "score_totals";
    static constexpr int threads                   = detail::score_threads;
    static constexpr int blocks_per_multiprocessor = 2;

    detail::token_rows<T> keys;
    detail::score_plan plan;
    detail::score_tiling tiling;
    index_t tiles_per_head;

    [[nodiscard]] index_t shared_bytes() const { return tiling.all; }

    __device__ void operator()() const
    {
        auto const number   = static_cast<std::uint32_t>(device::block()); // a grid has fewer than 2^31
        auto const tiles    = static_cast<std::uint32_t>(tiles_per_head);
        index_t const head  = number / tiles;
        index_t const first = index_t{number % tiles} * tiling.tokens();
        int const count     = tiling.count(keys.view.extent(1), first);
        mdkv::detail::carver memory{device::shared_memory()};
        detail::score_block const block{plan, tiling, head, memory};
        float* const sums = memory.take<float>(index_t{plan.softmaxes} * threads); // each thread's
        block.read(keys, first, count);
        block.project_keys();
        add_differences(block, first, count, sums);
        device::sync();
        for (int i = device::thread(); i < plan.softmaxes * tiling.tokens(); i += threads)
        {
            int const token = i % tiling.tokens();
            float total     = 0;
            for (int part = token; part < threads; part += tiling.tokens())
            {
                total = mdkv::detail::joined_rows(plan.norm, total, sums[i / tiling.tokens() * threads + part]);
            }
            if (token < count) { plan.total(head, i / tiling.tokens())[first + token] = total; }
        }
    }

private:
    /// Adds up P and |P' - P| over the rows.
    __device__ void add_differences(detail::score_block const& block, index_t first, int count, float* sums) const
    {
        for (int i = 0; i < plan.softmaxes; ++i) { sums[i * threads + device::thread()] = 0; }
        for (int p = tiling.share(); p * detail::score_panel < plan.rows; p += tiling.shares())
        {
            int const row                = p * detail::score_panel + block.row;
            unsigned const hidden        = block.hidden(first, count, row);
            detail::score_products exact = {}; // probabilities, once they are known
            detail::score_products logits;
            for (int softmax = 0; softmax < plan.softmaxes; ++softmax)
            {
                block.template multiply<T>(logits, softmax, p);
                auto const of_rows = device::load<float4>(block.operands.lse + index_t{softmax} * plan.rows + row);
                float const lse[4]{of_rows.x, of_rows.y, of_rows.z, of_rows.w};
                float totals[4] = {};
                mdkv::detail::with_norm(plan.norm, [&](auto norm) {
                    detail::add_differences<norm>(logits, lse, hidden, softmax == 0, exact, totals);
                });
                float& total = sums[softmax * threads + device::thread()];
                total        = mdkv::detail::joined_rows(plan.norm, total, detail::fold4(totals, 2, 1, plan.norm));
            }
        }
    }
};

} // namespace MDKV_NAMESPACE::gpu::kernels
