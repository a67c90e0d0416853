#include <mdkv/gpu/merge.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(merge_rows<float>);
template __global__ void entry(merge_rows<half>);
template __global__ void entry(merge_rows<bfloat16>);

} // namespace mdkv::gpu::kernels
