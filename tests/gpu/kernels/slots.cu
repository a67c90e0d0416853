#include <mdkv/gpu/slots.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(__grid_constant__ count_rungs const);
template __global__ void entry(__grid_constant__ scan_rungs const);
template __global__ void entry(__grid_constant__ list_rungs const);

} // namespace mdkv::gpu::kernels
