/// \file gathered_cells.hpp: keys and values of a sequence's tokens for the stages, gathered only if they are scattered
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/engine/gather.hpp>

#include <cstddef>
#include <vector>

#include "attention_node.hpp"
#include "cell_list.hpp"

namespace mdkv_ggml
{

/// Keys and values for one call that reads them. Refers to its node.
class gathered_cells
{
public:
    /// Takes `tokens` places from `place` on.
    gathered_cells(mdkv::cpu::executor_ref threads, attention_node const& node, cell_list const& cells, index_t place,
        index_t tokens)
        : node_{node}
        , first_{tokens > 0 ? cells[place] : 0}
        , tokens_{tokens}
    {
        if (cells.are_neighbours(place, tokens)) { return; }
        mdkv::workspace none{mdkv::cpu::host_memory{}};
        mdkv::cpu::backend const on{&none, threads};
        auto const table  = mdkv::in(on, cells.first(place + tokens).data() + place, tokens);
        auto const gather = [&](auto const& pages, std::vector<mdkv::half>& to, index_t dim) {
            to.resize(static_cast<std::size_t>(node.heads() * tokens * dim));
            mdkv::gather_pages(on, pages, table, mdkv::out(on, to.data(), node.heads(), tokens, dim));
        };
        gather(node.key_pages(on), keys_, node.dims().keys);
        gather(node.value_pages(on), values_, node.dims().values);
    }

    /// [H, tokens, D]
    template <class B>
    [[nodiscard]] auto keys(B const& on) const
    {
        return keys_.empty() ? node_.keys(on, first_, tokens_)
                             : mdkv::in(on, keys_.data(), node_.heads(), tokens_, node_.dims().keys);
    }
    template <class B>
    [[nodiscard]] auto values(B const& on) const
    {
        return values_.empty() ? node_.values(on, first_, tokens_)
                               : mdkv::in(on, values_.data(), node_.heads(), tokens_, node_.dims().values);
    }

private:
    attention_node const& node_;
    index_t first_;
    index_t tokens_;
    std::vector<mdkv::half> keys_, values_; // empty: neighbouring cells
};

} // namespace mdkv_ggml
