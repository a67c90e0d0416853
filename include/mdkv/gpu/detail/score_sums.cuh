/// \file score_sums.cuh: score's sweep one: the log-sum-exp of every query in every softmax (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/score_plan.cuh>
#include <mdkv/gpu/detail/score_products.cuh>
#include <mdkv/gpu/detail/score_tile.cuh>
#include <mdkv/gpu/device.cuh>

#include <cmath>
#include <cstddef>

#include <vector_types.h>

namespace mdkv::gpu::detail
{

/// Starting maximum: lower than any logit, and finite so that differences are numbers.
inline constexpr float lowest_logit = -1e30F;

/// Largest logit and sum of 2^(logit - largest) of every row, of one softmax and one warp's tokens.
struct score_state
{
    float* largest; // [rows]
    float* sum;     // [rows]

    /// Adds a lane's logits of a panel, from `row` on the lane's own. What a warp writes here it reads again itself.
    __device__ void add(score_products const& logits, unsigned hidden, int row) const
    {
        float4 const before = load4(largest + row);
        float top[4]{before.x, before.y, before.z, before.w};
        // Of a row, the lanes that differ in their tokens share a sum; of those, the lanes with bit 4 unset keep it.
        int const lane  = device::lane();
        int const which = (lane & 16) / 8 + (lane & 8) / 8;
        bool const mine = (lane & 4) == 0;
        if (raise(logits, hidden, top) && mine)
        {
            float const new_top = which == 0 ? top[0] : which == 1 ? top[1] : which == 2 ? top[2] : top[3];
            sum[row + which] *= exp2f(largest[row + which] - new_top);
            largest[row + which] = new_top;
        }
        float sums[4];
        for (int j = 0; j < 4; ++j)
        {
            sums[j] = 0;
            for (int i = 0; i < 4; ++i) { sums[j] += exp2f(shown(logits[i][j], hidden, i, j) - top[j]); }
        }
        float total = fold4(sums, 16, 8);
        total += device::shuffle_xor(total, 4);
        if (mine) { sum[row + which] += total; }
        device::sync_warp();
    }

private:
    /// Makes `top` the rows' largest logits so far, and says whether any has grown: rare once the first tiles are past.
    [[nodiscard]] static __device__ bool raise(score_products const& logits, unsigned hidden, float (&top)[4])
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
};

/// States of all parts: [H, parts, token_warps, softmaxes, 2, rows].
struct score_states
{
    float* memory;
    int rows;
    int softmaxes;
    int token_warps;

    [[nodiscard]] MDKV_HD index_t per_part() const noexcept { return index_t{2} * token_warps * softmaxes * rows; }
    [[nodiscard]] __device__ score_state at(index_t part, int warp, int softmax) const
    {
        float* const first = memory + part * per_part() + (index_t{warp} * softmaxes + softmax) * 2 * rows;
        return {first, first + rows};
    }
};

} // namespace mdkv::gpu::detail

namespace mdkv::gpu::kernels
{

/// One block a head and part of its tokens, the window being one part more. `Shared`: tiles are in shared memory.
template <element T, bool Shared>
struct score_sums
{
    static constexpr char const* name              = "score_sums";
    static constexpr int threads                   = detail::score_threads;
    static constexpr int blocks_per_multiprocessor = Shared ? 2 : 1;

    in_view<T, 3, backend> keys;
    in_view<T, 3, backend> window_keys;
    detail::score_plan plan;
    detail::score_tiling tiling;
    detail::score_operands operands;
    detail::score_sight sight;
    detail::score_states states;
    std::byte* tiles; // [blocks, tiling.bytes]  unless Shared
    int parts;        // without the window
    int items;        // heads * (parts + 1)
    int tiles_per_head;
    int window_tiles;
    bool keys_wide;
    bool window_wide;
    bool exact; ///< the exact softmax is wanted

    [[nodiscard]] index_t shared_bytes() const { return Shared ? tiling.bytes : 0; }

    __device__ void operator()() const
    {
        auto const tile = tiling.at(Shared ? device::shared_memory() : tiles + device::block() * tiling.bytes);
        for (auto item = static_cast<int>(device::block()); item < items; item += static_cast<int>(device::blocks()))
        {
            clear(item);
            sum_part(item / (parts + 1), item % (parts + 1), tile);
            if constexpr (Shared) { return; } // a block for every item
        }
    }

private:
    __device__ void clear(int item) const
    {
        detail::score_state const all = states.at(item, 0, 0);
        for (index_t i = device::thread(); i < states.per_part(); i += threads)
        {
            all.largest[i] = i / plan.rows % 2 == 0 ? detail::lowest_logit : 0.0F;
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
            if (sight.none_sees(offset + t)) { return; }
            int const count = tiling.count(in_window ? window_keys.extent(1) : keys.extent(1), i);
            device::sync(); // the tile before may still be read, and states be cleared
            if (in_window)
            {
                detail::read_rows(window_keys, window_wide, head, t, count, tiling, plan.tensor ? nullptr : tile.keys,
                    plan.tensor ? tile.rows : nullptr);
                device::sync();
            }
            else { detail::prepare_keys(keys, keys_wide, head, t, count, plan, tiling, h, tile); }
            add_tile(head * (parts + 1) + part, {sight, offset + t, count, tiling}, in_window, h, tile);
        }
    }

    /// With `whole` the tile's keys are stored as they are at every rung (the window).
    __device__ void add_tile(int item, detail::score_shade const& shade, bool whole, detail::score_head const& h,
        detail::score_tile const& tile) const
    {
        detail::score_place const at{tiling};
        int const step   = tiling.tokens();
        auto const state = [&](int softmax) { return states.at(item, device::warp() % tiling.token_warps(), softmax); };
        for (int p = at.first_panel; p * detail::score_panel < plan.rows; p += at.panel_step)
        {
            int const row                 = p * detail::score_panel + at.row;
            unsigned const hidden         = shade.hidden(at.token, row);
            detail::score_products logits = {};
            if (exact || whole)
            {
                detail::multiply_queries<T>(logits, tile, at, p, plan, step, h);
                for (int i = exact ? 0 : 1; i < (whole ? plan.softmaxes : 1); ++i)
                {
                    state(i).add(logits, hidden, row);
                }
            }
            if (whole) { continue; }
            detail::for_each_rung(
                plan, tile, at, p, step, h, logits, [&](int softmax) { state(softmax).add(logits, hidden, row); });
        }
    }
};

/// Joins what the parts left of every softmax into log-sum-exps that a query's weight is part of: P times w is
/// 2^(logit - (lse - log2 w)). One thread a softmax and row.
struct score_join
{
    static constexpr char const* name = "score_join";
    static constexpr int threads      = 256;

    in_view<float, 2, backend> lse;     // [H*G, Q]  natural logarithm, if given
    in_view<float, 1, backend> weights; // [Q]       if given
    detail::score_plan plan;
    detail::score_operands operands;
    detail::score_states states;
    int parts; // the window among them
    index_t blocks_per_head;
    bool lse_given;
    bool weighted;

    __device__ void operator()() const
    {
        index_t const head = device::block() / blocks_per_head;
        index_t const item = device::block() % blocks_per_head * threads + device::thread();
        if (item >= index_t{plan.softmaxes} * plan.rows) { return; }
        int const softmax = static_cast<int>(item / plan.rows);
        int const row     = static_cast<int>(item % plan.rows);
        float& to         = operands.of(head).lse[item];
        if (row >= plan.query_rows)
        {
            to = -detail::lowest_logit; // weighs nothing
            return;
        }
        int const query    = row % plan.per_head;
        float const weight = weighted ? log2f(weights(query)) : 0.0F;
        if (softmax == 0 && lse_given)
        {
            index_t const query_head = head * (plan.query_rows / plan.per_head) + row / plan.per_head;
            to                       = lse(query_head, query) * mdkv::detail::log2_e - weight;
            return;
        }
        float largest = detail::lowest_logit;
        for_each_state(head, softmax,
            [&](detail::score_state const& s) { largest = s.largest[row] > largest ? s.largest[row] : largest; });
        float total = 0;
        for_each_state(head, softmax,
            [&](detail::score_state const& s) { total += s.sum[row] * exp2f(s.largest[row] - largest); });
        to = largest + log2f(total) - weight;
    }

private:
    template <class Use>
    __device__ void for_each_state(index_t head, int softmax, Use const& use) const
    {
        for (int part = 0; part < parts; ++part)
        {
            for (int w = 0; w < states.token_warps; ++w) { use(states.at(head * parts + part, w, softmax)); }
        }
    }
};

} // namespace mdkv::gpu::kernels
