/// \file host.hpp: places for prompts and caches, where calls take turns at threads and scratch memory; the CPU
#pragma once

#include <mdkv/compress.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/thread_pool.hpp>
#include <mdkv/detail/cache_owner.hpp>

#include <cstddef>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#include "engine.hpp"
#include "turn_lock.hpp"

namespace mdkv_python
{

/// Memory of the host, untouched until it is used.
using host_bytes = mdkv::detail::owned_bytes<mdkv::cpu::host_memory>;

/// Types of a place: its backend, where its memory comes from, memory, and caches.
template <class Place>
struct place_types;

/// Where prompts and caches lie, of which one call at a time has the threads or the stream, and the scratch memory.
/// `Place` has a backend, `with(workspace&)`, and `copy(from, to, bytes)`; its type `inside` lives as long as a turn.
template <class Place>
class place_of
{
    using types = place_types<Place>;

public:
    explicit place_of(typename types::source const& from)
        : source_{from}
    {
        scratch_.emplace(source_);
    }

    /// Calls call(backend), whose scratch memory grows.
    template <class Call>
    auto lend(Call const& call)
    {
        auto const one_at_a_time = turn();
        calls const inside{calls_};
        return call(self().with(*scratch_));
    }

    /// Gives the scratch memory back, unless this thread is in a call that uses it.
    void release_scratch()
    {
        auto const one_at_a_time = turn();
        if (calls_ == 0) { scratch_.emplace(source_); }
    }

    /// A turn at the backend and at all that was made on it, as long as it lives.
    struct turn_at
    {
        std::unique_lock<turn_lock> lock;
        typename types::inside inside;
    };
    [[nodiscard]] turn_at turn() { return {std::unique_lock{turn_}, typename types::inside{self()}}; }

    [[nodiscard]] index_t scratch_bytes()
    {
        auto const no_growth = turn();
        return scratch_->held();
    }

    /// Where the place's memory comes from.
    [[nodiscard]] typename types::source const& source() const noexcept { return source_; }

    [[nodiscard]] typename types::memory memory(std::size_t bytes) const
    {
        return {static_cast<index_t>(bytes), source_};
    }

    /// A copy of host memory in memory of the place.
    template <class V>
    [[nodiscard]] typename types::memory copy_of(std::vector<V> const& values)
    {
        auto there = memory(values.size() * sizeof(V));
        if (there.size() > 0)
        {
            self().copy(reinterpret_cast<std::byte const*>(values.data()), there.data(), there.size());
        }
        return there;
    }

private:
    /// One call more in its scope.
    struct calls
    {
        explicit calls(int& count)
            : count{count += 1}
        {}
        calls(calls const&)            = delete;
        calls& operator=(calls const&) = delete;
        ~calls() { count -= 1; }
        int& count;
    };

    [[nodiscard]] Place& self() noexcept { return static_cast<Place&>(*this); }

    turn_lock turn_;
    typename types::source source_;
    std::optional<mdkv::workspace> scratch_; // always there; a new one holds nothing
    int calls_ = 0;                          // that use it: one calls functions of Python's, which may call again
};

template <>
struct place_types<host>
{
    using backend = mdkv::cpu::backend;
    using source  = mdkv::cpu::host_memory;
    using memory  = host_bytes;
    template <mdkv::element T>
    using cache = mdkv::cpu::cache<T>;
    struct inside
    {
        explicit inside(host&) noexcept {}
    };
};

/// Threads of the CPU.
class host : public place_of<host>
{
public:
    explicit host(int threads)
        : place_of{mdkv::cpu::host_memory{}}
        , threads_{threads}
    {}

    [[nodiscard]] mdkv::cpu::backend with(mdkv::workspace& scratch) noexcept { return {&scratch, threads_}; }
    [[nodiscard]] int threads() const noexcept { return threads_.threads(); }

    /// A cache without heads.
    template <mdkv::element T>
    [[nodiscard]] static mdkv::cpu::cache<T> empty_cache()
    {
        return {};
    }

    static void copy(std::byte const* from, std::byte* to, index_t bytes) noexcept
    {
        if (bytes > 0) { std::memcpy(to, from, static_cast<std::size_t>(bytes)); }
    }

private:
    mdkv::cpu::thread_pool threads_;
};

} // namespace mdkv_python
