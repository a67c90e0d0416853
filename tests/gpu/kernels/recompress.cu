#include <mdkv/gpu/backend.cuh>
#include <mdkv/recompress.hpp>

namespace MDKV_NAMESPACE::gpu::kernels
{

constexpr space there = space::device;

template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::read_projections<float, there>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::read_projections<half, there>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::read_projections<bfloat16, there>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::read_tokens<float, there>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::read_tokens<half, there>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::read_tokens<bfloat16, there>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::carry_over<float, there>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::carry_over<half, there>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::carry_over<bfloat16, there>> const);
template __global__ void entry(
    __grid_constant__ job_of_teams<mdkv::detail::stored_channels<half, half, backend>> const);
// The same code for every element type:
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::mask_losses<half, there>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::settle_rungs<half, there>> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
