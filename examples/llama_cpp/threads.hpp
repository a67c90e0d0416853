/// \file threads.hpp: the engine's threads lent to the library: those of the OpenMP that ggml has loaded, or a pool
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include <dlfcn.h>

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>

namespace mdkv_ggml
{

/// ggml and this library use one team of libgomp, so that no thread waits for work beside one that works. libgomp is looked
/// for at run time, because one file serves builds of ggml with and without it.
class lent_threads
{
public:
    void resize(int threads)
    {
        if (team() == nullptr && threads != threads_) { pool_ = std::make_unique<mdkv::cpu::thread_pool>(threads); }
        threads_ = threads;
    }
    [[nodiscard]] int threads() const noexcept { return threads_; }
    void parallel_for(mdkv::index_t count, mdkv::cpu::executor_ref::task_function task, void* context) const
    {
        if (pool_ != nullptr) { return pool_->parallel_for(count, task, context); }
        loop shared{count, task, context};
        if (threads_ > 1 && count > 1) { team()(run, &shared, static_cast<unsigned>(threads_), 0); }
        else { run(&shared); }
        if (shared.failure) { std::rethrow_exception(shared.failure); }
    }

private:
    struct loop
    {
        mdkv::index_t count;
        mdkv::cpu::executor_ref::task_function task;
        void* context;
        std::atomic<mdkv::index_t> next{0};
        std::mutex failing{};
        std::exception_ptr failure{}; ///< an exception may not leave an OpenMP region
    };

    /// Every thread of a team takes the next index until none is left.
    static void run(void* data)
    {
        loop& shared = *static_cast<loop*>(data);
        for (mdkv::index_t i = shared.next++; i < shared.count; i = shared.next++)
        {
            try
            {
                shared.task(shared.context, i);
            }
            catch (...)
            {
                std::lock_guard const lock{shared.failing};
                if (!shared.failure) { shared.failure = std::current_exception(); }
            }
        }
    }

    /// libgomp's entry for `#pragma omp parallel num_threads(n)`; null where the process has no libgomp.
    static auto team() -> void (*)(void (*)(void*), void*, unsigned, unsigned)
    {
        using parallel             = void (*)(void (*)(void*), void*, unsigned, unsigned);
        static parallel const call = [] {
            void* const library = dlopen("libgomp.so.1", RTLD_NOW | RTLD_NOLOAD);
            return library == nullptr ? nullptr : reinterpret_cast<parallel>(dlsym(library, "GOMP_parallel"));
        }();
        return call;
    }

    int threads_ = 1;
    std::unique_ptr<mdkv::cpu::thread_pool> pool_; ///< only without libgomp
};

} // namespace mdkv_ggml
