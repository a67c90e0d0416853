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

/// Adds a lane's logits of a panel to the state of its rows: largest logits, and `step` after them the sums. A warp reads here
/// only what it wrote itself.
__device__ inline void add_to_state(float* largest, int step, score_products const& logits, unsigned hidden)
{
    float4 const before = load4(largest);
    float top[4]{before.x, before.y, before.z, before.w};
    // Of a row, the lanes that differ in their tokens share a sum; of those, the lanes with bit 4 unset keep it.
    int const lane  = device::lane();
    int const which = (lane & 16) / 8 + (lane & 8) / 8;
    bool const mine = (lane & 4) == 0;
    float& sum      = largest[step + which];
    if (raise(logits, hidden, top) && mine)
    {
        float const new_top = which == 0 ? top[0] : which == 1 ? top[1] : which == 2 ? top[2] : top[3];
        sum *= exp2f(largest[which] - new_top);
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

    detail::token_rows<T> keys;
    detail::token_rows<T> window_keys;
    detail::score_plan plan;
    detail::score_tiling tiling;
    detail::score_operands operands;
    detail::causal_mask mask;
    detail::score_states states; // a part of a head for every warp of tokens
    index_t parts;               // without the window
    bool exact;                  ///< the exact softmax is wanted

    [[nodiscard]] index_t shared_bytes() const { return tiling.keys; }

    __device__ void operator()() const
    {
        index_t const head   = device::block() / (parts + 1);
        index_t const part   = device::block() % (parts + 1);
        bool const in_window = part == parts;
        auto const& from     = in_window ? window_keys : keys;
        index_t const tokens = from.view.extent(1);
        index_t const tiles  = tiling.tiles(tokens);
        index_t const offset = in_window ? keys.view.extent(1) : 0;
        index_t const end    = in_window ? tiles : tiles * (part + 1) / parts;
        auto const h         = operands.of(head);
        mdkv::detail::carver memory{device::shared_memory()};
        detail::score_tile const tile{memory, plan, tiling};
        clear();
        for (index_t i = in_window ? 0 : tiles * part / parts; i < end; ++i)
        {
            index_t const t = i * tiling.tokens();
            if (mask.none_sees(offset + t)) { return; }
            int const count = tiling.count(tokens, t);
            device::sync(); // the tile before may still be read, and states be cleared
            detail::read_keys(from, head, t, count, tiling, tile);
            if (!in_window) { detail::prepare_keys(plan, tiling, h, tile); }
            add_tile(head, part, {mask, offset + t, count, tiling}, in_window, h, tile);
        }
    }

private:
    __device__ void clear() const
    {
        index_t const size = states.per_part() * tiling.token_warps();
        for (index_t i = device::thread(); i < size; i += threads)
        {
            states.memory[device::block() * size + i] = i / plan.rows % 2 == 0 ? mdkv::detail::lowest_logit : 0.0F;
        }
    }

    /// With `whole` the tile's keys are stored as they are at every rung (the window).
    __device__ void add_tile(index_t head, index_t part, detail::score_shade const& shade, bool whole,
        detail::score_head const& h, detail::score_tile const& tile) const
    {
        detail::score_place const at{tiling};
        index_t const own = part * tiling.token_warps() + device::warp() % tiling.token_warps();
        for (int p = at.first_panel; p * detail::score_panel < plan.rows; p += at.panel_step)
        {
            int const row         = p * detail::score_panel + at.row;
            unsigned const hidden = shade.hidden(at.token, row);
            detail::score_products logits;
            for (int i = exact || whole ? 0 : 1; i < plan.softmaxes; ++i)
            {
                if (i == 0 || !whole) { detail::multiply_queries<T>(logits, i, tile, at, p, plan, tiling, h); }
                if (i > 0 || exact)
                {
                    detail::add_to_state(states.largest(head, own, i) + row, plan.rows, logits, hidden);
                }
            }
        }
    }
};

} // namespace mdkv::gpu::kernels
