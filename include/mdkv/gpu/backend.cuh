/// \file backend.cuh: the CUDA backend, and how it runs jobs: every item is one block's, enqueued on the stream.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/detail/backend.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/launch.cuh>
#include <mdkv/gpu/team.cuh>

#include <type_traits>

namespace mdkv::inline MDKV_MACHINE::gpu
{

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

/// Enqueues one block for every item. Does nothing in a dry run.
/// \throws invalid_argument   the job needs more shared memory than the device gives a block
/// \throws cuda_error         the start failed
template <class Job>
void run(backend const& on, Job const& job, index_t items)
{
    if (on.scratch->counting()) { return; }
    launch(on, kernels::job_of_teams<Job>{job}, items);
}

/// Copies n objects to the host and waits for them and for all work enqueued before. Does nothing in a dry run.
/// \throws cuda_error   the copy failed, or work before it did
template <class V>
void fetch(backend const& on, V const* from, V* to, index_t n)
{
    static_assert(std::is_trivially_copyable_v<V>);
    if (on.scratch->counting()) { return; }
    copy(on, from, to, n * index_t{sizeof(V)});
}

} // namespace mdkv::inline MDKV_MACHINE::gpu
