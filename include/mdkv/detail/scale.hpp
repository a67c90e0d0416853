/// \file scale.hpp: the factor of q.k: the model's, or 1/sqrt(D).
#pragma once

#include <mdkv/core/float_environment.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/softmax.hpp>

#include <cmath>

namespace mdkv::inline MDKV_MACHINE::detail
{

/// The scale that an option or a cache gives; 0 means 1/sqrt(D).
[[nodiscard]] inline float scale_or_default(float given, index_t dim) noexcept
{
    float_environment const standard;
    return given > 0.0F ? given : 1.0F / std::sqrt(static_cast<float>(dim));
}
/// The scale for logits in base 2; 0 means the default.
[[nodiscard]] inline float scale_in_base_two(float given, index_t dim) noexcept
{
    float_environment const standard;
    return log2_e * scale_or_default(given, dim);
}

} // namespace mdkv::inline MDKV_MACHINE::detail
