#include "gpu/support/cpu_reference.hpp"

#include <mdkv/cpu/allocate.hpp>
#include <mdkv/cpu/compress.hpp>

namespace support
{

void allocate_on_cpu(cpu_side const& on, mdkv::in_view<float, 3, cpu_side> loss, mdkv::rung_costs<> const& costs,
    mdkv::in_view<mdkv::index_t, 1, cpu_side> limits, mdkv::allocate_options options,
    mdkv::out_view<std::uint8_t, 2, cpu_side> rung, mdkv::out_view<mdkv::allocation, 1, cpu_side> report)
{
    mdkv::allocate(on, loss, costs, limits, options, rung, report);
}

template <class T>
mdkv::compress_report compress_on_cpu(cpu_side const& on, mdkv::layer_view<cpu_side, T> const& layer,
    mdkv::ratio_set<> const& ratios, mdkv::compress_options<cpu_side> const& options, mdkv::cpu::cache<T>& destination)
{
    return mdkv::compress(on, layer, ratios, options, destination);
}

template mdkv::compress_report compress_on_cpu(cpu_side const&, mdkv::layer_view<cpu_side, float> const&,
    mdkv::ratio_set<> const&, mdkv::compress_options<cpu_side> const&, mdkv::cpu::cache<float>&);
template mdkv::compress_report compress_on_cpu(cpu_side const&, mdkv::layer_view<cpu_side, mdkv::half> const&,
    mdkv::ratio_set<> const&, mdkv::compress_options<cpu_side> const&, mdkv::cpu::cache<mdkv::half>&);
template mdkv::compress_report compress_on_cpu(cpu_side const&, mdkv::layer_view<cpu_side, mdkv::bfloat16> const&,
    mdkv::ratio_set<> const&, mdkv::compress_options<cpu_side> const&, mdkv::cpu::cache<mdkv::bfloat16>&);

} // namespace support
