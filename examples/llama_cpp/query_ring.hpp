/// \file query_ring.hpp: the last queries of a layer, by which its tokens are scored
#pragma once

#include <mdkv/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention_node.hpp"
#include "cell_list.hpp"
#include "ggml.h"

namespace mdkv_ggml
{

/// Queries of consecutive places of one sequence, as halves. After a gap the ring keeps only queries behind it.
class query_ring
{
public:
    /// Keeps the last `most` queries from now on, and frees memory that they do not need.
    void limit(index_t most)
    {
        most_ = most;
        forget_before(end_ - most);
        std::vector<mdkv::half> rows;
        rows.reserve(static_cast<std::size_t>(most * width_));
        rows.assign(rows_.begin(), rows_.end());
        rows_ = std::move(rows);
        words_.shrink_to_fit();
    }

    void clear() noexcept
    {
        rows_.clear();
        words_.clear();
        first_ = end_ = 0;
    }

    /// Whether the queries belong to the tokens in the cells.
    [[nodiscard]] bool is_of(attention_node const& node, cell_list const& cells) const noexcept
    {
        for (index_t place = first_; place < end_; ++place)
        {
            if (words_[static_cast<std::size_t>(place - first_)] != node.word(cells[place])) { return false; }
        }
        return true;
    }

    /// Adds the query of token i of a batch, which is at `place` and in `cell`.
    void add(attention_node const& from, index_t i, index_t place, index_t cell)
    {
        if (place != end_)
        {
            rows_.clear();
            words_.clear();
            first_ = end_ = place;
        }
        if (end_ - first_ == most_ + slack) { forget_before(end_ - most_); } // not at every token
        width_          = from.query_heads() * from.dims().keys;
        auto const dim  = static_cast<std::size_t>(from.dims().keys);
        auto const old  = rows_.size();
        auto const& q   = from.q();
        auto const* row = static_cast<std::byte const*>(q.data) + static_cast<std::size_t>(i) * q.nb[1];
        rows_.resize(old + static_cast<std::size_t>(width_));
        for (index_t h = 0; h < from.query_heads(); ++h, row += q.nb[2])
        {
            ggml_fp32_to_fp16_row(reinterpret_cast<float const*>(row),
                reinterpret_cast<ggml_fp16_t*>(rows_.data() + old + static_cast<std::size_t>(h) * dim), q.ne[0]);
        }
        words_.push_back(from.word(cell));
        ++end_;
    }

    /// Drops queries of a sequence that was cut to `places`.
    void cut(index_t places)
    {
        if (places >= end_) { return; }
        if (places <= first_) { return clear(); }
        end_ = places;
        rows_.resize(static_cast<std::size_t>((end_ - first_) * width_));
        words_.resize(static_cast<std::size_t>(end_ - first_));
    }

    /// Number of consecutive queries, at most `most`, that end before `place`.
    [[nodiscard]] index_t count_before(index_t place, index_t most) const noexcept
    {
        return place < first_ || place > end_ ? 0 : std::min(most, place - first_);
    }

    /// [count, Hq, D], the last queries before `place`.
    [[nodiscard]] mdkv::half const* before(index_t place, index_t count) const noexcept
    {
        return rows_.data() + (place - count - first_) * width_;
    }

    [[nodiscard]] index_t bytes() const noexcept
    {
        return static_cast<index_t>(rows_.capacity() * sizeof rows_[0] + words_.capacity() * sizeof words_[0]);
    }

private:
    static constexpr index_t slack = 8; // queries that may be held in excess of most_

    void forget_before(index_t place)
    {
        if (place <= first_) { return; }
        rows_.erase(rows_.begin(), rows_.begin() + (std::min(place, end_) - first_) * width_);
        words_.erase(words_.begin(), words_.begin() + (std::min(place, end_) - first_));
        first_ = std::min(place, end_);
    }

    std::vector<mdkv::half> rows_;     // [end - first, Hq, D]
    std::vector<std::uint64_t> words_; // words of the tokens' cells
    index_t width_ = 0;
    index_t first_ = 0;
    index_t end_   = 0;
    index_t most_  = 64;
};

} // namespace mdkv_ggml
