#include <mdkv/gpu/basis.cuh>
#include <mdkv/replay/leverage.hpp>

namespace MDKV_NAMESPACE::gpu::kernels
{

template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::whiten<backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::add_squares<backend, float>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::add_squares<backend, half>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::add_squares<backend, bfloat16>> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
