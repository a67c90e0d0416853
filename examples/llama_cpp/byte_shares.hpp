/// \file byte_shares.hpp: caches' bytes beside the engine's cells of the same tokens, over all and over served layers
#pragma once

#include <mdkv/core/types.hpp>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "attention_node.hpp"
#include "ggml.h"

namespace mdkv_ggml
{

/// Bytes, summed over the tokens that were served.
struct byte_share
{
    double held  = 0; ///< bytes of compressed caches, and of the cells of layers that pass through
    double cells = 0; ///< bytes of the engine's cells

    [[nodiscard]] double percent() const noexcept { return cells > 0 ? 100 * held / cells : 0; }
};

/// A token that any layer serves counts in every layer that has a cache. A layer that passes the token through holds the
/// cells of its sequence in full, at most its cache's (a sliding window's cache has fewer). Cells that several layers read
/// count once.
class byte_shares
{
public:
    /// Begins a node, before any part of it is served.
    void begin(attention_node const& node)
    {
        int place          = -1; // place in the graph of a node without its own name
        bool const unnamed = std::sscanf(node.node->name, "node_%d", &place) == 1;
        index_t const rows = node.tokens() * node.streams();
        if (rows != rows_ || (unnamed ? place <= last_place_ : names_.contains(node.node->name))) { end_graph(); }
        rows_ = rows;
        if (unnamed) { last_place_ = place; }
        else { names_.emplace(node.node->name); }
        ggml_tensor const& keys = attention_node::whole(node.k());
        if (std::strncmp(keys.name, "cache_k_l", 9) != 0) { return; }
        ggml_tensor const& values = attention_node::whole(node.v());
        layers_.try_emplace(keys.data, false);
        cache& one      = graph_[keys.data];
        one.cells       = keys.ne[1];
        one.token_bytes = static_cast<index_t>(keys.nb[1] + (&values == &keys ? 0 : values.nb[1]));
    }

    /// Counts tokens of a node's batch that were served.
    /// \param first    first of the batch's tokens in the stream
    /// \param tokens   number of tokens of their sequence
    /// \param bytes    bytes that the layer holds of the sequence
    void serve(attention_node const& node, index_t stream, index_t first, index_t count, index_t tokens, index_t bytes)
    {
        void const* const keys = attention_node::whole(node.k()).data;
        layers_[keys]          = true;
        for (index_t i = first; i < first + count; ++i)
        {
            served_[{stream, i}] = tokens;
            graph_[keys].held[{stream, i}] += bytes;
        }
    }

    /// Adds up a graph after all of its nodes have come.
    void end_graph()
    {
        for (auto const& [place, tokens] : served_)
        {
            for (auto const& [keys, one] : graph_)
            {
                auto const full  = static_cast<double>(one.token_bytes * std::min(tokens, one.cells));
                auto const found = one.held.find(place);
                bool const here  = found != one.held.end();
                double const now = here ? static_cast<double>(found->second) : full;
                all_.held += now;
                all_.cells += full;
                of_served_.held += here ? now : 0;
                of_served_.cells += here ? full : 0;
            }
        }
        served_.clear();
        graph_.clear();
        names_.clear();
        last_place_ = -1;
    }

    [[nodiscard]] byte_share all() const noexcept { return all_; }
    [[nodiscard]] byte_share of_served() const noexcept { return of_served_; }
    [[nodiscard]] index_t caches() const noexcept { return std::ssize(layers_); }
    [[nodiscard]] index_t served_caches() const noexcept
    {
        return std::count_if(layers_.begin(), layers_.end(), [](auto const& one) { return one.second; });
    }

private:
    using row = std::pair<index_t, index_t>; // stream, token of the batch
    struct cache
    {
        index_t cells       = 0; ///< cells of a stream
        index_t token_bytes = 0;
        std::map<row, index_t> held{}; ///< bytes held instead of its cells, by served row
    };

    std::map<void const*, cache> graph_; // by keys, in the current graph
    std::map<row, index_t> served_;      // tokens of the row's sequence
    std::set<std::string> names_;        // names of the graph's nodes
    std::map<void const*, bool> layers_; // by keys, in all graphs: whether any was served
    byte_share all_, of_served_;
    index_t rows_   = 0;
    int last_place_ = -1;
};

} // namespace mdkv_ggml
