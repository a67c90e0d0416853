#include <mdkv/engine/unpack.hpp>
#include <mdkv/gpu/backend.cuh>

namespace MDKV_NAMESPACE::gpu::kernels
{

// read_projections and read_tokens: recompress.cu
constexpr space there = space::device;

template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::count_rows<float, there>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::count_rows<half, there>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::count_rows<bfloat16, there>> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
