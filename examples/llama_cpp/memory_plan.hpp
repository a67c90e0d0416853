/// \file memory_plan.hpp: how the bytes that a layer may take are divided among compressed part, tail and remembered queries
#pragma once

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <algorithm>

#include "attention_node.hpp"
#include "settings.hpp"
#include "shared.hpp"

namespace mdkv_ggml
{

inline constexpr index_t most_fold_queries = 8;

/// Number of queries that a tail is folded by: about 16 rows of a KV head, because the compressed part pays for their
/// bytes.
[[nodiscard]] inline index_t fold_queries(attention_node const& node) noexcept
{
    return std::clamp<index_t>(16 * node.heads() / node.query_heads(), 2, most_fold_queries);
}

struct memory_plan
{
    bool whole    = true; ///< everything is kept
    index_t arena = 0;    ///< bytes of the compressed part
    index_t rows  = 0;    ///< rows of the tail; 0: it grows
    index_t keep  = 0;    ///< last tokens of the tail that a fold keeps, so that they can be taken back

    /// Plans for a sequence of `tokens` tokens. A percentage is one of these tokens' cells, or, if prompts are compressed while
    /// they are read, of all the cache's, because a limit that grows would have lowered tokens too early.
    /// \param share   factor of the compressed part's bytes, other than 1 if layers have unequal parts of one budget
    /// \throws mdkv::invalid_argument   the limit does not hold what is beside the compressed part
    memory_plan(attention_node const& node, index_t tokens, double share, shared const& with)
    {
        memory_limit const& limit = with.chosen.limit;
        if (limit.whole()) { return; }
        whole                = false;
        index_t const token  = node.token_bytes();
        index_t const of     = with.chosen.reading ? node.cells() : tokens;
        double const bytes   = limit.in == memory_limit::unit::bytes
                                   ? limit.amount / static_cast<double>(with.layers)
                                   : static_cast<double>(token) * limit.amount
                                       * (limit.in == memory_limit::unit::tokens ? 1 : static_cast<double>(of) / 100);
        auto const all       = static_cast<index_t>(bytes);
        index_t const part   = std::min(tokens / 16, all / token / 4); // few folds, in a quarter of the limit at most
        rows                 = with.chosen.tail >= 0 ? with.chosen.tail : std::clamp<index_t>(part / 16 * 16, 16, 256);
        keep                 = std::min<index_t>(rows / 4, 16);
        index_t const beside = rows * token + node.heads() * index_t{sizeof(mdkv::head_entry)}
                               + index_t{sizeof(index_t)}
                               + fold_queries(node) * (8 + node.query_heads() * node.dims().keys * 2);
        mdkv::expects(all > beside, "a limit of ", all, " bytes a layer does not hold the tail of ", rows,
            " tokens and the rest beside the compressed part; at least ", beside, " are needed for these");
        arena = static_cast<index_t>(static_cast<double>(all - beside) * share);
    }

    [[nodiscard]] mdkv::budget limit() const noexcept
    {
        return whole ? mdkv::budget::fraction(1, 1) : mdkv::budget::bytes(arena);
    }
};

} // namespace mdkv_ggml
