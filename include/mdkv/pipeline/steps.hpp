/// \file steps.hpp: what prompt, reader and recompress do alike between two stages (arXiv 2603.20616, section 4).
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/stages/allocate.hpp>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace MDKV_NAMESPACE::detail
{

/// Waits for the stream of a GPU's backend.
/// \throws cuda_error   work before it failed
template <backend B>
void wait(B const& on)
{
    fetch(on, static_cast<std::byte const*>(nullptr), static_cast<std::byte*>(nullptr), 0);
}

/// Fills the weights of last queries: `early_weight` before the last `question` ones, 1 for these.
template <backend B>
void fill_query_weights(B const& on, out_view<float, 1, B> weights, float early_weight, index_t question)
{
    index_t const early = (std::max<index_t>)(weights.extent(0) - question, 0);
    run(on, fill<float>{weights.data_handle(), early_weight, early});
    run(on, fill<float>{after(weights.data_handle(), early), 1.0F, weights.extent(0) - early});
}

/// Chooses rungs within limits, and waits for the reports.
template <backend B>
[[nodiscard]] std::vector<allocation> allocate_within(B const& on, in_view<index_t, 1, B> limits,
    rung_costs const& costs, allocate_options options, list_losses<B::memory_space> const& of)
{
    workspace::frame frame{*on.scratch, "allocate"};
    auto const reports = scratch_view<allocation>(on, frame, limits.extent(0));
    static_cast<void>(frame.ready());
    mdkv::allocate(on, of, costs, limits, options, reports);
    std::vector<allocation> found(static_cast<std::size_t>(limits.extent(0)));
    fetch(on, reports.data_handle(), found.data(), limits.extent(0));
    return found;
}

/// The sum of reports.
[[nodiscard]] inline allocation total_of(std::vector<allocation> const& reports) noexcept
{
    allocation total;
    for (allocation const& one : reports)
    {
        total.status     = (std::max)(total.status, one.status);
        total.multiplier = (std::max)(total.multiplier, one.multiplier);
        total.loss += one.loss;
        total.dual += one.dual;
        total.limit += one.limit;
        total.token_bytes += one.token_bytes;
        total.charged_bytes += one.charged_bytes;
        for (std::size_t r = 0; r < max_rungs; ++r) { total.tokens[r] += one.tokens[r]; }
    }
    return total;
}

} // namespace MDKV_NAMESPACE::detail
