#include <mdkv/gpu/backend.cuh>
#include <mdkv/replay/join.hpp>

namespace MDKV_NAMESPACE::gpu::kernels
{

template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::sum_pieces<backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::add_losses<backend>> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
