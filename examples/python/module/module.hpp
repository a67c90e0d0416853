/// \file module.hpp: the parts of the module
#pragma once

#include <mdkv/core/budget.hpp>

#include <memory>
#include <string>

#include <nanobind/nanobind.h>

#include "engine.hpp"

namespace mdkv_python
{

namespace nb = nanobind;

class rank_group; // ranks.hpp

/// mdkv.Layer.
struct layer_object
{
    std::unique_ptr<layer> of;
    std::string dtype;
    nb::object bytes; ///< mdkv.Stored in whose bytes the arena lies, or none
};

/// A limit as Python gives it: an mdkv.Budget, or a share of the uncompressed bytes.
[[nodiscard]] mdkv::budget budget_of(nb::handle limit);

/// Ranks as Python gives them: an mdkv.Ranks, or none.
[[nodiscard]] rank_group const* ranks_of(nb::handle ranks);

void bind_values(nb::module_& m);
void bind_ranks(nb::module_& m);
void bind_storing(nb::module_& m);

} // namespace mdkv_python
