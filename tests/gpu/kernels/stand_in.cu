#include <mdkv/gpu/backend.cuh>
#include <mdkv/replay/stand_in.hpp>

namespace MDKV_NAMESPACE::gpu::kernels
{

template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::choose_seeds<backend, float>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::choose_seeds<backend, half>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::choose_seeds<backend, bfloat16>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::scale_queries<backend, float>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::scale_queries<backend, half>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::scale_queries<backend, bfloat16>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::attend_dropped<backend, float>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::attend_dropped<backend, half>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::attend_dropped<backend, bfloat16>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::mean_of_cluster<backend, float>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::mean_of_cluster<backend, half>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::mean_of_cluster<backend, bfloat16>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::place_stand_in<backend>> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
