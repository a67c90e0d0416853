/// \file backend.cuh: the CUDA backend: its stream and scratch memory, and how it runs jobs, one block an item, enqueued on the stream.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/team.cuh>

#include <type_traits>

#include <driver_types.h>

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

/// A job as a kernel.
template <class Job>
struct job_of_teams
{
    static constexpr char const* name = Job::name;
    static constexpr int threads      = mdkv::detail::threads_of<Job>();

    Job job;

    [[nodiscard]] index_t shared_bytes() const
    {
        return team<threads>::reserved_bytes + mdkv::detail::scratch_bytes_of(job);
    }
    __device__ void operator()() const { job(team<threads>{}, device::block()); }
};

} // namespace kernels

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

#include <mdkv/gpu/launch.cuh>
