#include "gpu/support/cpu_reference.hpp"

#include <mdkv/cpu/allocate.hpp>
#include <mdkv/cpu/basis.hpp>
#include <mdkv/cpu/compress.hpp>
#include <mdkv/cpu/recompress.hpp>

namespace support
{

void allocate_on_cpu(cpu_side const& on, mdkv::in_view<float, 3, cpu_side> loss, mdkv::rung_costs<> const& costs,
    mdkv::in_view<mdkv::index_t, 1, cpu_side> limits, mdkv::allocate_options options,
    mdkv::out_view<std::uint8_t, 2, cpu_side> rung, mdkv::out_view<mdkv::allocation, 1, cpu_side> report)
{
    mdkv::allocate(on, loss, costs, limits, options, rung, report);
}

void eigenbasis_on_cpu(cpu_side const& on, mdkv::in_view<double, 3, cpu_side> gram,
    mdkv::out_view<float, 3, cpu_side> basis, mdkv::out_view<float, 2, cpu_side> energy)
{
    mdkv::eigenbasis(on, gram, basis, energy);
}

template <class T>
void accumulate_gram_on_cpu(
    cpu_side const& on, mdkv::in_view<T, 3, cpu_side> samples, mdkv::out_view<double, 3, cpu_side> gram)
{
    mdkv::accumulate_gram(on, samples, gram);
}

template <class T>
void fit_query_aware_basis_on_cpu(cpu_side const& on, mdkv::in_view<T, 3, cpu_side> queries,
    mdkv::in_view<T, 3, cpu_side> keys, mdkv::out_view<float, 3, cpu_side> of_keys,
    mdkv::out_view<float, 3, cpu_side> of_queries, mdkv::out_view<float, 2, cpu_side> energy)
{
    mdkv::fit_query_aware_basis(on, queries, keys, of_keys, of_queries, energy);
}

template <class T>
mdkv::compress_report compress_on_cpu(cpu_side const& on, mdkv::layer_view<cpu_side, T> const& layer,
    mdkv::ratio_set<> const& ratios, mdkv::compress_options<cpu_side> const& options, mdkv::cpu::cache<T>& destination)
{
    return mdkv::compress(on, layer, ratios, options, destination);
}

template <class T>
mdkv::recompress_report recompress_on_cpu(cpu_side const& on, mdkv::in_view<T, 3, cpu_side> queries,
    mdkv::ratio_set<> const& ratios, mdkv::recompress_options<cpu_side> const& options, mdkv::cpu::cache<T>& cache)
{
    return mdkv::recompress(on, queries, ratios, options, cache);
}

template void accumulate_gram_on_cpu(
    cpu_side const&, mdkv::in_view<float, 3, cpu_side>, mdkv::out_view<double, 3, cpu_side>);
template void fit_query_aware_basis_on_cpu(cpu_side const&, mdkv::in_view<float, 3, cpu_side>,
    mdkv::in_view<float, 3, cpu_side>, mdkv::out_view<float, 3, cpu_side>, mdkv::out_view<float, 3, cpu_side>,
    mdkv::out_view<float, 2, cpu_side>);
template mdkv::compress_report compress_on_cpu(cpu_side const&, mdkv::layer_view<cpu_side, float> const&,
    mdkv::ratio_set<> const&, mdkv::compress_options<cpu_side> const&, mdkv::cpu::cache<float>&);
template mdkv::recompress_report recompress_on_cpu(cpu_side const&, mdkv::in_view<float, 3, cpu_side>,
    mdkv::ratio_set<> const&, mdkv::recompress_options<cpu_side> const&, mdkv::cpu::cache<float>&);

template void accumulate_gram_on_cpu(
    cpu_side const&, mdkv::in_view<mdkv::half, 3, cpu_side>, mdkv::out_view<double, 3, cpu_side>);
template void fit_query_aware_basis_on_cpu(cpu_side const&, mdkv::in_view<mdkv::half, 3, cpu_side>,
    mdkv::in_view<mdkv::half, 3, cpu_side>, mdkv::out_view<float, 3, cpu_side>, mdkv::out_view<float, 3, cpu_side>,
    mdkv::out_view<float, 2, cpu_side>);
template mdkv::compress_report compress_on_cpu(cpu_side const&, mdkv::layer_view<cpu_side, mdkv::half> const&,
    mdkv::ratio_set<> const&, mdkv::compress_options<cpu_side> const&, mdkv::cpu::cache<mdkv::half>&);
template mdkv::recompress_report recompress_on_cpu(cpu_side const&, mdkv::in_view<mdkv::half, 3, cpu_side>,
    mdkv::ratio_set<> const&, mdkv::recompress_options<cpu_side> const&, mdkv::cpu::cache<mdkv::half>&);

template void accumulate_gram_on_cpu(
    cpu_side const&, mdkv::in_view<mdkv::bfloat16, 3, cpu_side>, mdkv::out_view<double, 3, cpu_side>);
template void fit_query_aware_basis_on_cpu(cpu_side const&, mdkv::in_view<mdkv::bfloat16, 3, cpu_side>,
    mdkv::in_view<mdkv::bfloat16, 3, cpu_side>, mdkv::out_view<float, 3, cpu_side>, mdkv::out_view<float, 3, cpu_side>,
    mdkv::out_view<float, 2, cpu_side>);
template mdkv::compress_report compress_on_cpu(cpu_side const&, mdkv::layer_view<cpu_side, mdkv::bfloat16> const&,
    mdkv::ratio_set<> const&, mdkv::compress_options<cpu_side> const&, mdkv::cpu::cache<mdkv::bfloat16>&);
template mdkv::recompress_report recompress_on_cpu(cpu_side const&, mdkv::in_view<mdkv::bfloat16, 3, cpu_side>,
    mdkv::ratio_set<> const&, mdkv::recompress_options<cpu_side> const&, mdkv::cpu::cache<mdkv::bfloat16>&);

} // namespace support
