/// \file cuda_layers.cu: the CUDA backend of mdkv_run, for all element types
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/gpu/error.cuh>
#include <mdkv/gpu/memory.cuh>

#include <memory>
#include <string>

#include <cuda_runtime_api.h>

#include "cuda_layers.cuh"

namespace runner
{

namespace
{

/// Where a sequence's layers work: a stream of their own, and the device's pool.
class device_place
{
public:
    device_place()
    {
        mdkv::gpu::expects_success(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "--backend cuda");
    }
    ~device_place() { static_cast<void>(cudaStreamDestroy(stream_)); }
    device_place(device_place const&)            = delete;
    device_place& operator=(device_place const&) = delete;

protected:
    cudaStream_t stream_ = nullptr;
    mdkv::gpu::pool_resource memory_;
};

/// The place comes first among the bases, so that it goes last.
template <mdkv::element T>
class placed_layers final : device_place, public cuda_layers<T, mdkv::gpu::pool_resource>
{
public:
    placed_layers()
        : cuda_layers<T, mdkv::gpu::pool_resource>{stream_, memory_}
    {}
};

} // namespace

template <mdkv::element T>
std::unique_ptr<device_layers<T>> make_device_layers()
{
    int devices            = 0;
    cudaError_t const code = cudaGetDeviceCount(&devices);
    if (code != cudaSuccess || devices == 0)
    {
        throw mdkv::error{std::string{"--backend cuda: no GPU answers ("}
                          + cudaGetErrorString(code == cudaSuccess ? cudaErrorNoDevice : code)
                          + "); without one there is --backend cpu"};
    }
    return std::make_unique<placed_layers<T>>();
}

template std::unique_ptr<device_layers<float>> make_device_layers<float>();
template std::unique_ptr<device_layers<mdkv::half>> make_device_layers<mdkv::half>();

} // namespace runner
