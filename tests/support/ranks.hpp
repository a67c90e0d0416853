/// \file ranks.hpp: ranks as threads of one process, which count the bytes of their sums and check that all exchange alike
#pragma once

#include <mdkv/core/ranks.hpp>
#include <mdkv/core/types.hpp>

#include <atomic>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
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

    /// One rank's part of a sum.
    void sum(int rank, std::int64_t* numbers, index_t n)
    {
        auto& own = offers_[static_cast<std::size_t>(rank)];
        own.assign(numbers, numbers + n);
        barrier_.arrive_and_wait();
        for (auto const& other : offers_)
        {
            if (other.size() != own.size())
            {
                std::fprintf(stderr, "ranks sum different numbers: %zu and %zu\n", own.size(), other.size());
                std::abort();
            }
        }
        for (index_t i = 0; i < n; ++i)
        {
            numbers[i] = 0;
            for (auto const& other : offers_) { numbers[i] += other[static_cast<std::size_t>(i)]; }
        }
        if (rank == 0)
        {
            ++calls_;
            bytes_ += 8 * n;
        }
        barrier_.arrive_and_wait();
    }

private:
    std::barrier<> barrier_;
    std::vector<std::vector<std::int64_t>> offers_;
    std::atomic<index_t> calls_{0};
    std::atomic<index_t> bytes_{0};
};

/// A rank of a team.
struct thread_rank
{
    rank_team& all;
    int number;

    /// This rank with heads from number `first` on of `heads` in each layer. Refers to *this.
    [[nodiscard]] mdkv::ranks with(index_t first, index_t heads) const
    {
        auto const sum = [](void* state, std::int64_t* numbers, index_t n) {
            auto const& rank = *static_cast<thread_rank const*>(state);
            rank.all.sum(rank.number, numbers, n);
        };
        return {first, heads, sum, const_cast<thread_rank*>(this)};
    }
};

/// Calls body(rank) on a thread for each rank. Returns each rank's error message; empty if there was none.
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
