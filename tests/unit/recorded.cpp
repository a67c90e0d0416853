// Every stage of the CPU against figures recorded from an earlier version of the library (data/recorded.txt): bits
// of numbers, hashes of arrays. The inputs are made of integers, so they are the same everywhere; the results depend
// on instruction set, vector width and fused multiply-adds. CMake therefore compiles this file, in an executable of
// its own, for the x86-64 baseline with -O2 -ffp-contract=off, where g++ and clang agree, and the lines are compared
// bit for bit. For 64-bit Arm it is compiled for armv8-a with the same flags. There, too, the lines are compared bit for
// bit, but for those of attend and of merge_attention: its kernels serve more query heads at a time, which add values in
// another order. Instead *near* compares numbers. Four kinds of lines are special:
//   *leftover*   depend also on how allocate spends the bytes that the multiplier leaves over
//   *by_use*     loss=<decimal>, where heads pay for projections by use: it must not exceed 1.005 of the recorded one
//   *near*       a weighted sum of all numbers of an array, and the sum of its terms' magnitudes, of which the former may be
//                off by the tolerance of docs/numerics.md: 2e-5 and two roundings of the element; everywhere
//   *eigen*      depend also on the eigenvectors, thus on the version of Eigen
// MDKV_RECORD=<path> writes the lines there instead of comparing them. To see whether a change keeps the bits of
// optimised builds, compile this file and main.cpp of both trees with -O3 -march=native, run each with MDKV_RECORD
// on one machine, and compare the two files with diff.
#include <mdkv/mdkv.hpp>

#include "support/host.hpp"

#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace
{

using namespace mdkv;
using support::run;
using support::tensor;
using host         = cpu::backend;
using chosen_rungs = tensor<std::uint8_t, 2>;

template <class... Pieces>
std::string text(Pieces const&... pieces)
{
    std::ostringstream all;
    all.precision(12);
    (all << ... << pieces);
    return all.str();
}

std::string hex(std::uint64_t x)
{
    std::ostringstream all;
    all << std::hex << x;
    return all.str();
}
std::string bits(double x)
{
    std::ostringstream all;
    all << std::hexfloat << x;
    return all.str();
}

/// 64-bit FNV-1a.
std::string hashed(void const* data, index_t bytes)
{
    std::uint64_t state = 0xcbf29ce484222325U;
    for (index_t i = 0; i < bytes; ++i)
    {
        state = (state ^ static_cast<unsigned char const*>(data)[i]) * 0x100000001b3U;
    }
    return hex(state);
}
template <class T, std::size_t Rank>
std::string hashed(tensor<T, Rank> const& x)
{
    return hashed(x.data(), x.count() * index_t{sizeof(T)});
}

/// A sum in which every number has a weight of its own, and the sum of its terms' magnitudes.
template <class T, std::size_t Rank>
std::string near(tensor<T, Rank> const& x)
{
    double sum = 0, size = 0, weight = 1;
    for (T const number : x.elements())
    {
        double const term = weight * static_cast<double>(widen(number));
        sum += term;
        size += std::fabs(term);
        weight = weight < 2 ? weight + 0x1p-8 : 1;
    }
    return text(" ", sum, " ", size);
}

std::map<std::string, std::string> lines;

void record(std::string const& name, std::string const& figures)
{
    REQUIRE_MESSAGE(lines.emplace(name, figures.starts_with(' ') ? figures : " " + figures).second,
        "two lines are called " << name);
}

/// splitmix64, and what integers and powers of two make of it without rounding.
struct numbers
{
    index_t seed;
    std::uint64_t state = static_cast<std::uint64_t>(seed);
    index_t below(index_t n)
    {
        std::uint64_t z = (state += 0x9e3779b97f4a7c15U);
        z               = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
        z               = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
        return static_cast<index_t>((z ^ (z >> 31)) % static_cast<std::uint64_t>(n));
    }
    float bell() { return static_cast<float>(below(32768) + below(32768) + below(32768) - 49150) / 16384.0F; }
    float loss()
    {
        index_t const octave = 10 + below(12);
        return static_cast<float>(below(1 << 20)) / static_cast<float>(1 << octave);
    }
};

/// Coordinates of falling size, one row in eight three times as large.
template <class T, std::size_t Rank>
tensor<T, Rank> random_rows(index_t seed, std::array<index_t, Rank> extents)
{
    numbers random{seed};
    tensor<T, Rank> x{extents};
    std::vector<T> all;
    for (index_t i = 0, d = 0, dim = extents[Rank - 1], scale = 1; i < x.count(); ++i, d = (d + 1) % dim)
    {
        if (d == 0) { scale = random.below(8) == 0 ? 3 : 1; }
        all.push_back(narrow<T>(random.bell() * static_cast<float>(scale) / static_cast<float>(1 << (4 * d / dim))));
    }
    x.assign(all);
    return x;
}

/// Hadamard matrices of the largest power of two in dim along the diagonal, rows shifted by head.
tensor<float, 3> orthonormal(index_t heads, index_t dim)
{
    index_t const block = dim & -dim;
    float const unit    = 1.0F / std::sqrt(static_cast<float>(block));
    tensor<float, 3> basis{{heads, dim, dim}};
    for (index_t i = 0; i < heads * dim * dim; ++i)
    {
        index_t const h = i / dim / dim, row = (i / dim + 3 * h) % dim, j = i % dim;
        bool const odd = std::popcount(static_cast<std::uint64_t>(row % block & j % block)) % 2 != 0;
        basis.set(j / block != row / block ? 0.0F : odd ? -unit : unit, h, i / dim % dim, j);
    }
    return basis;
}

/// What score and pack take as the basis of keys.
in_view<float, 3, host> key_basis_argument(tensor<float, 3> const& basis)
{
    return basis.in();
}

struct shape
{
    index_t heads, group, queries, tokens, window, keys, values;
    [[nodiscard]] std::string name() const { return text("n", tokens, "d", keys, "v", values); }
};
constexpr std::array<shape, 4> shapes{
    {{2, 4, 5, 37, 8, 64, 64}, {1, 1, 3, 1, 4, 128, 128}, {3, 1, 1, 16, 0, 40, 24}, {4, 2, 33, 100, 16, 64, 128}}};

template <class T>
struct layer
{
    shape s;
    tensor<T, 3> queries       = random_rows<T, 3>(s.tokens + 1, {s.heads * s.group, s.queries, s.keys});
    tensor<T, 3> keys          = random_rows<T, 3>(s.tokens + 2, {s.heads, s.tokens, s.keys});
    tensor<T, 3> values        = random_rows<T, 3>(s.tokens + 3, {s.heads, s.tokens, s.values});
    tensor<T, 3> window_keys   = random_rows<T, 3>(s.tokens + 4, {s.heads, s.window, s.keys});
    tensor<T, 3> window_values = random_rows<T, 3>(s.tokens + 5, {s.heads, s.window, s.values});
    tensor<float, 3> key_basis = orthonormal(s.heads, s.keys), value_basis = orthonormal(s.heads, s.values);
};

struct named_set
{
    std::string name;
    ratio_set ratios;
    [[nodiscard]] index_t size() const { return static_cast<index_t>(ratios.size()); }
};
named_set const evict{"evict", evict_ratios}, paper{"paper", paper_ratios}, bit{"bits", bit_ratios};

/// Plain and quantised rungs; which of two is the cheaper one depends on the element.
template <class T>
named_set mixed()
{
    if (sizeof(T) == 4) { return {"mixed", {drop, fraction(1, 8), full_int4, fraction(1, 4), full_int8, full}}; }
    return {"mixed", {drop, fraction(1, 8), fraction(1, 4), full_int4, full_int8, full}};
}

void record_pool()
{
    for (auto const& extents : std::array<std::array<index_t, 3>, 4>{{{2, 3, 37}, {1, 1, 1}, {3, 4, 100}, {1, 2, 16}}})
    {
        numbers random{extents[2]};
        tensor<float, 3> loss{extents}, pooled{extents};
        std::vector<float> all;
        for (index_t i = 0; i < loss.count(); ++i) { all.push_back(random.below(4) == 0 ? 0.0F : random.loss()); }
        loss.assign(all);
        for (pooling const kind : {pooling::max, pooling::mean, pooling::adaptive})
        {
            std::string figures;
            for (index_t const width : {1, 3, 7, 25})
            {
                run([&](host const& on) { pool(on, loss.in(), {.width = width, .kind = kind}, pooled.out()); });
                figures += text(" w", width, "=", hashed(pooled));
            }
            std::string const name = kind == pooling::max ? "max" : kind == pooling::mean ? "mean" : "adaptive";
            record(text("pool.", name, ".n", extents[2]), figures);
        }
    }
}

/// The choice, but for the sums of losses, whose last bits depend on the order of summation.
std::string choice(allocation const& a, index_t rungs)
{
    std::string all = text(" m=", bits(a.multiplier), " s=", static_cast<int>(a.status), " b=", a.token_bytes, "+",
        a.charged_bytes, "<=", a.limit, " t");
    for (std::size_t r = 0; r < static_cast<std::size_t>(rungs); ++r) { all += text(":", a.tokens[r]); }
    return all;
}
std::string losses(allocation const& a)
{
    return text(" ", bits(a.loss), "/", bits(a.dual));
}

/// Losses that fall to 0 with the rung, unless of any kind.
tensor<float, 3> random_losses(std::string const& kind, index_t heads, index_t rungs, index_t tokens)
{
    numbers random{heads + 100 * rungs + tokens};
    tensor<float, 3> loss{{heads, rungs, tokens}};
    for (index_t i = 0; i < heads * tokens; ++i)
    {
        float base = kind == "ties" ? static_cast<float>(1 + random.below(3)) : random.loss();
        if (kind == "zeros" && random.below(4) != 0) { base = 0; }
        if (kind == "huge" && random.below(20) == 0) { base *= 1e30F; }
        for (index_t r = 0; r < rungs; ++r)
        {
            float x = kind == "any" ? random.loss() : base * static_cast<float>((rungs - 1 - r) * (rungs - 1 - r));
            if (kind == "non_finite" && random.below(60) == 0) { x = std::numeric_limits<float>::quiet_NaN(); }
            loss.set(x, i / tokens, r, i % tokens);
        }
    }
    return loss;
}

void record_allocate(named_set const& set, std::string const& kind, index_t heads, index_t tokens, index_t percent)
{
    // Where percent is 0 every head has a limit of its own.
    index_t const whole = 256 * tokens, R = set.size(), count = percent == 0 ? heads : 1;
    tensor<float, 3> const loss = random_losses(kind, heads, R, tokens);
    tensor<index_t, 1> limits{{count}};
    for (index_t h = 0; h < count; ++h)
    {
        limits.set(percent == 0 ? whole * (10 + 35 * h) / 100 : heads * whole * percent / 100, h);
    }
    chosen_rungs rung{{heads, tokens}};
    auto const allocated = [&](projection_charge charge, bool spend) {
        allocate_options options;
        options.charge         = charge;
        options.spend_leftover = spend;
        rung_costs const costs{set.ratios, head_dims{64, 64}, index_t{2}};
        tensor<allocation, 1> reports{{count}};
        run([&](host const& on) { allocate(on, loss.in(), costs, limits.in(), options, rung.out(), reports.out()); });
        return reports.elements();
    };
    std::string const name{text("allocate.", set.name, ".", kind, ".h", heads, "n", tokens, ".", percent, "%")};
    std::string chosen, sums, leftover;
    for (allocation const& a : allocated(projection_charge::always, false))
    {
        chosen += choice(a, R), sums += losses(a);
    }
    record(name, text(chosen, " r=", hashed(rung)));
    record(name + ".loss", sums);
    for (allocation const& a : allocated(projection_charge::always, true)) { leftover += text(" ", bits(a.loss)); }
    record(name + ".leftover", text(leftover, " r=", hashed(rung)));
    if (set.name == "paper" && kind != "non_finite")
    {
        double total = 0;
        for (allocation const& a : allocated(projection_charge::by_use, true)) { total += a.loss; }
        record(name + ".by_use", text("loss=", total));
    }
}

void record_allocate()
{
    for (named_set const& set : {evict, bit, paper})
    {
        for (std::string const kind : {"any", "falling", "ties", "zeros", "huge", "non_finite"})
        {
            for (index_t const percent : {0, 25, 60}) { record_allocate(set, kind, 3, 100, percent); }
        }
        for (index_t const percent : {20, 60})
        {
            for (std::string const kind : {"falling", "ties"}) { record_allocate(set, kind, 4, 5000, percent); }
            record_allocate(set, "falling", 2, 1, percent);
        }
        record_allocate(set, "falling", 3, 100, 2); // less than the projections
        record_allocate(set, "falling", 1, 37, 150);
    }
}

template <class T>
void record_score()
{
    for (shape const& s : shapes)
    {
        layer<T> const x{s};
        tensor<float, 1> weights{{s.queries}};
        tensor<float, 2> lse{{s.heads * s.group, s.queries}};
        for (index_t q = 0; q < s.queries; ++q) { weights.set(static_cast<float>(1 + q % 5) / 4.0F, q); }
        lse.assign(std::vector<float>(static_cast<std::size_t>(lse.count()), 5.0F));
        for (named_set const& set : {paper, bit, mixed<T>()})
        {
            tensor<float, 3> loss{{s.heads, set.size(), s.tokens}};
            auto const scored = [&](char const* name, score_options<host> const& options) {
                run([&](host const& on) {
                    score(on, x.queries.in(), x.keys.in(), x.values.in(), x.window_keys.in(),
                        key_basis_argument(x.key_basis), x.value_basis.in(), set.ratios, options, loss.out());
                });
                record(text("score.", element_name<T>(), ".", s.name(), ".", set.name, ".", name), hashed(loss));
            };
            scored("noise", {});
            scored("noise_weights", {.query_weights = weights.in()});
            scored("place_scale", {.scale = 0.25F, .first_query = s.tokens / 2});
            scored("lse_given", {.first_query = s.tokens / 2, .lse = lse.in()});
        }
    }
}

template <class T>
std::string contents(cpu::cache<T>& cache)
{
    auto const view = cache.view();
    std::vector<index_t> directory;
    for (index_t h = 0; h < view.layout.heads; ++h)
    {
        head_entry const& e = view.heads[h];
        directory.insert(directory.end(), {e.key_projection, e.value_projection, e.key_columns, e.value_columns,
                                              e.exact.tokens, e.exact.keys, e.exact.values});
        for (std::size_t r = 0; r < view.layout.rungs; ++r)
        {
            directory.insert(directory.end(), {e.runs[r].tokens, e.runs[r].keys, e.runs[r].values});
        }
    }
    return text(" a=", view.arena_bytes, ":", hashed(view.arena, view.arena_bytes),
        " d=", hashed(directory.data(), static_cast<index_t>(directory.size() * sizeof(index_t))));
}

/// At random rungs; the second head has but the cheapest and the dearest.
template <class T>
cpu::cache<T> packed(layer<T> const& x, named_set const& set, index_t tail, chosen_rungs& rung)
{
    numbers random{x.s.tokens + set.size()};
    for (index_t i = 0; i < rung.count(); ++i)
    {
        index_t const h = i / x.s.tokens, drawn = random.below(set.size());
        rung.set(static_cast<std::uint8_t>(h == 1 && drawn > 0 ? set.size() - 1 : drawn), h, i % x.s.tokens);
    }
    cache_layout const layout{set.ratios, x.s.heads, x.s.window, head_dims{x.s.keys, x.s.values}};
    index_t bytes = 0;
    run([&](host const& on) { bytes = packed_bytes<T>(on, rung.in(), layout); });
    cpu::cache<T> cache{layout, bytes, tail};
    run([&](host const& on) {
        pack(on, x.keys.in(), x.values.in(), x.window_keys.in(), x.window_values.in(), key_basis_argument(x.key_basis),
            x.value_basis.in(), rung.in(), cache.view());
    });
    return cache;
}

template <class T>
void append_rows(cpu::cache<T>& cache, shape const& s, index_t count)
{
    for (index_t i = 0; i < count; ++i)
    {
        auto const key   = random_rows<T, 2>(1000 * count + 2 * i, {s.heads, s.keys});
        auto const value = random_rows<T, 2>(1000 * count + 2 * i + 1, {s.heads, s.values});
        run([&](host const& on) { append(on, key.in(), value.in(), cache.view()); });
    }
}

template <class T>
void record_cache()
{
    named_set const parts{"parts", {drop, fraction(1, 8), fraction(1, 4), fraction(1, 2)}};
    named_set const codes{"codes_of_parts", {drop, fraction(1, 4).as(storage::int8), fraction(1, 2), full}};
    std::vector<named_set> sets{paper, bit, mixed<T>()};
    if (std::same_as<T, half>) { sets.insert(sets.end(), {evict, parts, codes}); }
    for (shape const& s : shapes)
    {
        layer<T> const x{s};
        index_t const rows = s.heads * s.group;
        auto const query   = random_rows<T, 2>(77, {rows, s.keys});
        for (named_set const& set : sets)
        {
            std::string const name = text(".", element_name<T>(), ".", s.name(), ".", set.name);
            chosen_rungs rung{{s.heads, s.tokens}};
            cpu::cache<T> cache = packed(x, set, 21, rung);
            tensor<T, 2> first{{rows, s.values}}, second{{rows, s.values}}, merged{{rows, s.values}};
            tensor<float, 1> first_lse{{rows}}, second_lse{{rows}}, merged_lse{{rows}};
            std::string numbers;
            auto const attended = [&](tensor<T, 2>& output, tensor<float, 1>& lse, float scale) {
                run([&](host const& on) {
                    attend(on, query.in(), cache.view(), {.scale = scale}, output.out(), lse.out());
                });
                numbers += near(output) + near(lse);
                return text(" ", hashed(output), "/", hashed(lse));
            };
            record("pack" + name, contents(cache));
            std::string figures = attended(second, second_lse, 0.25F);
            append_rows(cache, s, 3);
            figures += attended(first, first_lse, 0);
            append_rows(cache, s, 15);
            record("attend" + name, figures + attended(second, second_lse, 0));
            run([&](host const& on) {
                merge_attention(
                    on, first.in(), first_lse.in(), second.in(), second_lse.in(), merged.out(), merged_lse.out());
            });
            record("merge" + name, text(hashed(merged), "/", hashed(merged_lse)));
            record("near" + name, numbers + near(merged) + near(merged_lse));
            tensor<std::int32_t, 2> positions{{s.heads, s.tokens}};
            tensor<index_t, 2> begins{{s.heads, set.size() + 1}};
            run([&](host const& on) { list_slots(on, rung.in(), positions.out(), begins.out()); });
            if (std::same_as<T, half>) { record("slots" + name, text(hashed(positions), "/", hashed(begins))); }
        }
    }
}

/// Folds of a growing cache, the last with room for everything; by use only the first, which the others depend on.
void record_folds(shape const& s, named_set const& set, std::string const& how)
{
    layer<half> const x{s};
    chosen_rungs rung{{s.heads, s.tokens}};
    cpu::cache<half> cache = packed(x, set, 40, rung);
    recompress_options<host> options;
    options.allocation.spend_leftover = !how.empty();
    options.allocation.charge         = how == ".by_use" ? projection_charge::by_use : projection_charge::always;
    for (index_t fold = 0; fold < (how == ".by_use" ? 1 : 3); ++fold)
    {
        append_rows(cache, s, 11 + 6 * fold);
        index_t const before = cache.arena_bytes();
        options.limit        = budget::bytes(fold == 0 ? before - 1000 : fold == 1 ? before : 10 * before);
        options.pooling      = {.width = fold == 0 ? 7 : 3, .kind = fold == 0 ? pooling::max : pooling::adaptive};
        tensor<std::int32_t, 2> sources{{s.heads, most_slots<half>(cache.view())}};
        options.sources = sources.out();
        recompress_report report;
        run([&](host const& on) { report = recompress(on, x.queries.in(), set.ratios, options, cache); });
        std::string const name = text("recompress.", s.name(), ".", set.name, ".", fold, how);
        if (how == ".by_use") { record(name, text("loss=", report.chosen.loss)); }
        else if (how == ".leftover") { record(name, losses(report.chosen) + contents(cache)); }
        else
        {
            record(name, text(choice(report.chosen, set.size()), " moved=", report.released, ":", report.kept, ":",
                             report.lowered, ":", report.dropped, contents(cache), " sources=", hashed(sources)));
            record(name + ".loss", losses(report.chosen));
        }
    }
}

void record_recompress()
{
    for (shape const& s : {shape{3, 2, 4, 60, 4, 40, 24}, shape{2, 1, 1, 33, 8, 64, 64}})
    {
        for (named_set const& set : {evict, bit, paper, mixed<half>()})
        {
            record_folds(s, set, "");
            record_folds(s, set, ".leftover");
        }
        record_folds(s, paper, ".by_use");
    }
}

/// The rows of a layer's tokens, then those of its window.
template <class T>
tensor<T, 3> joined(tensor<T, 3> const& tokens, tensor<T, 3> const& window)
{
    tensor<T, 3> all{{tokens.extent(0), tokens.extent(1) + window.extent(1), tokens.extent(2)}};
    for (index_t h = 0; h < all.extent(0); ++h)
    {
        for (index_t d = 0; d < all.extent(2); ++d)
        {
            for (index_t i = 0; i < tokens.extent(1); ++i) { all.set(tokens.get(h, i, d), h, i, d); }
            for (index_t i = 0; i < window.extent(1); ++i) { all.set(window.get(h, i, d), h, tokens.extent(1) + i, d); }
        }
    }
    return all;
}

/// The stages of a layer one after another, with options of allocate that no preset has.
struct by_stages
{
    chosen_rungs rung;
    allocation chosen;
    cpu::cache<half> cache;

    by_stages(layer<half> const& x, preset const& by, in_view<float, 1, host> weights, index_t limit,
        allocate_options const& options)
        : rung{{x.s.heads, x.s.tokens}}
    {
        shape const& s   = x.s;
        bool const bases = by.ratios.any_projected(), coded = by.ratios.any_rotated();
        tensor<float, 3> key_basis{{bases ? s.heads : 0, s.keys, s.keys}};
        tensor<float, 3> value_basis{{bases ? s.heads : 0, s.values, s.values}};
        tensor<float, 2> key_energy{{s.heads, s.keys}}, value_energy{{s.heads, s.values}};
        tensor<float, 3> channels{{coded ? s.heads : 0, 3, s.keys}};
        std::array<index_t, 3> const of_losses{s.heads, static_cast<index_t>(by.ratios.size()), s.tokens};
        tensor<float, 3> loss{of_losses}, pooled{of_losses};
        tensor<index_t, 1> bytes{{1}};
        tensor<allocation, 1> report{{1}};
        bytes.set(limit, 0);
        if (bases)
        {
            run([&](host const& on) { fit_basis(on, x.keys.in(), key_basis.out(), key_energy.out()); });
            run([&](host const& on) { fit_basis(on, x.values.in(), value_basis.out(), value_energy.out()); });
        }
        if (coded)
        {
            run([&](host const& on) { fit_channels(on, x.queries.in(), x.keys.in(), channels.out()); });
        }
        score_options<host> scoring{.query_weights = weights};
        if (coded) { scoring.channels = channels.in(); }
        run([&](host const& on) {
            score(on, x.queries.in(), x.keys.in(), x.values.in(), x.window_keys.in(), key_basis.in(), value_basis.in(),
                by.ratios, scoring, loss.out());
        });
        run([&](host const& on) { pool(on, loss.in(), by.pooling, pooled.out()); });
        rung_costs const costs{by.ratios, {s.keys, s.values}, 2};
        run([&](host const& on) { allocate(on, pooled.in(), costs, bytes.in(), options, rung.out(), report.out()); });
        chosen = report.get(0);
        cache_layout const layout{by.ratios, s.heads, s.window, {s.keys, s.values}};
        index_t arena_bytes = 0;
        run([&](host const& on) { arena_bytes = packed_bytes<half>(on, rung.in(), layout); });
        cache = {layout, arena_bytes};
        run([&](host const& on) {
            pack(on, x.keys.in(), x.values.in(), x.window_keys.in(), x.window_values.in(), key_basis.in(),
                value_basis.in(), rung.in(), cache.view(), channels.in());
        });
    }
};

void record_compress(std::string const& name, preset chosen, projection_charge charge)
{
    for (shape const& s : {shape{2, 4, 40, 150, 8, 64, 64}, {3, 1, 8, 77, 4, 40, 24}, {1, 2, 4, 19, 1, 64, 128}})
    {
        layer<half> const x{s};
        tensor<half, 3> const keys = joined(x.keys, x.window_keys), values = joined(x.values, x.window_values);
        prompt_rows<host, half> const rows{x.queries.in(), keys.in(), values.in()};
        tensor<float, 1> weights{{s.queries}};
        for (index_t q = 0; q < s.queries; ++q) { weights.set(chosen.query_weight(q, s.queries), q); }
        chosen.window  = s.window;
        chosen.queries = s.queries;
        chosen.charge  = charge;
        chosen.uniform = 0;
        layer_shape const one{s.heads, s.group, s.tokens, s.window, {s.keys, s.values}, 2};
        for (index_t const tenths : {1, 4, 10})
        {
            budget const limit     = budget::fraction(tenths, 10);
            index_t const bytes    = limit.in_bytes(one);
            std::string const line = text("compress.", name, ".", s.name(), ".", 10 * tenths);
            prompt_shape<host> const sizes{
                .layers = 1, .heads = s.heads, .group = s.group, .dims = one.dims, .tokens = s.tokens + s.window};
            cpu::cache<half> cache;
            chosen_rungs rung{{s.heads, s.tokens}};
            compress_report report;
            run([&](host const& on) {
                prompt<host, half> p{on, chosen, sizes};
                p.finish_layer(on, 0, rows);
                allocation const total = p.allocate(on, limit);
                report                 = p.pack(on, 0, rows, cache);
                report.chosen          = total;
                if (on.scratch->counting()) { return; }
                for (index_t h = 0; h < s.heads; ++h)
                {
                    for (index_t i = 0; i < s.tokens; ++i) { rung.set(p.rungs_of(0)(h, i), h, i); }
                }
            });
            auto const figures = [&](allocation const& c, chosen_rungs const& r, cpu::cache<half>& of) {
                return text("s=", static_cast<int>(report.status), " b=", of.arena_bytes(), "<=", bytes,
                    choice(c, static_cast<index_t>(chosen.ratios.size())), " r=", hashed(r), contents(of));
            };
            if (report.status == compress_status::uncompressed)
            {
                record(line + "%", figures(report.chosen, rung, cache));
                record(line + "%.loss", losses(report.chosen));
                continue;
            }
            record(line + "%.leftover", text(losses(report.chosen), " r=", hashed(rung), contents(cache)));
            by_stages plain{
                x, chosen, weights.in(), bytes - one.window_bytes(), {.spend_leftover = false, .charge = charge}};
            record(line + "%", figures(plain.chosen, plain.rung, plain.cache));
            record(line + "%.loss", losses(plain.chosen));
        }
    }
}

void record_basis()
{
    for (auto const& extents : std::array<std::array<index_t, 3>, 3>{{{2, 100, 64}, {3, 20, 40}, {1, 200, 128}}})
    {
        auto const [heads, samples, dim] = extents;
        auto const rows                  = random_rows<half, 3>(9, extents);
        tensor<float, 3> basis{{heads, dim, dim}};
        tensor<float, 2> energy{{heads, dim}};
        run([&](host const& on) { fit_basis(on, rows.in(), basis.out(), energy.out()); });
        record(text("basis.eigen.n", samples, "d", dim), text(hashed(basis), "/", hashed(energy)));
    }
}

void record_finite()
{
    std::string figures;
    for (float const bad : {0.0F, std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()})
    {
        auto rows = random_rows<half, 3>(9, {3, 21, 40});
        rows.set(narrow<half>(bad), 1, 17, 39);
        rows.set(narrow<half>(bad), 2, 14, 3);
        // The message's numbers: layer, head, row.
        auto const message = support::error_text<non_finite_input>(
            [&] { run([&](host const& on) { expects_finite(on, "rows", rows.in(), 5); }); });
        figures += " ";
        for (char const c : message) { figures += c >= '0' && c <= '9' ? std::string{c} : ""; }
    }
    record("finite", figures);
}

/// Whether the pairs of `near` agree within the tolerance of the element that the name has second.
bool agrees_nearly(std::string const& name, std::string const& now, std::string const& before)
{
    double const rounding = name.starts_with("near.f32") ? 0 : name.starts_with("near.f16") ? 0x1p-11 : 0x1p-8;
    std::istringstream a{now}, b{before};
    double sum[2], size[2];
    int pairs = 0;
    for (; a >> sum[0] >> size[0] && b >> sum[1] >> size[1]; ++pairs)
    {
        if (!(std::fabs(sum[0] - sum[1]) <= (2e-5 + 2 * rounding) * size[1])) { return false; }
    }
    return pairs == 8;
}

/// Whether a line is as it was recorded.
bool agrees(std::string const& name, std::string const& now, std::string const& before)
{
    if (name.starts_with("near.")) { return agrees_nearly(name, now, before); }
#if !defined(__x86_64__)
    if (name.starts_with("attend.") || name.starts_with("merge.")) { return !before.empty(); }
#endif
    auto const loss = [](std::string const& line) { return std::strtod(line.c_str() + line.find('=') + 1, nullptr); };
    return name.find("by_use") == std::string::npos ? now == before : loss(now) <= 1.005 * loss(before);
}

} // namespace

TEST_CASE("every stage gives the figures that were recorded")
{
    lines.clear();
    record_pool();
    record_allocate();
    record_score<float>();
    record_score<half>();
    record_cache<float>();
    record_cache<half>();
    record_cache<bfloat16>();
    record_recompress();
    record_compress("best", presets::by_window, projection_charge::by_use); // no projections, so nothing is charged
    record_compress("evict", presets::evict, projection_charge::by_use);
    record_compress("eigen.paper", presets::paper, projection_charge::always);
    record_basis();
    record_finite();

    if (char const* const path = std::getenv("MDKV_RECORD"))
    {
        std::ofstream file{path};
        for (auto const& [name, figures] : lines) { file << name << figures << '\n'; }
        REQUIRE_MESSAGE(file.flush(), "cannot write " << path);
        return;
    }
    std::ifstream file{MDKV_TEST_DATA_DIR "/recorded.txt"};
    REQUIRE_MESSAGE(file, "cannot read " MDKV_TEST_DATA_DIR "/recorded.txt");
    std::map<std::string, std::string> recorded;
    for (std::string name, figures; file >> name && std::getline(file, figures);) { recorded[name] = figures; }
    for (auto const& [name, figures] : lines)
    {
        std::string const& before = recorded[name]; // empty where it was not recorded
        CHECK_MESSAGE(agrees(name, figures, before), name << "\n  now      " << figures << "\n  recorded " << before);
        recorded.erase(name);
    }
    for (auto const& line : recorded) { FAIL_CHECK(line.first << " is recorded and was not computed"); }
}
