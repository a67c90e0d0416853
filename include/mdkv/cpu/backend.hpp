/// \file backend.hpp: the CPU backend: whose threads to use and where scratch memory lies.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/width.hpp>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH
{

/// Passed first to every stage. Serial, and without scratch, unless told otherwise.
struct backend
{
    static constexpr space memory_space = space::host;

    workspace* scratch = nullptr;
    executor_ref executor{};

    /// Parts that scratch memory is cut into for a loop over `count` pieces of work.
    [[nodiscard]] index_t slots(index_t count) const noexcept
    {
        index_t const threads = executor.threads() < count ? executor.threads() : count;
        return threads > 1 ? threads : 1;
    }

    /// Calls `body(i, slot)` for every i in [0, count); no two calls with the same slot run at once. Which slot serves
    /// which i may vary between runs, so a body must not let results depend on it.
    template <class Body>
    void for_each(index_t count, Body const& body) const
    {
        index_t const parts = slots(count);
        index_t next        = 0; // (std::atomic's header takes longer to compile than all of this)
        executor.parallel_for(parts, [&](index_t slot) {
            for (index_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < count;) { body(i, slot); }
        });
    }
};

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH
