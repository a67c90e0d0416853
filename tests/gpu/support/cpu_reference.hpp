/// \file cpu_reference.hpp: stages of the CPU backend that nvcc cannot compile (vectors in functions that kernels share) or takes long over (Eigen), as functions of a source of their own
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/compress.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/recompress.hpp>

#include <cstdint>

namespace support
{

using cpu_side = mdkv::cpu::backend;

void allocate_on_cpu(cpu_side const& on, mdkv::in_view<float, 3, cpu_side> loss, mdkv::rung_costs<> const& costs,
    mdkv::in_view<mdkv::index_t, 1, cpu_side> limits, mdkv::allocate_options options,
    mdkv::out_view<std::uint8_t, 2, cpu_side> rung, mdkv::out_view<mdkv::allocation, 1, cpu_side> report);

void eigenbasis_on_cpu(cpu_side const& on, mdkv::in_view<double, 3, cpu_side> gram,
    mdkv::out_view<float, 3, cpu_side> basis, mdkv::out_view<float, 2, cpu_side> energy);

// For float, half and bfloat16:

template <class T>
void accumulate_gram_on_cpu(
    cpu_side const& on, mdkv::in_view<T, 3, cpu_side> samples, mdkv::out_view<double, 3, cpu_side> gram);

template <class T>
void fit_query_aware_basis_on_cpu(cpu_side const& on, mdkv::in_view<T, 3, cpu_side> queries,
    mdkv::in_view<T, 3, cpu_side> keys, mdkv::out_view<float, 3, cpu_side> of_keys,
    mdkv::out_view<float, 3, cpu_side> of_queries, mdkv::out_view<float, 2, cpu_side> energy);

template <class T>
mdkv::compress_report compress_on_cpu(cpu_side const& on, mdkv::layer_view<cpu_side, T> const& layer,
    mdkv::ratio_set<> const& ratios, mdkv::compress_options<cpu_side> const& options, mdkv::cpu::cache<T>& destination);

template <class T>
mdkv::recompress_report recompress_on_cpu(cpu_side const& on, mdkv::in_view<T, 3, cpu_side> queries,
    mdkv::ratio_set<> const& ratios, mdkv::recompress_options<cpu_side> const& options, mdkv::cpu::cache<T>& cache);

} // namespace support
