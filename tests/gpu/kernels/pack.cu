#include <mdkv/gpu/pack.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(__grid_constant__ lay_out_heads<float> const);
template __global__ void entry(__grid_constant__ lay_out_heads<half> const);
template __global__ void entry(__grid_constant__ lay_out_heads<bfloat16> const);
template __global__ void entry(__grid_constant__ pack_projections<float> const);
template __global__ void entry(__grid_constant__ pack_projections<half> const);
template __global__ void entry(__grid_constant__ pack_projections<bfloat16> const);
template __global__ void entry(__grid_constant__ pack_coordinates<float> const);
template __global__ void entry(__grid_constant__ pack_coordinates<half> const);
template __global__ void entry(__grid_constant__ pack_coordinates<bfloat16> const);
template __global__ void entry(__grid_constant__ pack_exact<float> const);
template __global__ void entry(__grid_constant__ pack_exact<half> const);
template __global__ void entry(__grid_constant__ pack_exact<bfloat16> const);

} // namespace mdkv::gpu::kernels
