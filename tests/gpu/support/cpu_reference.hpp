/// \file cpu_reference.hpp: stages of the CPU backend that nvcc cannot compile (vectors in functions that kernels share), as functions of a source of their own
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/compress.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>

#include <cstdint>

namespace support
{

using cpu_side = mdkv::cpu::backend;

void allocate_on_cpu(cpu_side const& on, mdkv::in_view<float, 3, cpu_side> loss, mdkv::rung_costs<> const& costs,
    mdkv::in_view<mdkv::index_t, 1, cpu_side> limits, mdkv::allocate_options options,
    mdkv::out_view<std::uint8_t, 2, cpu_side> rung, mdkv::out_view<mdkv::allocation, 1, cpu_side> report);

/// For float, half and bfloat16.
template <class T>
mdkv::compress_report compress_on_cpu(cpu_side const& on, mdkv::layer_view<cpu_side, T> const& layer,
    mdkv::ratio_set<> const& ratios, mdkv::compress_options<cpu_side> const& options, mdkv::cpu::cache<T>& destination);

} // namespace support
