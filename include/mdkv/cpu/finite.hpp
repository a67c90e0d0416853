/// \file finite.hpp: expects_finite on the CPU.
#pragma once

#include <mdkv/finite.hpp>

#include <mdkv/cpu/run.hpp>
#include <mdkv/cpu/width.hpp>
#include <mdkv/detail/finite.hpp>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH
{

using mdkv::detail::expects_finite_impl;

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH
