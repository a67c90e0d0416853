#include <mdkv/gpu/pages.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(__grid_constant__ gather_page_rows<float> const);
template __global__ void entry(__grid_constant__ gather_page_rows<half> const);
template __global__ void entry(__grid_constant__ gather_page_rows<bfloat16> const);

} // namespace mdkv::gpu::kernels
