/// \file score_work.cuh: the sums a block of score's sweep two keeps in shared memory.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/detail/score_plan.cuh>

#include <cstddef>

namespace mdkv::gpu::detail
{

/// A block's sums, always in shared memory. A sum over many rows or coordinates is kept in `parts` of one float a thread:
/// whoever shares a token has a part of its own, and parts are joined in their order.
struct score_work
{
    float* sums;    // [most of softmaxes and rungs, parts]  sums of probabilities, then of squared rests
    float* totals;  // [softmaxes, tokens]                   sum P, sum |P' - P|
    float* pieces;  // [1 + 2 * rungs, parts]                |v|^2; |v - v'|^2 by rounding; squares of kept coordinates
    unsigned* rest; // [1]                                   some token needs its rest computed from the difference

    static constexpr int parts = score_threads;

    /// Of one token, a sum's parts in their order; `tokens` of the tile.
    [[nodiscard]] static __device__ float joined(float const* sum, int token, int tokens)
    {
        float total = 0;
        for (int part = token; part < parts; part += tokens) { total += sum[part]; }
        return total;
    }
};

/// Where its arrays begin in a block's shared memory, in bytes; the tile may follow.
struct score_work_places
{
    int totals, pieces, rest, tile;

    score_work_places(score_plan const& p, int tokens) noexcept
    {
        device::shared_carver carver{nullptr};
        auto const here = [&] { return static_cast<int>(carver.bytes()); };
        int const sums  = p.softmaxes < p.count ? p.count : p.softmaxes;
        static_cast<void>(carver.take<float>(index_t{sums} * score_work::parts));
        totals = here();
        static_cast<void>(carver.take<float>(index_t{p.softmaxes} * tokens));
        pieces = here();
        static_cast<void>(carver.take<float>(index_t{1 + 2 * p.count} * score_work::parts));
        rest = here();
        static_cast<void>(carver.take<unsigned>(1));
        tile = here();
    }
    [[nodiscard]] __device__ score_work at(std::byte* memory) const
    {
        return {reinterpret_cast<float*>(memory), reinterpret_cast<float*>(memory + totals),
            reinterpret_cast<float*>(memory + pieces), reinterpret_cast<unsigned*>(memory + rest)};
    }
};

} // namespace mdkv::gpu::detail
