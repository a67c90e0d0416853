#include <mdkv/gpu/backend.cuh>
#include <mdkv/replay/refit.hpp>

namespace MDKV_NAMESPACE::gpu::kernels
{

template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::attend_rows<backend, float, float>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::attend_rows<backend, half, half>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::attend_rows<backend, half, float>> const);
template __global__ void entry(
    __grid_constant__ job_of_teams<mdkv::detail::attend_rows<backend, bfloat16, bfloat16>> const);
template __global__ void entry(
    __grid_constant__ job_of_teams<mdkv::detail::attend_rows<backend, bfloat16, float>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::scale_rows<backend, float>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::scale_rows<backend, half>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::scale_rows<backend, bfloat16>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::weigh_stored<backend, float>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::weigh_stored<backend, half>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::weigh_stored<backend, bfloat16>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::change_values<backend, float>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::change_values<backend, half>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::change_values<backend, bfloat16>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::miss_rows<backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::multiply_weights<backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::solve_weights<backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::find_changes<backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::judge_changes<backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::count_fitted<backend>> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
