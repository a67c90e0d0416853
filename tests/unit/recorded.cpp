// Whole pipelines of the CPU against hashes recorded from an earlier version of the library (data/recorded.txt): for each
// preset and element the caches of a prompt, those after a fold, and those of a reader, with their losses. Stages have
// oracles in tests of their own; a change of any bit shows here. The inputs are made of integers, so they are the same
// everywhere; the results depend on instruction set, vector width and fused multiply-adds. CMake therefore compiles this
// file, in an executable of its own, for the x86-64 baseline (armv8-a on 64-bit Arm) with -O2 -ffp-contract=off, where
// g++ and clang agree, on both processors.
// MDKV_RECORD=<path> writes the recorded lines with today's in their place there instead of comparing them. To see whether a change keeps the bits of
// optimised builds, compile this file and main.cpp of both trees with -O3 -march=native, run each with MDKV_RECORD
// on one machine, and compare the two files with diff.
#include <mdkv/mdkv.hpp>

#include "support/cases.hpp"
#include "support/host.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <span>
#include <sstream>
#include <string>
#include <vector>

namespace
{

using namespace mdkv;
using support::tensor;
using host = cpu::backend;

constexpr index_t layers = 2, heads = 2, group = 2, dim = 64, value_dim = 40, tokens = 600, chunk = 200, later = 24;

/// 64-bit FNV-1a of bytes, and losses beside it.
struct figures
{
    std::uint64_t state = 0xcbf29ce484222325U;
    std::ostringstream losses;

    void add(void const* data, index_t bytes)
    {
        for (index_t i = 0; i < bytes; ++i)
        {
            state = (state ^ static_cast<unsigned char const*>(data)[i]) * 0x100000001b3U;
        }
    }
    template <class T>
    void add(cpu::cache<T> const& cache)
    {
        auto const view = cache.view();
        add(view.arena, view.arena_bytes);
        for (index_t h = 0; h < view.layout.heads; ++h)
        {
            head_entry const& e = view.heads[h];
            std::vector<index_t> numbers{e.key_projection, e.value_projection, e.key_columns, e.value_columns,
                e.exact.tokens, e.exact.keys, e.exact.values};
            for (std::size_t r = 0; r < view.layout.rungs; ++r)
            {
                numbers.insert(numbers.end(), {e.runs[r].tokens, e.runs[r].keys, e.runs[r].values});
            }
            add(numbers.data(), std::ssize(numbers) * index_t{sizeof(index_t)});
        }
    }
    void add(allocation const& chosen) { losses << ' ' << std::hexfloat << chosen.loss; }
    [[nodiscard]] std::string line() const
    {
        std::ostringstream all;
        all << std::hex << state << losses.str();
        return all.str();
    }
};

/// splitmix64, and sums of integers as numbers.
struct numbers
{
    std::uint64_t state;
    index_t below(index_t n)
    {
        std::uint64_t z = (state += 0x9e3779b97f4a7c15U);
        z               = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
        z               = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
        return static_cast<index_t>((z ^ (z >> 31)) % static_cast<std::uint64_t>(n));
    }
    float bell() { return static_cast<float>(below(32768) + below(32768) + below(32768) - 49150) / 16384.0F; }
};

/// Coordinates of falling size, one row in eight three times as large.
template <class T>
tensor<T, 3> random_rows(index_t seed, std::array<index_t, 3> extents)
{
    numbers random{static_cast<std::uint64_t>(seed)};
    tensor<T, 3> x{extents};
    std::vector<T> all;
    for (index_t i = 0, d = 0, row = extents[2], scale = 1; i < x.count(); ++i, d = (d + 1) % row)
    {
        if (d == 0) { scale = random.below(8) == 0 ? 3 : 1; }
        all.push_back(narrow<T>(random.bell() * static_cast<float>(scale) / static_cast<float>(1 << (4 * d / row))));
    }
    x.assign(all);
    return x;
}

/// A text of such rows, of which the last `last` queries are at hand at a prompt's end.
template <class T>
support::text<T> random_text(index_t last)
{
    support::text<T> x{{.layers = layers, .tokens = tokens, .dims = {dim, value_dim}, .last = 0}};
    x.last = last;
    for (index_t l = 0; l < layers; ++l)
    {
        auto const i     = static_cast<std::size_t>(l);
        x.all[i].queries = random_rows<T>(10 * l + 1, {heads * group, tokens, dim});
        x.all[i].keys    = random_rows<T>(10 * l + 2, {heads, tokens, dim});
        x.all[i].values  = random_rows<T>(10 * l + 3, {heads, tokens, value_dim});
        x.lse[i]         = tensor<float, 2>{{heads * group, last}};
        x.lse[i].assign(std::vector<float>(static_cast<std::size_t>(heads * group * last), 6.75F));
    }
    return x;
}

/// Row i of [n, H, D].
template <class T>
in_view<T, 2, host> token_of(tensor<T, 3> const& rows, index_t i)
{
    return in(host{}, rows.data() + i * rows.extent(1) * rows.extent(2), rows.extent(1), rows.extent(2));
}

std::map<std::string, std::string> lines;

template <class T>
void record(preset const& chosen)
{
    workspace scratch{cpu::host_memory{}};
    host const on{&scratch, {}};
    std::string const name = "." + std::string{chosen.name} + "." + element_name<T>();
    auto const x           = random_text<T>(chosen.queries);
    support::conditions<T> const how{.make = [&](char const*, auto const& call) { call(on); }, .part = chunk};
    std::vector<cpu::cache<T>> caches(layers);
    {
        prompt<host, T> p{on, chosen, x.shape()};
        figures f;
        f.add(support::feed(p, x, chosen, budget::fraction(1, 8), caches, how));
        for (auto const& cache : caches) { f.add(cache); }
        lines["prompt" + name] = f.line();
    }

    figures folded;
    for (index_t l = 0; l < layers; ++l)
    {
        auto& cache = caches[static_cast<std::size_t>(l)];
        cache.reserve_tail(later);
        auto const keys   = random_rows<T>(10 * l + 4, {later, heads, dim});
        auto const values = random_rows<T>(10 * l + 5, {later, heads, value_dim});
        for (index_t i = 0; i < later; ++i) { append(on, token_of(keys, i), token_of(values, i), cache); }
        folded.add(recompress(on, x.part(l, tokens - later, later).queries, chosen, cache).chosen);
        folded.add(cache);
    }
    lines["fold" + name] = folded.line();

    if (!chosen.replayed) { return; }
    figures f;
    support::read_text<T> r{x, chosen, {.limit = budget::fraction(1, 8), .chunk = chunk}, how};
    r.read(0, tokens, chunk);
    r.finish();
    for (reader_report const& report : r.reports) { f.add(report.chosen); }
    for (auto const& cache : r.caches) { f.add(cache); }
    lines["reader" + name] = f.line();
}

} // namespace

TEST_CASE_TEMPLATE("every preset's pipelines give the bits that were recorded", T, float, half, bfloat16)
{
    if (std::getenv("MDKV_RECORD") == nullptr) { lines.clear(); } // a new file gets the lines of all elements
    for (preset const& chosen : {presets::paper, presets::paper_literal, presets::evict, presets::by_window,
             presets::best, presets::any_question})
    {
        record<T>(chosen);
    }
    std::map<std::string, std::string> recorded;
    std::ifstream earlier{MDKV_TEST_DATA_DIR "/recorded.txt"};
    REQUIRE_MESSAGE(earlier, "cannot read " MDKV_TEST_DATA_DIR "/recorded.txt");
    for (std::string name, line; earlier >> name >> std::ws && std::getline(earlier, line);) { recorded[name] = line; }
    if (char const* const path = std::getenv("MDKV_RECORD")) // that file
    {
        for (auto const& [name, line] : lines) { recorded[name] = line; }
        std::ofstream file{path};
        for (auto const& [name, line] : recorded) { file << name << ' ' << line << '\n'; }
        REQUIRE_MESSAGE(file.flush(), "cannot write " << path);
        return;
    }
    for (auto const& [name, line] : lines)
    {
        CHECK_MESSAGE(line == recorded[name], name << "\n  now      " << line << "\n  recorded " << recorded[name]);
    }
    CHECK(static_cast<std::size_t>(std::count_if(recorded.begin(), recorded.end(), [](auto const& of) {
        return of.first.ends_with(std::string{"."} + element_name<T>());
    })) == lines.size());
}
