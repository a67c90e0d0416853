#include <mdkv/gpu/slots.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(count_rungs);
template __global__ void entry(scan_rungs);
template __global__ void entry(list_rungs);

} // namespace mdkv::gpu::kernels
