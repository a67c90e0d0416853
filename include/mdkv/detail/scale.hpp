/// \file scale.hpp: the factor of q.k: the model's, or 1/sqrt(D).
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/float_environment.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/softmax.hpp>

#include <cmath>

namespace mdkv::inline MDKV_MACHINE::detail
{

/// The scale that an option or a cache says: 0 is 1/sqrt(D).
[[nodiscard]] inline float scale_or_default(float given, index_t dim) noexcept
{
    float_environment const standard;
    return given > 0.0F ? given : 1.0F / std::sqrt(static_cast<float>(dim));
}
/// The same for logits in base 2.
[[nodiscard]] inline float scale_in_base_two(float given, index_t dim) noexcept
{
    float_environment const standard;
    return log2_e * scale_or_default(given, dim);
}

/// An option of a stage that reads a cache: 0, or the scale of the cache again, which the caller may have rounded otherwise.
/// \throws invalid_argument   the option or the cache's scale is negative or not finite, or they differ
MDKV_OUTLINE inline void expects_scale(char const* stage, float given, float of_cache, index_t dim)
{
    expects_not_negative(stage, "scale", given);
    expects_not_negative(stage, "cache.layout.scale", of_cache);
    float const own = scale_or_default(of_cache, dim);
    expects(given == 0.0F || std::fabs(given - own) <= 1e-5F * own, stage, ": scale is ", given,
        "; cache.layout.scale is ", own, ", and they must be the same");
}

} // namespace mdkv::inline MDKV_MACHINE::detail
