#include <mdkv/compress.hpp>
#include <mdkv/gpu/backend.cuh>

namespace mdkv::inline MDKV_MACHINE::gpu::kernels
{

template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::hand_over<space::device>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::report_whole<space::device>> const);

} // namespace mdkv::inline MDKV_MACHINE::gpu::kernels
