/// \file allocation.hpp: operands and results of allocate: costs of rungs, options, and the report (arXiv 2603.20616, section 4.3).
#pragma once

#include <mdkv/core/budget.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ranks.hpp>
#include <mdkv/core/ratios.hpp>

namespace MDKV_NAMESPACE
{

/// Cost of each rung, in bytes per token and head, of a head's projections if that rung is its widest projected one
/// in use, and of its channels. Made from a ratio set, or filled in by callers with other rungs.
struct rung_costs
{
    mdkv::array<index_t, max_rungs> bytes{};      ///< strictly ascending
    mdkv::array<index_t, max_rungs> projection{}; ///< bytes of the projections; 0 for a rung that needs none
    mdkv::array<bool, max_rungs> rotated{};       ///< needs the head's channels
    index_t channels  = 0; ///< bytes of a head's channels, set aside for every head; 0 if no rung needs them
    std::size_t rungs = 0;

    rung_costs() = default;

    /// \throws invalid_argument   a dimension is below 1, a rung is no whole number of coordinates, or costs no more than the
    ///                            one before it
    MDKV_OUTLINE constexpr rung_costs(ratio_set const& ratios, head_dims dims, index_t element_bytes)
        : rungs{ratios.size()}
    {
        expects(dims.keys >= 1 && dims.values >= 1, "rung_costs: head dimensions are ", dims.keys, " and ", dims.values,
            "; they must be at least 1");
        ratios.expects_fit("key", dims.keys);
        ratios.expects_fit("value", dims.values);
        ratios.expects_ascending(dims, element_bytes);
        for (std::size_t r = 0; r < ratios.size(); ++r)
        {
            bytes[r]      = ratios.bytes(r, dims, element_bytes);
            projection[r] = projection_bytes(ratios, r, dims, element_bytes);
            rotated[r]    = ratios[r].rotated();
            channels      = rotated[r] ? channel_bytes(dims, element_bytes) : channels;
        }
    }

    /// The least bytes of some heads: all their tokens at the cheapest rung, and what that rung needs beside them.
    [[nodiscard]] MDKV_OUTLINE constexpr index_t least(index_t heads, index_t tokens) const
    {
        index_t const head =
            checked_add(checked_multiply(tokens, bytes[0]), projection[0]) + (rotated[0] ? channels : 0);
        return checked_multiply(heads, head);
    }

    /// Bytes of the widest projections a head could need.
    [[nodiscard]] MDKV_OUTLINE MDKV_HD constexpr index_t widest_projection() const noexcept
    {
        index_t most = 0;
        for (std::size_t r = 0; r < size(); ++r) { most = projection[r] > most ? projection[r] : most; }
        return most;
    }

    [[nodiscard]] MDKV_HD constexpr std::size_t size() const noexcept { return rungs; }

    MDKV_OUTLINE void expects_valid(char const* caller) const
    {
        expects(rungs >= 1 && rungs <= max_rungs, caller, ": costs has ", rungs, " rungs");
        expects(channels >= 0, caller, ": costs.channels is ", channels, "; it must not be negative");
        for (std::size_t r = 0; r < rungs; ++r)
        {
            expects(bytes[r] >= 0, caller, ": costs.bytes[", r, "] is ", bytes[r], "; it must not be negative");
            expects(r == 0 || bytes[r] > bytes[r - 1], caller, ": costs.bytes must ascend; [", r, "] = ", bytes[r],
                " does not exceed ", bytes[r == 0 ? 0 : r - 1]);
            expects(projection[r] >= 0, caller, ": costs.projection[", r, "] is ", projection[r],
                "; it must not be negative");
        }
    }
};

/// Losses of heads' tokens at every rung, and the rungs that they get. Heads have tokens of one number, or lists of tokens that
/// follow one another without padding.
template <space S>
struct list_losses
{
    view<float const, 3, S> loss{};    ///< [H, R, N]  N tokens of the longest head; stride 0 between heads of lists
    view<std::uint8_t, 2, S> rung{};   ///< [H, N]     the same
    view<index_t const, 1, S> first{}; ///< [H + 1]  where heads' lists begin and the last one ends; empty: none
    index_t tokens = 0;                ///< tokens of all lists in `loss`
    index_t rungs  = 0;                ///< tokens of all lists in `rung`

    list_losses() = default;
    /// Losses [H, R, N], pooled or not, which need not fall with the rung; and rungs [H, N].
    constexpr list_losses(view<float const, 3, S> const& loss_, view<std::uint8_t, 2, S> const& rung_) noexcept
        : loss{loss_}
        , rung{rung_}
    {}
    /// Losses [R, M] and rungs [M], head after head, and where each head's tokens begin, ascending, and the last one's end, at
    /// most M. `longest` is the number of tokens of the longest head, on all ranks.
    constexpr list_losses(view<float const, 2, S> const& loss_, view<std::uint8_t, 1, S> const& rung_,
        view<index_t const, 1, S> const& first_, index_t longest) noexcept
        : loss{loss_.data_handle(), {first_.extent(0) - 1, loss_.extent(0), longest}, {0, loss_.stride(0), 1}}
        , rung{rung_.data_handle(), {first_.extent(0) - 1, longest}, {0, 1}}
        , first{first_}
        , tokens{loss_.extent(1)}
        , rungs{rung_.extent(0)}
    {}

    [[nodiscard]] MDKV_HD constexpr index_t heads() const noexcept { return loss.extent(0); }
    [[nodiscard]] MDKV_HD constexpr index_t longest() const noexcept { return loss.extent(2); }
    [[nodiscard]] MDKV_HD constexpr index_t begin(index_t h) const noexcept { return first.empty() ? 0 : first(h); }
    /// Tokens of head h.
    [[nodiscard]] MDKV_HD constexpr index_t count(index_t h) const noexcept
    {
        return first.empty() ? longest() : first(h + 1) - first(h);
    }
    /// Losses of head h at rung r.
    [[nodiscard]] MDKV_HD constexpr float const* losses_at(index_t h, index_t r) const noexcept
    {
        return loss.row(h, r) + begin(h);
    }
    [[nodiscard]] MDKV_HD constexpr std::uint8_t* rungs_of(index_t h) const noexcept { return rung.row(h) + begin(h); }
};

/// Whether heads pay for projections.
enum class projection_charge : std::uint8_t
{
    if_better, ///< all heads, for the widest projected rung, or none, which have no projected rungs then: where less is lost
    always ///< all heads, as the paper words it; none if the limit does not hold the projections
};

struct allocate_options
{
    projection_charge charge = projection_charge::if_better;

    /// Other ranks that have further heads under the same limit. All of them make the call with the same arguments, which is not
    /// checked: `prompt` checks it. Reports are then those of all heads.
    mdkv::ranks const* ranks = nullptr;
    index_t layers           = 1; ///< over ranks: layers of the heads, layer by layer
};

/// The outcome of allocate. If several hold, the first in the order over_limit, non_finite_loss, unprojected_only, optimal.
enum class allocation_status : std::uint8_t
{
    optimal,          ///< the dual optimum, of whose ties as many as fit take the costlier rung
    everything_kept,  ///< compress and recompress left every token as it was, and did not allocate
    unprojected_only, ///< the limit could not hold the projections; projected rungs were left out
    non_finite_loss, ///< a loss was NaN or infinite: such tokens were given the cheapest open rung; the limit still holds
    over_limit       ///< even the cheapest rungs exceed the limit; every token has the cheapest one
};

/// The result of allocate, in absolute units.
struct allocation
{
    allocation_status status = allocation_status::optimal;
    double multiplier        = 0; ///< loss per byte at which the budget binds (lambda*); 0 when it does not
    double loss              = 0; ///< sum of the losses of the chosen rungs
    double dual              = 0; ///< lower bound on the loss if all heads pay, or none; over_limit: the loss
    index_t limit            = 0; ///< bytes allowed for tokens, projections and channels
    index_t token_bytes      = 0; ///< bytes the chosen rungs take
    index_t charged_bytes    = 0; ///< bytes of projections and channels
    mdkv::array<index_t, max_rungs> tokens{}; ///< tokens at each rung

    /// Upper bound on the distance of the loss from the best one; 0 when the dual is tight.
    [[nodiscard]] constexpr double gap() const noexcept { return loss - dual; }
};

} // namespace MDKV_NAMESPACE
