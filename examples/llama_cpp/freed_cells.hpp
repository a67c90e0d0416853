/// \file freed_cells.hpp: which cells of a layer were given back to the system: nothing may be computed from them
#pragma once

#include <mdkv/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention_node.hpp"
#include "cell_list.hpp"

namespace mdkv_ggml
{

class freed_cells
{
public:
    [[nodiscard]] bool any() const noexcept { return count_ > 0; }
    [[nodiscard]] bool holds(index_t cell) const noexcept
    {
        return cell < std::ssize(freed_) && freed_[static_cast<std::size_t>(cell)];
    }

    /// Whether one of a sequence's tokens from place `first` to `end` is in a freed cell.
    [[nodiscard]] bool any_of(cell_list const& cells, index_t first, index_t end) const noexcept
    {
        for (index_t place = first; any() && place < end; ++place)
        {
            if (holds(cells[place])) { return true; }
        }
        return false;
    }

    /// Whether a token of a batch sees a freed cell.
    [[nodiscard]] bool seen_by(attention_node const& node) const noexcept
    {
        for (index_t i = 0; any() && i < node.tokens(); ++i)
        {
            auto const row = node.mask_row(i);
            for (index_t cell = 0; cell < std::ssize(row); ++cell)
            {
                if (holds(cell) && row[static_cast<std::size_t>(cell)] != 0xFC00) { return true; }
            }
        }
        return false;
    }

    /// Notes whether the first tokens' cells hold keys and values.
    void note(cell_list const& cells, index_t tokens, bool are_freed)
    {
        for (std::int32_t const cell : cells.first(tokens))
        {
            freed_.resize(std::max(freed_.size(), static_cast<std::size_t>(cell) + 1), false);
            count_ += int{are_freed} - int{holds(cell)};
            freed_[static_cast<std::size_t>(cell)] = are_freed;
        }
    }
    /// Whether all cells of the first tokens are freed.
    [[nodiscard]] bool all_of(cell_list const& cells, index_t tokens) const noexcept
    {
        auto const first = cells.first(tokens);
        return std::all_of(first.begin(), first.end(), [&](std::int32_t cell) { return holds(cell); });
    }

    /// Notes that a batch's token was written to a cell.
    void written(attention_node const& node, index_t cell)
    {
        if (!holds(cell) || node.is_blank(cell)) { return; }
        freed_[static_cast<std::size_t>(cell)] = false;
        --count_;
    }

    /// From now on the cells before `end` may be given back, because no other sequence needs them.
    void allow(index_t end) noexcept { allowed_ = end; }

    /// Gives back the cells before `end` that may be given back and were not yet. Returns the bytes.
    index_t give_back(attention_node const& node, index_t end, std::uint64_t& next_stamp)
    {
        end           = std::min(end, allowed_);
        index_t begin = 0;
        while (begin < end && holds(begin)) { ++begin; }
        if (begin >= end) { return 0; }
        index_t const bytes = node.give_back(begin, end);
        if (begin == 0) { node.stamp(next_stamp++); }
        freed_.resize(std::max(freed_.size(), static_cast<std::size_t>(end)), false);
        for (index_t cell = begin; cell < end; ++cell)
        {
            count_ += holds(cell) ? 0 : 1;
            freed_[static_cast<std::size_t>(cell)] = true;
        }
        return bytes;
    }

private:
    std::vector<bool> freed_; // by cell
    index_t count_   = 0;
    index_t allowed_ = 0;
};

} // namespace mdkv_ggml
