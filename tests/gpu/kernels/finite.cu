#include <mdkv/engine/finite.hpp>
#include <mdkv/gpu/backend.cuh>

namespace MDKV_NAMESPACE::gpu::kernels
{

template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::find_not_finite<backend, float>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::find_not_finite<backend, half>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::find_not_finite<backend, bfloat16>> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
