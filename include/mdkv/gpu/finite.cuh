/// \file finite.cuh: expects_finite on the GPU.
#pragma once

#include <mdkv/finite.hpp>

#include <mdkv/detail/finite.hpp>
#include <mdkv/gpu/run.cuh>

namespace mdkv::gpu
{

using mdkv::detail::expects_finite_impl;

} // namespace mdkv::gpu
