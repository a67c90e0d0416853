#include <mdkv/gpu/pack.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(lay_out_heads<float>);
template __global__ void entry(lay_out_heads<half>);
template __global__ void entry(lay_out_heads<bfloat16>);
template __global__ void entry(pack_projections<float>);
template __global__ void entry(pack_projections<half>);
template __global__ void entry(pack_projections<bfloat16>);
template __global__ void entry(pack_coordinates<float>);
template __global__ void entry(pack_coordinates<half>);
template __global__ void entry(pack_coordinates<bfloat16>);
template __global__ void entry(pack_exact<float>);
template __global__ void entry(pack_exact<half>);
template __global__ void entry(pack_exact<bfloat16>);

} // namespace mdkv::gpu::kernels
