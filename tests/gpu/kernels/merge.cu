#include <mdkv/gpu/backend.cuh>
#include <mdkv/merge.hpp>

namespace MDKV_NAMESPACE::gpu::kernels
{

template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::merge_rows<backend, float>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::merge_rows<backend, half>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::merge_rows<backend, bfloat16>> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
