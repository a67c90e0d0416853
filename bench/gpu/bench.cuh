/// \file bench.cuh: what the GPU benchmarks share: device memory, calls that are recorded or enqueued, and main
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/error.cuh>
#include <mdkv/gpu/memory.cuh>

#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include <cuda_runtime_api.h>

#include "record.hpp"

namespace bench
{

namespace gpu = mdkv::gpu;
using gpu::expects_success;
using mdkv::index_t;

/// The one stream of a benchmark; it lives as long as the process.
[[nodiscard]] inline cudaStream_t stream()
{
    static cudaStream_t const made = [] {
        cudaStream_t fresh = nullptr;
        expects_success(cudaStreamCreateWithFlags(&fresh, cudaStreamNonBlocking), "cudaStreamCreate");
        return fresh;
    }();
    return made;
}

[[nodiscard]] inline gpu::pool_resource& memory()
{
    static gpu::pool_resource resource;
    return resource;
}

/// Enqueues a kernel of the benchmark's own.
template <class Kernel>
void launch(Kernel const& kernel, index_t blocks)
{
    gpu::launch(gpu::backend{stream(), nullptr}, kernel, blocks);
}

template <class T>
class device_array
{
public:
    device_array() noexcept = default;
    explicit device_array(index_t count)
        : bytes_{mdkv::checked_multiply(count, index_t{sizeof(T)}), {stream(), &memory()}}
    {}

    [[nodiscard]] T* data() const noexcept { return reinterpret_cast<T*>(bytes_.data()); }
    [[nodiscard]] index_t size() const noexcept { return bytes_.size() / index_t{sizeof(T)}; }
    [[nodiscard]] index_t bytes() const noexcept { return bytes_.size(); }

private:
    gpu::device_bytes<gpu::pool_resource> bytes_;
};

/// A copy of host values, there when this returns.
template <class T>
[[nodiscard]] device_array<T> to_device(std::vector<T> const& from)
{
    device_array<T> made{static_cast<index_t>(from.size())};
    gpu::copy(gpu::backend{stream(), nullptr}, from.data(), made.data(), made.bytes());
    return made;
}

/// The first object of an array, once all that was enqueued is done.
template <class T>
[[nodiscard]] T first_of(device_array<T> const& from)
{
    T value{};
    gpu::copy(gpu::backend{stream(), nullptr}, from.data(), &value, sizeof(T));
    return value;
}

/// Something to time: enqueues `calls` calls on the stream.
struct work
{
    std::function<void()> enqueue;
    index_t calls = 1;
};

/// What `record` enqueues, as a graph.
class graph
{
public:
    template <class Record>
    explicit graph(Record const& record)
    {
        expects_success(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
        record();
        cudaGraph_t recorded = nullptr;
        expects_success(cudaStreamEndCapture(stream(), &recorded), "cudaStreamEndCapture");
        cudaError_t const made = cudaGraphInstantiate(&ready_, recorded, 0);
        cudaGraphDestroy(recorded);
        expects_success(made, "cudaGraphInstantiate");
    }
    ~graph() { cudaGraphExecDestroy(ready_); }
    graph(graph const&)            = delete;
    graph& operator=(graph const&) = delete;

    void launch() const { expects_success(cudaGraphLaunch(ready_, stream()), "cudaGraphLaunch"); }

private:
    cudaGraphExec_t ready_ = nullptr;
};

/// `calls` times call(on, i), one after another as in an engine's step, in one graph; they share scratch, which has grown before.
/// What the call refers to must outlive the work.
template <class Call>
[[nodiscard]] work recorded(index_t calls, Call const& call)
{
    auto const scratch = std::make_shared<mdkv::workspace>(gpu::stream_memory<gpu::pool_resource>{stream(), &memory()});
    gpu::backend const on{stream(), scratch.get()};
    call(on, index_t{0});
    auto const made = std::make_shared<graph>([&] {
        for (index_t i = 0; i < calls; ++i) { call(on, i); }
    });
    return {[scratch, made] { made->launch(); }, calls};
}

/// Calls the library once, outside a graph.
template <class Call>
void enqueue(Call const& call)
{
    mdkv::workspace scratch{gpu::stream_memory<gpu::pool_resource>{stream(), &memory()}};
    call(gpu::backend{stream(), &scratch});
}

/// `gpu_<bench> [--json FILE]`. Exit status 0: measured; 1: something failed; 2: asked for something else.
template <class Body>
int run(int count, char** arguments, Body const& body)
{
    bool const json = count == 3 && std::string_view{arguments[1]} == "--json";
    if (count != 1 && !json)
    {
        std::fprintf(stderr, "usage: %s [--json FILE]\n", arguments[0]);
        return 2;
    }
    try
    {
        expects_success(cudaSetDevice(0), "cudaSetDevice");
        record results;
        body(results);
        if (json) { results.write(arguments[2]); }
    }
    catch (std::exception const& e)
    {
        std::fprintf(stderr, "%s: %s\n", arguments[0], e.what());
        return 1;
    }
    return 0;
}

} // namespace bench
