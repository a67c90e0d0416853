/// \file view.hpp: the non-owning tensors every stage reads and writes: shape, strides and memory space, and how to make one.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <type_traits>
#include <utility>

#include <cuda/std/array>
#include <cuda/std/mdspan>

namespace mdkv
{

/// Where memory lives. Part of every view's type, so that a host view cannot be handed to a device backend.
enum class space
{
    host,
    device
};

/// The one memory layout of the library: elements of the last dimension are neighbours, every other stride is free.
/// Holds [H, N, D], [N, H, D] seen as [H, N, D], a slice of a larger buffer, or one head broadcast with stride 0.
struct layout_rows
{
    template <class Extents>
    class mapping
    {
    public:
        using extents_type = Extents;
        using index_type   = typename Extents::index_type;
        using size_type    = typename Extents::size_type;
        using rank_type    = typename Extents::rank_type;
        using layout_type  = layout_rows;

        static constexpr rank_type rank = Extents::rank();

        mapping() noexcept = default;

        /// Contiguous rows.
        MDKV_HD constexpr explicit mapping(Extents const& extents) noexcept
            : extents_{extents}
        {
            index_type step = 1;
            for (rank_type i = rank; i-- > 0;)
            {
                strides_[i] = step;
                step *= extents.extent(i);
            }
        }

        /// Free strides, in elements; the last one must be 1 (checked where the view is made).
        MDKV_HD constexpr mapping(Extents const& extents, ::cuda::std::array<index_type, rank> const& strides) noexcept
            : extents_{extents}
            , strides_{strides}
        {}

        [[nodiscard]] MDKV_HD constexpr Extents const& extents() const noexcept { return extents_; }
        [[nodiscard]] MDKV_HD constexpr index_type stride(rank_type r) const noexcept { return strides_[r]; }

        template <class... Indices>
        [[nodiscard]] MDKV_HD constexpr index_type operator()(Indices... indices) const noexcept
        {
            return offset(std::make_index_sequence<rank>{}, static_cast<index_type>(indices)...);
        }

        /// One past the largest offset in use; 0 for an empty view.
        [[nodiscard]] MDKV_HD constexpr index_type required_span_size() const noexcept
        {
            index_type size = 1;
            for (rank_type i = 0; i < rank; ++i)
            {
                if (extents_.extent(i) == 0) { return 0; }
                size += (extents_.extent(i) - 1) * strides_[i];
            }
            return size;
        }

        [[nodiscard]] MDKV_HD static constexpr bool is_always_unique() noexcept { return false; }
        [[nodiscard]] MDKV_HD static constexpr bool is_always_exhaustive() noexcept { return false; }
        [[nodiscard]] MDKV_HD static constexpr bool is_always_strided() noexcept { return true; }
        [[nodiscard]] MDKV_HD static constexpr bool is_unique() noexcept { return false; }
        [[nodiscard]] MDKV_HD static constexpr bool is_exhaustive() noexcept { return false; }
        [[nodiscard]] MDKV_HD static constexpr bool is_strided() noexcept { return true; }

        [[nodiscard]] MDKV_HD friend constexpr bool operator==(mapping const& a, mapping const& b) noexcept
        {
            return a.extents_ == b.extents_ && a.strides_ == b.strides_;
        }

    private:
        template <std::size_t... I, class... Indices>
        [[nodiscard]] MDKV_HD constexpr index_type offset(std::index_sequence<I...>, Indices... indices) const noexcept
        {
            return ((indices * (I + 1 == rank ? index_type{1} : strides_[I])) + ... + index_type{0});
        }

        Extents extents_{};
        ::cuda::std::array<index_type, rank> strides_{};
    };
};

/// Plain access; carries the memory space in its type.
template <class T, space S>
struct space_accessor
{
    using offset_policy    = space_accessor;
    using element_type     = T;
    using reference        = T&;
    using data_handle_type = T*;

    space_accessor() noexcept = default;

    template <class U>
        requires std::is_convertible_v<U (*)[], T (*)[]>
    MDKV_HD constexpr space_accessor(space_accessor<U, S>) noexcept
    {}

    [[nodiscard]] MDKV_HD constexpr reference access(data_handle_type data, std::size_t i) const noexcept
    {
        return data[i];
    }
    [[nodiscard]] MDKV_HD constexpr data_handle_type offset(data_handle_type data, std::size_t i) const noexcept
    {
        return data + i;
    }
};

template <class T, std::size_t Rank, space S>
using view = ::cuda::std::mdspan<T, ::cuda::std::dextents<index_t, Rank>, layout_rows, space_accessor<T, S>>;

/// Something that runs stages: an object with its own resources (threads or a stream, scratch memory) whose namespace
/// holds the functions `<stage>_impl`, found by argument-dependent lookup. A backend of your own is a new namespace.
template <class B>
concept backend = requires {
    {
        B::memory_space
    } -> std::convertible_to<space>;
};

template <class T, std::size_t Rank, backend B>
using in_view = view<T const, Rank, B::memory_space>;

template <class T, std::size_t Rank, backend B>
using out_view = view<T, Rank, B::memory_space>;

/// Any strided tensor of another library: `::cuda::std::mdspan`, `std::mdspan`, or a struct with the same members.
template <class V>
concept strided_tensor = requires(V const& v, std::size_t r) {
    {
        V::rank()
    } -> std::convertible_to<std::size_t>;
    {
        v.extent(r)
    } -> std::convertible_to<index_t>;
    {
        v.stride(r)
    } -> std::convertible_to<index_t>;
    {
        v.data_handle()
    } -> std::convertible_to<void const*>;
};

namespace detail
{

template <class T, space S, std::size_t Rank>
[[nodiscard]] constexpr view<T, Rank, S> make_view(
    T* data, std::array<index_t, Rank> const& extents, std::array<index_t, Rank> const& strides)
{
    index_t span = 1;
    bool empty   = false;
    for (std::size_t i = 0; i < Rank; ++i)
    {
        expects(extents[i] >= 0, "view: extent ", i, " is ", extents[i], "; it must not be negative");
        expects(strides[i] >= 0, "view: stride ", i, " is ", strides[i], "; negative strides are not supported");
        empty = empty || extents[i] == 0;
        if (extents[i] > 0) { span = checked_add(span, checked_multiply(extents[i] - 1, strides[i])); }
    }
    if (!empty) { static_cast<void>(checked_multiply(span, index_t{sizeof(T)})); }
    expects(Rank == 0 || extents[Rank - 1] <= 1 || strides[Rank - 1] == 1, "view: stride ", Rank - 1, " is ",
        strides[Rank == 0 ? 0 : Rank - 1], "; elements of the last dimension must be neighbours (stride 1)");
    ::cuda::std::array<index_t, Rank> e{};
    ::cuda::std::array<index_t, Rank> s{};
    for (std::size_t i = 0; i < Rank; ++i)
    {
        e[i] = extents[i];
        s[i] = strides[i];
    }
    using extents_type = ::cuda::std::dextents<index_t, Rank>;
    return view<T, Rank, S>{data, typename layout_rows::mapping<extents_type>{extents_type{e}, s}};
}

template <std::size_t Rank>
[[nodiscard]] constexpr std::array<index_t, Rank> row_strides(std::array<index_t, Rank> const& extents)
{
    std::array<index_t, Rank> strides{};
    index_t step = 1;
    for (std::size_t i = Rank; i-- > 0;)
    {
        strides[i] = step;
        if (extents[i] > 0) { step = checked_multiply(step, extents[i]); }
    }
    return strides;
}

template <strided_tensor V>
using pointee = std::remove_pointer_t<std::remove_cvref_t<decltype(std::declval<V const&>().data_handle())>>;

template <strided_tensor V>
[[nodiscard]] constexpr auto shape_of(V const& tensor)
{
    std::pair<std::array<index_t, V::rank()>, std::array<index_t, V::rank()>> shape{};
    for (std::size_t i = 0; i < V::rank(); ++i)
    {
        shape.first[i]  = static_cast<index_t>(tensor.extent(i));
        shape.second[i] = static_cast<index_t>(tensor.stride(i));
    }
    return shape;
}

} // namespace detail

/// An input of contiguous rows: `in(on, pointer, H, N, D)`.
/// \throws invalid_argument, size_overflow   an extent is negative, or the span leaves 64 bits
template <backend B, class T, std::convertible_to<index_t>... Extents>
[[nodiscard]] constexpr in_view<std::remove_const_t<T>, sizeof...(Extents), B> in(B const&, T* data, Extents... extents)
{
    std::array<index_t, sizeof...(Extents)> const e{static_cast<index_t>(extents)...};
    return detail::make_view<std::remove_const_t<T> const, B::memory_space>(
        static_cast<std::remove_const_t<T> const*>(data), e, detail::row_strides(e));
}

/// An input with free strides, in elements: `in(on, pointer, {H, N, D}, {D, H * D, 1})` reads [N, H, D] as [H, N, D].
/// \throws invalid_argument, size_overflow   a stride is negative, the last one is not 1, or the span leaves 64 bits
template <backend B, class T, std::size_t Rank>
[[nodiscard]] constexpr in_view<std::remove_const_t<T>, Rank, B> in(
    B const&, T* data, index_t const (&extents)[Rank], index_t const (&strides)[Rank])
{
    return detail::make_view<std::remove_const_t<T> const, B::memory_space>(
        static_cast<std::remove_const_t<T> const*>(data), std::to_array(extents), std::to_array(strides));
}

/// An input seen through any strided tensor type.
template <backend B, strided_tensor V>
[[nodiscard]] constexpr auto in(B const&, V const& tensor)
{
    auto const [extents, strides] = detail::shape_of(tensor);
    using value_type              = std::remove_cv_t<detail::pointee<V>>;
    return detail::make_view<value_type const, B::memory_space>(
        static_cast<value_type const*>(tensor.data_handle()), extents, strides);
}

/// An output of contiguous rows.
/// \throws invalid_argument, size_overflow   an extent is negative, or the span leaves 64 bits
template <backend B, class T, std::convertible_to<index_t>... Extents>
    requires(!std::is_const_v<T>)
[[nodiscard]] constexpr out_view<T, sizeof...(Extents), B> out(B const&, T* data, Extents... extents)
{
    std::array<index_t, sizeof...(Extents)> const e{static_cast<index_t>(extents)...};
    return detail::make_view<T, B::memory_space>(data, e, detail::row_strides(e));
}

/// An output with free strides, in elements.
/// \throws invalid_argument, size_overflow   a stride is negative, the last one is not 1, or the span leaves 64 bits
template <backend B, class T, std::size_t Rank>
    requires(!std::is_const_v<T>)
[[nodiscard]] constexpr out_view<T, Rank, B> out(
    B const&, T* data, index_t const (&extents)[Rank], index_t const (&strides)[Rank])
{
    return detail::make_view<T, B::memory_space>(data, std::to_array(extents), std::to_array(strides));
}

/// An output seen through any strided tensor type.
template <backend B, strided_tensor V>
    requires(!std::is_const_v<detail::pointee<V>>)
[[nodiscard]] constexpr auto out(B const&, V const& tensor)
{
    auto const [extents, strides] = detail::shape_of(tensor);
    return detail::make_view<detail::pointee<V>, B::memory_space>(tensor.data_handle(), extents, strides);
}

/// An output read as an input.
template <class T, class Extents, space S>
[[nodiscard]] constexpr auto as_input(
    ::cuda::std::mdspan<T, Extents, layout_rows, space_accessor<T, S>> const& whole) noexcept
{
    return ::cuda::std::mdspan<T const, Extents, layout_rows, space_accessor<T const, S>>{
        whole.data_handle(), whole.mapping()};
}

/// Rows [first, first + count) of dimension `Dim`, e.g. tokens of a [H, N, D] view.
/// \throws invalid_argument   the range leaves the view
template <std::size_t Dim, class T, class Extents, space S>
[[nodiscard]] constexpr auto slice(
    ::cuda::std::mdspan<T, Extents, layout_rows, space_accessor<T, S>> const& whole, index_t first, index_t count)
{
    constexpr std::size_t rank = Extents::rank();
    static_assert(Dim < rank, "slice: the view has no such dimension");
    expects(first >= 0 && count >= 0 && first <= whole.extent(Dim) - count, "slice: ", count, " from ", first,
        " on leave the extent ", whole.extent(Dim), " of dimension ", Dim);
    auto [extents, strides] = detail::shape_of(whole);
    extents[Dim]            = count;
    index_t const offset    = count == 0 ? 0 : first * strides[Dim];
    T* const data           = whole.data_handle();
    return detail::make_view<T, S>(data == nullptr ? nullptr : data + offset, extents, strides);
}

} // namespace mdkv
