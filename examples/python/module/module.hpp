/// \file module.hpp: the parts of the module
#pragma once

#include <mdkv/core/budget.hpp>

#include <nanobind/nanobind.h>

namespace mdkv_python
{

namespace nb = nanobind;

/// A limit as Python gives it: an mdkv.Budget, or a share of the uncompressed bytes.
[[nodiscard]] mdkv::budget budget_of(nb::handle limit);

void bind_values(nb::module_& m);

} // namespace mdkv_python
