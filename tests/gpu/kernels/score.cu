#include <mdkv/gpu/score.cuh>

namespace MDKV_NAMESPACE::gpu::kernels
{

template <class T>
using score_queries = job_of_teams<mdkv::detail::score_queries<backend, T>>;

template __global__ void entry(__grid_constant__ score_queries<float> const);
template __global__ void entry(__grid_constant__ score_queries<half> const);
template __global__ void entry(__grid_constant__ score_queries<bfloat16> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::score_bases<backend>> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::score_channels<half, half, backend>> const);
template __global__ void entry(__grid_constant__ score_panels<float> const);
template __global__ void entry(__grid_constant__ score_panels<half> const);
template __global__ void entry(__grid_constant__ score_panels<bfloat16> const);
template __global__ void entry(__grid_constant__ score_sums<float> const);
template __global__ void entry(__grid_constant__ score_sums<half> const);
template __global__ void entry(__grid_constant__ score_sums<bfloat16> const);
template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::score_join<backend>> const);
template __global__ void entry(__grid_constant__ score_losses<float> const);
template __global__ void entry(__grid_constant__ score_losses<half> const);
template __global__ void entry(__grid_constant__ score_losses<bfloat16> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
