/// \file backend.cuh: the CUDA backend: its stream and scratch memory, and the one way a kernel is started, how jobs run, one block an item, and the one way bytes go between host and device.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/error.cuh>
#include <mdkv/gpu/team.cuh>

#include <type_traits>

#include <cuda_runtime_api.h>

namespace MDKV_NAMESPACE::gpu
{

/// Passed first to every stage. A stage enqueues its kernels on `stream` and returns: views and scratch, all of them device
/// memory, must live until the stream has reached the end of that work. Nothing waits for the device, nothing depends on the
/// device's data, and nothing is allocated once the workspace has grown, so that every call that was made before can be
/// recorded into a CUDA graph.
struct backend
{
    static constexpr space memory_space = space::device;

    cudaStream_t stream = nullptr;
    workspace* scratch  = nullptr; ///< over device memory; its addresses are only computed with
};

namespace kernels
{

/// Blocks that a kernel is planned to have on a multiprocessor at once; the compiler must leave registers for them.
template <class Kernel>
[[nodiscard]] constexpr int planned_blocks()
{
    if constexpr (requires { Kernel::blocks_per_multiprocessor; }) { return Kernel::blocks_per_multiprocessor; }
    else { return 1; }
}

/// Every kernel is an object that is copied to the device and called by every thread. __grid_constant__ avoids a copy of it for
/// every thread.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::threads, planned_blocks<Kernel>())
    entry(__grid_constant__ Kernel const kernel)
{
    kernel();
}

/// A job as a kernel.
template <class Job>
struct job_of_teams
{
    static constexpr char const* name = Job::name;
    static constexpr int threads      = mdkv::detail::threads_of<Job>();

    Job job;

    [[nodiscard]] index_t shared_bytes() const { return mdkv::detail::scratch_bytes_of(job); }
    __device__ void operator()() const { job(team<threads>{}, device::block()); }
};

} // namespace kernels

/// Makes the stream's device the thread's current one as long as it lives: CUDA starts kernels on the current device alone. A
/// stream that is being captured must be of the current device: it does not tell its own, and to ask would end the capture.
class device_of
{
public:
    explicit device_of(cudaStream_t stream)
    {
        expects_success(cudaGetDevice(&before_), "device_of");
        number_ = before_;
#if CUDART_VERSION >= 12080 // older ones cannot tell: the stream must be of the current device
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        if (stream != nullptr) { expects_success(cudaStreamIsCapturing(stream, &status), "device_of"); }
        if (stream != nullptr && status == cudaStreamCaptureStatusNone)
        {
            expects_success(cudaStreamGetDevice(stream, &number_), "device_of");
        }
#endif
        if (number_ != before_) { expects_success(cudaSetDevice(number_), "device_of"); }
    }
    device_of(device_of const&)            = delete;
    device_of& operator=(device_of const&) = delete;
    ~device_of()
    {
        if (number_ != before_) { static_cast<void>(cudaSetDevice(before_)); }
    }

    [[nodiscard]] int number() const noexcept { return number_; }

private:
    int before_ = 0;
    int number_ = 0;
};

/// Bytes of shared memory that the device of a backend's stream gives a block at most, a kernel's static memory included.
[[nodiscard]] inline int most_shared_memory(backend const& on = {})
{
    int bytes = 0;
    expects_success(
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_of{on.stream}.number()),
        "most_shared_memory");
    return bytes;
}

/// The most dynamic shared memory of a kernel on each device, 0 until it was requested there: a cache that no result
/// depends on. Every source has its own, because nvcc gives every source its own kernel.
template <class Kernel>
static int granted_shared_memory[16];

/// Requests from CUDA, once for each kernel and device, all the dynamic shared memory that a block can have, and returns its bytes.
template <class Kernel>
int grant_shared_memory(backend const& on, int device)
{
    bool const known = device < 16;
    int* const kept  = granted_shared_memory<Kernel> + (known ? device : 0);
    int most         = known ? __atomic_load_n(kept, __ATOMIC_RELAXED) : 0;
    if (most > 0) { return most; }
    cudaFuncAttributes compiled{};
    expects_success(cudaFuncGetAttributes(&compiled, kernels::entry<Kernel>), Kernel::name);
    most = most_shared_memory(on) - static_cast<int>(compiled.sharedSizeBytes);
    expects_success(
        cudaFuncSetAttribute(kernels::entry<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, most), Kernel::name);
    if (known) { __atomic_store_n(kept, most, __ATOMIC_RELAXED); }
    return most;
}

/// The shared memory that a block of a kernel asks for: what its `shared_bytes` says or its `carve` takes, 0 if it has neither.
template <class Kernel>
[[nodiscard]] index_t shared_bytes(Kernel const& kernel)
{
    mdkv::detail::carver counting;
    if constexpr (requires { kernel.shared_bytes(); }) { return kernel.shared_bytes(); }
    else if constexpr (requires { kernel.carve(counting); }) { static_cast<void>(kernel.carve(counting)); }
    return counting.bytes();
}

/// Enqueues `blocks` blocks of Kernel::threads threads, or nothing if `blocks` is 0.
/// Kernel::blocks_per_multiprocessor, how many are to run at once, is optional.
/// \throws invalid_argument   a block needs more shared memory than the device gives it
/// \throws cuda_error         the start failed
template <class Kernel>
void launch(backend const& on, Kernel const& kernel, index_t blocks)
{
    static_assert(Kernel::threads % device::warp_size == 0 && Kernel::threads <= 1024,
        "launch: Kernel::threads must be a multiple of a warp and at most 1024");
    if (blocks <= 0) { return; }
    expects(blocks <= INT32_MAX, Kernel::name, ": ", blocks, " blocks are more than a grid may have");
    index_t const shared = shared_bytes(kernel);
    device_of const device{on.stream};
    constexpr index_t always_granted = 40 * 1024; // 48 KB less a kernel's static memory
    if (shared > always_granted)
    {
        index_t const most = grant_shared_memory<Kernel>(on, device.number());
        expects(shared <= most, Kernel::name, ": a block needs ", shared, " bytes of shared memory; this GPU gives it ",
            most);
    }
    // Not by <<<>>>: its error is the thread's last error, which may come from an earlier call.
    void* arguments[] = {const_cast<Kernel*>(&kernel)};
    expects_success(cudaLaunchKernel(kernels::entry<Kernel>, dim3(static_cast<unsigned>(blocks)), dim3(Kernel::threads),
                        arguments, static_cast<std::size_t>(shared), on.stream),
        Kernel::name);
}

/// Copies `bytes` between host and device, after all work enqueued before, and waits for both.
/// \throws cuda_error   the copy failed, or something before it did
inline void copy(backend const& on, void const* from, void* to, index_t bytes)
{
    if (bytes > 0)
    {
        expects_success(
            cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, on.stream), "copy");
    }
    expects_success(cudaStreamSynchronize(on.stream), "copy");
}

/// Enqueues one block for every item.
/// \throws invalid_argument   the job needs more shared memory than the device gives a block
/// \throws cuda_error         the start failed
template <class Job>
void run(backend const& on, Job const& job, index_t items)
{
    launch(on, kernels::job_of_teams<Job>{job}, items);
}

/// Copies n objects to the host and waits for them and for all work enqueued before.
/// \throws cuda_error   the copy failed, or work before it did
template <class V>
void fetch(backend const& on, V const* from, V* to, index_t n)
{
    static_assert(std::is_trivially_copyable_v<V>);
    copy(on, from, to, n * index_t{sizeof(V)});
}

} // namespace MDKV_NAMESPACE::gpu
