#include <mdkv/gpu/cache.cuh>

namespace MDKV_NAMESPACE::gpu::kernels
{

template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::fill<head_entry>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::move_tail<float, space::device>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::move_tail<half, space::device>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::move_tail<bfloat16, space::device>> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
