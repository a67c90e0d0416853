#include <mdkv/gpu/backend.cuh>
#include <mdkv/replay/advance.hpp>

namespace MDKV_NAMESPACE::gpu::kernels
{

template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::advance_rows<backend, float>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::advance_rows<backend, half>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::advance_rows<backend, bfloat16>> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
