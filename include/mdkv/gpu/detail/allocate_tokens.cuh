/// \file allocate_tokens.cuh: how one thread of allocate reads a token's losses, and what follows from them (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/threshold.hpp>
#include <mdkv/gpu/detail/allocate_state.cuh>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda/std/bit>

namespace mdkv::gpu::dual
{

using mdkv::detail::best_upgrade;
using mdkv::detail::scalar_operations;
using mdkv::detail::token_thresholds;
using mdkv::detail::upgrade_choice;

[[nodiscard]] MDKV_HD inline bool is_finite(float x)
{
    return x - x == 0.0F;
}

/// Floats that are not negative are ordered as their bits are.
[[nodiscard]] MDKV_HD inline std::uint32_t order_of(float threshold)
{
    return ::cuda::std::bit_cast<std::uint32_t>(threshold);
}
[[nodiscard]] MDKV_HD inline float float_of(std::uint32_t order)
{
    return ::cuda::std::bit_cast<float>(order);
}

/// Calls body with the number of rungs as a constant where it is a usual one, so that losses stay in registers.
template <class Body>
__device__ void with_rungs(std::size_t count, Body const& body)
{
    if (count == 4) { body(std::integral_constant<std::size_t, 4>{}); }
    else if (count == 2) { body(std::integral_constant<std::size_t, 2>{}); }
    else if (count == 3) { body(std::integral_constant<std::size_t, 3>{}); }
    else { body(std::integral_constant<std::size_t, run_time>{}); }
}

/// One head's losses of the rungs of a table; with a constant number of rungs the rows' addresses stay in registers.
template <std::size_t Count>
class loss_rows
{
public:
    /// \param head        counted as the losses' heads are
    /// \param ask_closed  rungs that are not open must be finite as well
    __device__ loss_rows(work const& w, rung_table const& rungs, index_t head, bool ask_closed)
        : rungs_{rungs}
        , first_{w.loss.data_handle() + head * w.loss.mapping().stride(0)}
        , stride_{w.loss.mapping().stride(1)}
        , asked_{ask_closed ? w.loss.extent(1) : 0}
    {
        if constexpr (Count != run_time)
        {
            for (std::size_t r = 0; r < Count; ++r) { row_[r] = first_ + index_t{rungs.index[r]} * stride_; }
        }
    }

    [[nodiscard]] __device__ std::size_t count() const { return Count == run_time ? rungs_.count : Count; }
    [[nodiscard]] __device__ float at(std::size_t r, index_t token) const
    {
        if constexpr (Count != run_time) { return row_[r][token]; }
        else { return first_[index_t{rungs_.index[r]} * stride_ + token]; }
    }
    [[nodiscard]] __device__ bool others_finite(index_t token) const
    {
        bool finite = true;
        for (index_t r = 0; r < asked_; ++r) { finite = finite && is_finite(first_[r * stride_ + token]); }
        return finite;
    }

private:
    rung_table const& rungs_;
    float const* first_;
    index_t stride_;
    index_t asked_; ///< rungs of the ratio set
    float const* row_[Count == run_time ? 1 : Count];
};

/// The losses of one token, by rung of the table.
template <std::size_t Count>
struct token
{
    static constexpr std::size_t capacity = Count == run_time ? max_rungs : Count;

    float loss[capacity];
    bool finite = true; ///< else all are zero: such a token has nothing to gain

    __device__ token(loss_rows<Count> const& rows, index_t at)
    {
        for (std::size_t r = 0; r < rows.count(); ++r)
        {
            loss[r] = rows.at(r, at);
            finite  = finite && is_finite(loss[r]);
        }
        finite = finite && rows.others_finite(at);
        if (finite) { return; }
        for (std::size_t r = 0; r < rows.count(); ++r) { loss[r] = 0.0F; }
    }
};

template <std::size_t Count>
struct thresholds_of : token_thresholds<scalar_operations, Count>
{
    __device__ thresholds_of(rung_table const& rungs, float const* loss)
    {
        this->first(rungs, loss);
        this->others(rungs, loss);
    }
};

/// What a token ends at, and pays, when it makes every upgrade that saves at least the multiplier per byte.
struct plateau_walk
{
    std::size_t rung;
    index_t bytes;
};

[[nodiscard]] __device__ inline plateau_walk walk_plateau(
    rung_table const& rungs, float const* loss, std::size_t from, float cap)
{
    std::size_t rung = from;
    for (upgrade_choice u = best_upgrade(rungs, loss, rung, rungs.unit, cap); u.key >= cap;
         u                = best_upgrade(rungs, loss, rung, rungs.unit, cap))
    {
        rung = u.target;
    }
    return {rung, rungs.cost[rung] - rungs.cost[from]};
}

} // namespace mdkv::gpu::dual
