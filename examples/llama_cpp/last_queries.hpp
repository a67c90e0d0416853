/// \file last_queries.hpp: a prompt's last queries as the stages are given them, when its tokens are scored
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/stages/score.hpp>

#include <optional>
#include <utility>
#include <vector>

#include "attention_node.hpp"
#include "query_ring.hpp"

namespace mdkv_ggml
{

/// [Hq, count]  the sinks' logits, repeated for `count` queries; or none
[[nodiscard]] inline std::vector<float> sink_logits(attention_node const& node, index_t count)
{
    std::vector<float> all;
    for (index_t i = 0; node.sinks() != nullptr && i < node.query_heads() * count; ++i)
    {
        all.push_back(node.sinks()[i / count]);
    }
    return all;
}

/// The last queries with their weights, sinks and other options for `score`. Refers to its arguments.
class last_queries
{
public:
    last_queries(
        attention_node const& node, query_ring const& queries, index_t end, index_t most, mdkv::preset const& preset)
        : node_{node}
        , queries_{queries}
        , preset_{preset}
        , end_{end}
        , count_{queries.count_before(end, most)}
    {
        for (index_t q = 0; q < count_; ++q) { weights_.push_back(preset_.query_weight(q, count_)); }
        sinks_ = sink_logits(node, count_);
    }

    [[nodiscard]] index_t count() const noexcept { return count_; }

    /// [Hq, count, D]
    template <class B>
    [[nodiscard]] auto queries(B const& on) const
    {
        auto const [H, D] = std::pair{node_.query_heads(), node_.dims().keys};
        return mdkv::in(on, queries_.before(end_, count_), {H, count_, D}, {D, H * D, 1});
    }
    template <class B>
    [[nodiscard]] mdkv::score_options<B> options(B const& on) const
    {
        return {.scale     = node_.scale(),
            .lse_elsewhere = sinks(on),
            .query_weights = mdkv::in(on, weights_.data(), count_),
            .even_queries  = preset_.even_queries(count_)};
    }
    /// The sinks' logits as log-sum-exps of keys elsewhere, if there are sinks.
    template <class B>
    [[nodiscard]] std::optional<mdkv::in_view<float, 2, B>> sinks(B const& on) const
    {
        if (sinks_.empty()) { return std::nullopt; }
        return mdkv::in(on, sinks_.data(), node_.query_heads(), count_);
    }

private:
    attention_node const& node_;
    query_ring const& queries_;
    mdkv::preset const& preset_;
    index_t end_;
    index_t count_;
    std::vector<float> weights_; // [count]
    std::vector<float> sinks_;   // [Hq, count], or none
};

} // namespace mdkv_ggml
