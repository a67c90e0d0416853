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

/// Whether some of the tokens before a batch have a blank cell, or most of them values of zero: their keys may have been shifted
/// since a state was loaded.
[[nodiscard]] inline bool some_blank(attention_node const& node, cell_list const& cells, index_t before) noexcept
{
    index_t const looks = std::min<index_t>(before, 8);
    index_t zeros       = 0;
    for (index_t i = 0; i < looks; ++i)
    {
        for (index_t const place : {i * before / looks, (i + 1) * before / looks - 1})
        {
            if (node.is_blank(cells[place])) { return true; }
            auto const row = node.value_row(cells[place]);
            zeros += std::all_of(row.begin(), row.end(), [](std::byte x) { return x == std::byte{0}; }) ? 1 : 0;
        }
    }
    return looks > 0 && zeros > looks;
}

/// Whether a token of a batch sees a blank cell, as those of a state are that was saved after they had been given back.
[[nodiscard]] inline bool sees_blank(attention_node const& node) noexcept
{
    for (index_t i = 0; i < node.tokens(); ++i)
    {
        auto const row = node.mask_row(i);
        for (index_t cell = 0; cell < std::ssize(row); ++cell)
        {
            if (row[static_cast<std::size_t>(cell)] != 0xFC00 && node.is_blank(cell)) { return true; }
        }
    }
    return false;
}

} // namespace mdkv_ggml
