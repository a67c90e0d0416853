/// \file backend.hpp: the CPU backend: whose threads to use, where scratch memory lies, and how it runs jobs: every item is one thread's.
#pragma once

#include <mdkv/core/float_environment.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/team.hpp>
#include <mdkv/detail/team.hpp>

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
    void for_each(index_t count, auto const& body) const
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
    index_t scratch_bytes; ///< scratch of a team, in whole cache lines
    void (*call)(void const* job, std::byte* scratch, index_t item);
    void const* job;

    template <class Job>
    any_job(Job const& given) // NOLINT: every job is one
        : scratch_bytes{(mdkv::detail::scratch_bytes_of(given) + line - 1) / line * line}
        , call{[](void const* any, std::byte* scratch, index_t item) {
            (*static_cast<Job const*>(any))(team{scratch}, item);
        }}
        , job{&given}
    {}

private:
    static constexpr auto line = static_cast<index_t>(workspace::alignment);
};

/// Calls job(team, item) for every item, on the backend's threads, each with scratch of a team, and returns when all are done.
MDKV_OUTLINE inline void run(backend const& on, any_job const& job, index_t items)
{
    workspace::frame frame{on.scratch};
    std::byte* const memory = frame.take<std::byte>(on.workers(items) * job.scratch_bytes);
    on.for_each(
        items, [&](index_t item, index_t worker) { job.call(job.job, memory + worker * job.scratch_bytes, item); });
}

/// Takes the scratch of a run and gives it back: the run itself finds its memory then.
inline void reserve(backend const& on, any_job const& job, index_t items)
{
    static_cast<void>(workspace::frame{on.scratch}.take<std::byte>(on.workers(items) * job.scratch_bytes));
}

/// Copies `bytes` between the host's memory and the backend's.
inline void copy(backend const&, void const* from, void* to, index_t bytes)
{
    if (bytes > 0) { std::memcpy(to, from, static_cast<std::size_t>(bytes)); }
}

/// Copies n objects of the backend's memory to the host's.
template <class V>
void fetch(backend const& on, V const* from, V* to, index_t n)
{
    static_assert(std::is_trivially_copyable_v<V>);
    copy(on, from, to, n * index_t{sizeof(V)});
}

} // namespace MDKV_NAMESPACE::cpu
