/// \file openmp.hpp: an executor over OpenMP, for programs that already run on its threads (compile with -fopenmp).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include <exception>

#if defined(_OPENMP)
#    include <omp.h>
#endif

namespace mdkv::cpu
{

/// Runs loops on the OpenMP runtime's own team. Without -fopenmp the pragma means nothing and the loop is serial.
struct openmp_executor
{
    /// Size of the team; 0 leaves it to the runtime.
    int team = 0;

    [[nodiscard]] int threads() const noexcept
    {
#if defined(_OPENMP)
        return team > 0 ? team : omp_get_max_threads();
#else
        return 1;
#endif
    }

    void parallel_for(index_t count, executor_ref::task_function task, void* context) const
    {
        std::exception_ptr failure;
#if defined(_OPENMP)
        int const members = threads();
#    pragma omp parallel for schedule(dynamic, 1) num_threads(members)
#endif
        for (index_t i = 0; i < count; ++i)
        {
            // An exception may not leave an OpenMP loop.
            try
            {
                task(context, i);
            }
            catch (...)
            {
#if defined(_OPENMP)
#    pragma omp critical(mdkv_openmp_executor)
#endif
                if (!failure) { failure = std::current_exception(); }
            }
        }
        if (failure) { std::rethrow_exception(failure); }
    }
};

} // namespace mdkv::cpu
