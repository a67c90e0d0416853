#include <mdkv/gpu/basis.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(__grid_constant__ gram_products<float> const);
template __global__ void entry(__grid_constant__ gram_products<half> const);
template __global__ void entry(__grid_constant__ gram_products<bfloat16> const);
template __global__ void entry(__grid_constant__ gram_of_parts const);
template __global__ void entry(__grid_constant__ symmetric_eigen<0> const);
template __global__ void entry(__grid_constant__ symmetric_eigen<1> const);
template __global__ void entry(__grid_constant__ symmetric_eigen<2> const);
template __global__ void entry(__grid_constant__ clear_doubles const);
template __global__ void entry(__grid_constant__ query_scales const);
template __global__ void entry(__grid_constant__ scale_energies const);
template __global__ void entry(__grid_constant__ weighted_products<float, double> const);
template __global__ void entry(__grid_constant__ weighted_products<double, double> const);
template __global__ void entry(__grid_constant__ weighted_products<float, float> const);

} // namespace mdkv::gpu::kernels
