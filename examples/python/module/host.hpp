/// \file host.hpp: the CPU as a place for prompts and caches: threads and scratch memory that calls take turns at
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <span>

#include "engine.hpp"

namespace mdkv_python
{

/// Memory for workspaces, untouched until it is used.
class aligned_bytes
{
public:
    aligned_bytes() = default;
    explicit aligned_bytes(std::size_t bytes)
        : size_{(bytes + sizeof(line) - 1) / sizeof(line)}
        , lines_{std::make_unique_for_overwrite<line[]>(size_)}
    {}

    [[nodiscard]] std::span<std::byte> bytes() noexcept
    {
        return std::as_writable_bytes(std::span{lines_.get(), size_});
    }
    [[nodiscard]] std::size_t size() const noexcept { return size_ * sizeof(line); }

private:
    struct alignas(mdkv::workspace::alignment) line
    {
        std::byte bytes[mdkv::workspace::alignment];
    };
    std::size_t size_ = 0; // lines
    std::unique_ptr<line[]> lines_;
};

class host
{
public:
    using backend = mdkv::cpu::backend;

    explicit host(int threads)
        : threads_{threads}
    {}

    /// Calls call(backend): at first with the scratch memory at hand, and if that is too small, with as much as a dry run
    /// asks for. Calls that change something check their scratch memory before.
    template <class Call>
    auto lend(Call const& call)
    {
        auto const one_at_a_time = turn();
        try
        {
            mdkv::workspace lent{scratch_.bytes()};
            return call(backend{&lent, threads_});
        }
        catch (mdkv::insufficient_workspace const&)
        {
            mdkv::workspace counting;
            static_cast<void>(call(backend{&counting, threads_}));
            if (counting.bytes() <= scratch_.size()) { throw; } // not scratch memory was missing
            scratch_ = {};
            scratch_ = aligned_bytes{counting.bytes() + counting.bytes() / 8};
        }
        mdkv::workspace lent{scratch_.bytes()};
        return call(backend{&lent, threads_});
    }

    /// A turn at the backend and at all that was made on it.
    [[nodiscard]] std::unique_lock<std::recursive_mutex> turn() { return std::unique_lock{turn_}; }

    [[nodiscard]] int threads() const noexcept { return threads_.threads(); }
    [[nodiscard]] std::size_t scratch_bytes() const noexcept { return scratch_.size(); }

private:
    std::recursive_mutex turn_;
    mdkv::cpu::thread_pool threads_;
    aligned_bytes scratch_;
};

} // namespace mdkv_python
