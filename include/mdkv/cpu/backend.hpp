/// \file backend.hpp: the CPU backend: whose threads to use, where scratch memory lies, and how it runs jobs: every item is one thread's.
#pragma once

#include <mdkv/core/float_environment.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/team.hpp>
#include <mdkv/detail/team.hpp>

#include <cstddef>
#include <cstring>
#include <type_traits>

namespace MDKV_NAMESPACE::cpu
{

/// Passed first to every stage. Serial and without scratch by default.
struct backend
{
    static constexpr space memory_space = space::host;

    workspace* scratch = nullptr;
    executor_ref executor{};

    /// Workers, each with scratch memory of its own, of a loop over `count` items.
    [[nodiscard]] index_t workers(index_t count) const noexcept
    {
        index_t const threads = executor.threads() < count ? executor.threads() : count;
        return threads > 1 ? threads : 1;
    }

    /// Calls `body(i, worker)` for every i in [0, count); no two calls with the same worker run at once. Which worker serves
    /// which i may vary between runs, so a body must not let results depend on it. Bodies run in the floating-point
    /// environment of core/float_environment.hpp.
    template <class Body>
    void for_each(index_t count, Body const& body) const
    {
        index_t const all  = workers(count);
        index_t const some = count / (32 * all) + 1; // items taken at once: small neighbours share cache lines
        index_t next       = 0;                      // (std::atomic's header takes longer to compile than all of this)
        executor.parallel_for(all, [&](index_t worker) {
            float_environment const standard;
            for (index_t i; (i = __atomic_fetch_add(&next, some, __ATOMIC_RELAXED)) < count;)
            {
                for (index_t const end = count - i < some ? count : i + some; i < end; ++i) { body(i, worker); }
            }
        });
    }
};

/// A job of any type, so that its start is compiled once.
struct any_job
{
    char const* name;
    index_t scratch_bytes; ///< scratch of a team
    void (*call)(void const* job, std::byte* scratch, index_t item);
    void const* job;
};

/// The start of any job: its items on the backend's threads, with scratch of a team for each thread.
MDKV_OUTLINE inline void run(backend const& on, any_job const& job, index_t items)
{
    constexpr auto line = static_cast<index_t>(workspace::alignment);
    index_t const bytes = (job.scratch_bytes + line - 1) / line * line;
    workspace::frame frame{*on.scratch, job.name};
    std::byte* const memory = frame.take<std::byte>(on.workers(items) * bytes);
    if (!frame.ready()) { return; }
    on.for_each(items, [&](index_t item, index_t worker) { job.call(job.job, memory + worker * bytes, item); });
}

/// Calls job(team, item) for every item, on the backend's threads, and returns when all are done. In a dry run it only
/// counts the scratch memory.
/// \throws insufficient_workspace   naming the job and the size needed
template <class Job>
void run(backend const& on, Job const& job, index_t items)
{
    auto const call = [](void const* any, std::byte* scratch, index_t item) {
        (*static_cast<Job const*>(any))(team{scratch}, item);
    };
    run(on, any_job{Job::name, mdkv::detail::scratch_bytes_of(job), call, &job}, items);
}

/// Copies n objects of the backend's memory to the host's. Does nothing in a dry run.
template <class V>
void fetch(backend const& on, V const* from, V* to, index_t n)
{
    static_assert(std::is_trivially_copyable_v<V>);
    if (on.scratch->counting() || n == 0) { return; }
    std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(V));
}

} // namespace MDKV_NAMESPACE::cpu
