/// \file score_sweeps.cuh: score's two sweeps: the log-sum-exp of every query in every softmax, then the totals of every token's probabilities and of their differences (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/score_prepare.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/score_products.cuh>
#include <mdkv/gpu/device.cuh>

#include <cmath>
#include <cstring>

#include <vector_types.h>

namespace MDKV_NAMESPACE::gpu::detail
{

/// Adds a lane's logits of a panel to the state of its rows: the largest logits, and `step` floats after them the sums. A
/// warp reads only what it has written itself.
__device__ inline void add_to_state(float* largest, int step, score_products const& logits, unsigned hidden)
{
    auto const before = device::load<float4>(largest);
    float top[4]{before.x, before.y, before.z, before.w};
    float here[4];
    bool raised = false;
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
    // Eight lanes have the same four rows. Lane bits 16 and 8 choose the row whose sum a lane keeps, if its bit 4 is unset.
    int const lane  = device::lane();
    int const which = (lane & 16) / 8 + (lane & 8) / 8;
    bool const mine = (lane & 4) == 0;
    float& sum      = largest[step + which];
    if (device::any(raised)) // rare once the first tiles are past
    {
        for (int j = 0; j < 4; ++j)
        {
            for (int mask = 4; mask < device::warp_size; mask *= 2)
            {
                float const other = device::shuffle_xor(here[j], mask);
                here[j]           = other > here[j] ? other : here[j];
            }
            top[j] = here[j];
        }
        float const new_top = which == 0 ? top[0] : which == 1 ? top[1] : which == 2 ? top[2] : top[3];
        if (mine)
        {
            sum *= exp2f(largest[which] - new_top);
            // race: the vote needs what every lane has read before
            largest[which] = new_top;
        }
    }
    float sums[4] = {};
    for (int j = 0; j < 4; ++j)
    {
        for (int i = 0; i < 4; ++i) { sums[j] += exp2f(shown(logits[i][j], hidden, i, j) - top[j]); }
    }
    float total = fold4(sums, 16, 8, row_norm::sum);
    total += device::shuffle_xor(total, 4);
    if (mine) { sum += total; }
    device::sync_warp();
}

} // namespace MDKV_NAMESPACE::gpu::detail

namespace MDKV_NAMESPACE::gpu::kernels
{

/// Unscaled queries in the order in which tensor cores take them (see multiply_exact). One block a head and panel of rows.
template <element U>
struct score_fragments
{
    static constexpr char const* name = "score_fragments";
    static constexpr int threads      = 256;

    in_view<U, 3, backend> queries;
    detail::score_plan plan;

    __device__ void operator()() const
    {
        int const panels   = plan.rows / detail::score_panel;
        int const count    = plan.dim / detail::score_depth * device::warp_size; // fragments of a panel
        index_t const head = device::block() / panels;
        auto const panel   = static_cast<int>(device::block() % panels);
        for (int i = device::thread(); i < count; i += threads)
        {
            int const lane = i % device::warp_size;
            U pairs[2][2][2]; // [product][coordinates from 0 or 8][two]
            for (int j = 0; j < 8; ++j)
            {
                int const row = panel * detail::score_panel + lane / 8 * 4 + j / 4 * 2 + lane / 4 % 2;
                int const d   = i / device::warp_size * detail::score_depth + lane % 4 * 2 + j / 2 % 2 * 8 + j % 2;
                pairs[j / 4][j / 2 % 2][j % 2] =
                    row >= plan.query_rows ? narrow<U>(0.0F)
                                           : queries(head * (plan.query_rows / plan.per_head) + row / plan.per_head,
                                               row % plan.per_head, d);
            }
            uint4 vec16;
            static_assert(sizeof vec16 == sizeof pairs);
            std::memcpy(&vec16, pairs, sizeof vec16);
            device::store(plan.head(head).more + (index_t{panel} * count + i) * 4, vec16);
        }
    }
};

/// A sweep over the keys: one block for each head and split of its tiles. Sweep one has the window as one more split; sweep two has
/// a split for each tile.
template <element T, bool Second>
struct score_sweep
{
    static constexpr char const* name              = Second ? "score_totals" : "score_sums";
    static constexpr int threads                   = detail::score_threads;
    static constexpr int blocks_per_multiprocessor = 2;

    in_view<T, 3, backend> keys;
    in_view<T, 3, backend> window_keys;
    detail::score_plan plan;
    detail::score_tiling tiling;
    index_t splits; ///< splits of a head, without the window; each warp of tokens has states of its own
    bool exact;     ///< the exact softmax is wanted

    [[nodiscard]] index_t blocks() const { return keys.extent(0) * (Second ? splits : splits + 1); }
    [[nodiscard]] index_t shared_bytes() const { return tiling.bytes; }

    __device__ void operator()() const
    {
        index_t const parts  = Second ? splits : splits + 1;
        index_t const head   = device::block() / parts;
        index_t const split  = device::block() % parts;
        bool const in_window = !Second && split == splits;
        auto const& from     = in_window ? window_keys : keys;
        index_t const tokens = from.extent(1);
        index_t const tiles  = tiling.tiles(tokens);
        index_t const offset = in_window ? keys.extent(1) : 0;
        index_t const end    = in_window ? tiles : tiles * (split + 1) / splits;
        detail::score_block const block{plan, tiling, head};
        if constexpr (!Second)
        {
            float* const states = plan.state(head, split * tiling.token_warps(), 0);
            for (int i = device::thread(); i < tiling.token_warps() * plan.softmaxes * 2 * plan.rows; i += threads)
            {
                states[i] = i / plan.rows % 2 == 0 ? mdkv::detail::lowest_logit : 0.0F;
            }
        }
        for (index_t i = in_window ? 0 : tiles * split / splits; i < end; ++i)
        {
            index_t const t = i * tiling.tokens();
            if (!Second && plan.none_sees(offset + t)) { return; }
            int const count = tiling.count(tokens, t);
            device::sync(); // the tile before may still be read, and states be cleared
            block.read(from, t, count);
            if (!in_window) { block.project_keys(); }
            if constexpr (Second) { find_totals(block, t, count); }
            else { add_states(block, split, offset + t, count, in_window); }
        }
    }

private:
    /// Adds a tile's logits to the states. If `exact_keys`, all rungs store the tile's keys as they are (the window).
    __device__ void add_states(
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
                detail::add_to_state(plan.state(block.head, warp_split, i) + row, plan.rows, logits, hidden);
            }
        }
    }

    /// Adds up P and |P' - P| over the rows, in sums of each thread, and writes the totals of a tile.
    __device__ void find_totals(detail::score_block const& block, index_t first, int count) const
    {
        float* const sums = block.tile.sums;
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
                mdkv::detail::with_norm(plan.norm, [&](auto of_plan) {
                    constexpr row_norm norm = decltype(of_plan)::value;
                    for (int k = 0; k < 16; ++k)
                    {
                        int const i     = k / 4;
                        int const j     = k % 4;
                        float const own = exp2f(detail::shown(logits[i][j], hidden, i, j) - lse[j]);
                        float const x   = fabsf(own - exact[i][j]);
                        totals[i] = mdkv::detail::joined_rows(norm, totals[i], norm == row_norm::euclidean ? x * x : x);
                        if (softmax == 0) { exact[i][j] = own; }
                    }
                });
                float& total = sums[softmax * threads + device::thread()];
                total        = mdkv::detail::joined_rows(plan.norm, total, detail::fold4(totals, 2, 1, plan.norm));
            }
        }
        device::sync();
        for (int i = device::thread(); i < plan.softmaxes * tiling.tokens(); i += threads)
        {
            int const token = i % tiling.tokens();
            float total     = 0;
            for (int part = token; part < threads; part += tiling.tokens())
            {
                total = mdkv::detail::joined_rows(plan.norm, total, sums[i / tiling.tokens() * threads + part]);
            }
            if (token < count) { plan.total(block.head, i / tiling.tokens())[first + token] = total; }
        }
    }
};

} // namespace MDKV_NAMESPACE::gpu::kernels
