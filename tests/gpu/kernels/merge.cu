#include <mdkv/gpu/merge.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(__grid_constant__ merge_rows<float> const);
template __global__ void entry(__grid_constant__ merge_rows<half> const);
template __global__ void entry(__grid_constant__ merge_rows<bfloat16> const);

} // namespace mdkv::gpu::kernels
