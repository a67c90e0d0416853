/// \file device_memory.hpp: a real GPU's memory, and a call recorded into a graph before it runs
#pragma once

#include <mdkv/gpu/backend.cuh>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

namespace support
{

/// nvcc fuses products with sums.
inline constexpr bool rounds_like_host = false;

class device_memory
{
public:
    /// A copy of `bytes`, `shift` bytes past a multiple of 64.
    device_memory(std::vector<std::byte> const& bytes, std::size_t shift)
        : shift_{shift}
        , size_{bytes.size()}
    {
        mdkv::gpu::expects_success(cudaMalloc(reinterpret_cast<void**>(&memory_), size_ + shift + 1), "cudaMalloc");
        if (size_ > 0)
        {
            mdkv::gpu::expects_success(cudaMemcpy(data(), bytes.data(), size_, cudaMemcpyHostToDevice), "cudaMemcpy");
            // The copy out of pageable memory may still be on its way, and other streams do not wait for this one.
            mdkv::gpu::expects_success(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
        }
    }
    /// Poisoned; as it comes where a tool looks for reads of what nobody wrote (MDKV_TEST_LEAVE_SCRATCH set).
    [[nodiscard]] static device_memory scratch(std::size_t size)
    {
        char const* const leave = std::getenv("MDKV_TEST_LEAVE_SCRATCH");
        if (leave == nullptr || *leave == '\0') { return {std::vector<std::byte>(size, std::byte{0xFF}), 0}; }
        device_memory made{{}, 0};
        cudaFree(std::exchange(made.memory_, nullptr));
        mdkv::gpu::expects_success(cudaMalloc(reinterpret_cast<void**>(&made.memory_), size + 1), "cudaMalloc");
        made.size_ = size;
        return made;
    }
    ~device_memory() { cudaFree(memory_); }
    device_memory(device_memory&& other) noexcept
        : memory_{std::exchange(other.memory_, nullptr)}
        , shift_{other.shift_}
        , size_{other.size_}
    {}
    device_memory& operator=(device_memory&& other) noexcept
    {
        std::swap(memory_, other.memory_);
        std::swap(shift_, other.shift_);
        std::swap(size_, other.size_);
        return *this;
    }

    [[nodiscard]] std::byte* data() const { return memory_ + shift_; }
    [[nodiscard]] std::vector<std::byte> host() const
    {
        std::vector<std::byte> bytes(size_);
        mdkv::gpu::expects_success(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        if (size_ > 0)
        {
            mdkv::gpu::expects_success(cudaMemcpy(bytes.data(), data(), size_, cudaMemcpyDeviceToHost), "cudaMemcpy");
        }
        return bytes;
    }

private:
    std::byte* memory_ = nullptr;
    std::size_t shift_;
    std::size_t size_;
};

/// For one call.
class own_stream
{
public:
    own_stream()
    {
        mdkv::gpu::expects_success(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    ~own_stream() { cudaStreamDestroy(stream_); }
    own_stream(own_stream const&)            = delete;
    own_stream& operator=(own_stream const&) = delete;

    [[nodiscard]] cudaStream_t get() const { return stream_; }

private:
    cudaStream_t stream_ = nullptr;
};

/// The call, recorded into a graph.
template <class Call>
cudaGraph_t recorded(cudaStream_t stream, cudaStreamCaptureMode mode, Call const& call)
{
    mdkv::gpu::expects_success(cudaStreamBeginCapture(stream, mode), "cudaStreamBeginCapture");
    cudaGraph_t graph = nullptr;
    try
    {
        call(stream);
    }
    catch (...)
    {
        cudaStreamEndCapture(stream, &graph);
        if (graph != nullptr) { cudaGraphDestroy(graph); }
        static_cast<void>(cudaGetLastError()); // of ending a recording that failed
        throw;
    }
    mdkv::gpu::expects_success(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    return graph;
}

/// Records the call into a graph, which fails where it waits, and again, which fails where it allocates, launches the second
/// graph and waits for it. Returns how many nodes it has: kernels that were started.
template <class Call>
std::uint64_t run_on_stream(Call const& call)
{
    own_stream const own;
    cudaStream_t const stream = own.get();
    mdkv::gpu::expects_success(
        cudaGraphDestroy(recorded(stream, cudaStreamCaptureModeRelaxed, call)), "cudaGraphDestroy");
    cudaGraph_t const graph = recorded(stream, cudaStreamCaptureModeGlobal, call);
    std::size_t nodes = 0;
    mdkv::gpu::expects_success(cudaGraphGetNodes(graph, nullptr, &nodes), "cudaGraphGetNodes");
    cudaGraphExec_t ready = nullptr;
    mdkv::gpu::expects_success(cudaGraphInstantiate(&ready, graph, 0), "cudaGraphInstantiate");
    mdkv::gpu::expects_success(cudaGraphLaunch(ready, stream), "cudaGraphLaunch");
    mdkv::gpu::expects_success(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    cudaGraphExecDestroy(ready);
    cudaGraphDestroy(graph);
    return nodes;
}

/// Without a graph: for what waits for the device itself.
template <class Call>
void run_on_stream_now(Call const& call)
{
    own_stream const own;
    call(own.get());
    mdkv::gpu::expects_success(cudaStreamSynchronize(own.get()), "cudaStreamSynchronize");
}

} // namespace support
