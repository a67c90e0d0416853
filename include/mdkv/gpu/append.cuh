/// \file append.cuh: append on the GPU.
#pragma once

#include <mdkv/append.hpp>

#include <mdkv/detail/append.hpp>
#include <mdkv/gpu/run.cuh>

namespace mdkv::gpu
{

using mdkv::detail::append_impl;

} // namespace mdkv::gpu
