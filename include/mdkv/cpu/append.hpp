/// \file append.hpp: append on the CPU.
#pragma once

#include <mdkv/append.hpp>

#include <mdkv/cpu/run.hpp>
#include <mdkv/cpu/width.hpp>
#include <mdkv/detail/append.hpp>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH
{

using mdkv::detail::append_impl;

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH
