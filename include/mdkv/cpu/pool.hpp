/// \file pool.hpp: pool on the CPU.
#pragma once

#include <mdkv/pool.hpp>

#include <mdkv/cpu/run.hpp>
#include <mdkv/cpu/width.hpp>
#include <mdkv/detail/pool.hpp>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH
{

using mdkv::detail::pool_impl;

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH
