/// \file threads.hpp: the engine's threads lent to the library: OpenMP's threads, which ggml's own loops use, or a pool
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#if defined(_OPENMP)
#    include <exception>
#else
#    include <mdkv/cpu/thread_pool.hpp>

#    include <memory>
#endif

namespace mdkv_ggml
{

#if defined(_OPENMP)
/// ggml and this library use one team of libgomp, so that no thread waits for work beside one that works.
class lent_threads
{
public:
    void resize(int threads) { team_ = threads; }
    [[nodiscard]] int threads() const noexcept { return team_; }
    void parallel_for(mdkv::index_t count, mdkv::cpu::executor_ref::task_function task, void* context) const
    {
        std::exception_ptr failure; // an exception may not leave an OpenMP loop
#    pragma omp parallel for schedule(dynamic, 1) num_threads(team_)
        for (mdkv::index_t i = 0; i < count; ++i)
        {
            try
            {
                task(context, i);
            }
            catch (...)
            {
#    pragma omp critical(mdkv_ggml_failure)
                if (!failure) { failure = std::current_exception(); }
            }
        }
        if (failure) { std::rethrow_exception(failure); }
    }

private:
    int team_ = 1;
};
#else
class lent_threads
{
public:
    void resize(int threads)
    {
        if (threads != this->threads()) { pool_ = std::make_unique<mdkv::cpu::thread_pool>(threads); }
    }
    [[nodiscard]] int threads() const noexcept { return pool_ == nullptr ? 1 : pool_->threads(); }
    void parallel_for(mdkv::index_t count, mdkv::cpu::executor_ref::task_function task, void* context) const
    {
        if (pool_ != nullptr) { return pool_->parallel_for(count, task, context); }
        for (mdkv::index_t i = 0; i < count; ++i) { task(context, i); }
    }

private:
    std::unique_ptr<mdkv::cpu::thread_pool> pool_;
};
#endif

} // namespace mdkv_ggml
