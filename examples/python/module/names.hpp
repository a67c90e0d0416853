/// \file names.hpp: names of rungs and of enumerations' values
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/presets.hpp>

#include <cstddef>
#include <string>
#include <string_view>

namespace mdkv_python
{

[[nodiscard]] inline std::string name_of(mdkv::rung const& rung)
{
    std::string const kind = rung.kind == mdkv::storage::int8 ? "int8" : rung.kind == mdkv::storage::int4 ? "int4" : "";
    if (rung.dropped()) { return "drop"; }
    if (rung.num == rung.den) { return kind.empty() ? "full" : kind; }
    return std::to_string(rung.num) + "/" + std::to_string(rung.den) + (kind.empty() ? "" : ":" + kind);
}

/// Names of an enumeration's values, in order.
template <class Enum>
inline constexpr std::string_view names[1]{};
template <>
inline constexpr std::string_view names<mdkv::pooling>[] { "max", "mean", "adaptive" };
template <>
inline constexpr std::string_view names<mdkv::row_norm>[] { "sum", "euclidean", "maximum" };
template <>
inline constexpr std::string_view names<mdkv::projection_charge>[] { "if_better", "always" };
template <>
inline constexpr std::string_view names<mdkv::rotary_pairs>[] { "halves", "neighbours" };
template <>
inline constexpr std::string_view names<mdkv::compress_status>[] { "compressed", "uncompressed" };
template <>
inline constexpr std::string_view names<mdkv::allocation_status>[] {
    "optimal", "everything_kept", "unprojected_only", "non_finite_loss", "over_limit"
};

template <class Enum>
[[nodiscard]] std::string name_in(Enum value)
{
    return std::string{names<Enum>[static_cast<std::size_t>(value)]};
}
template <class Enum>
[[nodiscard]] Enum value_of(std::string const& name, char const* what)
{
    std::size_t i = 0;
    std::string all;
    for (std::string_view const known : names<Enum>)
    {
        if (name == known) { return static_cast<Enum>(i); }
        all += (i++ == 0 ? "" : ", ") + std::string{known};
    }
    throw mdkv::invalid_argument{std::string{what} + " is \"" + name + "\"; there are " + all};
}

} // namespace mdkv_python
