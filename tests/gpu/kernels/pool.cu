#include <mdkv/gpu/backend.cuh>
#include <mdkv/stages/pool.hpp>

namespace MDKV_NAMESPACE::gpu::kernels
{

template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::pool_windows<backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::pool_fading<backend>> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
