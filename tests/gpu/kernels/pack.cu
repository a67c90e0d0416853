#include <mdkv/stages/pack.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/gpu/backend.cuh>

namespace MDKV_NAMESPACE::gpu::kernels
{

template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::lay_out_heads<float, backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::lay_out_heads<half, backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::lay_out_heads<bfloat16, backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::write_channels<float, backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::write_channels<half, backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::write_channels<bfloat16, backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::pack_tiles<float, backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::pack_tiles<half, backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::pack_tiles<bfloat16, backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::narrow_stand_ins<float, backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::narrow_stand_ins<half, backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::narrow_stand_ins<bfloat16, backend>> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
