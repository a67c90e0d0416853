// Tolerance against the CPU backend: both differ from the exact losses by 3e-5 of a token's loss and what it would lose if
// dropped (see tests/score.cpp), so from each other by twice that at most.
#include <mdkv/gpu/score.cuh>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/score.hpp>

#include "gpu/support/device.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"

#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using support::device_tensor;
using support::layer;
using support::layer_sizes;
using support::placement;
using support::tensor;
using support::worst_error;

constexpr double tolerance = 6e-5;

std::vector<rung> const paper_rungs{drop, part(1, 8), part(1, 4), full};

// Every kind of rung, in order of bytes for halves at head dimension 64.
std::vector<rung> const mixed_rungs{drop, part(1, 4).as(storage::int4), part(1, 8), part(1, 4).as(storage::int8),
    part(1, 4), full_int4.rotated(), full_int8, full};

/// score_options for either backend, and the second basis.
struct choice
{
    float scale                         = 0.0F;
    std::optional<index_t> first_query  = std::nullopt;
    tensor<float, 2> const* lse         = nullptr;
    tensor<float, 1> const* weights     = nullptr;
    quantisation_loss rule              = quantisation_loss::bound;
    tensor<float, 3> const* query_basis = nullptr;
    rounding round                      = rounding::exact;
};

template <class B>
score_options<B> options_of(choice const& c)
{
    return {.scale = c.scale, .first_query = c.first_query, .quantisation = c.rule};
}

template <class T>
std::vector<float> on_cpu(layer<T> const& x, std::vector<rung> const& rungs, choice const& c = {})
{
    auto options        = options_of<cpu::backend>(c);
    options.first_query = c.first_query ? c.first_query : x.sizes.first_query;
    if (c.lse != nullptr) { options.lse = c.lse->in(); }
    if (c.weights != nullptr) { options.query_weights = c.weights->in(); }
    tensor<float, 3> loss{{x.sizes.heads, static_cast<index_t>(rungs.size()), x.sizes.tokens}};
    support::run([&](cpu::backend const& on) {
        key_bases<cpu::backend> bases{x.key_basis.in()};
        if (c.query_basis != nullptr) { bases.of_queries = c.query_basis->in(); }
        score(on, x.queries.in(), x.keys.in(), x.values.in(), x.window_keys.in(), bases, x.value_basis.in(),
            ratio_set<>{std::span<rung const>{rungs}, c.round}, options, loss.out());
    });
    return loss.elements();
}

template <class T>
std::vector<float> on_gpu(
    layer<T> const& x, std::vector<rung> const& rungs, choice const& c = {}, placement of_loss = {})
{
    device_tensor<T, 3> const queries{x.queries};
    device_tensor<T, 3> const keys{x.keys};
    device_tensor<T, 3> const values{x.values};
    device_tensor<T, 3> const window_keys{x.window_keys};
    device_tensor<float, 3> const key_basis{x.key_basis};
    device_tensor<float, 3> const query_basis{c.query_basis != nullptr ? *c.query_basis : x.key_basis};
    device_tensor<float, 3> const value_basis{x.value_basis};
    tensor<float, 2> const no_lse{{0, 0}};
    tensor<float, 1> const no_weights{{0}};
    device_tensor<float, 2> const lse{c.lse != nullptr ? *c.lse : no_lse};
    device_tensor<float, 1> const weights{c.weights != nullptr ? *c.weights : no_weights};
    device_tensor<float, 3> loss{{x.sizes.heads, static_cast<index_t>(rungs.size()), x.sizes.tokens}, of_loss};
    auto options        = options_of<gpu::backend>(c);
    options.first_query = c.first_query ? c.first_query : x.sizes.first_query;
    if (c.lse != nullptr) { options.lse = lse.in(); }
    if (c.weights != nullptr) { options.query_weights = weights.in(); }
    support::run_on_device([&](gpu::backend const& on) {
        key_bases<gpu::backend> bases{key_basis.in()};
        bases.of_queries = query_basis.in();
        score(on, queries.in(), keys.in(), values.in(), window_keys.in(), bases, value_basis.in(),
            ratio_set<>{std::span<rung const>{rungs}, c.round}, options, loss.out());
    });
    return loss.elements();
}

/// Of the losses on the GPU, against those of the CPU.
template <class T>
worst_error error_of(layer<T> const& x, std::vector<rung> const& rungs, choice const& c = {})
{
    std::vector<float> const got     = on_gpu(x, rungs, c);
    std::vector<float> const want    = on_cpu(x, rungs, c);
    std::vector<float> const dropped = on_cpu(x, {drop}, c);
    auto const tokens                = static_cast<std::size_t>(x.sizes.tokens);
    worst_error error;
    for (std::size_t i = 0; i < want.size(); ++i)
    {
        std::size_t const head = i / tokens / rungs.size();
        long double total      = 0;
        for (std::size_t t = 0; t < tokens; ++t) { total += static_cast<long double>(dropped[head * tokens + t]); }
        // Tokens of next to no attention are compared on the scale of the average one's thousandth.
        long double const magnitude = static_cast<long double>(dropped[head * tokens + i % tokens] + want[i])
                                      + 1e-3L * total / static_cast<long double>(tokens);
        error.add(static_cast<long double>(got[i]), static_cast<long double>(want[i]), magnitude,
            static_cast<std::int64_t>(i));
    }
    return error;
}

template <class T = float>
void check(layer_sizes const& sizes, std::vector<rung> const& rungs, choice const& c = {})
{
    worst_error const error = error_of(layer<T>{sizes}, rungs, c);
    CAPTURE(error);
    CHECK(error.within(tolerance));
}

/// Bases whose products with short numbers are exact in float, so that both backends quantise the same coordinates:
/// Hadamard's four by four, strewn over the dimensions. `stretch` by powers of two makes them one of a pair.
void set_exact_basis(tensor<float, 3>& basis, int stretch)
{
    index_t const dim = basis.extent(1); // a multiple of 4
    for (index_t h = 0; h < basis.extent(0); ++h)
    {
        for (index_t c = 0; c < dim; ++c)
        {
            for (index_t d = 0; d < dim; ++d)
            {
                bool const met  = c % (dim / 4) == (d + 3 * h) % (dim / 4);
                index_t const a = c / (dim / 4);
                index_t const b = d / (dim / 4);
                bool const odd  = ((a & b & 1) + (a & b & 2) / 2) % 2 != 0;
                float const one = std::ldexp(odd ? -0.5F : 0.5F, stretch * static_cast<int>(c % 5 - 2));
                basis.set(met ? one : 0.0F, h, c, d);
            }
        }
    }
}

template <class T = bfloat16>
layer<T> exact_layer(layer_sizes const& sizes, placement how = {})
{
    layer<T> x{sizes, how};
    set_exact_basis(x.key_basis, 0);
    set_exact_basis(x.value_basis, 0);
    return x;
}

/// Natural log-sum-exps of all queries, as a flash prefill would hand them over.
template <class T>
tensor<float, 2> lse_of(layer<T> const& x)
{
    tensor<float, 2> lse{{x.sizes.heads * x.sizes.group, x.sizes.queries}};
    for (index_t h = 0; h < x.sizes.heads; ++h)
    {
        auto const want = support::expected_scores(x, h, {drop});
        for (index_t i = 0; i < x.sizes.group * x.sizes.queries; ++i)
        {
            lse.set(static_cast<float>(want.lse[static_cast<std::size_t>(i)]), h * x.sizes.group + i / x.sizes.queries,
                i % x.sizes.queries);
        }
    }
    return lse;
}

} // namespace

TEST_CASE_TEMPLATE(
    "score on the GPU agrees with the CPU for every head dimension and element type", T, float, half, bfloat16)
{
    for (index_t const dim : {32, 40, 56, 64, 128})
    {
        CAPTURE(dim);
        check<T>({.queries = 5, .tokens = 37, .window = 5, .dim = dim, .value_dim = dim}, paper_rungs);
    }
    check<T>({.queries = 3, .tokens = 35, .dim = 64, .value_dim = 40}, paper_rungs);
    check<T>({.queries = 3, .tokens = 35, .dim = 8, .value_dim = 96}, paper_rungs);
}

TEST_CASE_TEMPLATE("score on the GPU serves head dimensions 1 and 7, and ones so large that tiles are in global memory",
    T, float, half)
{
    check<T>({.dim = 1, .value_dim = 1}, {drop, full});
    check<T>({.dim = 7, .value_dim = 7}, {drop, part(1, 4), part(1, 2), full}, {.round = rounding::down});
    check<T>({.heads = 1, .queries = 3, .tokens = 70, .dim = 576, .value_dim = 512, .decay = 0.98}, paper_rungs);
}

TEST_CASE("score on the GPU takes any number of tokens, also those that fill no tile or are cut into parts")
{
    for (index_t const tokens : {1, 2, 31, 33, 127, 128, 129, 200})
    {
        CAPTURE(tokens);
        check({.heads = 1, .group = 3, .queries = 4, .tokens = tokens}, paper_rungs);
    }
    check<half>({.heads = 1, .group = 4, .queries = 32, .tokens = 330, .window = 32}, paper_rungs); // tiles of 64
    check<half>(
        {.heads = 1, .group = 4, .queries = 32, .tokens = 70, .dim = 256, .value_dim = 256}, paper_rungs); // of 32
    check({.heads = 1, .group = 1, .queries = 3, .tokens = 1300, .dim = 16, .value_dim = 16}, paper_rungs);
}

TEST_CASE("score on the GPU lets any number of query heads share a KV head")
{
    for (index_t const group : {1, 2, 5, 9})
    {
        for (index_t const queries : {1, 3, 8})
        {
            CAPTURE(group);
            CAPTURE(queries);
            check<half>({.heads = 3, .group = group, .queries = queries, .tokens = 40, .window = 8}, paper_rungs);
        }
    }
}

TEST_CASE("score on the GPU takes the window into the softmax, whatever its size, and queries from anywhere")
{
    for (index_t const window : {0, 1, 17, 140})
    {
        CAPTURE(window);
        check({.queries = 6, .tokens = 40, .window = window}, paper_rungs);
        for (index_t const first : {0, 3, 89, 95, 100, 1000})
        {
            CAPTURE(first);
            check({.group = 3, .queries = 9, .tokens = 95, .window = window, .first_query = first}, paper_rungs);
        }
    }
    check({.group = 1, .queries = 70, .tokens = 9, .window = 0, .first_query = 0}, paper_rungs);
}

TEST_CASE("score on the GPU makes nothing of a token that no query may see")
{
    layer<float> const x{{.heads = 1, .queries = 3, .tokens = 150, .window = 4, .first_query = 10}};
    std::vector<float> const loss = on_gpu(x, mixed_rungs);
    for (std::size_t i = 0; i < loss.size(); ++i)
    {
        if (i % 150 > 12) { CHECK(loss[i] == 0.0F); }
    }
    CHECK(loss[12] > 0.0F);
    std::vector<float> const all = on_gpu(x, paper_rungs, {.first_query = 154});
    CHECK(support::same_bits(on_gpu(x, paper_rungs, {.first_query = std::numeric_limits<index_t>::max()}), all));
}

TEST_CASE("score on the GPU takes ratio sets of one to sixteen rungs, with and without 0 and 1")
{
    std::vector<rung> sixteen{drop};
    for (int i = 1; i < 15; ++i) { sixteen.push_back(part(2 * i, 32)); }
    sixteen.push_back(full);
    std::vector<std::vector<rung>> const sets{{drop}, {full}, {part(1, 4)}, {drop, full}, {drop, part(1, 2)},
        {drop, part(1, 32), part(3, 32), part(1, 4), part(31, 32), full}, sixteen};
    for (auto const& set : sets)
    {
        CAPTURE(set.size());
        check({.tokens = 35}, set);
        check<half>({.tokens = 35, .value_dim = 64}, set);
    }
}

TEST_CASE("score on the GPU scores quantised rungs of every kind as the CPU does, under either rule")
{
    std::vector<std::vector<rung>> const sets{{drop, full_int4, full_int8, full},
        {drop, part(1, 4).as(storage::int8), full_int4, full}, {drop, part(1, 8), full_int4.rotated(), full},
        mixed_rungs, {full_int8}};
    for (index_t const dim : {64, 40})
    {
        auto const x = exact_layer(
            {.queries = 5, .tokens = 75, .window = 6, .dim = dim, .value_dim = 104 - dim, .first_query = 70});
        for (std::size_t set = 0; set < sets.size(); ++set)
        {
            for (auto const rule : {quantisation_loss::bound, quantisation_loss::value_only})
            {
                CAPTURE(dim);
                CAPTURE(set);
                CAPTURE(static_cast<int>(rule));
                worst_error const error = error_of(x, sets[set], {.rule = rule});
                CAPTURE(error);
                CHECK(error.within(tolerance));
            }
        }
    }
    // In float, with tiles that lie in global memory.
    auto const wide = exact_layer<float>({.heads = 1, .tokens = 40, .dim = 256, .value_dim = 256, .decay = 0.97});
    worst_error const error = error_of(wide, mixed_rungs);
    CAPTURE(error);
    CHECK(error.within(tolerance));
}

TEST_CASE("score on the GPU takes log-sum-exps and weights of the queries at every kind of rung")
{
    auto const x = exact_layer({.group = 3, .queries = 4, .tokens = 130, .window = 4, .dim = 64, .value_dim = 64});
    tensor<float, 2> const lse = lse_of(x);
    tensor<float, 1> weights{{4}};
    weights.assign(std::vector<float>{0.25F, 0.0F, 1.0F, 37.5F});
    for (auto const rule : {quantisation_loss::bound, quantisation_loss::value_only})
    {
        for (auto const* const given : {static_cast<tensor<float, 2> const*>(nullptr), &lse})
        {
            CAPTURE(static_cast<int>(rule));
            CAPTURE(given != nullptr);
            for (auto const& rungs : {mixed_rungs, std::vector<rung>{drop, full}})
            {
                worst_error const error = error_of(x, rungs, {.lse = given, .weights = &weights, .rule = rule});
                CAPTURE(error);
                CHECK(error.within(tolerance));
            }
        }
    }
    weights.set(-1.0F, 2);
    for (float const l : on_gpu(x, {drop}, {.weights = &weights})) { CHECK(std::isnan(l)); }
}

TEST_CASE("score on the GPU brings keys and queries to the basis by two different matrices, and takes a scale")
{
    auto x = exact_layer({.queries = 5, .tokens = 75, .window = 6, .dim = 64, .value_dim = 40});
    tensor<float, 3> of_queries{{2, 64, 64}};
    set_exact_basis(x.key_basis, 1);
    set_exact_basis(of_queries, -1);
    worst_error const error = error_of(x, mixed_rungs, {.scale = 0.07F, .query_basis = &of_queries});
    CAPTURE(error);
    CHECK(error.within(tolerance));
}

TEST_CASE("score on the GPU finds what is missing of values that a rung nearly holds, from the difference")
{
    // Rank 8 of 64: the rungs of 8 and 16 coordinates hold everything.
    check({.tokens = 140, .dim = 64, .value_dim = 64, .rank = 8}, paper_rungs);
    check<half>({.tokens = 40, .dim = 40, .value_dim = 40, .rank = 5}, paper_rungs);
    auto x                  = exact_layer({.tokens = 40, .dim = 64, .value_dim = 64, .decay = 0.7});
    worst_error const error = error_of(x, {drop, part(1, 4).as(storage::int4), part(1, 4), part(15, 16), full});
    CAPTURE(error);
    CHECK(error.within(tolerance));
}

TEST_CASE_TEMPLATE("score on the GPU gives the same bits for every placement of the same numbers, and in two runs", T,
    float, half, bfloat16)
{
    layer_sizes const sizes{.heads = 3, .queries = 5, .tokens = 75, .window = 9, .dim = 48, .value_dim = 56};
    std::vector<float> const plain = on_gpu(layer<T>{sizes}, mixed_rungs);
    CHECK(support::same_bits(on_gpu(layer<T>{sizes}, mixed_rungs), plain));
    int const element = sizeof(T);
    for (placement const how : {placement{.swapped = true}, placement{.slack = 3}, placement{.slack = 8},
             placement{.swapped = true, .slack = 1}, placement{.misalign = element}})
    {
        CAPTURE(how.swapped);
        CAPTURE(how.slack);
        CAPTURE(how.misalign);
        CHECK(support::same_bits(
            on_gpu(layer<T>{sizes, how}, mixed_rungs, {}, {.swapped = how.swapped, .slack = how.slack}), plain));
    }
}

TEST_CASE("score on the GPU says that the full rung loses exactly 0 and that no loss is negative")
{
    layer<half> const x{{.tokens = 140, .dim = 64, .value_dim = 64, .logits = 40.0}};
    for (auto const& rungs : {paper_rungs, mixed_rungs})
    {
        std::vector<float> const loss = on_gpu(x, rungs);
        int wrong                     = 0;
        for (std::size_t i = 0; i < loss.size(); ++i)
        {
            bool const is_full = i / 140 % rungs.size() == rungs.size() - 1;
            wrong += std::isfinite(loss[i]) && (is_full ? loss[i] == 0.0F : loss[i] >= 0.0F) ? 0 : 1;
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("score on the GPU makes a value that is no number its own token's losses, and nobody else's")
{
    layer_sizes const sizes{.heads = 1, .tokens = 70, .dim = 64, .value_dim = 64};
    for (auto const rule : {quantisation_loss::bound, quantisation_loss::value_only})
    {
        std::vector<float> const want = on_gpu(layer<half>{sizes}, mixed_rungs, {.rule = rule});
        for (index_t const dim : {3, 40})
        {
            layer<half> y{sizes};
            y.values.set(narrow<half>(std::numeric_limits<float>::quiet_NaN()), 0, 66, dim);
            std::vector<float> const got = on_gpu(y, mixed_rungs, {.rule = rule});
            int wrong                    = 0;
            for (std::size_t i = 0; i + 70 < got.size(); ++i)
            {
                wrong += (i % 70 == 66 ? std::isnan(got[i]) : got[i] == want[i]) ? 0 : 1;
            }
            CHECK(wrong == 0);
        }
    }
}

TEST_CASE("score on the GPU needs scratch that stops growing with the number of tokens")
{
    auto const bytes = [](index_t tokens) {
        gpu::backend const any{};
        auto const at = [&](index_t heads, index_t count, index_t width) {
            return in(any, static_cast<half*>(nullptr), heads, count, width);
        };
        auto const basis = in(any, static_cast<float*>(nullptr), 2, 64, 64);
        workspace count;
        score(gpu::backend{nullptr, &count}, at(4, 32, 64), at(2, tokens, 64), at(2, tokens, 64), at(2, 32, 64), basis,
            basis, paper_ratios, {}, out(any, static_cast<float*>(nullptr), 2, 4, tokens));
        return count.bytes();
    };
    CHECK(bytes(1 << 19) > 0);
    CHECK(bytes(1 << 20) == bytes(1 << 19));
    CHECK(bytes(1 << 24) == bytes(1 << 19));
}

TEST_CASE("score on the GPU has nothing to do without heads or tokens, and refuses elements at odd addresses")
{
    CHECK(on_gpu(layer<float>{{.tokens = 0, .window = 8}}, paper_rungs).empty());
    CHECK(on_gpu(layer<float>{{.heads = 0}}, paper_rungs).empty());
    CHECK(support::error_text<invalid_argument>([] {
        static_cast<void>(on_gpu(layer<half>{{}, {.misalign = 1}}, paper_rungs));
    }) == "score: queries is not aligned to 2 bytes, which a GPU needs");
}
