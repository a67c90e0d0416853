#include <mdkv/engine/slots.hpp>
#include <mdkv/gpu/backend.cuh>

namespace mdkv::inline MDKV_MACHINE::gpu::kernels
{

template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::sort_slots<backend>> const);

} // namespace mdkv::inline MDKV_MACHINE::gpu::kernels
