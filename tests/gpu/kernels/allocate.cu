#include <mdkv/gpu/backend.cuh>
#include <mdkv/stages/allocate.hpp>

namespace MDKV_NAMESPACE::gpu::kernels
{

namespace dual = mdkv::detail::dual;

template __global__ void entry(__grid_constant__ job_of_teams<dual::begin> const);
template __global__ void entry(__grid_constant__ job_of_teams<dual::weigh_sets> const);
template __global__ void entry(__grid_constant__ job_of_teams<dual::curves> const);
template __global__ void entry(__grid_constant__ job_of_teams<dual::choose> const);
template __global__ void entry(__grid_constant__ job_of_teams<dual::weigh> const);
template __global__ void entry(__grid_constant__ job_of_teams<dual::narrow> const);
template __global__ void entry(__grid_constant__ job_of_teams<dual::weigh_ties> const);
template __global__ void entry(__grid_constant__ job_of_teams<dual::find_tie> const);
template __global__ void entry(__grid_constant__ job_of_teams<dual::assign> const);
template __global__ void entry(__grid_constant__ job_of_teams<dual::conclude> const);
template __global__ void entry(__grid_constant__ job_of_teams<dual::copy_best> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
