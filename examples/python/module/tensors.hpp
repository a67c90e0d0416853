/// \file tensors.hpp: views of Python's tensors, and NumPy arrays of results
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "engine.hpp"
#include "interpreter.hpp"

namespace mdkv_python
{

namespace nb = nanobind;

/// A tensor of Python's that is read. torch's lazy signs, such as that of z.conj().imag, are no part of DLPack: such a tensor is
/// replaced by a copy with its values.
template <class... Args>
struct input_of : nb::ndarray<Args...>
{};
using input = input_of<nb::ro>;

/// A tensor of Python's that is written.
struct output : nb::ndarray<>
{
    bool negative = false; ///< its values are the negatives of its bytes
};

/// A view of a tensor of Python's, or of a copy if its rows are no runs of neighbours.
class viewed
{
public:
    explicit viewed(input const& array)
        : viewed(static_cast<nb::ndarray<nb::ro> const&>(array), true)
    {}
    viewed(output const& array, char const* name)
        : viewed(static_cast<nb::ndarray<> const&>(array), false)
    {
        mdkv::expects(!array.negative, name,
            " is a view with torch's negative bit set, such as z.conj().imag, which "
            "cannot be written; a tensor of its own is needed");
    }
    viewed(viewed const&)            = delete;
    viewed& operator=(viewed const&) = delete;

    [[nodiscard]] tensor const& operator*() const noexcept { return view_; }

private:
    template <class Array>
    viewed(Array const& array, bool copies)
    {
        view_.ndim = static_cast<int>(array.ndim());
        for (std::size_t i = 0; i < array.ndim(); ++i)
        {
            shape_.push_back(static_cast<std::int64_t>(array.shape(i)));
            strides_.push_back(array.stride(i));
        }
        view_.dtype       = {array.dtype().code, array.dtype().bits, array.dtype().lanes};
        view_.device      = {array.device_type(), array.device_id()};
        view_.data        = const_cast<void*>(static_cast<void const*>(array.data()));
        bool const direct = std::ranges::all_of(strides_, [](std::int64_t s) { return s >= 0; })
                            && (strides_.empty() || strides_.back() == 1 || shape_.back() <= 1);
        if (array.size() == 0) { close_up(); } // NumPy's strides are 0 then
        else if (copies && !direct && view_.device.device_type == nb::device::cpu::value) { copy(); }
        view_.shape   = shape_.data();
        view_.strides = strides_.data();
    }

    void copy()
    {
        std::size_t const size = view_.dtype.bits / 8U;
        std::size_t count      = 1;
        for (std::int64_t const n : shape_) { count *= static_cast<std::size_t>(n); }
        copy_.resize(count * size);
        auto const* const from = static_cast<std::byte const*>(view_.data);
        std::vector<std::int64_t> at(shape_.size());
        for (std::size_t i = 0; i < count; ++i)
        {
            std::int64_t offset = 0;
            for (std::size_t d = 0; d < at.size(); ++d) { offset += at[d] * strides_[d]; }
            std::memcpy(&copy_[i * size], from + offset * static_cast<std::int64_t>(size), size);
            for (std::size_t d = at.size(); d-- > 0 && ++at[d] == shape_[d];) { at[d] = 0; }
        }
        close_up();
        view_.data = copy_.data();
    }

    /// Strides of elements without gaps.
    void close_up()
    {
        std::int64_t step = 1;
        for (std::size_t d = shape_.size(); d-- > 0; step *= shape_[d]) { strides_[d] = step; }
    }

    std::vector<std::int64_t> shape_, strides_;
    std::vector<std::byte> copy_;
    tensor view_;
};

[[nodiscard]] inline std::optional<tensor> tensor_of(std::optional<viewed> const& given)
{
    return given ? std::optional{**given} : std::nullopt;
}

/// The rows of a layer, viewed.
class viewed_rows
{
public:
    viewed_rows(input const& q, input const& k, input const& v, std::optional<input> const& lse,
        std::optional<input> const& sink_logits = {})
        : queries_{q}
        , keys_{k}
        , values_{v}
    {
        if (lse) { lse_.emplace(*lse); }
        if (sink_logits) { sink_logits_.emplace(*sink_logits); }
    }
    [[nodiscard]] rows operator*() const
    {
        return {*queries_, *keys_, *values_, tensor_of(lse_), tensor_of(sink_logits_)};
    }

private:
    viewed queries_, keys_, values_;
    std::optional<viewed> lse_, sink_logits_;
};

/// Calls call(T{}) for the element type by this name.
template <class Call>
auto with_element(std::string_view name, Call const& call)
{
    if (name == "float16") { return call(mdkv::half{}); }
    if (name == "bfloat16") { return call(mdkv::bfloat16{}); }
    mdkv::expects(name == "float32", "dtype is \"", std::string{name}, "\"; there are float32, float16 and bfloat16");
    return call(float{});
}

[[nodiscard]] inline std::string element_name(input const& array)
{
    auto const type = array.dtype();
    if (type == nb::dtype<float>()) { return "float32"; }
    return type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat) ? "bfloat16" : "float16";
}

template <class T>
nb::object numpy(std::vector<T>&& values, std::vector<std::size_t> const& shape)
{
    auto* const owned = new std::vector<T>{std::move(values)};
    nb::capsule const owner{owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); }};
    return nb::cast(nb::ndarray<nb::numpy, T>{owned->data(), shape.size(), shape.data(), owner});
}

/// Whether torch's negative bit of a tensor is set; other packages' tensors have none.
[[nodiscard]] inline bool is_negative(nb::handle tensor)
{
    nb::object const method = nb::getattr(tensor, "is_neg", nb::none());
    return PyCallable_Check(method.ptr()) != 0 && nb::cast<bool>(called(method));
}

/// Whether the last dimension of a tensor of torch's has gaps; those of a device are not copied by `viewed`.
[[nodiscard]] inline bool has_gaps(nb::handle tensor)
{
    nb::object const method = nb::getattr(tensor, "stride", nb::none());
    if (PyCallable_Check(method.ptr()) == 0) { return false; }
    nb::object const strides = called(method);
    return nb::len(strides) > 0 && nb::cast<index_t>(strides[-1]) != 1;
}

/// A tensor as DLPack's capsule if it gives one by a function of Python's, as torch's do; any other as it is.
/// \param writes   the capsule must tell whether the tensor may be written
[[nodiscard]] inline nb::object exported(nb::handle tensor, bool writes)
{
    nb::object const method = nb::getattr(tensor, "__dlpack__", nb::none());
    if (method.is_none() || PyCFunction_Check(method.ptr()) != 0 || PyType_Check(tensor.ptr()) != 0)
    {
        return nb::borrow(tensor);
    }
    nb::dict options;
    nb::object const on_device = nb::getattr(tensor, "is_cuda", nb::none());
    if (on_device.ptr() == Py_True) { options["stream"] = -1; } // it is ready in the order of the backend's stream
    if (writes) { options["max_version"] = nb::make_tuple(1, 0); }
    nb::tuple const none;
    auto capsule = nb::steal(with_interpreter([&] { return PyObject_Call(method.ptr(), none.ptr(), options.ptr()); }));
    if (capsule.is_valid()) { return capsule; }
    PyErr_Clear(); // nanobind asks in other ways, and reports
    return nb::borrow(tensor);
}

} // namespace mdkv_python

namespace nanobind::detail
{

template <class... Args>
struct type_caster<mdkv_python::input_of<Args...>>
{
    using array = make_caster<ndarray<Args...>>;
    NB_TYPE_CASTER(mdkv_python::input_of<Args...>, array::Name)

    template <class Flags>
    bool from_python(handle given, Flags flags, cleanup_list* cleanup)
    {
        object plain = borrow(given);
        if (mdkv_python::is_negative(given)) { plain = mdkv_python::called(given.attr("resolve_neg")); }
        if (mdkv_python::has_gaps(plain)) { plain = mdkv_python::called(plain.attr("contiguous")); }
        array made;
        bool const good                       = made.from_python(mdkv_python::exported(plain, false), flags, cleanup);
        static_cast<ndarray<Args...>&>(value) = std::move(made.value);
        return good;
    }
};

template <>
struct type_caster<mdkv_python::output>
{
    using array = make_caster<ndarray<>>;
    NB_TYPE_CASTER(mdkv_python::output, array::Name)

    template <class Flags>
    bool from_python(handle given, Flags flags, cleanup_list* cleanup)
    {
        array made;
        bool const good                = made.from_python(mdkv_python::exported(given, true), flags, cleanup);
        static_cast<ndarray<>&>(value) = std::move(made.value);
        value.negative                 = good && mdkv_python::is_negative(given);
        return good;
    }
};

} // namespace nanobind::detail
