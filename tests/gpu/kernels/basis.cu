#include <mdkv/gpu/basis.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(gram_products<float>);
template __global__ void entry(gram_products<half>);
template __global__ void entry(gram_products<bfloat16>);
template __global__ void entry(gram_of_parts);
template __global__ void entry(symmetric_eigen<0>);
template __global__ void entry(symmetric_eigen<1>);
template __global__ void entry(symmetric_eigen<2>);
template __global__ void entry(clear_doubles);
template __global__ void entry(query_scales);
template __global__ void entry(scale_energies);
template __global__ void entry(weighted_products<float, double>);
template __global__ void entry(weighted_products<double, double>);
template __global__ void entry(weighted_products<float, float>);

} // namespace mdkv::gpu::kernels
