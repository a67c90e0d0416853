#include <mdkv/compress.hpp>
#include <mdkv/gpu/backend.cuh>

#include <cstdint>

namespace MDKV_NAMESPACE::gpu::kernels
{

template __global__ void entry(__grid_constant__ job_of_teams<mdkv::detail::copy_rows<backend, std::uint8_t>> const);

} // namespace MDKV_NAMESPACE::gpu::kernels
