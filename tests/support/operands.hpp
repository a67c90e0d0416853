/// \file operands.hpp: operands of a call, described by name, letters and element, and placed in memory in any way
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>

#include "support/guarded_buffer.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <cctype>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace support
{

using contents = std::vector<std::byte>;

/// Values of the letters that name extents.
using sizes = std::map<std::string, index_t>;

/// Value of an extent: letters and numbers, joined from left to right, as in "H*G", "N+W", "D/2", "3".
[[nodiscard]] inline index_t value_of(std::string const& extent, sizes const& s)
{
    index_t value = 0;
    char joined   = '+';
    for (std::size_t i = 0, end = 0; i < extent.size(); i = end + 1)
    {
        end                    = std::min(extent.find_first_of("*+/", i), extent.size());
        std::string const name = extent.substr(i, end - i);
        index_t const x        = std::isdigit(name[0]) != 0 ? std::stoll(name) : s.at(name);
        value                  = joined == '+' ? value + x : joined == '*' ? value * x : value / x;
        if (end < extent.size()) { joined = extent[end]; }
    }
    return value;
}

/// Value of the element at these indices.
using number = double (*)(source&, std::span<index_t const> at);

/// Every fourth row is so small that its halves, or the scales of its codes, are subnormal.
inline double normal(source& random, std::span<index_t const> at)
{
    return random.normal() * (at.size() == 3 && at[1] % 4 == 3 ? 1e-6 : 1.0);
}
inline double positive(source& random, std::span<index_t const>)
{
    return std::exp(random.normal());
}
inline double below_five(source& random, std::span<index_t const>)
{
    return static_cast<double>(random.below(5));
}
template <int X>
double all(source&, std::span<index_t const>)
{
    return X;
}

/// What a call reads or writes: a tensor, or a part of a cache, whose extents no message names.
struct operand
{
    char const* name;
    std::size_t size;      ///< bytes of an element
    std::size_t alignment; ///< 1: any address
    bool written;
    std::string letters              = {}; ///< as messages have them; empty for a part of a cache
    std::vector<std::string> extents = {}; ///< of which `value_of` has the values
    std::function<void(std::byte* to, source&, std::span<index_t const> at)> fill = {}; ///< sets one element

    /// \param given   letters as in messages, e.g. "H*G,Q,D"; an extent with another value has it after '=': "1 or H=1"
    template <class E>
    [[nodiscard]] static operand of(
        char const* name, std::string const& given, std::size_t alignment, bool written, number value)
    {
        operand x{name, sizeof(E), alignment, written};
        std::istringstream list{given};
        for (std::string one; std::getline(list, one, ',');)
        {
            std::size_t const equals = one.find('=');
            x.letters += (x.letters.empty() ? "" : ",") + one.substr(0, equals);
            x.extents.push_back(one.substr(equals + 1)); // all of it without '='
        }
        x.fill = [value](std::byte* to, source& random, std::span<index_t const> at) {
            [[maybe_unused]] auto const next = value(random, at);
            E element{};
            if constexpr (std::same_as<E, mdkv::half>) { element = mdkv::narrow<E>(static_cast<float>(next)); }
            else if constexpr (std::floating_point<E>) { element = static_cast<E>(next); }
            else if constexpr (std::integral<E>) { element = static_cast<E>(static_cast<index_t>(next)); }
            std::memcpy(to, &element, sizeof element);
        };
        return x;
    }
};

/// Keys, values or queries, which may lie at any address.
[[nodiscard]] inline operand rows(char const* name, char const* letters)
{
    return operand::of<mdkv::half>(name, letters, 1, false, normal);
}
template <class E>
[[nodiscard]] operand in_of(char const* name, char const* letters, number value = normal)
{
    return operand::of<E>(name, letters, alignof(E), false, value);
}
template <class E>
[[nodiscard]] operand out_of(char const* name, char const* letters, number before = normal)
{
    return operand::of<E>(name, letters, alignof(E), true, before);
}
/// A part of a cache that a stage checks: "cache.arena", "cache.heads", "cache.tail" or "cache.appended".
[[nodiscard]] inline operand part(char const* name, bool written = false, std::size_t alignment = 1)
{
    return {name, 1, alignment, written};
}

/// An operand in memory. What is no element is 0xFF: a NaN of every type.
class placed
{
public:
    std::byte* shown;             ///< the pointer that the call gets; a test may set another
    std::vector<index_t> strides; ///< those that the call gets

    placed(operand const& of, std::vector<index_t> const& extents, placement how)
        : extents_{extents}
        , strides_(extents.size())
        , size_{of.size}
    {
        std::vector<std::size_t> order; // from the innermost in memory to the outermost
        for (std::size_t i = extents.size(); i-- > 0;) { order.push_back(i); }
        if (how.swapped && order.size() >= 3) { std::swap(order[order.size() - 1], order[order.size() - 2]); }
        index_t step = 1;
        index_t span = 1;
        for (std::size_t const i : order)
        {
            strides_[i] = step;
            count_ *= extents[i];
            span += (extents[i] - 1) * step;
            step = step * extents[i] + (i == order.front() ? how.slack : 0);
        }
        length_ = count_ == 0 ? 0 : static_cast<std::size_t>(span) * size_;
        if (how.fence)
        {
            fenced_.emplace(length_, *how.fence);
            data_ = fenced_->data();
            std::fill_n(data_, length_, poison);
        }
        else
        {
            room_.resize(length_ + 2 * margin, poison);
            auto const past = reinterpret_cast<std::uintptr_t>(room_.data()) % 64;
            data_ = room_.data() + margin / 2 + (64 - past) + static_cast<std::size_t>(how.misalign) * of.alignment;
        }
        source random{of.name};
        std::vector<index_t> at(extents.size());
        for (index_t flat = 0; flat < count_; ++flat)
        {
            index_t rest = flat;
            for (std::size_t i = extents.size(); i-- > 0; rest /= extents[i]) { at[i] = rest % extents[i]; }
            of.fill(place(flat), random, at);
        }
        shown   = length_ == 0 ? nullptr : data_;
        strides = strides_;
    }

    template <class E, std::size_t Rank>
    [[nodiscard]] mdkv::view<E, Rank, mdkv::space::host> as() const
    {
        mdkv::array<index_t, Rank> shape{}, steps{};
        std::copy_n(extents_.begin(), Rank, &shape[0]);
        std::copy_n(strides.begin(), Rank, &steps[0]);
        return {reinterpret_cast<E*>(shown), shape, steps};
    }

    [[nodiscard]] std::vector<index_t> const& extents() const { return extents_; }
    [[nodiscard]] std::byte* data() const { return data_; }
    [[nodiscard]] std::size_t length() const { return length_; } ///< bytes from the first element to the last one's end

    /// The elements in index order, zeros for what an allocation has between its members.
    [[nodiscard]] contents elements() const
    {
        contents values;
        for (index_t i = 0; i < count_ * static_cast<index_t>(size_); ++i)
        {
            auto const at = static_cast<std::size_t>(i) % size_;
            bool const no = size_ == sizeof(mdkv::allocation) && at > 0 && at < offsetof(mdkv::allocation, multiplier);
            values.push_back(no ? std::byte{0} : place(i / static_cast<index_t>(size_))[at]);
        }
        return values;
    }
    /// Whether all that is no element is as it was.
    [[nodiscard]] bool slack_is_untouched() const
    {
        std::byte* const begin = fenced_ ? data_ : const_cast<std::byte*>(room_.data());
        contents expected(fenced_ ? length_ : room_.size(), poison);
        for (index_t i = 0; i < count_; ++i) { std::copy_n(place(i), size_, expected.data() + (place(i) - begin)); }
        return std::equal(expected.begin(), expected.end(), begin);
    }

private:
    static constexpr std::size_t margin = 1U << 15;
    static constexpr std::byte poison{0xFF};

    [[nodiscard]] std::byte* place(index_t flat) const
    {
        index_t at = 0;
        for (std::size_t i = extents_.size(); i-- > 0; flat /= extents_[i]) { at += flat % extents_[i] * strides_[i]; }
        return data_ + at * static_cast<index_t>(size_);
    }

    std::vector<index_t> extents_, strides_;
    std::size_t size_;
    std::size_t length_ = 0;
    index_t count_      = 1;
    std::byte* data_    = nullptr;
    contents room_;
    std::optional<guarded_buffer> fenced_;
};

} // namespace support
