/// \file cell_list.hpp: the cells of one sequence's tokens, in the order of its tokens
#pragma once

#include <mdkv/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace mdkv_ggml
{

using mdkv::index_t;

/// A token's place is its number in the sequence. Neighbouring cells are the common case; they need not be gathered.
class cell_list
{
public:
    [[nodiscard]] index_t size() const noexcept { return std::ssize(cells_); }
    [[nodiscard]] index_t operator[](index_t place) const noexcept { return cells_[static_cast<std::size_t>(place)]; }
    [[nodiscard]] std::span<std::int32_t const> first(index_t count) const noexcept
    {
        return std::span{cells_}.first(static_cast<std::size_t>(count));
    }

    void add(index_t cell)
    {
        if (run_ == size() && (run_ == 0 || cell == (*this)[run_ - 1] + 1)) { ++run_; }
        cells_.push_back(static_cast<std::int32_t>(cell));
    }

    void cut(index_t places)
    {
        if (places >= size()) { return; }
        cells_.resize(static_cast<std::size_t>(places));
        run_ = std::min(run_, places);
    }

    /// Whether `count` places from `place` on lie in neighbouring cells.
    [[nodiscard]] bool are_neighbours(index_t place, index_t count) const noexcept
    {
        if (place + count <= run_) { return true; }
        index_t i = 1;
        while (i < count && (*this)[place + i] == (*this)[place] + i) { ++i; }
        return i >= count;
    }

    /// Number of places from the first on that lie in neighbouring cells.
    [[nodiscard]] index_t run() const noexcept { return run_; }

private:
    std::vector<std::int32_t> cells_;
    index_t run_ = 0;
};

} // namespace mdkv_ggml
