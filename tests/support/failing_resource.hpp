/// \file failing_resource.hpp: a memory resource whose k-th allocation fails, once or from then on, and that knows what is still out
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>

#include <cstddef>
#include <memory_resource>
#include <new>
#include <stdexcept>

namespace support
{

enum class failure
{
    never,
    once,   ///< the k-th allocation fails, later ones succeed
    from_on ///< the k-th and every later one fail
};

class failing_resource final : public std::pmr::memory_resource
{
public:
    explicit failing_resource(failure how = failure::never, int k = 0)
        : how_{how}
        , k_{k}
    {}

    /// Arms it anew; the count of allocations starts at 0.
    void arm(failure how, int k = 0)
    {
        how_      = how;
        k_        = k;
        attempts_ = 0;
    }

    [[nodiscard]] int attempts() const { return attempts_; }
    /// Bytes not given back yet: 0 after everything is destroyed, or there is a leak.
    [[nodiscard]] std::size_t outstanding() const { return outstanding_; }

private:
    void* do_allocate(std::size_t bytes, std::size_t alignment) override
    {
        int const attempt = attempts_++;
        bool const fails  = how_ == failure::once ? attempt == k_ : how_ == failure::from_on && attempt >= k_;
        if (fails) { throw std::bad_alloc{}; }
        void* const memory = std::pmr::new_delete_resource()->allocate(bytes, alignment);
        outstanding_ += bytes;
        return memory;
    }

    void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override
    {
        outstanding_ -= bytes;
        std::pmr::new_delete_resource()->deallocate(memory, bytes, alignment);
    }

    [[nodiscard]] bool do_is_equal(std::pmr::memory_resource const& other) const noexcept override
    {
        return this == &other;
    }

    failure how_;
    int k_;
    int attempts_            = 0;
    std::size_t outstanding_ = 0;
};

/// Two workers, the number of loops that they were asked for, and that of the loop in which they throw.
struct counting_executor
{
    int loops  = 0;
    int thrown = -1;
    int threads() const { return 2; }
    void parallel_for(mdkv::index_t count, mdkv::cpu::executor_ref::task_function task, void* context)
    {
        if (loops++ == thrown) { throw std::runtime_error{"no more threads"}; }
        for (mdkv::index_t i = 0; i < count; ++i) { task(context, i); }
    }
};

/// Makes the call with a workspace whose memory ends after 0, 1, 2, ... allocations, until there is enough. Returns how often
/// there was not.
template <class Call>
int insist(Call const& call, mdkv::cpu::executor_ref threads = {})
{
    for (int k = 0;; ++k)
    {
        failing_resource memory{failure::from_on, k};
        mdkv::workspace scratch{mdkv::cpu::host_memory{&memory}};
        try
        {
            call(mdkv::cpu::backend{&scratch, threads});
            return k;
        }
        catch (std::bad_alloc const&)
        {}
    }
}

} // namespace support
