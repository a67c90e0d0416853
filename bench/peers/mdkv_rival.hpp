/// \file mdkv_rival.hpp: mdkv's attend over caches of the rungs that `best` chooses from
#pragma once

#include <mdkv/cpu/attend.hpp>

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "rival.hpp"

namespace peers
{

/// Tokens of every thousand at each rung of bit_ratios: dropped, 4 bits, 8 bits, all bits.
using shares = std::array<index_t, 4>;

// The choice of `best` at KV 512, 64 and 16 of 2,048 tokens, the mean over the eight texts that docs/lab/2026-11/quality.md
// reports on:
//   mdkv_run compare --model MODEL --text TEXTS --policies best --kv-size 16,64,512      (column "tokens per rung %")
// KV 512 of 16,384 and of 65,536 tokens are the same part of the full cache as the last two.
inline constexpr shares best_quarter{226, 660, 113, 1};
inline constexpr shares best_32nd{904, 94, 2, 0};
inline constexpr shares best_128th{986, 14, 0, 0};

/// The rungs of all tokens, [H, N]: in every head so many at each rung, the others dropped, in random order.
[[nodiscard]] inline std::vector<std::uint8_t> shuffled_rungs(shares const& counts, index_t tokens)
{
    std::mt19937 random{5};
    std::vector<std::uint8_t> rung(static_cast<std::size_t>(heads * tokens));
    for (auto row = rung.begin(); row != rung.end(); row += tokens)
    {
        auto at = row;
        for (std::uint8_t r = 1; r < 4; ++r) { at = std::fill_n(at, counts[r], r); }
        std::shuffle(row, row + tokens, random);
    }
    return rung;
}

[[nodiscard]] inline std::vector<std::uint8_t> rungs_in(shares const& of, index_t tokens)
{
    shares counts = of;
    for (index_t& count : counts) { count = tokens * count / 1000; }
    return shuffled_rungs(counts, tokens);
}

/// As many tokens as fit into the bytes of `kv_size` plain ones, those that are kept in these shares of each other.
[[nodiscard]] inline std::vector<std::uint8_t> rungs_of_size(shares const& of, index_t tokens, index_t kv_size)
{
    mdkv::head_dims const dims{dim, dim};
    auto const bytes_at = [&](std::size_t r) { return mdkv::bit_ratios.bytes(r, dims, sizeof(half)); };
    index_t bytes       = 0; // of a thousand tokens
    for (std::size_t r = 1; r < of.size(); ++r) { bytes += of[r] * bytes_at(r); }
    shares counts = of;
    for (index_t& count : counts) { count = kv_size * bytes_at(3) * count / bytes; }
    return shuffled_rungs(counts, tokens);
}

[[nodiscard]] inline bench::layer packed(
    source const& from, std::vector<std::uint8_t> const& rung, mdkv::cpu::thread_pool& pool)
{
    mdkv::cache_layout const layout{mdkv::bit_ratios, heads, 0, {dim, dim}};
    std::vector<float> const no_basis(static_cast<std::size_t>(dim * dim)); // no rung is projected
    mdkv::cpu::backend const on;
    auto const rungs  = mdkv::in(on, rung.data(), heads, from.tokens);
    auto const keys   = mdkv::in(on, from.keys(), heads, from.tokens, dim);
    auto const values = mdkv::in(on, from.values(), heads, from.tokens, dim);
    auto const window = mdkv::in(on, static_cast<half const*>(nullptr), heads, 0, dim);
    auto const basis  = mdkv::in(on, no_basis.data(), {heads, dim, dim}, {index_t{0}, dim, index_t{1}});
    index_t bytes     = 0;
    bench::with_scratch(
        [&](mdkv::cpu::backend const& with) { bytes = mdkv::packed_bytes<half>(with, rungs, layout); }, pool);
    bench::layer made{layout, bytes, 0, &bench::memory()};
    bench::with_scratch(
        [&](mdkv::cpu::backend const& with) {
            mdkv::pack(with, keys, values, window, window, basis, basis, rungs, made.view());
        },
        pool);
    return made;
}

class mdkv_rival final : public rival
{
public:
    mdkv_rival(std::string name_, source const& from, bench::layer&& first)
        : rival{std::move(name_), first.arena_bytes()}
        , queries_{from.queries}
        , output_(queries_.size())
        , lse_(static_cast<std::size_t>(rows))
    {
        index_t const count = layers_beyond_caches(bytes);
        layers_.push_back(std::move(first));
        for (index_t i = 1; i < count; ++i) { layers_.push_back(layers_[0].copy()); }
    }

    void use_threads(mdkv::cpu::thread_pool& pool) override
    {
        pool_ = &pool;
        attend_to(0); // scratch grows
    }
    void begin_turn() override { wake(*pool_); }
    void end_turn() override {} // the pool's threads sleep after some ten microseconds without work
    void attend_to(std::size_t l) override
    {
        mdkv::cpu::backend const on{&scratch_, *pool_};
        mdkv::attend(on, mdkv::in(on, queries_.data(), rows, dim), layers_[l].view(), {},
            mdkv::out(on, output_.data(), rows, dim), mdkv::out(on, lse_.data(), rows));
    }
    [[nodiscard]] std::size_t layers() const override { return layers_.size(); }
    [[nodiscard]] std::byte const* memory(std::size_t l) const override { return layers_[l].view().arena; }
    [[nodiscard]] std::vector<float> const& output() const override { return output_; }

private:
    std::vector<bench::layer> layers_;
    mdkv::cpu::thread_pool* pool_ = nullptr;
    mdkv::workspace scratch_{mdkv::cpu::host_memory{}};
    std::vector<float> queries_;
    std::vector<float> output_;
    std::vector<float> lse_;
};

} // namespace peers
