#include <mdkv/gpu/recompress.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(__grid_constant__ stored_rungs const);
template __global__ void entry(__grid_constant__ mask_losses const);
template __global__ void entry(__grid_constant__ count_kept const);
template __global__ void entry(__grid_constant__ list_sources const);
template __global__ void entry(__grid_constant__ stored_projections<float> const);
template __global__ void entry(__grid_constant__ stored_projections<half> const);
template __global__ void entry(__grid_constant__ stored_projections<bfloat16> const);
template __global__ void entry(__grid_constant__ read_tokens<float> const);
template __global__ void entry(__grid_constant__ read_tokens<half> const);
template __global__ void entry(__grid_constant__ read_tokens<bfloat16> const);
template __global__ void entry(__grid_constant__ copy_stored<float> const);
template __global__ void entry(__grid_constant__ copy_stored<half> const);
template __global__ void entry(__grid_constant__ copy_stored<bfloat16> const);

} // namespace mdkv::gpu::kernels
