/// \file layer_prompt.hpp: a layer's memory of a prompt until the prompt is compressed
#pragma once

#include <cstdint>
#include <vector>

#include "kept_node.hpp"
#include "query_ring.hpp"
#include "replayed_losses.hpp"

namespace mdkv_ggml
{

struct layer_prompt
{
    query_ring queries{};
    replayed_losses replayed{};
    kept_node node{};                  ///< the last node, if losses are replayed
    std::vector<std::uint8_t> rungs{}; ///< [H, past], chosen by one budget in this step or an earlier one

    void cut(index_t places)
    {
        queries.cut(places);
        replayed.cut(places);
    }
    void clear()
    {
        queries.clear();
        rungs.clear();
        replayed.clear();
    }
};

} // namespace mdkv_ggml
