/// \file module.hpp: the parts of the module
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/ratios.hpp>

#include <memory>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include "engine.hpp"
#include "host.hpp"
#include "interpreter.hpp"

namespace mdkv_python
{

namespace nb = nanobind;

/// mdkv.Layer.
struct layer_object
{
    std::unique_ptr<layer> of;
    std::string dtype;
    nb::object bytes; ///< mdkv.Stored in whose bytes the arena lies, or none
};

/// mdkv.CudaBackend.
struct device_object
{
    std::shared_ptr<device> of;
};

/// Calls call() while other threads of Python's run. A call over ranks has the turn at the backend and waits for the interpreter.
template <class Call>
auto unlocked(Call const& call)
{
    others_run const meanwhile;
    return call();
}

/// Calls call(place) with the backend that Python gives: mdkv.Backend, mdkv.CudaBackend, or none for one thread of the CPU.
/// \param name  of the class that is made, for the error
template <class Call>
auto on_place(nb::handle backend, char const* name, Call const& call)
{
#if defined(MDKV_PYTHON_CUDA)
    if (nb::isinstance<device_object>(backend)) { return call(nb::cast<device_object&>(backend).of); }
#endif
    if (!backend.is_none() && !nb::isinstance<host>(backend))
    {
        throw nb::type_error(
            (std::string{name} + ": backend is no mdkv.Backend, nor mdkv.CudaBackend of a package with CUDA").c_str());
    }
    return call(backend.is_none() ? std::make_shared<host>(1) : nb::cast<std::shared_ptr<host>>(backend));
}

/// A choice of rungs as a dictionary.
[[nodiscard]] nb::dict choice_of(mdkv::allocation const& x, mdkv::ratio_set const& ratios);

/// A limit as Python gives it: an mdkv.Budget, or a share of the uncompressed bytes.
[[nodiscard]] mdkv::budget budget_of(nb::handle limit);

/// Ranks as Python gives them: an mdkv.Ranks, or none.
[[nodiscard]] mdkv::ranks const* ranks_of(nb::handle ranks);

void bind_values(nb::module_& m);
void bind_device(nb::module_& m); // in a build with CUDA
void bind_ranks(nb::module_& m);
void bind_reader(nb::module_& m);
void bind_storing(nb::module_& m);

} // namespace mdkv_python
