/// \file ranks.hpp: ranks as threads of one process, whose transport counts the bytes and checks that all ranks exchange alike
#pragma once

#include <mdkv/core/ranks.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <thread>
#include <vector>

namespace support
{

using mdkv::index_t;

/// Threads that exchange numbers at a barrier.
class rank_team
{
public:
    explicit rank_team(int size)
        : barrier_{size}
        , offers_(static_cast<std::size_t>(size))
    {}

    [[nodiscard]] int size() const { return static_cast<int>(offers_.size()); }
    /// Numbers of calls and of bytes that each rank gave so far.
    [[nodiscard]] index_t calls() const { return calls_; }
    [[nodiscard]] index_t bytes() const { return bytes_; }

    /// One rank's part of an exchange.
    template <class V, class Join>
    void exchange(int rank, V* numbers, index_t n, Join const& join)
    {
        auto const count = static_cast<std::size_t>(n);
        offer& own       = offers_[static_cast<std::size_t>(rank)];
        own.kind         = typeid_of<V>;
        own.bytes.resize(count * sizeof(V));
        std::memcpy(own.bytes.data(), numbers, own.bytes.size());
        barrier_.arrive_and_wait();
        for (offer const& other : offers_)
        {
            if (other.kind != own.kind || other.bytes.size() != own.bytes.size())
            {
                std::fprintf(stderr, "ranks exchange different numbers: %zu bytes and %zu\n", own.bytes.size(),
                    other.bytes.size());
                std::abort();
            }
        }
        for (std::size_t i = 0; i < count; ++i)
        {
            V all{};
            for (std::size_t r = 0; r < offers_.size(); ++r)
            {
                V x{};
                std::memcpy(&x, offers_[r].bytes.data() + i * sizeof(V), sizeof(V));
                all = r == 0 ? x : join(all, x);
            }
            std::memcpy(numbers + i, &all, sizeof(V));
        }
        if (rank == 0)
        {
            ++calls_;
            bytes_ += static_cast<index_t>(own.bytes.size());
        }
        barrier_.arrive_and_wait();
    }

private:
    template <class V>
    static constexpr int typeid_of = V(-1) < V(0) ? 1 : 2;

    struct offer
    {
        int kind = 0;
        std::vector<std::byte> bytes;
    };

    std::barrier<> barrier_;
    std::vector<offer> offers_;
    std::atomic<index_t> calls_{0};
    std::atomic<index_t> bytes_{0};
};

/// A rank of a team.
struct thread_rank
{
    static constexpr mdkv::space memory_space = mdkv::space::host;

    rank_team& all;
    int number;

    [[nodiscard]] int rank() const { return number; }
    [[nodiscard]] int size() const { return all.size(); }
    void sum(std::int64_t* x, index_t n) const
    {
        all.exchange(number, x, n, [](std::int64_t a, std::int64_t b) { return a + b; });
    }
    void least(std::uint64_t* x, index_t n) const
    {
        all.exchange(number, x, n, [](std::uint64_t a, std::uint64_t b) { return std::min(a, b); });
    }
};

/// A rank that says another number of itself, or of all.
struct claimed_rank : thread_rank
{
    int said_rank;
    int said_size;

    [[nodiscard]] int rank() const { return said_rank; }
    [[nodiscard]] int size() const { return said_size; }
};

/// Calls body(transport) on a thread for each rank. Returns each rank's error message; empty if there was none.
template <class Body>
std::vector<std::string> on_ranks(rank_team& all, Body const& body)
{
    std::vector<std::string> errors(static_cast<std::size_t>(all.size()));
    std::vector<std::thread> threads;
    for (int r = 0; r < all.size(); ++r)
    {
        threads.emplace_back([&, r] {
            try
            {
                body(thread_rank{all, r});
            }
            catch (std::exception const& e)
            {
                errors[static_cast<std::size_t>(r)] = e.what();
            }
        });
    }
    for (std::thread& thread : threads) { thread.join(); }
    return errors;
}

} // namespace support
