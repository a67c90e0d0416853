/// \file merge.hpp: merge_attention on the CPU.
#pragma once

#include <mdkv/merge.hpp>

#include <mdkv/cpu/run.hpp>
#include <mdkv/cpu/width.hpp>
#include <mdkv/detail/merge.hpp>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH
{

using mdkv::detail::merge_attention_impl;

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH
