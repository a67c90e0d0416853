/// \file allocate.hpp: allocate: a rung for every token, at least total loss within a byte budget (arXiv 2603.20616, sections 4.3, 4.4).
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/allocate/solve.hpp>
#include <mdkv/detail/check.hpp>

#include <cstdint>

namespace MDKV_NAMESPACE
{

/// Chooses every token's rung: least total loss with token bytes and projections within the limit, by the Lagrangian dual
/// (docs/method.md). Equal choices are settled by head and position. One limit is shared by the heads of the layer
/// (MixedDimKV), each of H limits is one head's (MixedDimKV-H). If a rung needs channels of keys, their bytes are set aside for
/// every head first. If the limit holds every token uncompressed, skip allocate.
///
/// \param on            backend: threads, scratch
/// \param[in]  loss     [H, R, N]  pooled or not; need not fall with the rung
/// \param[in]  costs    bytes of each rung
/// \param[in]  limits   [1] or [H]  bytes for tokens, projections and channels of keys (the window not included)
/// \param[in]  options  leftover, charge, ranks
/// \param[out] rung     [H, N]     index of the chosen rung
/// \param[out] report   [1] or [H], one for each limit
/// \pre    costs ascend; 1 <= R <= 16; fewer than 2^33 tokens
/// \cost   two to five passes over the losses, O(R^2) a token; scratch 18 KiB a limit, 128 bytes a head, 2.1 KiB for 8,192 tokens
///         of a head. Charged by use one pass more for each width and three for each candidate, 16 KiB a head and width, and a
///         byte a token and width. Over ranks scratch for the heads of all ranks
/// \sync   returns when done (cpu); enqueued on the stream, at most 15 launches (gpu); over ranks a GPU is waited for
/// \order  bitwise the same for equal inputs, for any number of threads and on every backend
/// \throws invalid_argument        a shape disagrees, costs do not ascend, a limit is negative (gpu: over_limit), or
///                                 there are several over ranks
/// \throws insufficient_workspace  naming the size needed; nothing was changed in either case
/// \see    tests/unit/stages/allocate.cpp, docs/numerics.md; report.status holds errors of the data (NaN losses, a limit below
///         the cheapest rungs), so that the same contract holds on a device
template <backend B>
void allocate(B const& on, in_view<float, 3, B> loss, rung_costs const& costs, in_view<index_t, 1, B> limits,
    allocate_options options, out_view<std::uint8_t, 2, B> rung, out_view<allocation, 1, B> report)
{
    index_t const heads = loss.extent(0);
    costs.expects_valid("allocate");
    expects(limits.extent(0) == 1 || limits.extent(0) == heads, "allocate: limits has ", limits.extent(0),
        " entries; it must have 1 (shared) or ", heads, " (one a head)");
    detail::checks{on, "allocate"}
        .in("loss", loss, {heads, static_cast<index_t>(costs.size()), loss.extent(2)}, "H,R,N")
        .in("limits", limits, {limits.extent(0)}, "1 or H")
        .out("rung", rung, {heads, loss.extent(2)}, "H,N")
        .out("report", report, {limits.extent(0)}, "1 or H");
    if constexpr (B::memory_space == space::host)
    {
        for (index_t i = 0; i < limits.extent(0) && !detail::dry_run(on); ++i)
        {
            expects(limits(i) >= 0, "allocate: limits[", i, "] is ", limits(i), "; it must not be negative");
        }
    }
    expects(limits.extent(0) == 1 || options.ranks == nullptr, "allocate: limits has ", limits.extent(0),
        " entries; over ranks it must have 1");
    detail::staged(on, "allocate", [&](B const& with) {
        detail::dual::allocate_stage(with, loss, costs, limits, options, rung, report);
    });
}

/// The same for heads with different numbers of tokens, whose losses follow one another without padding.
///
/// \param on            backend: threads, scratch
/// \param[in]  loss     [R, M]   M tokens, head after head
/// \param[in]  first    [H + 1]  where each head's tokens begin, ascending, and where the last one's end; at most M
/// \param      longest  tokens of the longest head, on all ranks
/// \param[in]  costs    bytes of each rung; the cheapest rung takes none
/// \param[in]  limit    [1]
/// \param[in]  options  leftover and charge
/// \param[out] rung     [M]
/// \param[out] report   [1]
/// \pre    no head has more tokens than `longest`
/// \cost   the same
/// \sync   the same
/// \order  the same; bit for bit the choice for heads that are padded to one length with tokens that lose nothing
/// \throws invalid_argument   a shape disagrees, the cheapest rung takes bytes, or (cpu) heads leave the tokens or `longest`; and
///                            the other errors
/// \see    tests/unit/stages/allocate.cpp
template <backend B>
void allocate(B const& on, in_view<float, 2, B> loss, in_view<index_t, 1, B> first, index_t longest,
    rung_costs const& costs, in_view<index_t, 1, B> limit, allocate_options options, out_view<std::uint8_t, 1, B> rung,
    out_view<allocation, 1, B> report)
{
    costs.expects_valid("allocate");
    index_t const heads  = first.extent(0) - 1;
    index_t const tokens = loss.extent(1);
    expects(heads >= 0, "allocate: first [H + 1] is empty");
    expects(longest >= 0, "allocate: longest is ", longest, "; it must not be negative");
    expects(costs.bytes[0] == 0, "allocate: the cheapest rung takes ", costs.bytes[0],
        " bytes a token; heads with different numbers of tokens need one that takes none");
    detail::checks{on, "allocate"}
        .in("loss", loss, {static_cast<index_t>(costs.size()), tokens}, "R,M")
        .in("first", first, {heads + 1}, "H+1")
        .in("limit", limit, {1}, "1")
        .out("rung", rung, {tokens}, "M")
        .out("report", report, {1}, "1");
    if constexpr (B::memory_space == space::host)
    {
        for (index_t h = 0; h < heads && !detail::dry_run(on); ++h)
        {
            index_t const n = first(h + 1) - first(h);
            expects(first(h) >= 0 && n >= 0 && first(h + 1) <= tokens, "allocate: tokens of head ", h, " are ",
                first(h), " to ", first(h + 1), "; they must be among the ", tokens,
                " and follow those of the head before");
            expects(n <= longest, "allocate: head ", h, " has ", n, " tokens, above longest = ", longest);
        }
    }
    detail::staged(on, "allocate", [&](B const& with) {
        detail::dual::allocate_stage<B>(with,
            {loss.data_handle(), {heads, loss.extent(0), longest}, {0, loss.stride(0), 1}}, costs, limit, options,
            {rung.data_handle(), {heads, longest}, {0, 1}}, report, first.data_handle());
    });
}

} // namespace MDKV_NAMESPACE
