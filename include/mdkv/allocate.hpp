/// \file allocate.hpp: contract of allocate: a rung for every token, at least total loss within a byte budget (arXiv 2603.20616, sections 4.3, 4.4).
#pragma once

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/check.hpp>

#include <cstddef>
#include <cstdint>

namespace mdkv
{

/// Cost of each rung, in bytes per token and head, and of a head's projections if that rung is its widest projected one
/// in use. Made from a ratio set, or filled in by callers with other rungs.
struct rung_costs
{
    mdkv::array<index_t, max_rungs> bytes{};      ///< strictly ascending
    mdkv::array<bool, max_rungs> projected{};     ///< needs the head's projections
    mdkv::array<index_t, max_rungs> projection{}; ///< bytes of the projections; 0 for a rung that needs none
    std::size_t rungs = 0;

    rung_costs() = default;

    /// \throws invalid_argument   a rung is no whole number of coordinates, or costs no more than the one before it
    constexpr rung_costs(ratio_set const& ratios, head_dims dims, index_t element_bytes)
        : rungs{ratios.size()}
    {
        ratios.expects_fit("key", dims.keys);
        ratios.expects_fit("value", dims.values);
        ratios.expects_ascending(dims, element_bytes);
        for (std::size_t r = 0; r < ratios.size(); ++r)
        {
            bytes[r]      = ratios.bytes(r, dims, element_bytes);
            projected[r]  = ratios[r].projected();
            projection[r] = projection_bytes(ratios, r, dims, element_bytes);
        }
    }

    /// Bytes of the widest projections a head could need.
    [[nodiscard]] MDKV_HD constexpr index_t widest_projection() const noexcept
    {
        index_t most = 0;
        for (std::size_t r = 0; r < size(); ++r) { most = projection[r] > most ? projection[r] : most; }
        return most;
    }

    [[nodiscard]] MDKV_HD constexpr std::size_t size() const noexcept { return rungs; }

    void expects_valid(char const* caller) const
    {
        expects(rungs >= 1 && rungs <= max_rungs, caller, ": costs has ", rungs, " rungs");
        for (std::size_t r = 0; r < rungs; ++r)
        {
            expects(bytes[r] >= 0, caller, ": costs.bytes[", r, "] is ", bytes[r], "; it must not be negative");
            expects(r == 0 || bytes[r] > bytes[r - 1], caller, ": costs.bytes must ascend; [", r, "] = ", bytes[r],
                " does not exceed ", bytes[r == 0 ? 0 : r - 1]);
            expects(projection[r] >= 0 && (projected[r] || projection[r] == 0), caller, ": costs.projection[", r,
                "] is ", projection[r], "; it must be 0 for a rung that is not projected, and never negative");
        }
    }
};

/// Which heads pay for projections.
enum class projection_charge : std::uint8_t
{
    by_use, ///< a head that uses a projected rung, for the widest one it uses; decided with everything else
    always  ///< every head, for the widest projected rung of the set, as the paper words it
};

struct allocate_options
{
    /// Spend the leftover, first on ties, then on upgrades. If false, the dual's own choice is reported: no allocation
    /// of as many bytes loses less, but heads that change their projections may leave much of the limit.
    bool spend_leftover = true;

    projection_charge charge = projection_charge::by_use;
};

/// Where several hold, the first in the order over_limit, non_finite_loss, unprojected_only, optimal.
enum class allocation_status : std::uint8_t
{
    optimal,          ///< the dual optimum, leftover spent
    everything_kept,  ///< compress and recompress left every token as it was, and did not allocate
    unprojected_only, ///< the limit could not hold the projections (`by_use`: not even the narrowest of one head);
                      ///< projected rungs were left out
    non_finite_loss,  ///< a loss was NaN or infinite: such tokens were given the cheapest rung open
                      ///< to their head; the limit still holds
    over_limit        ///< even the cheapest rungs exceed the limit; every token has the cheapest one
};

/// The result of allocate, in absolute units.
struct allocation
{
    allocation_status status = allocation_status::optimal;
    double multiplier        = 0; ///< loss per byte at which the budget binds (lambda*); 0 when it does not
    double loss              = 0; ///< sum of the losses of the chosen rungs
    double dual              = 0; ///< lower bound on the loss of any allocation within the limit (over_limit: the loss)
    index_t limit            = 0; ///< bytes allowed for tokens and projections
    index_t token_bytes      = 0; ///< bytes the chosen rungs take
    index_t charged_bytes    = 0; ///< bytes set aside for projections
    mdkv::array<index_t, max_rungs> tokens{}; ///< tokens at each rung

    /// Upper bound on the distance of the loss from the best one; 0 when the dual is tight.
    [[nodiscard]] constexpr double gap() const noexcept { return loss - dual; }
};

/// Chooses every token's rung: least total loss with token bytes and projections within the limit. Solved by its
/// Lagrangian dual: at a multiplier each token takes the rung of least loss + multiplier * bytes, the cheapest of
/// several, and the smallest multiplier whose choice fits is found. The leftover goes to ties, tokens with an equally
/// good costlier rung at the multiplier, by head and position, until the next does not fit; then, for each pair of
/// rungs, to the one upgrade that saves most, in order of loss saved per byte. Charged by use, a head also chooses the
/// widest projections it may use, and pays for them: the heads' choices at the multiplier, changed head by head as long
/// as that helps, and the same choice for every head are candidates, of which the best is taken. The loss is then never
/// above the better of "every head pays" and "no head pays". With one limit the heads of the layer share it
/// (MixedDimKV); with H limits each head has its own (MixedDimKV-H).
///
/// \param on            backend: threads, scratch
/// \param[in]  loss     [H, R, N]  pooled or not; need not fall with the rung
/// \param[in]  costs    bytes of each rung
/// \param[in]  limits   [1] or [H]  bytes for tokens and projections (the window not included)
/// \param[in]  options  leftover and charge
/// \param[out] rung     [H, N]     index of the chosen rung
/// \param[out] report   [1] or [H], as many as limits
/// \pre    costs ascend; 1 <= R <= 16; fewer than 2^33 tokens
/// \cost   three passes over the losses, and three over the few pieces that may hold the multiplier and its ties,
///         O(R^2) a token; `rung` serves as working memory; scratch 18 KiB a limit, 128 bytes a head, and 16 bytes for
///         2,048 tokens; charged by use: all but the first pass once for each candidate that may be best (at most one
///         more than there are widths, none included), and scratch as many times, 16 KiB a head and width, and a byte a
///         token and width
/// \sync   returns when done (cpu); enqueued on the stream, 13 launches, or 15 where heads choose (gpu)
/// \order  bitwise the same for equal inputs, for any number of threads and on every backend
/// \throws invalid_argument        a shape disagrees, costs do not ascend, a limit is negative (gpu: over_limit)
/// \throws insufficient_workspace  naming the size needed; nothing was changed in either case
/// \see    tests/allocate.cpp, docs/numerics.md; report.status holds errors of the data (NaN losses, a limit below the
///         cheapest rungs), so that the same contract holds on a device
template <backend B>
void allocate(B const& on, in_view<float, 3, B> loss, rung_costs const& costs, in_view<index_t, 1, B> limits,
    allocate_options options, out_view<std::uint8_t, 2, B> rung, out_view<allocation, 1, B> report)
{
    static_assert(
        requires { allocate_impl(on, loss, costs, limits, options, rung, report); },
        MDKV_DETAIL_NO_IMPLEMENTATION(allocate, allocate));
    index_t const heads = loss.extent(0);
    costs.expects_valid("allocate");
    expects(limits.extent(0) == 1 || limits.extent(0) == heads, "allocate: limits has ", limits.extent(0),
        " entries; it must have 1 (shared) or ", heads, " (one a head)");
    detail::check{on, "allocate"}
        .in("loss", loss, {heads, static_cast<index_t>(costs.size()), loss.extent(2)}, "H,R,N")
        .in("limits", limits, {limits.extent(0)}, "1 or H")
        .out("rung", rung, {heads, loss.extent(2)}, "H,N")
        .out("report", report, {limits.extent(0)}, "1 or H");
    allocate_impl(on, loss, costs, limits, options, rung, report);
}

} // namespace mdkv
