/// \file known_mask.hpp: a copy of a node's mask with the parts that were found in it, so that the layers of a graph are cut once
#pragma once

#include <mdkv/core/types.hpp>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "attention_node.hpp"
#include "sequence.hpp"

namespace mdkv_ggml
{

/// A copy takes the mask's memory again: tokens of a batch x cells x 2 bytes.
class known_mask
{
public:
    known_mask() = default;
    known_mask(attention_node const& node, std::vector<batch_part> found)
        : parts{std::move(found)}
        , width_{node.mask().ne[0]}
        , rows_{node.tokens()}
    {
        for (index_t i = 0; i < rows_; ++i)
        {
            auto const row = node.mask_row(i);
            mask_.insert(mask_.end(), row.begin(), row.end());
        }
    }

    [[nodiscard]] bool is_of(attention_node const& node) const noexcept
    {
        if (node.tokens() != rows_ || node.mask().ne[0] != width_) { return false; }
        for (index_t i = 0; i < rows_; ++i)
        {
            if (std::memcmp(mask_.data() + i * width_, node.mask_row(i).data(), node.mask_row(i).size_bytes()) != 0)
            {
                return false;
            }
        }
        return true;
    }

    std::vector<batch_part> parts;

private:
    std::vector<std::uint16_t> mask_;
    index_t width_ = -1;
    index_t rows_  = -1;
};

} // namespace mdkv_ggml
