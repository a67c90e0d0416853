/// \file view.hpp: the non-owning tensors every stage reads and writes: shape, strides and memory space, and how to make one.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <concepts>
#include <cstddef>
#include <optional>
#include <type_traits>
#include <utility>

namespace MDKV_NAMESPACE
{

/// Memory space. Part of every view's type, so that a host view does not convert for a device backend.
enum class space
{
    host,
    device
};

/// A pointer, extents and strides in elements. Elements of the last dimension are neighbours, every other stride is free:
/// holds [H, N, D], [N, H, D] read as [H, N, D], a slice of a larger buffer, or one head broadcast with stride 0.
/// Trivially copyable; kernels take it by value. `in` and `out` check extents and strides.
template <class T, std::size_t Rank, space S>
class view
{
public:
    using element_type                  = T;
    static constexpr space memory_space = S;

    view() = default;

    MDKV_HD constexpr view(T* data, array<index_t, Rank> const& extents, array<index_t, Rank> const& strides) noexcept
        : data_{data}
        , extents_{extents}
        , strides_{strides}
    {}

    /// An output converts to an input.
    template <class U>
        requires(!std::same_as<T, U> && std::is_convertible_v<U (*)[], T (*)[]>)
    MDKV_HD constexpr view(view<U, Rank, S> const& other) noexcept
        : data_{other.data_handle()}
        , extents_{other.extents()}
        , strides_{other.strides()}
    {}

    [[nodiscard]] MDKV_HD static constexpr std::size_t rank() noexcept { return Rank; }
    [[nodiscard]] MDKV_HD constexpr T* data_handle() const noexcept { return data_; }
    [[nodiscard]] MDKV_HD constexpr index_t extent(std::size_t i) const noexcept { return extents_[i]; }
    [[nodiscard]] MDKV_HD constexpr index_t stride(std::size_t i) const noexcept { return strides_[i]; }
    [[nodiscard]] MDKV_HD constexpr array<index_t, Rank> const& extents() const noexcept { return extents_; }
    [[nodiscard]] MDKV_HD constexpr array<index_t, Rank> const& strides() const noexcept { return strides_; }

    template <class... Indices>
        requires(sizeof...(Indices) == Rank)
    [[nodiscard]] MDKV_HD constexpr T& operator()(Indices... indices) const noexcept
    {
        return data_[offset(indices...)];
    }

    /// Address of the first element of a row: all indices but the last.
    template <class... Indices>
        requires(sizeof...(Indices) + 1 == Rank)
    [[nodiscard]] MDKV_HD constexpr T* row(Indices... indices) const noexcept
    {
        return data_ + offset(indices..., index_t{0});
    }

    /// Elements between the first one and this one.
    template <class... Indices>
        requires(sizeof...(Indices) == Rank)
    [[nodiscard]] MDKV_HD constexpr index_t offset(Indices... indices) const noexcept
    {
        return [&]<std::size_t... D>(std::index_sequence<D...>) {
            return ((static_cast<index_t>(indices) * (D + 1 == Rank ? index_t{1} : strides_[D])) + ... + index_t{0});
        }(std::make_index_sequence<Rank>{});
    }

    [[nodiscard]] MDKV_HD constexpr bool empty() const noexcept
    {
        bool none = false;
        for (std::size_t i = 0; i < Rank; ++i) { none = none || extents_[i] == 0; }
        return none;
    }

    /// One past the largest offset in use; 0 for an empty view.
    [[nodiscard]] MDKV_HD constexpr index_t required_span_size() const noexcept
    {
        if (empty()) { return 0; } // strides of an empty view may be any
        index_t size = 1;
        for (std::size_t i = 0; i < Rank; ++i) { size += (extents_[i] - 1) * strides_[i]; }
        return size;
    }

private:
    T* data_ = nullptr;
    array<index_t, Rank> extents_{};
    array<index_t, Rank> strides_{};
};

/// The place where stages run: an object with its resources (threads or a stream, scratch memory), in a namespace with
/// `run`, `fetch` and the functions `<stage>_impl`, found by argument-dependent lookup. Your own backend is a new namespace.
template <class B>
concept backend = requires { space{B::memory_space}; };

/// A view that a stage reads, in the backend's memory.
template <class T, std::size_t Rank, backend B>
using in_view = view<T const, Rank, B::memory_space>;

/// A view that a stage writes, in the backend's memory.
template <class T, std::size_t Rank, backend B>
using out_view = view<T, Rank, B::memory_space>;

/// Any strided tensor of another library: `std::mdspan`, `cuda::std::mdspan`, Kokkos' or a struct with the same members.
template <class V>
concept strided_tensor = requires(V const& v, std::size_t r) {
    static_cast<std::size_t>(V::rank());
    static_cast<index_t>(v.extent(r));
    static_cast<index_t>(v.stride(r));
    static_cast<void const*>(v.data_handle());
};

/// Upper bound of an extent, so that sums of extents cannot overflow, even of views that are empty or have strides of 0.
inline constexpr index_t largest_extent = index_t{1} << 48;

namespace detail
{

/// Checks extents and strides; if no strides are given, they are the strides of contiguous rows. (For views of any type and
/// rank, so that it is compiled once.)
MDKV_OUTLINE constexpr void fill_strides(
    index_t const* extents, index_t const* given, index_t* strides, std::size_t rank, index_t element_bytes)
{
    index_t row  = 1; // elements of all dimensions after this one
    index_t span = 1;
    bool empty   = false;
    for (std::size_t i = rank; i-- > 0;)
    {
        strides[i] = given == nullptr ? row : given[i];
        expects(extents[i] >= 0, "view: extent ", i, " is ", extents[i], "; it must not be negative");
        expects<size_overflow>(extents[i] <= largest_extent, "view: extent ", i, " is ", extents[i],
            "; it must not exceed ", largest_extent);
        expects(strides[i] >= 0, "view: stride ", i, " is ", strides[i], "; negative strides are not supported");
        empty = empty || extents[i] == 0;
        if (extents[i] == 0) { continue; }
        if (given == nullptr) { row = checked_multiply(row, extents[i]); }
        span = checked_add(span, checked_multiply(extents[i] - 1, strides[i]));
    }
    if (!empty) { static_cast<void>(checked_multiply(span, element_bytes)); }
    expects(extents[rank - 1] <= 1 || strides[rank - 1] == 1, "view: stride ", rank - 1, " is ", strides[rank - 1],
        "; elements of the last dimension must be neighbours (stride 1)");
}

template <class T, std::size_t Rank, space S>
[[nodiscard]] MDKV_OUTLINE constexpr view<T, Rank, S> make_view(
    T* data, index_t const* extents, index_t const* strides = nullptr)
{
    array<index_t, Rank> sizes{};
    array<index_t, Rank> steps{};
    for (std::size_t i = 0; i < Rank; ++i) { sizes[i] = extents[i]; }
    fill_strides(extents, strides, steps.data(), Rank, index_t{sizeof(T)});
    return {data, sizes, steps};
}

/// p + n, or null.
template <class V>
[[nodiscard]] constexpr V* after(V* p, index_t n) noexcept
{
    return p == nullptr ? nullptr : p + n;
}

template <strided_tensor V>
using pointee = std::remove_pointer_t<std::remove_cvref_t<decltype(std::declval<V const&>().data_handle())>>;

template <space S, strided_tensor V>
[[nodiscard]] constexpr view<pointee<V>, V::rank(), S> view_of(V const& tensor)
{
    array<index_t, V::rank()> extents{};
    array<index_t, V::rank()> strides{};
    for (std::size_t i = 0; i < V::rank(); ++i)
    {
        extents[i] = static_cast<index_t>(tensor.extent(i));
        strides[i] = static_cast<index_t>(tensor.stride(i));
    }
    return make_view<pointee<V>, V::rank(), S>(tensor.data_handle(), extents.data(), strides.data());
}

} // namespace detail

/// An input of contiguous rows: `in(on, pointer, H, N, D)`.
/// \throws invalid_argument   an extent is negative
/// \throws size_overflow      an extent is above `largest_extent`, or the span leaves 64 bits
template <backend B, class T, std::convertible_to<index_t>... Extents>
    requires(sizeof...(Extents) > 0)
[[nodiscard]] constexpr in_view<T, sizeof...(Extents), B> in(B const&, T const* data, Extents... extents)
{
    index_t const sizes[]{static_cast<index_t>(extents)...};
    return detail::make_view<T const, sizeof...(Extents), B::memory_space>(data, sizes);
}

/// An input with free strides, in elements: `in(on, pointer, {H, N, D}, {D, H * D, 1})` reads [N, H, D] as [H, N, D].
/// \throws invalid_argument   a stride is negative, or the last one is not 1; and the errors of contiguous rows
template <backend B, class T, std::size_t Rank>
[[nodiscard]] constexpr in_view<T, Rank, B> in(
    B const&, T const* data, index_t const (&extents)[Rank], index_t const (&strides)[Rank])
{
    return detail::make_view<T const, Rank, B::memory_space>(data, extents, strides);
}

/// An input from any strided tensor type.
template <backend B, strided_tensor V>
[[nodiscard]] constexpr in_view<std::remove_const_t<detail::pointee<V>>, V::rank(), B> in(B const&, V const& tensor)
{
    return detail::view_of<B::memory_space>(tensor);
}

/// An output of contiguous rows; refuses what `in` refuses.
template <backend B, class T, std::convertible_to<index_t>... Extents>
    requires(!std::is_const_v<T> && sizeof...(Extents) > 0)
[[nodiscard]] constexpr out_view<T, sizeof...(Extents), B> out(B const&, T* data, Extents... extents)
{
    index_t const sizes[]{static_cast<index_t>(extents)...};
    return detail::make_view<T, sizeof...(Extents), B::memory_space>(data, sizes);
}

/// An output with free strides, in elements; refuses what `in` refuses.
template <backend B, class T, std::size_t Rank>
    requires(!std::is_const_v<T>)
[[nodiscard]] constexpr out_view<T, Rank, B> out(
    B const&, T* data, index_t const (&extents)[Rank], index_t const (&strides)[Rank])
{
    return detail::make_view<T, Rank, B::memory_space>(data, extents, strides);
}

/// An output from any strided tensor type.
template <backend B, strided_tensor V>
    requires(!std::is_const_v<detail::pointee<V>>)
[[nodiscard]] constexpr out_view<detail::pointee<V>, V::rank(), B> out(B const&, V const& tensor)
{
    return detail::view_of<B::memory_space>(tensor);
}

/// An output read as an input.
template <class T, std::size_t Rank, space S>
[[nodiscard]] MDKV_HD constexpr view<T const, Rank, S> as_input(view<T, Rank, S> const& whole) noexcept
{
    return whole;
}

/// Rows [first, first + count) of dimension `Dim`, e.g. tokens of a [H, N, D] view.
/// \throws invalid_argument   the range leaves the view
template <std::size_t Dim, class T, std::size_t Rank, space S>
[[nodiscard]] constexpr view<T, Rank, S> slice(view<T, Rank, S> const& whole, index_t first, index_t count)
{
    static_assert(Dim < Rank, "slice: the view has no such dimension");
    expects(first >= 0 && count >= 0 && first <= whole.extent(Dim) - count, "slice: ", count, " from ", first,
        " on leave the extent ", whole.extent(Dim), " of dimension ", Dim);
    array<index_t, Rank> extents = whole.extents();
    extents[Dim]                 = count;
    return {detail::after(whole.data_handle(), count == 0 ? 0 : first * whole.stride(Dim)), extents, whole.strides()};
}

namespace detail
{

/// Item i of the first dimension.
template <class V, std::size_t Rank, space S>
[[nodiscard]] constexpr view<V, Rank - 1, S> item_of(view<V, Rank, S> const& all, index_t i) noexcept
{
    array<index_t, Rank - 1> extents{};
    array<index_t, Rank - 1> strides{};
    for (std::size_t d = 1; d < Rank; ++d)
    {
        extents[d - 1] = all.extent(d);
        strides[d - 1] = all.stride(d);
    }
    return {after(all.data_handle(), i * all.stride(0)), extents, strides};
}

/// Numbers [H*G, n] of queries [first, first + count). One column stands for all queries, and stays as it is.
template <class V, space S>
[[nodiscard]] constexpr std::optional<view<V, 2, S>> of_queries(
    std::optional<view<V, 2, S>> const& all, index_t first, index_t count)
{
    return all && all->extent(1) > 1 ? std::optional{slice<1>(*all, first, count)} : all;
}
/// The number of query i of query head g.
template <class V, space S>
[[nodiscard]] MDKV_HD constexpr V& of_query(view<V, 2, S> const& all, index_t g, index_t i) noexcept
{
    return all(g, all.extent(1) > 1 ? i : 0);
}

/// A view [H, ...] of one token as [H, 1, ...], which has `To` dimensions; one that has them already stays.
template <std::size_t To, class T, std::size_t Rank, space S>
[[nodiscard]] constexpr view<T, To, S> with_tokens(view<T, Rank, S> const& x) noexcept
{
    if constexpr (Rank == To) { return x; }
    else
    {
        array<index_t, To> extents{x.extent(0), 1};
        array<index_t, To> strides{x.stride(0), x.stride(0)};
        extents[To - 1] = To == 2 ? 1 : x.extent(Rank - 1);
        strides[To - 1] = 1;
        return {x.data_handle(), extents, strides};
    }
}

} // namespace detail

} // namespace MDKV_NAMESPACE
