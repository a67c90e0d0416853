/// \file score_losses.cuh: score's sweep two: the loss of every token at every rung (arXiv 2603.20616, section 4.2).
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/score_plan.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/score_products.cuh>
#include <mdkv/gpu/detail/score_tile.cuh>
#include <mdkv/gpu/detail/score_tiling.cuh>
#include <mdkv/gpu/device.cuh>

#include <cmath>
#include <cstddef>

namespace mdkv::gpu::kernels
{

/// One block a head and tile.
template <element T>
struct score_losses
{
    static constexpr char const* name              = "score_losses";
    static constexpr int threads                   = detail::score_threads;
    static constexpr int blocks_per_multiprocessor = 2;
    static constexpr int group                     = static_cast<int>(quantised_group);

    in_view<T, 3, backend> keys;
    in_view<T, 3, backend> values;
    out_view<float, 3, backend> loss;
    detail::score_plan plan;
    detail::score_tiling tiling;
    detail::score_operands operands;
    detail::causal_mask mask;
    int tiles_per_head;
    bool keys_wide;
    bool values_wide;

    [[nodiscard]] index_t shared_bytes() const { return tiling.bytes; }

    __device__ void operator()() const
    {
        auto const item = static_cast<int>(device::block());
        mdkv::detail::carver memory{device::shared_memory() + tiling.work};
        score_one(item / tiles_per_head, item % tiles_per_head, {device::shared_memory(), tiling},
            {memory, plan, tiling.tokens()});
    }

private:
    __device__ void score_one(int head, int which, detail::score_tile const& tile, detail::score_work const& work) const
    {
        index_t const first = index_t{which} * tiling.tokens();
        int const count     = tiling.count(keys.extent(1), which);
        auto const h        = operands.of(head);
        clear(work.sums, plan.softmaxes);
        detail::prepare_keys(keys, keys_wide, head, first, count, plan, tiling, h, tile);
        add_differences({mask, first, count, tiling}, h, tile, work);
        device::sync();
        join(work);
        prepare_values(head, first, count, h, tile, work);
        if (device::thread() < count) { write(head, first, work); }
    }

    __device__ void clear(float* sums, int count) const
    {
        for (int i = 0; i < count; ++i) { sums[i * threads + device::thread()] = 0; }
    }

    /// Adds up P and |P' - P| over the rows.
    __device__ void add_differences(detail::score_shade const& shade, detail::score_head const& h,
        detail::score_tile const& tile, detail::score_work const& work) const
    {
        detail::score_place const at{tiling};
        int const step = tiling.tokens();
        for (int p = at.first_panel; p * detail::score_panel < plan.rows; p += at.panel_step)
        {
            int const row          = p * detail::score_panel + at.row;
            unsigned const hidden  = shade.hidden(at.token, row);
            auto const probability = [&](float logit, float const(&lse)[4], int i, int j) {
                return exp2f(detail::shown(logit, hidden, i, j) - lse[j]);
            };
            auto const lse_of = [&](int softmax, float(&lse)[4]) {
                float4 const v = detail::load4(h.lse + index_t{softmax} * plan.rows + row);
                lse[0] = v.x, lse[1] = v.y, lse[2] = v.z, lse[3] = v.w;
            };
            detail::score_products exact;
            detail::multiply_queries<T>(exact, tile, at, p, plan, tiling, h);
            float lse[4];
            lse_of(0, lse);
            float sums[4] = {};
            for (int i = 0; i < 4; ++i)
            {
                for (int j = 0; j < 4; ++j)
                {
                    exact[i][j] = probability(exact[i][j], lse, i, j);
                    sums[i] += exact[i][j];
                }
            }
            detail::add_to_tokens(sums, at, step, work.sums);
            detail::score_products logits;
            detail::for_each_rung(plan, tile, at, p, step, h, logits, [&](int softmax) {
                float lse_there[4];
                lse_of(softmax, lse_there);
                float moved[4] = {};
                for (int i = 0; i < 4; ++i)
                {
                    for (int j = 0; j < 4; ++j)
                    {
                        moved[i] += fabsf(probability(logits[i][j], lse_there, i, j) - exact[i][j]);
                    }
                }
                detail::add_to_tokens(moved, at, step, work.sums + softmax * threads);
            });
        }
    }

    __device__ void join(detail::score_work const& work) const
    {
        int const tokens = tiling.tokens();
        for (int i = tiling.share(); i < plan.softmaxes; i += tiling.shares())
        {
            work.totals[i * tokens + tiling.token()] =
                detail::score_work::joined(work.sums + i * threads, tiling.token(), tokens);
        }
    }

    /// Fills score_work::pieces from the values; the first part of a token ends with its |v - v'|^2 at each rung.
    __device__ void prepare_values(index_t head, index_t first, int count, detail::score_head const& h,
        detail::score_tile const& tile, detail::score_work const& work) const
    {
        detail::read_rows(values, values_wide, head, first, count, tiling, tile.keys, nullptr);
        if (device::thread() == 0) { *work.rest = 0; }
        device::sync();
        if (plan.value_latent > 0)
        {
            detail::project(tile.keys, plan.value_dim, h.value_basis, plan.value_columns(), plan.value_latent, tiling,
                tile.latents);
            device::sync();
        }
        square(tile, work);
        device::sync();
        if (device::thread() < count) { find_missing(work); }
        device::sync();
        if (*work.rest == 0) { return; }
        clear(work.sums, plan.count);
        device::sync();
        add_rests(h, tile, work);
        device::sync();
    }

    /// This thread's parts of its token's sums of squares.
    __device__ void square(detail::score_tile const& tile, detail::score_work const& work) const
    {
        int const step     = tiling.tokens();
        int const token    = tiling.token();
        int const share    = tiling.share();
        int const shares   = tiling.shares();
        auto const at_most = [](int n) { return n < group ? n : group; };
        float norm         = 0;
        for (int c = share * group; c < plan.value_dim; c += shares * group)
        {
            float const* const x = tile.keys + c * step + token;
            int const n          = at_most(plan.value_dim - c);
            for (int i = 0; i < n; ++i) { norm += x[i * step] * x[i * step]; }
        }
        work.pieces[device::thread()] = norm;
        for (int r = 0; r < plan.count; ++r)
        {
            detail::score_rung const& u = plan.rungs[r];
            float rounding              = 0;
            for (int c = share * group; u.quantised() && c < u.values; c += shares * group)
            {
                float const* const x = (u.projected ? tile.latents : tile.keys) + c * step + token;
                detail::for_each_read_again(x, at_most(u.values - c), step, u, tile.again + c * step + token,
                    [&](int, float before, float read) { rounding += (before - read) * (before - read); });
            }
            float kept = 0;
            for (int c = u.kept_from + share; u.leaves_out && c < u.values; c += shares)
            {
                float const x = tile.latents[c * step + token];
                kept += x * x;
            }
            work.pieces[(1 + r) * threads + device::thread()]              = rounding;
            work.pieces[(1 + plan.count + r) * threads + device::thread()] = kept;
        }
    }

    [[nodiscard]] __device__ float& piece(detail::score_work const& work, int which) const
    {
        return work.pieces[which * threads + device::thread()];
    }
    [[nodiscard]] __device__ float& squared_rest(detail::score_work const& work, int rung) const
    {
        return piece(work, 1 + plan.count + rung);
    }

    /// |v - v'|^2 by Pythagoras, because a basis is orthonormal; one thread a token.
    __device__ void find_missing(detail::score_work const& work) const
    {
        int const tokens  = tiling.tokens();
        auto const joined = [&](int which) {
            return detail::score_work::joined(work.pieces + which * threads, device::thread(), tokens);
        };
        float const squared = joined(0);
        piece(work, 0)      = squared;
        float kept          = 0;
        bool rest           = false;
        for (int r = 0; r < plan.count; ++r)
        {
            piece(work, 1 + r) = joined(1 + r);
            if (!plan.rungs[r].leaves_out) { continue; }
            kept                  = (plan.rungs[r].kept_from == 0 ? 0.0F : kept) + joined(1 + plan.count + r);
            squared_rest(work, r) = squared - kept;
            rest                  = rest || mdkv::detail::cancels(squared - kept, squared);
        }
        if (rest) { device::atomic_max(work.rest, 1U); }
    }

    /// Adds up the squares of the differences between values and their projections.
    __device__ void add_rests(
        detail::score_head const& h, detail::score_tile const& tile, detail::score_work const& work) const
    {
        detail::score_place const at{tiling};
        int const step                = tiling.tokens();
        int const width               = plan.padded(plan.value_dim);
        float const* const value_rows = detail::score_extra{h, plan}.value_rows;
        for (int p = at.first_panel; p * detail::score_panel < plan.value_dim; p += at.panel_step)
        {
            int const d = p * detail::score_panel + at.row;
            int done    = 0;
            detail::score_products kept;
            for (int r = 0; r < plan.count; ++r)
            {
                detail::score_rung const& u = plan.rungs[r];
                if (!u.leaves_out) { continue; }
                if (u.kept_from == 0)
                {
                    detail::clear(kept);
                    done = 0;
                }
                detail::multiply_add(kept, tile.latents + done * step + at.token, step,
                    value_rows + index_t{done} * width + d, width, u.values - done);
                done          = u.values;
                float rest[4] = {};
                for (int j = 0; j < 4; ++j)
                {
                    if (d + j >= plan.value_dim) { continue; }
                    for (int i = 0; i < 4; ++i)
                    {
                        float const x = tile.keys[(d + j) * step + at.token + i] - kept[i][j];
                        rest[i] += x * x;
                    }
                }
                detail::add_to_tokens(rest, at, step, work.sums + r * threads);
            }
        }
    }

    /// The losses of this thread's token at every rung.
    __device__ void write(index_t head, index_t first, detail::score_work const& work) const
    {
        int const token     = device::thread();
        int const tokens    = tiling.tokens();
        float const squared = piece(work, 0);
        float const norm    = sqrtf(squared);
        float const mass    = work.totals[token];
        if (plan.dropped >= 0) { loss(head, plan.dropped, first + token) = mdkv::detail::dropped_loss(mass, norm); }
        if (plan.full >= 0) { loss(head, plan.full, first + token) = 0; }
        for (int r = 0; r < plan.count; ++r)
        {
            detail::score_rung const& u = plan.rungs[r];
            float missing               = piece(work, 1 + r);
            if (u.leaves_out)
            {
                float const rest = squared_rest(work, r);
                missing += mdkv::detail::cancels(rest, squared)
                               ? detail::score_work::joined(work.sums + r * threads, token, tokens)
                               : rest;
            }
            float const moved                  = u.softmax > 0 ? work.totals[u.softmax * tokens + token] : 0.0F;
            loss(head, u.index, first + token) = mdkv::detail::stored_loss(moved, mass, norm, sqrtf(missing));
        }
    }
};

} // namespace mdkv::gpu::kernels
