/// \file executor.hpp: how the CPU backend runs independent items: on threads that the caller lends it.
#pragma once

#include <mdkv/core/types.hpp>

#include <concepts>
#include <type_traits>

namespace MDKV_NAMESPACE::cpu
{

/// A non-owning reference to the caller's threads. The library never creates a thread: a default-made reference runs
/// everything in the calling thread. Anything with `parallel_for(index_t count, void (*task)(void*, index_t), void*)`
/// and `threads()` converts to it; `thread_pool.hpp` holds a ready-made one, and docs/integrate.md one over OpenMP.
///
/// An executor must call the task exactly once for every index, from any threads in any order, return after the last
/// has finished, and pass on the first exception. Results of the library do not depend on the number of threads.
class executor_ref
{
public:
    using task_function = void (*)(void* context, index_t index);

    /// Serial.
    executor_ref() noexcept = default;

    template <class Executor>
        requires(!std::same_as<std::remove_cv_t<Executor>, executor_ref>)
                    && requires(Executor& executor, task_function task) {
                           executor.parallel_for(index_t{}, task, nullptr);
                           {
                               executor.threads()
                           } -> std::convertible_to<int>;
                       }
    executor_ref(Executor& executor) noexcept
        : target_{&executor}
        , run_{[](void* target, index_t count, task_function task, void* context) {
            static_cast<Executor*>(target)->parallel_for(count, task, context);
        }}
        , threads_{executor.threads()}
    {}

    /// Number of items that may run at once, and of workers that have scratch memory of their own.
    [[nodiscard]] int threads() const noexcept { return threads_; }

    /// Calls `body(i)` for every i in [0, count). A single item runs in the calling thread.
    template <std::invocable<index_t> Body>
    void parallel_for(index_t count, Body const& body) const
    {
        // One copy of the body, however it is called.
        auto const call = [](void* context, index_t i) __attribute__((noinline))
        {
            (*static_cast<Body const*>(context))(i);
        };
        (count > 1 ? run_ : serially)(target_, count, call, const_cast<Body*>(&body));
    }

private:
    static void serially(void*, index_t count, task_function task, void* context)
    {
        for (index_t i = 0; i < count; ++i) { task(context, i); }
    }

    void* target_{};
    void (*run_)(void*, index_t, task_function, void*){serially};
    int threads_{1};
};

} // namespace MDKV_NAMESPACE::cpu
