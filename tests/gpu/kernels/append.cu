#include <mdkv/append.hpp>
#include <mdkv/gpu/backend.cuh>

namespace MDKV_NAMESPACE::gpu::kernels
{

template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::append_token<backend, float, float>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::append_token<backend, half, half>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::append_token<backend, half, float>> const);
template __global__ void entry(
    __grid_constant__ job_of_teams<mdkv::detail::append_token<backend, bfloat16, bfloat16>> const);
template __global__ void entry(
    __grid_constant__ job_of_teams<mdkv::detail::append_token<backend, bfloat16, float>> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
