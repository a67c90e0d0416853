/// \file read_in_chunks.cpp: prompts that mdkv_run compresses while it reads them
#include "runner/read_in_chunks.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <mdkv/core/budget.hpp>
#include <mdkv/core/types.hpp>

#include "runner/decode.hpp"
#include "runner/language_model.hpp"
#include "runner/policies.hpp"
#include "runner/prefill.hpp"
#include "runner/sequence_cache.hpp"
#include "support/message.hpp"
#include "support/synthetic_llama.hpp"

using support::message_of;
using support::says;

namespace
{

std::vector<std::int32_t> text(std::int64_t count)
{
    std::vector<std::int32_t> ids;
    for (std::int64_t i = 0; i < count; ++i) { ids.push_back(static_cast<std::int32_t>((i * 17 + i * i * 5) % 50)); }
    return ids;
}

double largest_difference(std::span<float const> a, std::span<float const> b)
{
    double most = a.size() == b.size() ? 0 : 1e9;
    for (std::size_t i = 0; i < a.size() && i < b.size(); ++i)
    {
        most = std::max(most, std::fabs(double{a[i]} - double{b[i]}));
    }
    return most;
}

} // namespace

TEST_CASE_TEMPLATE("a prompt that fits gives prefill's logits, read in one chunk or in several", T, float, mdkv::half)
{
    support::synthetic_llama const llama{{.layers = 3, .key_dim = 8, .value_dim = 16}};
    auto const model  = runner::language_model::load(llama.writer().file());
    auto const prompt = text(300);
    auto const want   = runner::prefill<T>(
        model, prompt, 8, {}, [](auto const&) {}, [](std::int64_t, std::int64_t) { return true; });
    for (std::string const policy :
        {"best[while_reading=yes]", "any_question[while_reading=yes]", "best[while_reading=yes+chunk=64]"})
    {
        CAPTURE(policy);
        runner::sequence_cache<T> cache{model, runner::parse_policy(policy), mdkv::budget::fraction(1, 1), 8, 3};
        std::int64_t read = 0;
        std::int64_t held = 0;
        auto const got    = cache.read(prompt, {}, [&](std::int64_t done, std::int64_t bytes) {
            CHECK(done > read);
            CHECK(bytes > held);
            read = done;
            held = bytes;
        });
        CHECK(read == 300);
        CHECK(held == cache.full_bytes());
        CHECK(cache.resident_bytes() == cache.full_bytes());
        CHECK(largest_difference(got, want) < 5e-3); // queries are not rounded to T
    }
}

TEST_CASE("a prompt that is compressed while it is read stays within its limit, and goes on")
{
    support::synthetic_llama const llama{{.layers = 3, .key_dim = 8, .value_dim = 16}};
    auto const model  = runner::language_model::load(llama.writer().file());
    auto const prompt = text(300);
    runner::sequence_cache<mdkv::half> cache{
        model, runner::parse_policy("best[while_reading=yes+chunk=32+slack=0]"), mdkv::budget::fraction(1, 4), 8, 3};
    auto const logits = cache.read(prompt, {},
        [&](std::int64_t, std::int64_t held) { CHECK(held <= 300 * 3 * model.shape().kv_heads * (8 + 16) * 2 / 4); });
    CHECK(cache.resident_bytes() <= cache.full_bytes() / 4);
    CHECK(cache.most_bytes() < cache.full_bytes() / 2);
    std::vector<float> next(static_cast<std::size_t>(model.shape().vocabulary));
    runner::decode_workspace space;
    std::int32_t const token    = 7;
    std::int64_t const position = 300;
    runner::decode_step(
        model, std::span{&token, 1}, std::span{&position, 1}, {},
        [&](std::int64_t layer, std::int64_t, float const* q, float const* k, float const* v, float* out) {
            cache.attend(layer, q, k, v, out, {});
        },
        next, space);
    for (float const x : next) { CHECK(std::isfinite(x)); }
}

TEST_CASE("policies that cannot compress while reading are refused by name")
{
    for (std::string const policy : {"by_window", "paper", "evict", "snapkv"})
    {
        CAPTURE(policy);
        says(message_of([&] { static_cast<void>(runner::parse_policy(policy + "[while_reading=yes]")); }),
            "while_reading = yes: unknown parameter");
    }
}
