#include <mdkv/gpu/attend.cuh>

namespace MDKV_NAMESPACE::gpu::kernels
{

template __global__ void entry(__grid_constant__ attend_slice<float, float, 128, 1> const);
template __global__ void entry(__grid_constant__ attend_slice<half, half, 64, 1> const);
template __global__ void entry(__grid_constant__ attend_slice<half, half, 128, 1> const);
template __global__ void entry(__grid_constant__ attend_slice<half, half, 256, 1> const);
template __global__ void entry(__grid_constant__ attend_slice<half, float, 128, 1> const);
template __global__ void entry(__grid_constant__ attend_slice<bfloat16, bfloat16, 128, 1> const);
template __global__ void entry(__grid_constant__ attend_merge<float, float, 128, 1> const);
template __global__ void entry(__grid_constant__ attend_merge<half, half, 128, 1> const);
template __global__ void entry(__grid_constant__ attend_merge<half, float, 64, 1> const);
template __global__ void entry(__grid_constant__ attend_merge<bfloat16, bfloat16, 256, 1> const);
template __global__ void entry(__grid_constant__ attend_slice<half, half, 128, attend_most_sequences> const);
template __global__ void entry(__grid_constant__ attend_slice<bfloat16, bfloat16, 64, attend_most_sequences> const);
template __global__ void entry(__grid_constant__ attend_merge<half, half, 128, attend_most_sequences> const);
template __global__ void entry(__grid_constant__ attend_merge<bfloat16, bfloat16, 64, attend_most_sequences> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
