#include <mdkv/engine/slots.hpp>
#include <mdkv/gpu/backend.cuh>

namespace MDKV_NAMESPACE::gpu::kernels
{

template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::sort_slots<backend>> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
