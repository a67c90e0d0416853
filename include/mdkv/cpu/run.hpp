/// \file run.hpp: run and fetch on the CPU: every item of a job is one thread's, with scratch memory out of the caller's workspace.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/width.hpp>
#include <mdkv/detail/team.hpp>

#include <concepts>
#include <cstddef>
#include <cstring>
#include <type_traits>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH
{

/// One thread. (MDKV_HD, because jobs are; a GPU never runs one with this team.)
class team
{
public:
    static constexpr int lanes = 16;

    MDKV_HD explicit team(std::byte* memory) noexcept
        : memory_{memory}
    {}

    [[nodiscard]] MDKV_HD static constexpr index_t rank() noexcept { return 0; }
    [[nodiscard]] MDKV_HD static constexpr index_t size() noexcept { return 1; }
    MDKV_HD static constexpr void sync() noexcept {}

    template <class V>
    [[nodiscard]] MDKV_HD static constexpr V sum(V x) noexcept
    {
        return x;
    }
    template <class V>
    [[nodiscard]] MDKV_HD static constexpr V max(V x) noexcept
    {
        return x;
    }
    template <class V>
    [[nodiscard]] MDKV_HD static constexpr mdkv::detail::prefix_sum<V> prefix(V x) noexcept
    {
        return {V{}, x};
    }

    template <std::integral I>
    MDKV_HD static constexpr void add(I* counter, I n) noexcept
    {
        *counter = static_cast<I>(*counter + n);
    }
    template <std::integral I>
    MDKV_HD static void add_across(I* counter, I n) noexcept
    {
#if !defined(__CUDA_ARCH__)
        __atomic_fetch_add(counter, n, __ATOMIC_RELAXED);
#endif
    }
    template <std::integral I>
    MDKV_HD static void min_across(I* least, I n) noexcept
    {
#if !defined(__CUDA_ARCH__)
        I seen = __atomic_load_n(least, __ATOMIC_RELAXED);
        while (n < seen && !__atomic_compare_exchange_n(least, &seen, n, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
#endif
    }

    [[nodiscard]] MDKV_HD mdkv::detail::carver scratch() const noexcept { return mdkv::detail::carver{memory_}; }

private:
    std::byte* memory_;
};

/// A job of any type, so that what starts it is compiled once.
struct any_job
{
    char const* name;
    index_t scratch_bytes; // of a team
    void (*call)(void const* job, std::byte* scratch, index_t item);
    void const* job;
};

MDKV_OUTLINE inline void run(backend const& on, any_job const& job, index_t items)
{
    constexpr auto line = static_cast<index_t>(workspace::alignment);
    index_t const bytes = (job.scratch_bytes + line - 1) / line * line;
    workspace::frame frame{*on.scratch, job.name};
    std::byte* const memory = frame.take<std::byte>(on.slots(items) * bytes);
    if (!frame.ready()) { return; }
    on.for_each(items, [&](index_t item, index_t slot) { job.call(job.job, memory + slot * bytes, item); });
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

/// Copies n objects of the backend's memory to the host's. Nothing in a dry run.
template <class V>
void fetch(backend const& on, V const* from, V* to, index_t n)
{
    static_assert(std::is_trivially_copyable_v<V>);
    if (on.scratch->counting() || n == 0) { return; }
    std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(V));
}

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH
