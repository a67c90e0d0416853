/// \file pack.cuh: pack on the GPU.
#pragma once

#include <mdkv/pack.hpp>

#include <mdkv/detail/pack.hpp>
#include <mdkv/gpu/run.cuh>

namespace mdkv::gpu
{

using mdkv::detail::pack_impl;
using mdkv::detail::packed_bytes_impl;

} // namespace mdkv::gpu
