/// \file pool.cuh: pool on the GPU.
#pragma once

#include <mdkv/pool.hpp>

#include <mdkv/detail/pool.hpp>
#include <mdkv/gpu/run.cuh>

namespace mdkv::gpu
{

using mdkv::detail::pool_impl;

} // namespace mdkv::gpu
