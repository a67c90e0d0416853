/// \file slots.hpp: list_slots on the CPU.
#pragma once

#include <mdkv/slots.hpp>

#include <mdkv/cpu/run.hpp>
#include <mdkv/cpu/width.hpp>
#include <mdkv/detail/slots.hpp>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH
{

using mdkv::detail::list_slots_impl;

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH
