/// \file shared.hpp: state that the layers of one context share: settings, scratch memory, threads, counts of work
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "attention_node.hpp"
#include "byte_shares.hpp"
#include "settings.hpp"
#include "threads.hpp"

#if defined(__GLIBC__)
#    include <malloc.h>
#endif

namespace mdkv_ggml
{

/// Calls of one kind and their time.
class stopwatch
{
    using clock = std::chrono::steady_clock;

public:
    class running
    {
    public:
        explicit running(stopwatch& watch)
            : watch_{watch}
        {}
        running(running const&)            = delete;
        running& operator=(running const&) = delete;
        ~running()
        {
            watch_.time_ += clock::now() - begin_;
            ++watch_.calls_;
        }

    private:
        stopwatch& watch_;
        clock::time_point begin_ = clock::now();
    };

    [[nodiscard]] running start() { return running{*this}; }
    [[nodiscard]] index_t calls() const noexcept { return calls_; }
    [[nodiscard]] double seconds() const noexcept { return std::chrono::duration<double>(time_).count(); }

private:
    clock::duration time_{};
    index_t calls_ = 0;
};

struct tally
{
    stopwatch replay, read, compress, fold, attend; ///< stages of a layer
    byte_shares shares{};
    index_t freed     = 0; ///< bytes of cells given back
    index_t most      = 0; ///< bytes of all compressed caches at any time
    index_t most_read = 0; ///< the same at steps that read a prompt, with its uncompressed part and its losses
    struct passed
    {
        std::set<std::string> layers;
        index_t nodes = 0;
    };
    std::map<std::string, passed> reasons;
    std::string unfolded; ///< why a tail was not folded, if one was not
};

struct shared
{
    settings chosen;
    tally counts{};
    lent_threads threads{};
    index_t most_cells  = 0; ///< most cells of a layer
    index_t most_tokens = 0; ///< most tokens of a batch in one of the engine's caches
    index_t layers      = 1; ///< layers of a sequence with most_cells cells
    /// Numbers of cells at which layers have different masks: some have a window, and until it slides nothing shows which.
    std::set<index_t> two_masks{};
    std::set<void const*> shared_keys{};               ///< keys that several layers read
    std::uint64_t next_stamp = std::random_device{}(); ///< stamp of the next cells that are given back
    std::vector<float> log_sum{};

    void log(char const* done, attention_node const& node, index_t tokens, index_t bytes) const
    {
        if (chosen.verbosity < 2) { return; }
        std::fprintf(stderr, "mdkv: %s: %s %td tokens into %td bytes\n", attention_node::whole(node.k()).name, done,
            tokens, bytes);
    }

    /// Calls `call(backend)`, whose scratch memory grows.
    template <class Call>
    auto lend(Call const& call)
    {
        return call(mdkv::cpu::backend{&*scratch, threads});
    }

    /// lend for a call that reads `bytes`. Few bytes are read by the calling thread alone, because they are read before a
    /// second thread has started.
    template <class Call>
    auto lend_reading(index_t bytes, Call const& call)
    {
        return call(mdkv::cpu::backend{
            &*scratch, bytes < 512 * 1024 ? mdkv::cpu::executor_ref{} : mdkv::cpu::executor_ref{threads}});
    }

    /// Gives memory that is free, and scratch, back to the system, if settings allow: the C library keeps what it frees.
    void trim()
    {
        if (!chosen.free_cells) { return; }
        scratch.emplace(mdkv::cpu::host_memory{});
#if defined(__GLIBC__)
        malloc_trim(0);
#endif
    }

    std::optional<mdkv::workspace> scratch{std::in_place, mdkv::cpu::host_memory{}};
};

} // namespace mdkv_ggml
