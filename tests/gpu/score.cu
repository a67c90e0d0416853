// Tolerance against the CPU backend: both differ from the exact losses by 3e-5 of a token's loss and what it would lose if
// dropped (see tests/unit/stages/score.cpp), so from each other by twice that at most.
#include <mdkv/gpu/score.cuh>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/score.hpp>

#include "gpu/support/device.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"
#include "support/score_cases.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_tensor;
using support::exact_layer;
using support::layer;
using support::layer_sizes;
using support::lse_of;
using support::mixed_rungs;
using support::paper_rungs;
using support::placement;
using support::tensor;
using support::worst_error;

constexpr double tolerance = 6e-5;

/// score_options for either backend.
struct choice
{
    float scale                        = 0.0F;
    std::optional<index_t> first_query = std::nullopt;
    tensor<float, 2> const* lse        = nullptr;
    tensor<float, 2> const* elsewhere  = nullptr;
    float early_weight                 = 1.0F;
    index_t question                   = 2;
    rounding round                     = rounding::exact;
    row_norm norm                      = row_norm::sum;
    float even                         = 0.0F;
    tensor<float, 3> const* queries    = nullptr; ///< instead of the layer's
};

template <class B>
score_options<B> options_of(choice const& c)
{
    return {.scale       = c.scale,
        .first_query     = c.first_query,
        .early_weight    = c.early_weight,
        .question        = c.question,
        .norm            = c.norm,
        .uniform_queries = c.even};
}

template <class T>
std::vector<float> on_cpu(layer<T> const& x, std::vector<rung> const& rungs, choice const& c = {})
{
    auto options        = options_of<cpu::backend>(c);
    options.first_query = c.first_query ? c.first_query : x.sizes.first_query;
    if (c.lse != nullptr) { options.lse = c.lse->in(); }
    if (c.elsewhere != nullptr) { options.lse_elsewhere = c.elsewhere->in(); }
    tensor<float, 3> loss{{x.sizes.heads, static_cast<index_t>(rungs.size()), x.sizes.tokens}};
    auto const scored = [&](auto const& queries) {
        support::run([&](cpu::backend const& on) {
            score(on, queries.in(), x.keys.in(), x.values.in(), x.window_keys.in(), x.key_basis.in(),
                x.value_basis.in(), ratio_set{std::span<rung const>{rungs}, c.round}, options, loss.out());
        });
    };
    if (c.queries != nullptr) { scored(*c.queries); }
    else { scored(x.queries); }
    return loss.elements();
}

template <class T>
std::vector<float> on_gpu(
    layer<T> const& x, std::vector<rung> const& rungs, choice const& c = {}, placement of_loss = {})
{
    device_tensor<T, 3> const keys{x.keys};
    device_tensor<T, 3> const values{x.values};
    device_tensor<T, 3> const window_keys{x.window_keys};
    device_tensor<float, 3> const key_basis{x.key_basis};
    device_tensor<float, 3> const value_basis{x.value_basis};
    tensor<float, 2> const no_lse{{0, 0}};
    device_tensor<float, 2> const lse{c.lse != nullptr ? *c.lse : no_lse};
    device_tensor<float, 2> const elsewhere{c.elsewhere != nullptr ? *c.elsewhere : no_lse};
    device_tensor<float, 3> loss{{x.sizes.heads, static_cast<index_t>(rungs.size()), x.sizes.tokens}, of_loss};
    auto options        = options_of<gpu::backend>(c);
    options.first_query = c.first_query ? c.first_query : x.sizes.first_query;
    if (c.lse != nullptr) { options.lse = lse.in(); }
    if (c.elsewhere != nullptr) { options.lse_elsewhere = elsewhere.in(); }
    auto const scored = [&](auto const& queries) {
        support::run_on_device([&](gpu::backend const& on) {
            score(on, queries.in(), keys.in(), values.in(), window_keys.in(), key_basis.in(), value_basis.in(),
                ratio_set{std::span<rung const>{rungs}, c.round}, options, loss.out());
        });
    };
    if (c.queries != nullptr) { scored(device_tensor<float, 3>{*c.queries}); }
    else { scored(device_tensor<T, 3>{x.queries}); }
    return loss.elements();
}

/// The losses on the GPU are those of the CPU; none is negative, and exactly 0 at the full rung.
template <class T>
void compare(layer<T> const& x, std::vector<rung> const& rungs, choice const& c = {})
{
    std::vector<float> const got     = on_gpu(x, rungs, c);
    std::vector<float> const want    = on_cpu(x, rungs, c);
    std::vector<float> const dropped = on_cpu(x, {drop}, c);
    auto const tokens                = static_cast<std::size_t>(x.sizes.tokens);
    worst_error error;
    int wrong = 0;
    for (std::size_t i = 0; i < want.size(); ++i)
    {
        std::size_t const head = i / tokens / rungs.size();
        bool const is_full     = rungs[i / tokens % rungs.size()].full();
        wrong += std::isfinite(got[i]) && (is_full ? got[i] == 0.0F : got[i] >= 0.0F) ? 0 : 1;
        long double total = 0;
        for (std::size_t t = 0; t < tokens; ++t) { total += static_cast<long double>(dropped[head * tokens + t]); }
        // Tokens of next to no attention are compared on the scale of the average one's thousandth.
        long double const magnitude = static_cast<long double>(dropped[head * tokens + i % tokens] + want[i])
                                      + 1e-3L * total / static_cast<long double>(tokens);
        error.add(static_cast<long double>(got[i]), static_cast<long double>(want[i]), magnitude,
            static_cast<std::int64_t>(i));
    }
    CAPTURE(error);
    CHECK(wrong == 0);
    CHECK(error.within(tolerance));
}

template <class T = float>
void check(layer_sizes const& sizes, std::vector<rung> const& rungs = paper_rungs, choice const& c = {})
{
    CAPTURE(sizes.tokens);
    CAPTURE(sizes.window);
    CAPTURE(sizes.queries);
    CAPTURE(sizes.dim);
    CAPTURE(rungs.size());
    compare(layer<T>{sizes}, rungs, c);
}

TEST_CASE_TEMPLATE(
    "score on the GPU agrees with the CPU for every head dimension and element type", T, float, half, bfloat16)
{
    for (index_t const dim : {32, 40, 56, 64, 128})
    {
        check<T>({.queries = 5, .tokens = 37, .window = 5, .dim = dim, .value_dim = dim});
    }
    check<T>({.queries = 3, .tokens = 35, .dim = 64, .value_dim = 40});
    check<T>({.queries = 3, .tokens = 35, .dim = 8, .value_dim = 96});
    check<T>({.dim = 1, .value_dim = 1}, {drop, full});
    check<T>({.dim = 7, .value_dim = 7}, {drop, fraction(1, 4), fraction(1, 2), full}, {.round = rounding::down});
    check<T>({.heads = 1, .queries = 3, .tokens = 70, .dim = 320, .value_dim = 256, .decay = 0.98});
    check<T>({.tokens = 140, .dim = 64, .value_dim = 64, .logits = 40.0}, mixed_rungs);
    // Values that are no whole vectors of eight.
    check<T>({.tokens = 45, .dim = 64, .value_dim = 37}, mixed_rungs, {.round = rounding::down});
}

TEST_CASE("score on the GPU agrees with the CPU for any numbers of tokens, queries and query heads, windows and places")
{
    for (index_t const tokens : {1, 2, 31, 33, 127, 128, 129, 200})
    {
        check({.heads = 1, .group = 3, .queries = 4, .tokens = tokens});
    }
    check<half>({.heads = 1, .group = 4, .queries = 32, .tokens = 330, .window = 32});                // tiles of 64
    check<half>({.heads = 1, .group = 4, .queries = 32, .tokens = 70, .dim = 256, .value_dim = 256}); // of 32
    check<half>({.heads = 1, .group = 8, .queries = 16, .tokens = 40, .dim = 512, .value_dim = 512});
    check({.heads = 1, .group = 1, .queries = 3, .tokens = 1300, .dim = 16, .value_dim = 16});
    for (index_t const group : {1, 2, 5, 9})
    {
        for (index_t const queries : {1, 3, 8})
        {
            check<half>({.heads = 3, .group = group, .queries = queries, .tokens = 40, .window = 8});
        }
    }
    for (index_t const window : {0, 1, 17, 140})
    {
        check({.queries = 6, .tokens = 40, .window = window});
        for (index_t const first : {0, 3, 89, 95, 100, 1000})
        {
            check({.group = 3, .queries = 9, .tokens = 95, .window = window, .first_query = first});
        }
    }
    check({.group = 1, .queries = 70, .tokens = 9, .window = 0, .first_query = 0});
}

TEST_CASE("score on the GPU makes the losses of a token that no query may see 0")
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

TEST_CASE("score on the GPU agrees with the CPU for ratio sets of one to sixteen rungs, with and without 0 and 1")
{
    std::vector<rung> sixteen{drop};
    for (int i = 1; i < 15; ++i) { sixteen.push_back(fraction(2 * i, 32)); }
    sixteen.push_back(full);
    std::vector<std::vector<rung>> const sets{{drop}, {full}, {fraction(1, 4)}, {drop, full}, {drop, fraction(1, 2)},
        {drop, fraction(1, 32), fraction(3, 32), fraction(1, 4), fraction(31, 32), full}, sixteen};
    for (auto const& set : sets)
    {
        check({.tokens = 35}, set);
        check<half>({.tokens = 35, .value_dim = 64}, set);
    }
}

TEST_CASE("score on the GPU agrees with the CPU for quantised rungs of every kind, with every option")
{
    for (index_t const dim : {64, 40})
    {
        auto const x = exact_layer<bfloat16>(
            {.queries = 5, .tokens = 75, .window = 6, .dim = dim, .value_dim = 104 - dim, .first_query = 70});
        for (auto const& rungs : support::quantised_sets) { compare(x, rungs); }
    }
    auto const x =
        exact_layer<bfloat16>({.group = 3, .queries = 4, .tokens = 130, .window = 4, .dim = 64, .value_dim = 64});
    tensor<float, 2> const lse = lse_of(x);
    for (auto const* const given : {static_cast<tensor<float, 2> const*>(nullptr), &lse})
    {
        for (auto const& rungs : {mixed_rungs, std::vector<rung>{drop, full}})
        {
            for (float const early : {0.25F, 0.0F, 37.5F}) { compare(x, rungs, {.lse = given, .early_weight = early}); }
            compare(x, rungs, {.lse = given, .elsewhere = &lse}); // as if all were there twice
        }
    }
    compare(x, mixed_rungs, {.scale = 0.07F});
}

TEST_CASE("score on the GPU agrees with the CPU in every norm over rows, for chunks of a prompt as well")
{
    for (auto const norm : {row_norm::euclidean, row_norm::maximum})
    {
        CAPTURE(static_cast<int>(norm));
        for (auto const& rungs : {paper_rungs, mixed_rungs})
        {
            auto const x = exact_layer<half>(
                {.group = 3, .queries = 9, .tokens = 75, .window = 6, .dim = 64, .value_dim = 64, .first_query = 70});
            compare(x, rungs, {.first_query = 70, .norm = norm});
            compare(x, rungs, {.first_query = 200, .early_weight = 0.25F, .question = 4, .norm = norm});
            compare(x, rungs, {.first_query = 200, .norm = norm, .even = 2.5F});
        }
        check<bfloat16>({.group = 2, .queries = 70, .tokens = 70, .window = 4, .dim = 64, .value_dim = 64},
            {drop, full_int4, full}, {.first_query = 74, .norm = norm});
        check<float>({.group = 1, .queries = 3, .tokens = 300, .dim = 40, .value_dim = 8}, paper_rungs, {.norm = norm});
    }
}

TEST_CASE("score on the GPU finds the rest of values that a rung nearly holds from the difference")
{
    // Rank 8 of 64: the rungs of 8 and 16 coordinates hold everything.
    check({.tokens = 140, .dim = 64, .value_dim = 64, .rank = 8});
    check<half>({.tokens = 40, .dim = 40, .value_dim = 40, .rank = 5});
    compare(exact_layer<bfloat16>({.tokens = 40, .dim = 64, .value_dim = 64, .decay = 0.7}),
        {drop, fraction(1, 4).as(storage::int8), fraction(1, 4), fraction(15, 16), full});
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

TEST_CASE("score on the GPU makes a value that is a NaN its own token's losses NaN, and no other token's")
{
    layer_sizes const sizes{.heads = 1, .tokens = 70, .dim = 64, .value_dim = 64};
    for (index_t const dim : {3, 40})
    {
        layer<half> x{sizes};
        x.values.set(half{}, 0, 66, dim); // for the mean
        std::vector<float> const want = on_gpu(x, mixed_rungs);
        layer<half> y{sizes};
        y.values.set(narrow<half>(std::numeric_limits<float>::quiet_NaN()), 0, 66, dim);
        std::vector<float> const got = on_gpu(y, mixed_rungs);
        int wrong                    = 0;
        for (std::size_t i = 0; i + 70 < got.size(); ++i)
        {
            wrong += (i % 70 == 66 ? std::isnan(got[i]) : got[i] == want[i]) ? 0 : 1;
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE_TEMPLATE("queries of another element than the keys are scored on the GPU as on the CPU", T, half, bfloat16)
{
    for (index_t const dim : {40, 64})
    {
        layer_sizes const sizes{.queries = 5, .tokens = 100, .dim = dim, .value_dim = 32};
        layer<float> const wide{sizes}; // its queries are not those of the other, rounded
        check<T>(sizes, mixed_rungs, {.queries = &wide.queries});
    }
}

TEST_CASE("score on the GPU gives losses that are NaN or infinite where a log-sum-exp or a weight is bad")
{
    constexpr float infinity = std::numeric_limits<float>::infinity();
    layer<half> const x{{.tokens = 40, .dim = 64, .value_dim = 64}};
    for (float const bad : {std::numeric_limits<float>::quiet_NaN(), infinity, -infinity, 3e38F, -3e38F, -200.0F})
    {
        CAPTURE(bad);
        tensor<float, 2> lse           = lse_of(x);
        std::vector<float> const right = on_gpu(x, mixed_rungs, {.lse = &lse});
        lse.set(bad, 3, 4); // of head 1
        std::vector<float> const losses = on_gpu(x, mixed_rungs, {.lse = &lse});
        int wrong                       = 0;
        for (std::size_t i = 0; i < losses.size(); ++i)
        {
            bool const as_before = i / 40 < mixed_rungs.size() || i / 40 % mixed_rungs.size() == mixed_rungs.size() - 1;
            wrong += (as_before ? losses[i] == right[i] : !std::isfinite(losses[i])) ? 0 : 1;
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE("score on the GPU needs scratch that stops growing with the number of tokens")
{
    auto const bytes = [](index_t tokens) {
        gpu::backend const any{};
        auto const place = [](std::uintptr_t i) { return reinterpret_cast<float*>(i << 40U); };
        auto const at    = [&](index_t heads, index_t count, index_t width) {
            return in(any, reinterpret_cast<half*>(place(1)), heads, count, width);
        };
        auto const basis = in(any, place(2), 2, 64, 64);
        return support::scratch_of_recording([&](gpu::backend const& on) {
            score(on, at(4, 32, 64), at(2, tokens, 64), at(2, tokens, 64), at(2, 32, 64), basis, basis, paper_ratios,
                {}, out(any, place(3), 2, 4, tokens));
        });
    };
    CHECK(bytes(1 << 19) > 0);
    CHECK(bytes(1 << 20) == bytes(1 << 19));
    CHECK(bytes(1 << 24) == bytes(1 << 19));
}

TEST_CASE("score on the GPU has nothing to do without heads or tokens, and refuses elements at odd addresses and head "
          "dimensions too large")
{
    layer<half> const large{{.heads = 1, .queries = 3, .tokens = 10, .dim = 8192, .value_dim = 64}};
    CHECK(support::error_text<invalid_argument>([&] {
        static_cast<void>(on_gpu(large, {drop, full}));
    }).starts_with("score: head dimensions 8192 and 64 take "));
    CHECK(on_gpu(layer<float>{{.tokens = 0, .window = 8}}, paper_rungs).empty());
    CHECK(on_gpu(layer<float>{{.heads = 0}}, paper_rungs).empty());
    CHECK(support::error_text<invalid_argument>([] {
        static_cast<void>(on_gpu(layer<half>{{}, {.misalign = 1}}, paper_rungs));
    }) == "score: queries is not aligned to 2 bytes");
}

} // namespace
