/// \file rival.hpp: the tokens, and one program that attends over them in layers of its own
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <sched.h>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "bench.hpp"
#include "layers.hpp"

namespace peers
{

using bench::dim;
using bench::group;
using bench::heads;
using mdkv::half;
using mdkv::index_t;

inline constexpr index_t rows          = heads * group;    // of queries
inline constexpr index_t beyond_caches = index_t{1} << 29; // bytes of all layers of a rival
inline constexpr float query_deviation = 3.0F;             // logits likewise: some tokens matter, as in real attention

[[noreturn]] inline void fail(std::string const& message)
{
    std::fprintf(stderr, "peers_ggml: %s\n", message.c_str());
    std::exit(1);
}

/// While it lives, threads that are started run on all processors but the first; from then on the calling thread stays on the
/// first. Otherwise the system sometimes runs both threads of a pool on one processor for a while.
class apart
{
public:
    apart() { stay_on(others()); }
    ~apart() { stay_on(first()); }
    apart(apart const&)            = delete;
    apart& operator=(apart const&) = delete;

private:
    static cpu_set_t const& all()
    {
        static cpu_set_t const allowed = [] {
            cpu_set_t read;
            CPU_ZERO(&read);
            sched_getaffinity(0, sizeof read, &read);
            return read;
        }();
        return allowed;
    }
    static cpu_set_t first()
    {
        cpu_set_t one;
        CPU_ZERO(&one);
        std::size_t i = 0;
        while (i < CPU_SETSIZE && !CPU_ISSET(i, &all())) { ++i; }
        CPU_SET(i, &one);
        return one;
    }
    static cpu_set_t others()
    {
        cpu_set_t const one = first();
        cpu_set_t rest;
        CPU_XOR(&rest, &all(), &one);
        return CPU_COUNT(&rest) > 0 ? rest : one;
    }
    static void stay_on(cpu_set_t const& set) { sched_setaffinity(0, sizeof set, &set); }
};

/// A pool whose threads run apart from the calling one.
[[nodiscard]] inline mdkv::cpu::thread_pool pool_apart(int threads)
{
    apart const them;
    return mdkv::cpu::thread_pool{threads};
}

/// Before a turn, so that no measurement holds the time that sleeping threads need to wake up.
inline void wake(mdkv::cpu::thread_pool& pool)
{
    mdkv::cpu::executor_ref{pool}.parallel_for(pool.threads(), [](index_t) {});
}

/// Keys and values of one layer, [H, N, D], and one token's queries, [H*G, D].
struct source
{
    index_t tokens;
    std::vector<half> vectors;
    std::vector<float> queries = std::vector<float>(static_cast<std::size_t>(rows * dim));

    explicit source(index_t n)
        : tokens{n}
        , vectors{bench::normal_numbers<half>(2 * heads * n * dim)}
    {
        std::mt19937 random{3};
        std::normal_distribution<float> normal{0.0F, query_deviation};
        for (float& q : queries) { q = normal(random); }
    }

    [[nodiscard]] index_t count() const { return heads * tokens * dim; }
    [[nodiscard]] half const* keys() const { return vectors.data(); }
    [[nodiscard]] half const* values() const { return vectors.data() + count(); }
};

/// A program's attention over one kind of cache: as many equal layers as the processor's caches cannot hold, in rotation.
class rival
{
public:
    rival(std::string name_, index_t bytes_)
        : name{std::move(name_)}
        , bytes{bytes_}
    {}
    virtual ~rival()               = default;
    rival(rival const&)            = delete;
    rival& operator=(rival const&) = delete;

    virtual void use_threads(mdkv::cpu::thread_pool& pool)             = 0;
    virtual void begin_turn()                                          = 0;
    virtual void end_turn()                                            = 0;
    virtual void attend_to(std::size_t layer)                          = 0;
    [[nodiscard]] virtual std::size_t layers() const                   = 0;
    [[nodiscard]] virtual std::byte const* memory(std::size_t l) const = 0;
    [[nodiscard]] virtual std::vector<float> const& output() const     = 0;

    [[nodiscard]] std::size_t rotate() { return next_++ % layers(); }

    std::string name;
    index_t bytes;        // of one layer
    double allowed   = 0; // difference from the full cache's output, relative; 0: any
    double differs   = -1;
    double seconds   = 0;
    double read_only = 0; // seconds of a plain read of as many bytes

private:
    std::size_t next_ = 0;
};

[[nodiscard]] inline index_t layers_beyond_caches(index_t bytes)
{
    return std::max<index_t>(2, (beyond_caches + bytes - 1) / bytes);
}

} // namespace peers
