// Opening a stored layer of 65,536 tokens (Llama-3-8B's shape, 8 KV heads, D = 128, f16; nothing dropped: 4 bits, some 8, some
// whole) from a mapped file in the page cache, against reading the same file into memory.
#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/engine/stored.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include <benchmark/benchmark.h>

#include "bench.hpp"

namespace
{

using namespace mdkv;

constexpr index_t heads  = 8;
constexpr index_t tokens = 65536;

/// A temporary file with the layer, with or without positions.
class stored_file
{
public:
    explicit stored_file(bool with_positions)
    {
        cache_layout const layout{ratio_set{full_int4, full_int8, full}, heads, 64, {128, 128}};
        mdkv::array<index_t, max_rungs> const at_rung{{tokens - 6600, 5924, 676}};
        std::vector<head_entry> entries(heads);
        index_t bytes = 0;
        for (head_entry& entry : entries) { bytes = lay_out_head<half>(layout, at_rung, bytes, entry); }
        cpu::cache<half> cache{layout, bytes};
        std::memset(cache.view().arena, 0x11, static_cast<std::size_t>(bytes));
        std::copy(entries.begin(), entries.end(), cache.view().heads);
        std::vector<std::int32_t> const numbers(static_cast<std::size_t>(heads * (tokens + 64)), 7);
        std::vector<layer_to_write<half>> layers{{std::as_const(cache).view(), {}}};
        if (with_positions) { layers[0].positions = in(cpu::backend{}, numbers.data(), heads, tokens + 64); }
        mdkv::write([&](std::span<std::byte const> part) { add(part); }, identity,
            {.model_layers = 1, .model_heads = heads, .tokens = tokens + 64}, std::span{layers});
        std::fflush(file_);
        memory_.resize(size_ + 64);
    }
    stored_file(stored_file const&)            = delete;
    stored_file& operator=(stored_file const&) = delete;
    ~stored_file() { std::fclose(file_); }

    [[nodiscard]] std::size_t size() const { return size_; }

    void open_mapped(verify how) const
    {
        void* const begin = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, ::fileno(file_), 0);
        if (begin == MAP_FAILED) { throw std::runtime_error{"the file cannot be mapped"}; }
        auto const caches = read<half>({static_cast<std::byte const*>(begin), size_}, identity, how);
        benchmark::DoNotOptimize(caches.layer(0).heads[0].exact.tokens);
        ::munmap(begin, size_);
    }
    void read_all()
    {
        for (std::size_t at = 0; at < size_;)
        {
            ::ssize_t const got = ::pread(::fileno(file_), memory_.data() + at, size_ - at, static_cast<::off_t>(at));
            if (got <= 0) { throw std::runtime_error{"the file cannot be read"}; }
            at += static_cast<std::size_t>(got);
        }
    }

private:
    static constexpr cache_identity identity{};

    void add(std::span<std::byte const> part)
    {
        if (std::fwrite(part.data(), 1, part.size(), file_) != part.size()) { throw std::runtime_error{"no room"}; }
        size_ += part.size();
    }

    std::FILE* file_  = std::tmpfile();
    std::size_t size_ = 0;
    std::vector<std::byte> memory_;
};

/// a: the file mapped and checked; b: the file read into memory, unchecked.
void open_against_read(benchmark::State& state)
{
    stored_file file{state.range(0) == 1};
    auto const how   = state.range(1) == 1 ? verify::everything : verify::bounds;
    auto const times = bench::measure_pair(
        state, [&] { file.open_mapped(how); }, [&] { file.read_all(); });
    state.counters["megabytes"] = static_cast<double>(file.size()) / 1e6;
    state.counters["us"]        = times.a * 1e6;
}

BENCHMARK(open_against_read)
    ->ArgNames({"positions", "checksums"})
    ->ArgsProduct({{0, 1}, {0, 1}})
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond)
    ->Iterations(21);

} // namespace

BENCHMARK_MAIN();
