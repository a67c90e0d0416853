/// \file contract.hpp: the checks every public stage makes on its arguments before it changes anything.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace mdkv::detail
{

/// True when the call only asks for the size of its workspace: views may then have no data.
template <backend B>
[[nodiscard]] constexpr bool dry_run(B const& on)
{
    if constexpr (requires { on.scratch->counting(); })
    {
        expects(on.scratch != nullptr, "backend: it has no workspace; give it one (an empty one only counts)");
        return on.scratch->counting();
    }
    else { return false; }
}

/// One argument under scrutiny: which stage, what it is called, and its view.
template <class V>
struct argument
{
    char const* stage;
    char const* name;
    V const& view;

    static constexpr std::size_t rank = V::rank();
    using value_type                  = typename V::element_type;

    [[nodiscard]] bool empty() const
    {
        for (std::size_t i = 0; i < rank; ++i)
        {
            if (view.extent(i) == 0) { return true; }
        }
        return false;
    }

    /// Extents must be these; letters names them in the message, e.g. "HND".
    argument const& shape(std::array<index_t, rank> const& wanted, char const* letters) const
    {
        for (std::size_t i = 0; i < rank; ++i)
        {
            if (view.extent(i) != wanted[i]) [[unlikely]]
            {
                std::string text = std::string{stage} + ": " + name + " must be [" + letters + "] = [";
                for (std::size_t j = 0; j < rank; ++j) { text += (j == 0 ? "" : ", ") + std::to_string(wanted[j]); }
                text += "], its extent " + std::to_string(i) + " is " + std::to_string(view.extent(i));
                throw invalid_argument{text};
            }
        }
        return *this;
    }

    /// There must be memory behind a view that is not empty.
    argument const& data(bool dry) const
    {
        expects(dry || empty() || view.data_handle() != nullptr, stage, ": ", name, " is null but not empty");
        return *this;
    }

    /// The pointer must suit the scalar type (keys, values and queries may lie anywhere; what else is read or written not).
    argument const& aligned() const
    {
        expects(reinterpret_cast<std::uintptr_t>(view.data_handle()) % alignof(value_type) == 0, stage, ": ", name,
            " is not aligned to ", index_t{alignof(value_type)}, " bytes");
        return *this;
    }

    /// No two indices of an output may share an element.
    argument const& unique() const
    {
        if (empty()) { return *this; }
        std::array<std::size_t, rank> order{};
        for (std::size_t i = 0; i < rank; ++i)
        {
            std::size_t j = i;
            for (; j > 0 && view.mapping().stride(order[j - 1]) > view.mapping().stride(i); --j)
            {
                order[j] = order[j - 1];
            }
            order[j] = i;
        }
        index_t reach = 1;
        for (std::size_t const i : order)
        {
            if (view.extent(i) == 1) { continue; }
            expects(view.mapping().stride(i) >= reach, stage, ": ", name, " overlaps itself: stride ",
                view.mapping().stride(i), " of dimension ", index_t(i), " is below ", reach);
            reach = view.mapping().stride(i) * (view.extent(i) - 1) + reach;
        }
        return *this;
    }

    /// Where its memory lies; begin == end for a view without any.
    struct range
    {
        std::uintptr_t begin;
        std::uintptr_t end;

        [[nodiscard]] bool overlaps(range const& other) const noexcept
        {
            return begin < other.end && other.begin < end;
        }
    };

    [[nodiscard]] range memory() const
    {
        auto const begin = reinterpret_cast<std::uintptr_t>(view.data_handle());
        bool const none  = empty() || view.data_handle() == nullptr;
        auto const bytes =
            none ? 0 : static_cast<std::uintptr_t>(view.mapping().required_span_size()) * sizeof(value_type);
        return {begin, begin + bytes};
    }

    /// An output must not share memory with another argument.
    template <class Other>
    argument const& apart_from(argument<Other> const& other) const
    {
        auto const theirs = other.memory();
        expects(!memory().overlaps({theirs.begin, theirs.end}), stage, ": ", name, " overlaps ", other.name);
        return *this;
    }

    /// No argument may lie in the memory that the call takes its scratch from.
    template <backend B>
    argument const& apart_from_scratch(B const& on) const
    {
        if constexpr (requires { on.scratch->free_memory(); })
        {
            auto const free  = on.scratch->free_memory();
            auto const begin = reinterpret_cast<std::uintptr_t>(free.data());
            expects(!memory().overlaps({begin, begin + free.size()}), stage, ": ", name, " overlaps the workspace");
        }
        return *this;
    }
};

template <class V>
argument(char const*, char const*, V const&) -> argument<V>;

/// Sentence for a backend whose implementation of a function was not included; used in static_asserts.
#define MDKV_DETAIL_NO_IMPLEMENTATION(header, function)                                                                \
    #function ": no implementation for this backend is visible; include <mdkv/cpu/" #header                            \
              ".hpp> (or <mdkv/mdkv.hpp>), or write " #function "_impl in your backend's namespace"

} // namespace mdkv::detail
