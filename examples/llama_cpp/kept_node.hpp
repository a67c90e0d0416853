/// \file kept_node.hpp: a copy of a node that outlives its graph, for a layer's cells
#pragma once

#include <cstddef>
#include <vector>

#include "attention_node.hpp"
#include "ggml.h"

namespace mdkv_ggml
{

/// The copy's cells are the engine's own, and hold what the engine has written since.
class kept_node
{
public:
    kept_node()                            = default;
    kept_node(kept_node const&)            = delete;
    kept_node& operator=(kept_node const&) = delete;

    void keep(attention_node const& node)
    {
        node_ = *node.node;
        for (std::size_t i = 1; i <= 2; ++i) // keys and values
        {
            cells_[i]    = *node.node->src[i];
            node_.src[i] = &cells_[i];
        }
        queries_        = node.q();
        queries_.src[0] = nullptr;
        node_.src[0]    = &queries_;
        node_.src[3]    = nullptr;
        if (node.sinks() == nullptr) { return; }
        logits_.assign(node.sinks(), node.sinks() + node.query_heads());
        sinks_       = *node.node->src[4];
        sinks_.data  = logits_.data();
        node_.src[4] = &sinks_;
    }

    [[nodiscard]] bool empty() const noexcept { return node_.src[1] == nullptr; }
    [[nodiscard]] attention_node get() noexcept { return {&node_}; }

private:
    ggml_tensor node_{};
    ggml_tensor queries_{}; ///< only the queries' shape
    ggml_tensor cells_[3]{};
    ggml_tensor sinks_{};
    std::vector<float> logits_; ///< logits of the sinks, copied because they may be the graph's own
};

} // namespace mdkv_ggml
