/// \file steps.hpp: what prompt, reader and recompress do alike between two stages (arXiv 2603.20616, section 4).
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/stages/allocate.hpp>

#include <algorithm>
#include <cstddef>

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

/// Chooses rungs within one limit, and waits for the report.
/// \param limit   [1]  scratch
/// \param report  [1]  scratch
/// \param tokens  losses of heads of one length, or losses, first tokens and longest head: see `allocate`
template <backend B, class Rungs, class... Tokens>
[[nodiscard]] allocation allocate_within(B const& on, index_t bytes, out_view<index_t, 1, B> limit,
    out_view<allocation, 1, B> report, rung_costs const& costs, allocate_options options, Rungs rung,
    Tokens const&... tokens)
{
    run(on, fill<index_t>{limit.data_handle(), bytes, 1});
    mdkv::allocate(on, tokens..., costs, as_input(limit), options, rung, report);
    allocation chosen;
    fetch(on, report.data_handle(), &chosen, 1);
    return chosen;
}

/// Adds the report of a further limit.
inline void add(allocation& total, allocation const& further) noexcept
{
    total.status     = (std::max)(total.status, further.status);
    total.multiplier = (std::max)(total.multiplier, further.multiplier);
    total.loss += further.loss;
    total.dual += further.dual;
    total.limit += further.limit;
    total.token_bytes += further.token_bytes;
    total.charged_bytes += further.charged_bytes;
    for (std::size_t r = 0; r < max_rungs; ++r) { total.tokens[r] += further.tokens[r]; }
}

} // namespace MDKV_NAMESPACE::detail
