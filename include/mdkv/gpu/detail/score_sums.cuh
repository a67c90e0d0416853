/// \file score_sums.cuh: score's sweep one: the log-sum-exp of every query in every softmax (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/score_prepare.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/score_products.cuh>
#include <mdkv/gpu/detail/score_tile.cuh>
#include <mdkv/gpu/detail/score_tiling.cuh>
#include <mdkv/gpu/device.cuh>

#include <cmath>
#include <cstddef>

#include <vector_types.h>

namespace mdkv::gpu::detail
{

/// Makes `top` the rows' largest logits so far, and says whether any has grown: rare once the first tiles are past.
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

/// Adds a lane's logits of a panel, from `row` on the lane's own. A warp reads here only what it wrote itself.
__device__ inline void add_to_state(score_state const& state, score_products const& logits, unsigned hidden, int row)
{
    float4 const before = load4(state.largest + row);
    float top[4]{before.x, before.y, before.z, before.w};
    // Of a row, the lanes that differ in their tokens share a sum; of those, the lanes with bit 4 unset keep it.
    int const lane  = device::lane();
    int const which = (lane & 16) / 8 + (lane & 8) / 8;
    bool const mine = (lane & 4) == 0;
    if (raise(logits, hidden, top) && mine)
    {
        float const new_top = which == 0 ? top[0] : which == 1 ? top[1] : which == 2 ? top[2] : top[3];
        state.sum[row + which] *= exp2f(state.largest[row + which] - new_top);
        state.largest[row + which] = new_top;
    }
    float sums[4];
    for (int j = 0; j < 4; ++j)
    {
        sums[j] = 0;
        for (int i = 0; i < 4; ++i) { sums[j] += exp2f(shown(logits[i][j], hidden, i, j) - top[j]); }
    }
    float total = fold4(sums, 16, 8);
    total += device::shuffle_xor(total, 4);
    if (mine) { state.sum[row + which] += total; }
    device::sync_warp();
}

} // namespace mdkv::gpu::detail

namespace mdkv::gpu::kernels
{

/// One block a head and part of its tokens, the window being one part more.
template <element T>
struct score_sums
{
    static constexpr char const* name              = "score_sums";
    static constexpr int threads                   = detail::score_threads;
    static constexpr int blocks_per_multiprocessor = 2;

    in_view<T, 3, backend> keys;
    in_view<T, 3, backend> window_keys;
    detail::score_plan plan;
    detail::score_tiling tiling;
    detail::score_operands operands;
    detail::causal_mask mask;
    detail::score_states states; // a part of a head for every warp of tokens
    int parts;                   // without the window
    int tiles_per_head;
    int window_tiles;
    bool keys_wide;
    bool window_wide;
    bool exact; ///< the exact softmax is wanted

    [[nodiscard]] index_t shared_bytes() const { return tiling.work; }

    __device__ void operator()() const
    {
        auto const item = static_cast<int>(device::block());
        clear(item);
        sum_part(item / (parts + 1), item % (parts + 1), {device::shared_memory(), tiling});
    }

private:
    __device__ void clear(int item) const
    {
        index_t const size = states.per_part() * tiling.token_warps();
        for (index_t i = device::thread(); i < size; i += threads)
        {
            states.memory[item * size + i] = i / plan.rows % 2 == 0 ? mdkv::detail::lowest_logit : 0.0F;
        }
    }

    /// Of part p of the head's tokens.
    __device__ void sum_part(int head, int part, detail::score_tile const& tile) const
    {
        bool const in_window = part == parts;
        index_t const offset = in_window ? keys.extent(1) : 0;
        int const all        = in_window ? window_tiles : tiles_per_head;
        int const begin      = in_window ? 0 : static_cast<int>(index_t{all} * part / parts);
        int const end        = in_window ? all : static_cast<int>(index_t{all} * (part + 1) / parts);
        auto const h         = operands.of(head);
        for (int i = begin; i < end; ++i)
        {
            index_t const t = index_t{i} * tiling.tokens();
            if (mask.none_sees(offset + t)) { return; }
            int const count = tiling.count(in_window ? window_keys.extent(1) : keys.extent(1), i);
            device::sync(); // the tile before may still be read, and states be cleared
            if (in_window)
            {
                detail::read_rows(window_keys, window_wide, head, t, count, tiling, tiling.tensor ? nullptr : tile.keys,
                    tiling.tensor ? tile.rows : nullptr);
                device::sync();
            }
            else { detail::prepare_keys(keys, keys_wide, head, t, count, plan, tiling, h, tile); }
            add_tile(head, part, {mask, offset + t, count, tiling}, in_window, h, tile);
        }
    }

    /// With `whole` the tile's keys are stored as they are at every rung (the window).
    __device__ void add_tile(int head, int part, detail::score_shade const& shade, bool whole,
        detail::score_head const& h, detail::score_tile const& tile) const
    {
        detail::score_place const at{tiling};
        int const step   = tiling.tokens();
        auto const state = [&](int softmax) {
            return states.at(head, part * tiling.token_warps() + device::warp() % tiling.token_warps(), softmax);
        };
        for (int p = at.first_panel; p * detail::score_panel < plan.rows; p += at.panel_step)
        {
            int const row                 = p * detail::score_panel + at.row;
            unsigned const hidden         = shade.hidden(at.token, row);
            detail::score_products logits = {};
            if (exact || whole)
            {
                detail::multiply_queries<T>(logits, tile, at, p, plan, tiling, h);
                for (int i = exact ? 0 : 1; i < (whole ? plan.softmaxes : 1); ++i)
                {
                    detail::add_to_state(state(i), logits, hidden, row);
                }
            }
            if (whole) { continue; }
            detail::for_each_rung(plan, tile, at, p, step, h, logits,
                [&](int softmax) { detail::add_to_state(state(softmax), logits, hidden, row); });
        }
    }
};

} // namespace mdkv::gpu::kernels
