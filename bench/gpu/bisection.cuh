/// \file bisection.cuh: the multiplier by halving an interval, as the paper describes it and a first version would have it: one reduction a pass, its sum awaited by the host
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/stages/allocate.hpp>

#include <cstddef>
#include <cstdint>

#include <thrust/execution_policy.h>
#include <thrust/functional.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/transform.h>
#include <thrust/transform_reduce.h>

#include "bench.cuh"

namespace bench
{

/// Rungs of tokens at one multiplier.
template <std::size_t R>
struct choice
{
    float const* loss; // [H, R, N]
    index_t tokens;    // N
    mdkv::rung_costs costs;
    double multiplier;

    [[nodiscard]] MDKV_HD double loss_at(index_t token, std::size_t rung) const
    {
        index_t const head = token / tokens;
        return loss[(head * index_t{R} + static_cast<index_t>(rung)) * tokens + token % tokens];
    }
    [[nodiscard]] MDKV_HD std::size_t rung(index_t token) const
    {
        std::size_t best = 0;
        double least     = loss_at(token, 0) + multiplier * static_cast<double>(costs.bytes[0]);
        for (std::size_t r = 1; r < R; ++r)
        {
            double const here = loss_at(token, r) + multiplier * static_cast<double>(costs.bytes[r]);
            if (here < least)
            {
                least = here;
                best  = r;
            }
        }
        return best;
    }
};

template <std::size_t R>
struct bytes_chosen
{
    choice<R> chosen;
    [[nodiscard]] MDKV_HD index_t operator()(index_t token) const { return chosen.costs.bytes[chosen.rung(token)]; }
};

template <std::size_t R>
struct rung_chosen
{
    choice<R> chosen;
    [[nodiscard]] MDKV_HD std::uint8_t operator()(index_t token) const
    {
        return static_cast<std::uint8_t>(chosen.rung(token));
    }
};

template <std::size_t R>
struct loss_chosen
{
    choice<R> chosen;
    [[nodiscard]] MDKV_HD double operator()(index_t token) const { return chosen.loss_at(token, chosen.rung(token)); }
};

/// Lends Thrust the same memory for every reduction, as the caching allocators of frameworks do.
class lender
{
public:
    using value_type = char;

    [[nodiscard]] char* allocate(std::ptrdiff_t bytes)
    {
        constexpr index_t step = 256;
        index_t const at       = used_;
        used_ += (index_t{bytes} + step - 1) / step * step;
        mdkv::expects<mdkv::error>(
            used_ <= memory_.size(), "bisection: Thrust asks for more than ", memory_.size(), " bytes");
        ++lent_;
        return memory_.data() + at;
    }
    void deallocate(char*, std::size_t) noexcept
    {
        if (--lent_ == 0) { used_ = 0; }
    }

private:
    device_array<char> memory_{index_t{16} << 20};
    index_t used_ = 0;
    index_t lent_ = 0;
};

/// What the passes found for tokens of all heads.
struct bisected
{
    double multiplier = 0;
    index_t bytes     = 0;
};

class bisection
{
public:
    static constexpr int passes     = 55;
    static constexpr double highest = 1e6;

    /// Rungs for [H, R, N] losses within `limit` bytes for the tokens alone. Waits for the device in every pass.
    template <std::size_t R>
    bisected solve(choice<R> chosen, index_t count, index_t limit, std::uint8_t* rung)
    {
        thrust::counting_iterator<index_t> const first{0};
        double low = 0.0;
        bisected found{highest, 0};
        for (int pass = 0; pass < passes; ++pass)
        {
            chosen.multiplier   = 0.5 * (low + found.multiplier);
            index_t const bytes = thrust::transform_reduce(thrust::cuda::par(lender_).on(stream()), first,
                first + count, bytes_chosen<R>{chosen}, index_t{0}, thrust::plus<index_t>{});
            if (bytes <= limit) { found = {chosen.multiplier, bytes}; }
            else { low = chosen.multiplier; }
        }
        chosen.multiplier = found.multiplier;
        thrust::transform(thrust::cuda::par(lender_).on(stream()), first, first + count, rung, rung_chosen<R>{chosen});
        return found;
    }

    /// Loss of what was found.
    template <std::size_t R>
    [[nodiscard]] double loss(choice<R> const& chosen, index_t count)
    {
        thrust::counting_iterator<index_t> const first{0};
        return thrust::transform_reduce(thrust::cuda::par(lender_).on(stream()), first, first + count,
            loss_chosen<R>{chosen}, 0.0, thrust::plus<double>{});
    }

private:
    lender lender_;
};

} // namespace bench
