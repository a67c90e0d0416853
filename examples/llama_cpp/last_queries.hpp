/// \file last_queries.hpp: a prompt's last queries as the stages are given them, when its tokens are scored
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/prompt.hpp>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "attention_node.hpp"
#include "gathered_cells.hpp"
#include "ggml.h"
#include "query_ring.hpp"

namespace mdkv_ggml
{

/// The last queries before a place. Refers to its node.
class last_queries
{
public:
    last_queries(attention_node const& node, query_ring const& queries, index_t end, index_t most)
        : node_{node}
        , count_{queries.count_before(end, most)}
        , rows_(static_cast<std::size_t>(count_ * node.query_heads() * node.dims().keys))
    {
        ggml_fp16_to_fp32_row(
            reinterpret_cast<ggml_fp16_t const*>(queries.before(end, count_)), rows_.data(), std::ssize(rows_));
    }

    [[nodiscard]] index_t count() const noexcept { return count_; }

    /// [Hq, count, D]
    template <class B>
    [[nodiscard]] auto queries(B const& on) const
    {
        auto const [H, D] = std::pair{node_.query_heads(), node_.dims().keys};
        return mdkv::in(on, rows_.data(), {H, count_, D}, {D, H * D, 1});
    }
    /// The rows of a layer with these keys and values.
    template <class B>
    [[nodiscard]] mdkv::prompt_rows<B, mdkv::half, float> rows(B const& on, gathered_cells const& cells) const
    {
        return {.queries       = queries(on),
            .keys          = cells.keys(on),
            .values        = cells.values(on),
            .lse_elsewhere = node_.sink_logits(on)};
    }

private:
    attention_node const& node_;
    index_t count_;
    std::vector<float> rows_; // [count, Hq, D]
};

} // namespace mdkv_ggml
