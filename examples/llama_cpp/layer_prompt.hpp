/// \file layer_prompt.hpp: a layer's memory of a prompt until the prompt is compressed
#pragma once

#include <mdkv/core/types.hpp>

#include <memory>

#include "attention_node.hpp"
#include "kept_node.hpp"
#include "query_ring.hpp"
#include "replayed_losses.hpp"
#include "rotary_of_node.hpp"

namespace mdkv_ggml
{

class joint_prompt;
class prompt_reading;

struct layer_prompt
{
    query_ring queries{};
    replayed_losses replayed{};
    kept_node node{};                       ///< the last node
    node_rotation rotation{};               ///< the first tokens' encoding, if the prompt may be compressed while it is read
    std::shared_ptr<joint_prompt> joint{};  ///< holds the rungs, from the compression of the first layer on
    std::shared_ptr<prompt_reading> read{}; ///< holds the tokens while the prompt is read
    index_t place = 0;                      ///< number of the layer in `joint` or `read`

    void cut(index_t places)
    {
        queries.cut(places);
        replayed.cut(places);
    }
    void clear()
    {
        queries.clear();
        joint.reset();
        replayed.clear();
    }
};

} // namespace mdkv_ggml
