#include <mdkv/gpu/basis.cuh>

namespace MDKV_NAMESPACE::gpu::kernels
{

template __global__ void entry(__grid_constant__ gram_products<float> const);
template __global__ void entry(__grid_constant__ gram_products<half> const);
template __global__ void entry(__grid_constant__ gram_products<bfloat16> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::gram_of_splits<space::device>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::eigenvectors<space::device>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::fill<double>> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
