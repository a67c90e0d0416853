/// \file slots.cuh: list_slots on the GPU.
#pragma once

#include <mdkv/slots.hpp>

#include <mdkv/detail/slots.hpp>
#include <mdkv/gpu/run.cuh>

namespace mdkv::gpu
{

using mdkv::detail::list_slots_impl;

} // namespace mdkv::gpu
