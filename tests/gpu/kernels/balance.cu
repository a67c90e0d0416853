#include <mdkv/gpu/backend.cuh>
#include <mdkv/replay/balance.hpp>

namespace MDKV_NAMESPACE::gpu::kernels
{

template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::sum_pieces<backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::widen_leverages<backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::weigh_surroundings<backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::balance_rows<backend>> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
