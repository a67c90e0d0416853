/// \file dlpack.hpp: views of DLPack tensors, of any version of its header: `in<half, 3>(on, managed->dl_tensor)`.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace mdkv_python
{

/// A struct with DLTensor's members.
template <class V>
concept dlpack_tensor = requires(V const& v) {
    static_cast<void const*>(v.data);
    static_cast<std::int64_t const*>(v.shape);
    static_cast<std::int64_t const*>(v.strides);
    v.ndim;
    v.byte_offset;
    v.dtype.code;
    v.dtype.bits;
    v.dtype.lanes;
    v.device.device_type;
};

/// The name of a DLPack type code, to which the bits are added: float32, bfloat16.
[[nodiscard]] constexpr char const* dlpack_kind(int code) noexcept
{
    constexpr char const* kinds[]{"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
    return code >= 0 && code < 7 ? kinds[code] : "unknown";
}

template <class T, std::size_t Rank, mdkv::space S, dlpack_tensor V>
[[nodiscard]] mdkv::view<T, Rank, S> view_of_dlpack(V const& tensor)
{
    using value_type   = std::remove_const_t<T>;
    constexpr int code = std::same_as<value_type, mdkv::bfloat16>                                       ? 4
                         : std::same_as<value_type, mdkv::half> || std::is_floating_point_v<value_type> ? 2
                         : std::is_unsigned_v<value_type>                                               ? 1
                                                                                                        : 0;
    constexpr int bits = 8 * static_cast<int>(sizeof(value_type));
    mdkv::expects(static_cast<int>(tensor.ndim) == static_cast<int>(Rank), "dlpack: the tensor has ",
        static_cast<mdkv::index_t>(tensor.ndim), " dimensions; ", Rank, " are needed");
    mdkv::expects(static_cast<int>(tensor.dtype.code) == code && static_cast<int>(tensor.dtype.bits) == bits,
        "dlpack: the element type is ", dlpack_kind(static_cast<int>(tensor.dtype.code)),
        static_cast<mdkv::index_t>(tensor.dtype.bits), "; ", dlpack_kind(code), bits, " is needed");
    mdkv::expects(static_cast<int>(tensor.dtype.lanes) == 1, "dlpack: an element has ",
        static_cast<mdkv::index_t>(tensor.dtype.lanes), " lanes; 1 is needed");
    auto const device = static_cast<int>(tensor.device.device_type);
    // 1: CPU, 2: CUDA, 3: pinned host memory, 13: managed memory, for both
    mdkv::expects(device == 13 || (S == mdkv::space::host ? device == 1 || device == 3 : device == 2),
        "dlpack: the device type is ", device, "; the backend needs ",
        S == mdkv::space::host ? "host (1 or 3)" : "CUDA (2)", " or managed (13) memory");
    auto* const first = static_cast<char*>(tensor.data);
    T* const data     = first == nullptr ? nullptr : reinterpret_cast<T*>(first + tensor.byte_offset);
    auto const view =
        mdkv::detail::make_view<T, Rank, S>(data, tensor.shape, tensor.strides); // null strides: contiguous rows
    mdkv::expects(view.empty() || data != nullptr, "dlpack: the tensor is null but not empty");
    return view;
}

/// An input from a DLPack tensor.
/// \throws invalid_argument   dimensions, element type or device differ from the view's, or a stride is negative
/// \throws size_overflow      the span leaves 64 bits
template <class T, std::size_t Rank, mdkv::backend B, dlpack_tensor V>
[[nodiscard]] mdkv::in_view<T, Rank, B> in(B const&, V const& tensor)
{
    return view_of_dlpack<T const, Rank, B::memory_space>(tensor);
}
/// An output from a DLPack tensor.
/// \throws invalid_argument   dimensions, element type or device differ from the view's, or a stride is negative
/// \throws size_overflow      the span leaves 64 bits
template <class T, std::size_t Rank, mdkv::backend B, dlpack_tensor V>
[[nodiscard]] mdkv::out_view<T, Rank, B> out(B const&, V const& tensor)
{
    return view_of_dlpack<T, Rank, B::memory_space>(tensor);
}

} // namespace mdkv_python
