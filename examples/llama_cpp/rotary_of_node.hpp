/// \file rotary_of_node.hpp: the rotary position encoding of a node's queries, found in the engine's graph
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/replay/replay.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "attention_node.hpp"
#include "ggml.h"

namespace mdkv_ggml
{

/// How far pairs of coordinates turn with each position. None if the queries are not rotated, or in a way not known here.
struct node_rotation
{
    std::vector<double> frequencies{}; ///< [n/2], for the first n coordinates
    mdkv::rotary_pairs pairs = mdkv::rotary_pairs::halves;

    [[nodiscard]] bool none() const noexcept { return frequencies.empty(); }
    [[nodiscard]] bool operator==(node_rotation const&) const = default;

    template <mdkv::backend B>
    [[nodiscard]] mdkv::rotary_encoding<B> encoding(B const& on) const
    {
        mdkv::rotary_encoding<B> made{.rotating = 2 * std::ssize(frequencies), .pairs = pairs};
        if (!none()) { made.frequencies = mdkv::in(on, frequencies.data(), std::ssize(frequencies)); }
        return made;
    }
};

namespace detail
{

/// A float among the parameters of a node of ggml.
inline float float_parameter(ggml_tensor const& node, std::size_t i) noexcept
{
    float value = 0;
    std::memcpy(&value, node.op_params + i, sizeof value);
    return value;
}

/// The frequencies of ggml's ROPE: powers of a base, divided by a model's factors, and stretched for longer contexts (only
/// some of them if the model uses YaRN).
inline std::vector<double> frequencies_of(ggml_tensor const& rope)
{
    int const rotating       = rope.op_params[1];
    float const base         = float_parameter(rope, 5);
    double const stretch     = double{float_parameter(rope, 6)};
    float const extrapolated = float_parameter(rope, 7);
    auto const* factors      = rope.src[2] == nullptr ? nullptr : static_cast<float const*>(rope.src[2]->data);
    float bounds[2];
    ggml_rope_yarn_corr_dims(
        rotating, rope.op_params[4], base, float_parameter(rope, 9), float_parameter(rope, 10), bounds);
    std::vector<double> all;
    for (int i = 0; i < rotating / 2; ++i)
    {
        double const plain =
            std::pow(double{base}, -2.0 * i / rotating) / (factors == nullptr ? 1.0 : double{factors[i]});
        double const past = (i - double{bounds[0]}) / std::max(0.001, double{bounds[1]} - double{bounds[0]});
        double const own  = double{extrapolated} * (1 - std::clamp(past, 0.0, 1.0));
        all.push_back(plain * (stretch * (1 - own) + own));
    }
    return all;
}

} // namespace detail

/// Looks back from the queries to the node that rotated them.
inline node_rotation rotation_of(attention_node const& node)
{
    ggml_tensor const* from = node.node->src[0];
    while (from != nullptr && from->op != GGML_OP_ROPE)
    {
        bool const moves = from->op == GGML_OP_VIEW || from->op == GGML_OP_RESHAPE || from->op == GGML_OP_PERMUTE
                           || from->op == GGML_OP_CONT || from->op == GGML_OP_SCALE;
        from = moves ? from->src[0] : nullptr;
    }
    if (from == nullptr || from->op_params[15] != 0) { return {}; } // it rotates other coordinates than the first ones
    switch (from->op_params[2])
    {
        case GGML_ROPE_TYPE_NORMAL:
            return {detail::frequencies_of(*from), mdkv::rotary_pairs::neighbours};
        case GGML_ROPE_TYPE_NEOX:
        case GGML_ROPE_TYPE_MROPE: // a text's positions are the same in all of its sections
        case GGML_ROPE_TYPE_IMROPE:
            return {detail::frequencies_of(*from), mdkv::rotary_pairs::halves};
        default:
            return {};
    }
}

} // namespace mdkv_ggml
