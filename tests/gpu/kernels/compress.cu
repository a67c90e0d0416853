#include <mdkv/gpu/compress.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(fill<std::uint8_t>);
template __global__ void entry(fill<index_t>);
template __global__ void entry(hand_over);
template __global__ void entry(report_whole);

} // namespace mdkv::gpu::kernels
