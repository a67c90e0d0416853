#include <mdkv/gpu/backend.cuh>

#include "../../support/counting_job.hpp"

namespace MDKV_NAMESPACE::gpu::kernels
{

template __global__ void entry(__grid_constant__ job_of_teams<support::count_bytes> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::fill<std::uint8_t>> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
