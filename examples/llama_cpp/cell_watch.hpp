/// \file cell_watch.hpp: whether the engine's cells still hold the tokens of which a layer's compressed cache was made
#pragma once

#include <mdkv/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "attention_node.hpp"
#include "sequence.hpp"

namespace mdkv_ggml
{

/// Watches the cells of one layer of one sequence.
class cell_watch
{
public:
    /// \param number   the layer's number in the order in which the layers of the sequence are computed
    cell_watch(index_t number, sequence& of)
        : of_{of}
        , number_{number}
    {}

    /// The first `base` tokens are in the compressed part from now on.
    void begin(attention_node const& node, index_t base)
    {
        base_        = base;
        some_        = print(node, few);
        all_         = print(node, base_);
        overwritten_ = of_.overwritten;
        if (of_.watcher < 0) { of_.watcher = number_; } // before other layers look in the same step
    }

    void append(attention_node const& node, index_t place) { tail_.push_back(node.word(of_.cells[place])); }
    void cut_tail(index_t tokens) { tail_.resize(static_cast<std::size_t>(tokens)); }

    /// Ends the watch: there is no compressed cache any more.
    void end() noexcept
    {
        if (of_.watcher == number_) { of_.watcher = -1; }
    }

    /// Whether the cells of the tokens before a batch still hold the tokens that were compressed and appended.
    [[nodiscard]] bool untouched(attention_node const& node, index_t before) noexcept
    {
        if (of_.watcher < 0 || of_.watcher > number_) { of_.watcher = number_; }
        bool const watcher = of_.watcher == number_;
        if (overwritten_ == of_.overwritten && holds(node, before, watcher)) { return true; }
        if (watcher) { ++of_.overwritten; }
        return false;
    }

private:
    static constexpr index_t few = 8;

    [[nodiscard]] bool holds(attention_node const& node, index_t before, bool every) const noexcept
    {
        if (every ? print(node, base_) != all_ : print(node, few) != some_) { return false; }
        auto const there = std::min(std::ssize(tail_), before - base_);
        for (index_t i = every ? 0 : std::max<index_t>(0, there - few); i < there; ++i)
        {
            if (tail_[static_cast<std::size_t>(i)] != node.word(of_.cells[base_ + i])) { return false; }
        }
        return true;
    }

    /// Hash of at most `most` cells of the compressed part, the first and the last among them.
    [[nodiscard]] std::uint64_t print(attention_node const& node, index_t most) const noexcept
    {
        index_t const looks = std::min(base_, most);
        std::uint64_t sum   = 1 + node.word(of_.cells[0]);
        for (index_t i = 0; i < looks; ++i)
        {
            sum = (sum ^ (sum >> 32)) * 0x9E3779B97F4A7C15U ^ node.word(of_.cells[(i + 1) * base_ / looks - 1]);
        }
        return sum;
    }

    std::vector<std::uint64_t> tail_; ///< words of the tail's cells
    sequence& of_;
    index_t number_;
    index_t base_        = 0;
    index_t overwritten_ = 0;
    std::uint64_t some_ = 0, all_ = 0;
};

} // namespace mdkv_ggml
