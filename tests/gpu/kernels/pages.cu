#include <mdkv/gpu/pages.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(gather_page_rows<float>);
template __global__ void entry(gather_page_rows<half>);
template __global__ void entry(gather_page_rows<bfloat16>);

} // namespace mdkv::gpu::kernels
