#include "runner/sequence_cache.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <mdkv/core/budget.hpp>
#include <mdkv/core/types.hpp>

#include "runner/decode.hpp"
#include "runner/llama_model.hpp"
#include "runner/policies.hpp"
#include "runner/prefill.hpp"
#include "support/full_cache.hpp"
#include "support/synthetic_llama.hpp"

namespace
{

constexpr std::int64_t window = 8;

std::vector<std::int32_t> text(std::int64_t count, std::int64_t vocabulary)
{
    std::vector<std::int32_t> ids;
    for (std::int64_t i = 0; i < count; ++i)
    {
        ids.push_back(static_cast<std::int32_t>((i * 17 + i * i * 5) % vocabulary));
    }
    return ids;
}

/// Logits of the tokens after `context`, fed one by one through whatever cache `load` and `attend` stand for.
template <class T, class Load, class Attend>
std::vector<float> continue_with(runner::llama_model const& model, std::vector<std::int32_t> const& tokens,
    std::int64_t context, Load load, Attend attend)
{
    auto const first = std::span{tokens}.first(static_cast<std::size_t>(context));
    static_cast<void>(
        runner::prefill<T>(model, first, window, {}, load, [](std::int64_t, std::int64_t) { return true; }));
    auto const vocabulary = static_cast<std::size_t>(model.shape().vocabulary);
    std::vector<float> all;
    std::vector<float> logits(vocabulary);
    runner::decode_workspace space;
    for (auto position = context; position < std::ssize(tokens); ++position)
    {
        std::int32_t const token = tokens[static_cast<std::size_t>(position)];
        runner::decode_step(
            model, std::span{&token, 1}, std::span{&position, 1}, {},
            [&](std::int64_t layer, std::int64_t, float const* q, float const* k, float const* v, float* out) {
                attend(layer, q, k, v, out);
            },
            logits, space);
        all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
}

template <class T>
std::vector<float> continue_compressed(runner::llama_model const& model, std::vector<std::int32_t> const& tokens,
    std::int64_t context, runner::sequence_cache<T>& cache)
{
    runner::scratch_memory scratch;
    return continue_with<T>(
        model, tokens, context, [&](runner::layer_kv<T> const& kv) { cache.compress_layer(kv, {}, scratch); },
        [&](std::int64_t layer, float const* q, float const* k, float const* v, float* out) {
            cache.attend(layer, q, k, v, out, {});
        });
}

} // namespace

TEST_CASE_TEMPLATE(
    "a full budget reproduces the full cache's logits to float rounding", T, float, mdkv::half, mdkv::bfloat16)
{
    support::synthetic_llama const llama{{.layers = 3, .key_dim = 8, .value_dim = 16}};
    auto const model  = runner::llama_model::load(llama.writer().file());
    auto const tokens = text(90, model.shape().vocabulary);
    support::full_cache<T> full{model.shape()};
    auto const expected = continue_with<T>(
        model, tokens, 70, [&](runner::layer_kv<T> const& kv) { full.load(kv); },
        [&](std::int64_t layer, float const* q, float const* k, float const* v, float* out) {
            full.attend(layer, q, k, v, out);
        });
    for (char const* name : {"full", "paper"})
    {
        CAPTURE(name);
        // With the policy "full" the budget is not read.
        auto const size = std::string{name} == "full" ? 1 : 70;
        runner::sequence_cache<T> cache{model.shape(), runner::find_policy(name), mdkv::budget::kv_size(size), 5};
        auto const found = continue_compressed(model, tokens, 70, cache);
        CHECK(cache.resident_bytes() == cache.full_bytes());
        REQUIRE(found.size() == expected.size());
        double worst = 0;
        for (std::size_t i = 0; i < found.size(); ++i)
        {
            worst = std::max(worst, std::abs(double{found[i]} - double{expected[i]}));
        }
        // Appended keys and values are rounded to T in both, so that only the order of float sums differs; where it moves
        // one across a rounding boundary, one unit of T follows.
        CHECK(worst < (std::is_same_v<T, float> ? 1e-4 : std::is_same_v<T, mdkv::half> ? 2e-2 : 2e-1));
    }
}

TEST_CASE("resident bytes stay within the budget at every layer, and more budget keeps more")
{
    support::synthetic_llama const llama{{.layers = 2, .key_dim = 8, .value_dim = 16}};
    auto const model  = runner::llama_model::load(llama.writer().file());
    auto const tokens = text(130, model.shape().vocabulary);
    double previous   = INFINITY;
    for (std::int64_t const size : {10, 20, 40, 80, 120})
    {
        CAPTURE(size);
        runner::sequence_cache<mdkv::half> cache{
            model.shape(), runner::find_policy("paper"), mdkv::budget::kv_size(size), 16};
        static_cast<void>(continue_compressed(model, tokens, 120, cache));
        double loss = 0;
        for (mdkv::compress_report const& report : cache.reports())
        {
            CHECK(report.resident_bytes <= report.budget_bytes);
            CHECK(report.budget_bytes == mdkv::budget::kv_size(size).in_bytes(report.shape));
            loss += report.chosen.loss;
        }
        CHECK(loss <= previous);
        previous = loss;
    }
    CHECK(previous == 0.0); // the last budget holds everything
}

TEST_CASE("the tail grows beyond what was reserved for it")
{
    support::synthetic_llama const llama{{.layers = 2}};
    auto const model  = runner::llama_model::load(llama.writer().file());
    auto const tokens = text(100, model.shape().vocabulary);
    runner::sequence_cache<float> roomy{model.shape(), runner::find_policy("evict"), mdkv::budget::kv_size(20), 64};
    runner::sequence_cache<float> tight{model.shape(), runner::find_policy("evict"), mdkv::budget::kv_size(20), 0};
    auto const a = continue_compressed(model, tokens, 40, roomy);
    auto const b = continue_compressed(model, tokens, 40, tight);
    REQUIRE(a.size() == b.size());
    for (std::size_t i = 0; i < a.size(); ++i) { CHECK(a[i] == doctest::Approx(b[i]).epsilon(1e-4)); }
}
