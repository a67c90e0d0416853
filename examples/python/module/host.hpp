/// \file host.hpp: places for prompts and caches, where calls take turns at threads and scratch memory; the CPU
#pragma once

#include <mdkv/compress.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "engine.hpp"
#include "turn_lock.hpp"

namespace mdkv_python
{

/// Aligned memory, untouched until it is used.
class host_bytes
{
public:
    host_bytes() = default;
    explicit host_bytes(std::size_t bytes)
        : size_{(bytes + sizeof(line) - 1) / sizeof(line)}
        , lines_{std::make_unique_for_overwrite<line[]>(size_)}
    {}

    [[nodiscard]] std::byte* data() const noexcept { return reinterpret_cast<std::byte*>(lines_.get()); }
    [[nodiscard]] index_t size() const noexcept { return static_cast<index_t>(size_ * sizeof(line)); }

private:
    struct alignas(mdkv::workspace::alignment) line
    {
        std::byte bytes[mdkv::workspace::alignment];
    };
    std::size_t size_ = 0; // lines
    std::unique_ptr<line[]> lines_;
};

/// Types of a place: its backend, memory, and caches.
template <class Place>
struct place_types;

/// Where prompts and caches lie, of which one call at a time has the threads or the stream, and the scratch memory.
/// `Place` has a backend, `with(workspace&)`, and `memory(bytes)`.
template <class Place>
class place_of
{
public:
    /// Calls call(backend): at first with the scratch memory at hand, and if that is too small, with as much as a dry run
    /// asks for. Calls that change something check their scratch memory before.
    template <class Call>
    auto lend(Call const& call)
    {
        auto const one_at_a_time = turn();
        auto const real          = [&] {
            mdkv::workspace lent{{scratch_.data(), scratch_bytes()}};
            return call(self().with(lent));
        };
        try
        {
            return real();
        }
        catch (mdkv::insufficient_workspace const&)
        {
            mdkv::workspace counting;
            static_cast<void>(call(self().with(counting)));
            if (counting.bytes() <= scratch_bytes()) { throw; } // not scratch memory was missing
            scratch_ = {};
            scratch_ = self().memory(counting.bytes() + counting.bytes() / 8);
        }
        return real();
    }

    /// As `lend`, for calls over ranks, which one rank cannot repeat: a dry run asks for the scratch memory before.
    template <class Ranks, class Call>
    auto lend(Ranks const& ranks, Call const& call)
    {
        auto const one_at_a_time = turn();
        try
        {
            mdkv::workspace counting;
            auto on  = self().with(counting);
            on.ranks = &ranks;
            static_cast<void>(call(on));
            if (counting.bytes() > scratch_bytes())
            {
                scratch_ = {};
                scratch_ = self().memory(counting.bytes() + counting.bytes() / 8);
            }
        }
        catch (...) // the call itself finds the same, and tells the other ranks
        {}
        mdkv::workspace lent{{scratch_.data(), scratch_bytes()}};
        auto on  = self().with(lent);
        on.ranks = &ranks;
        return call(on);
    }

    /// A turn at the backend and at all that was made on it.
    [[nodiscard]] std::unique_lock<turn_lock> turn() { return std::unique_lock{turn_}; }

    [[nodiscard]] std::size_t scratch_bytes() const noexcept { return static_cast<std::size_t>(scratch_.size()); }

private:
    [[nodiscard]] Place& self() noexcept { return static_cast<Place&>(*this); }

    turn_lock turn_;
    typename place_types<Place>::memory scratch_;
};

template <>
struct place_types<host>
{
    using backend = mdkv::cpu::backend;
    using memory  = host_bytes;
    template <mdkv::element T>
    using cache = mdkv::cpu::cache<T>;
};

/// Threads of the CPU.
class host : public place_of<host>
{
public:
    explicit host(int threads)
        : threads_{threads}
    {}

    [[nodiscard]] mdkv::cpu::backend with(mdkv::workspace& scratch) noexcept { return {&scratch, threads_}; }
    [[nodiscard]] static host_bytes memory(std::size_t bytes) { return host_bytes{bytes}; }
    [[nodiscard]] int threads() const noexcept { return threads_.threads(); }

    /// A copy of host memory in memory of the place.
    template <class V>
    [[nodiscard]] static host_bytes copy_of(std::vector<V> const& values)
    {
        host_bytes copy{values.size() * sizeof(V)};
        std::copy(values.begin(), values.end(), reinterpret_cast<V*>(copy.data()));
        return copy;
    }

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

    /// Packs a layer into a cache of its own.
    template <class Prompt, class Rows, class Cache>
    mdkv::compress_report pack(Prompt& from, index_t layer, Rows const& rows, Cache& to)
    {
        return lend([&](mdkv::cpu::backend on) { return from.pack(on, layer, rows, to); });
    }

private:
    mdkv::cpu::thread_pool threads_;
};

} // namespace mdkv_python
