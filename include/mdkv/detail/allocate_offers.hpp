/// \file allocate_offers.hpp: which rungs a head may choose from and what it pays for them, and what a limit allows at all (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/threshold.hpp>

#include <cstddef>
#include <cstdint>

#include <cuda/std/array>

namespace mdkv::detail
{

/// Rungs that are open to the tokens of a head, and what a head pays to have them.
struct offer
{
    rung_table rungs;
    ::cuda::std::array<std::uint8_t, max_rungs> place{}; ///< rung of the ratio set -> rung of the table
    index_t charge = 0;                                  ///< bytes of the projections

    MDKV_HD constexpr void allow(std::size_t r, index_t bytes) noexcept
    {
        place[r] = static_cast<std::uint8_t>(rungs.count);
        rungs.add(r, bytes);
    }

    /// Begins anew, with no rung.
    MDKV_HD constexpr void clear(index_t widest, index_t bytes) noexcept
    {
        rungs.count = 0;
        rungs.unit  = widest;
        charge      = bytes;
    }
};

/// The offers a head chooses from, each with all rungs of the one before it and wider projections.
struct menu
{
    ::cuda::std::array<offer, max_rungs> offers{};
    std::size_t count = 0;
    std::size_t rungs = 0;
    ::cuda::std::array<std::uint8_t, max_rungs> order{}; ///< rungs in the order in which the offers bring them
    ::cuda::std::array<bool, max_rungs> opens{};         ///< order[j] is the first that the next offer brings
    ::cuda::std::array<index_t, max_rungs> bytes{};      ///< of a token, in that order

    menu() = default;

    template <std::size_t R>
    explicit menu(rung_costs<R> const& costs)
    {
        arrange(costs);
        for (std::size_t k = 0; k < count; ++k) { make(k, costs); }
    }

    /// Everything but the offers' rungs.
    template <std::size_t R>
    MDKV_HD constexpr void arrange(rung_costs<R> const& costs) noexcept
    {
        rungs = costs.size();
        count = 0;
        for (std::size_t r = 0; r < max_rungs; ++r) { order[r] = static_cast<std::uint8_t>(r); }
        // Insertion: there are few, and equals stay in the order of their bytes.
        for (std::size_t j = 1; j < rungs; ++j)
        {
            for (std::size_t k = j; k > 0 && costs.projection[order[k]] < costs.projection[order[k - 1]]; --k)
            {
                std::uint8_t const later = order[k];
                order[k]                 = order[k - 1];
                order[k - 1]             = later;
            }
        }
        for (std::size_t j = 0; j < rungs; ++j)
        {
            index_t const charge = costs.projection[order[j]];
            opens[j]             = j > 0 && charge != costs.projection[order[j - 1]];
            bytes[j]             = costs.bytes[order[j]];
            if (j == 0 || opens[j]) { offers[count++].clear(costs.bytes[rungs - 1] - costs.bytes[0], charge); }
        }
    }

    /// The rungs of offer k.
    template <std::size_t R>
    MDKV_HD constexpr void make(std::size_t k, rung_costs<R> const& costs) noexcept
    {
        for (std::size_t r = 0; r < rungs; ++r)
        {
            if (costs.projection[r] <= offers[k].charge) { offers[k].allow(r, costs.bytes[r]); }
        }
    }

    /// The least that a head with so many tokens takes under an offer.
    [[nodiscard]] MDKV_HD constexpr index_t least_bytes(std::size_t k, index_t tokens) const noexcept
    {
        return offers[k].charge + tokens * offers[k].rungs.cost[0];
    }

    /// The offer of fewest bytes.
    [[nodiscard]] MDKV_HD constexpr std::size_t cheapest(index_t tokens) const noexcept
    {
        std::size_t least = 0;
        for (std::size_t k = 1; k < count; ++k)
        {
            if (least_bytes(k, tokens) < least_bytes(least, tokens)) { least = k; }
        }
        return least;
    }

    /// The first offer that has a rung of the ratio set.
    [[nodiscard]] MDKV_HD constexpr std::size_t offer_with(std::size_t rung) const noexcept
    {
        std::size_t k = 0;
        for (std::size_t j = 0; j < rungs; ++j)
        {
            k += opens[j] ? 1 : 0;
            if (order[j] == rung) { break; }
        }
        return k;
    }
};

/// What one limit allows before any loss is looked at.
struct terms
{
    allocation_status status = allocation_status::optimal;
    index_t charged          = 0; ///< for projections
    index_t spare            = 0; ///< bytes beyond every token's cheapest rung
    std::size_t everywhere   = 0; ///< the rung of all tokens, unless status asks for the search

    [[nodiscard]] MDKV_HD constexpr bool settled() const noexcept
    {
        return status == allocation_status::everything_kept || status == allocation_status::over_limit;
    }
};

template <std::size_t R>
MDKV_HD constexpr void open_rungs(offer& made, rung_costs<R> const& costs, bool projected_too) noexcept
{
    made.clear(costs.bytes[costs.size() - 1] - costs.bytes[0], 0);
    for (std::size_t r = 0; r < costs.size(); ++r)
    {
        if (projected_too || !costs.projected[r]) { made.allow(r, costs.bytes[r]); }
    }
}

/// Makes the offer that the limit can pay for: all rungs, and every head is charged for the widest projections; or those
/// that need none.
/// \param tokens   of all heads
template <std::size_t R>
[[nodiscard]] MDKV_HD constexpr terms charge_all(
    index_t heads, index_t tokens, offer& made, rung_costs<R> const& costs, index_t limit) noexcept
{
    std::size_t const last = costs.size() - 1;
    index_t const charge   = tokens > 0 ? heads * costs.widest_projection() : 0;
    terms t;
    t.charged = costs.projected[last] ? charge : 0;
    if (tokens * costs.bytes[last] + t.charged <= limit)
    {
        open_rungs(made, costs, true);
        t.status     = allocation_status::everything_kept;
        t.everywhere = last;
        return t;
    }
    t.charged = charge;
    t.spare   = limit - t.charged - tokens * costs.bytes[0];
    if (t.spare >= 0)
    {
        open_rungs(made, costs, true);
        return t;
    }
    bool only_projected = true;
    for (std::size_t r = 0; r <= last; ++r) { only_projected = only_projected && costs.projected[r]; }
    open_rungs(made, costs, only_projected);
    t.charged    = only_projected ? charge : 0;
    t.spare      = limit - t.charged - tokens * made.rungs.cost[0];
    t.everywhere = made.rungs.index[0];
    t.status     = t.spare >= 0 ? allocation_status::unprojected_only : allocation_status::over_limit;
    return t;
}

/// What a limit allows when heads pay for what they use; there are tokens.
/// \param tokens      of a head
/// \param all_alike   all heads pay for projections, or none
template <std::size_t R>
[[nodiscard]] MDKV_HD constexpr terms charge_by_use(index_t heads, index_t tokens, menu const& offered,
    rung_costs<R> const& costs, index_t limit, bool all_alike) noexcept
{
    std::size_t const last = costs.size() - 1;
    terms t;
    auto const settle = [&](allocation_status status, std::size_t rung) {
        t.status     = status;
        t.everywhere = rung;
        t.charged    = heads * costs.projection[rung];
        return t;
    };
    if (heads * (tokens * costs.bytes[last] + costs.projection[last]) <= limit)
    {
        return settle(allocation_status::everything_kept, last);
    }
    std::size_t const cheapest = offered.cheapest(tokens);
    index_t const others       = heads * offered.least_bytes(cheapest, tokens);
    if (others > limit) { return settle(allocation_status::over_limit, offered.offers[cheapest].rungs.index[0]); }
    bool projections = false;
    for (std::size_t k = 0; k < offered.count; ++k)
    {
        index_t const paying = all_alike ? heads : 1;
        index_t const more   = offered.least_bytes(k, tokens) - offered.least_bytes(cheapest, tokens);
        projections          = projections || (offered.offers[k].charge > 0 && others + paying * more <= limit);
    }
    if (!projections)
    {
        t.status = allocation_status::unprojected_only;
        t.spare  = limit - others;
    }
    return t;
}

} // namespace mdkv::detail
