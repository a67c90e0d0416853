/// \file check.hpp: the steps of every public stage before its work: checks of its arguments.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>

#include <limits>

namespace MDKV_NAMESPACE::detail
{

/// Checks an option that is a real number; `stage` and `option` are names for the message.
/// \throws invalid_argument   it is negative, infinite or NaN
MDKV_OUTLINE constexpr void expects_not_negative(char const* stage, char const* option, float x)
{
    expects(x >= 0.0F && x <= (std::numeric_limits<float>::max)(), stage, ": ", option, " is ", x,
        "; it must be finite and not negative");
}

MDKV_OUTLINE constexpr void expects_width(char const* option, index_t width)
{
    expects(width >= 1 && width % 2 == 1, option, " is ", width, "; it must be odd and at least 1");
}

/// The checks of all arguments of one call. Each is checked as it is named: its extents, that there is memory behind it, its
/// alignment, and that no output shares memory with any other argument.
class checks
{
public:
    template <backend B>
    checks(B const& on, char const* stage)
        : stage_{stage}
        , host_{B::memory_space == space::host}
    {
        if constexpr (requires { on.scratch; }) { expects(on.scratch != nullptr, "backend: it has no workspace"); }
    }

    /// An input of numbers, aligned as its type is. `letters` names the extents in messages, e.g. "H,R,N".
    template <class T, std::size_t Rank, space S>
    checks& in(char const* name, view<T, Rank, S> const& given, array<index_t, Rank> const& wanted, char const* letters)
    {
        return strided(of(name, given, wanted, letters), alignof(T), false);
    }

    /// An input that may be missing, in a std::optional.
    template <template <class> class Optional, class T, std::size_t Rank, space S>
    checks& in(char const* name, Optional<view<T, Rank, S>> const& given, array<index_t, Rank> const& wanted,
        char const* letters)
    {
        return given ? in(name, *given, wanted, letters) : *this;
    }

    /// Numbers of n queries of each of `heads` query heads, or one for all queries of a head, which may be missing.
    template <class Optional>
    checks& of_queries(char const* name, Optional const& given, index_t heads, index_t n, char const* letters)
    {
        return given ? in(name, *given, {heads, given->extent(1) == 1 ? 1 : n}, letters) : *this;
    }

    /// Keys, values or queries, which may lie at any address of the host.
    template <class T, std::size_t Rank, space S>
    checks& rows(
        char const* name, view<T, Rank, S> const& given, array<index_t, Rank> const& wanted, char const* letters)
    {
        return strided(of(name, given, wanted, letters), host_ ? 1 : alignof(T), false);
    }

    template <class T, std::size_t Rank, space S>
    checks& out(
        char const* name, view<T, Rank, S> const& given, array<index_t, Rank> const& wanted, char const* letters)
    {
        return strided(of(name, given, wanted, letters), alignof(T), true);
    }

    /// Memory that is no view of its own: a cache's arena, tail or directory.
    MDKV_OUTLINE checks& bytes(char const* name, void const* data, index_t size, bool output)
    {
        expects(size == 0 || data != nullptr, stage_, ": ", name, " is null but not empty");
        range const one{data, data == nullptr ? 0 : size, name, output};
        for (std::size_t i = 0; i < count_; ++i)
        {
            bool const shared = (output || seen_[i].output) && one.overlaps(seen_[i]);
            expects(!shared, stage_, ": ", name, " overlaps ", seen_[i].name);
        }
        expects(count_ < seen_.size(), stage_, ": too many arguments to check");
        seen_[count_++] = one;
        return *this;
    }

private:
    struct range
    {
        void const* begin;
        index_t size;
        char const* name;
        bool output;

        [[nodiscard]] bool overlaps(range const& other) const noexcept
        {
            auto const from = reinterpret_cast<std::uintptr_t>(begin);
            auto const at   = reinterpret_cast<std::uintptr_t>(other.begin);
            return from < at + static_cast<std::uintptr_t>(other.size) && at < from + static_cast<std::uintptr_t>(size)
                   && size > 0 && other.size > 0;
        }
    };

    /// A view without its type, so that the checks are compiled once.
    struct tensor
    {
        char const* name;
        char const* letters;
        std::size_t rank;
        index_t const* extents;
        index_t const* strides;
        index_t const* wanted;
        void const* data;
        index_t element_bytes;
    };

    template <class T, std::size_t Rank, space S>
    [[nodiscard]] static tensor of(
        char const* name, view<T, Rank, S> const& given, array<index_t, Rank> const& wanted, char const* letters)
    {
        return {name, letters, Rank, given.extents().data(), given.strides().data(), wanted.data(), given.data_handle(),
            index_t{sizeof(T)}};
    }

    MDKV_OUTLINE checks& strided(tensor const& x, std::uintptr_t alignment, bool output)
    {
        bool empty = false;
        for (std::size_t i = 0; i < x.rank; ++i)
        {
            if (x.extents[i] != x.wanted[i]) [[unlikely]] { wrong_shape(x, i); }
            empty = empty || x.extents[i] == 0;
        }
        index_t span = 1;
        for (std::size_t i = 0; !empty && i < x.rank; ++i) { span += (x.extents[i] - 1) * x.strides[i]; }
        if (output && !empty) { expects_unique(x); }
        bytes(x.name, x.data, empty ? 0 : span * x.element_bytes, output);
        expects(reinterpret_cast<std::uintptr_t>(x.data) % alignment == 0, stage_, ": ", x.name, " is not aligned to ",
            alignment, " bytes");
        return *this;
    }

    [[gnu::cold, gnu::noinline]] void wrong_shape(tensor const& x, std::size_t i) const
    {
        message sizes;
        for (std::size_t j = 0; j < x.rank; ++j)
        {
            sizes.add(j == 0 ? "" : ", ");
            sizes.add_number(x.wanted[j]);
        }
        expects(false, stage_, ": ", x.name, " must be [", x.letters, "] = [", sizes.text, "], its extent ", i, " is ",
            x.extents[i]);
    }

    /// No two indices of an output may share an element: each stride is beyond all that the smaller ones reach.
    void expects_unique(tensor const& x) const
    {
        for (std::size_t i = 0; i < x.rank; ++i)
        {
            index_t reach = 1;
            for (std::size_t j = 0; j < x.rank; ++j)
            {
                bool const smaller = x.strides[j] < x.strides[i] || (x.strides[j] == x.strides[i] && j < i);
                reach += smaller ? x.strides[j] * (x.extents[j] - 1) : 0;
            }
            expects(x.extents[i] == 1 || x.strides[i] >= reach, stage_, ": ", x.name, " overlaps itself: stride ",
                x.strides[i], " of dimension ", i, " is below ", reach);
        }
    }

    char const* stage_;
    bool host_;
    array<range, 16> seen_; // [count_]
    std::size_t count_ = 0;
};

/// Scratch memory as a view: `scratch_view<float>(on, frame, heads, tokens)`.
template <class V, backend B, class... Extents>
[[nodiscard]] auto scratch_view(B const& on, workspace::frame& frame, Extents... extents)
{
    index_t count = 1;
    ((count = checked_multiply(count, extents)), ...);
    return out(on, frame.template take<V>(count), extents...);
}

/// Sentence for a backend whose implementation of a function was not included; used in static_asserts.
#define MDKV_DETAIL_NO_IMPLEMENTATION(header, function)                                                                \
    #function ": no implementation for this backend is visible; include <mdkv/cpu/" #header                            \
              ".hpp> (or <mdkv/mdkv.hpp>), or write " #function "_impl in your backend's namespace"

} // namespace MDKV_NAMESPACE::detail
