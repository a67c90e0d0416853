#include <mdkv/gpu/compress.cuh>

namespace mdkv::gpu::kernels
{

template __global__ void entry(__grid_constant__ fill<std::uint8_t> const);
template __global__ void entry(__grid_constant__ fill<index_t> const);
template __global__ void entry(__grid_constant__ hand_over const);
template __global__ void entry(__grid_constant__ report_whole const);

} // namespace mdkv::gpu::kernels
