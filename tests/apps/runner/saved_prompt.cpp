/// \file saved_prompt.cpp: prompts that mdkv_run saves: the same logits afterwards, and files of others
#include "runner/saved_prompt.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
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
#include "support/scratch_folder.hpp"
#include "support/synthetic_llama.hpp"

using support::message_of;
using support::says;

namespace
{

constexpr std::int64_t window = 8;

std::vector<std::int32_t> text(std::int64_t count)
{
    std::vector<std::int32_t> ids;
    for (std::int64_t i = 0; i < count; ++i) { ids.push_back(static_cast<std::int32_t>((i * 17 + i * i * 5) % 50)); }
    return ids;
}

template <class T>
runner::sequence_cache<T> read_prompt(runner::language_model const& model, std::vector<std::int32_t> const& prompt,
    std::string const& policy, std::vector<float>& logits)
{
    runner::sequence_cache<T> cache{
        model, runner::parse_policy(policy), mdkv::budget::fraction(1, 4), window, 3}; // the tail must grow
    runner::scratch_memory scratch;
    logits = runner::prefill<T>(
        model, prompt, runner::queries_to_keep(cache.chosen(), window, std::ssize(prompt)), {},
        [&](runner::layer_kv<T> const& kv) { cache.compress_layer(kv, {}, scratch); },
        [](std::int64_t, std::int64_t) { return true; },
        [&](runner::layer_chunk<T> const& chunk) { cache.score_chunk(chunk, chunk.tokens, {}, scratch); });
    return cache;
}

/// Logits after each of some tokens behind the prompt.
template <class T>
std::vector<float> go_on(runner::language_model const& model, runner::sequence_cache<T>& cache, std::int64_t position)
{
    std::vector<float> all;
    std::vector<float> logits(static_cast<std::size_t>(model.shape().vocabulary));
    runner::decode_workspace space;
    for (std::int32_t const token : {4, 8, 15, 16, 23, 42})
    {
        runner::decode_step(
            model, std::span{&token, 1}, std::span{&position, 1}, {},
            [&](std::int64_t layer, std::int64_t, float const* q, float const* k, float const* v, float* out) {
                cache.attend(layer, q, k, v, out, {});
            },
            logits, space);
        ++position;
        all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
}

template <class T>
void save(std::string const& path, std::string const& model, runner::sequence_cache<T> const& cache,
    std::span<std::int32_t const> prompt, std::vector<float> const& logits)
{
    runner::file_replacement file{path};
    runner::save_prompt<T>(
        file, model, cache.layers_to_write(), prompt, {cache.chosen().label, cache.full_bytes(), logits});
}

} // namespace

TEST_CASE_TEMPLATE("a saved prompt goes on with the same logits, from the file's own pages", T, float, mdkv::half)
{
    scratch_folder const folder;
    support::synthetic_llama const llama{{.layers = 3, .key_dim = 8, .value_dim = 16}};
    auto const model  = runner::language_model::load(llama.writer().file());
    auto const prompt = text(300);
    for (std::string const policy :
        {"best", "any_question", "by_window", "paper", "evict", "snapkv", "snapkv[heads=query]", "low_rank", "full"})
    {
        CAPTURE(policy);
        std::vector<float> logits;
        auto cache             = read_prompt<T>(model, prompt, policy, logits);
        std::string const path = folder.file("prompt");
        save<T>(path, "m", cache, prompt, logits);
        auto const expected = go_on(model, cache, std::ssize(prompt));

        runner::saved_prompt<T> const saved{path, "m", model.shape()};
        CHECK(saved.answer().logits == logits);
        CHECK(saved.answer().policy == cache.chosen().label);
        saved.expect_beginning_of("a prompt", prompt);
        runner::sequence_cache<T> loaded{
            model, saved.shown_policy(model.shape()), mdkv::budget::fraction(1, 1), window, 2};
        loaded.load(saved.caches(), saved.answer().full_bytes);
        CHECK(loaded.resident_bytes() == cache.resident_bytes());
        CHECK(loaded.full_bytes() == cache.full_bytes());
        bool const same = go_on(model, loaded, std::ssize(prompt)) == expected;
        CHECK(same);
    }
}

TEST_CASE("a saved prompt is refused for another model, another prompt, another shape, and caches that are no prompt")
{
    scratch_folder const folder;
    support::synthetic_llama const llama{{.layers = 2}};
    auto const model       = runner::language_model::load(llama.writer().file());
    auto prompt            = text(300);
    std::string const path = folder.file("prompt");
    std::vector<float> logits;
    auto const cache = read_prompt<mdkv::half>(model, prompt, "best", logits);
    save<mdkv::half>(path, "m", cache, prompt, logits);

    using saved         = runner::saved_prompt<mdkv::half>;
    auto const& shape   = model.shape();
    auto const answered = [&](std::string const& name, auto const& of) {
        return message_of([&] { static_cast<void>(saved{path, name, of}); });
    };
    says(answered("n", shape), path + ": read: byte 4136: the file's model is \"m\", not \"n\"");
    says(message_of([&] {
        static_cast<void>(runner::saved_prompt<float>{path, "m", shape});
    }),
        "the file has elements of type 2; 1 (f32) is needed");
    auto other       = shape;
    other.vocabulary = 51;
    says(answered("m", other), "holds caches, but no prompt that mdkv_run saved with this vocabulary");
    other        = shape;
    other.layers = 3;
    says(answered("m", other), "holds caches of another shape");
    other         = shape;
    other.key_dim = 4;
    says(answered("m", other), "holds caches of another shape");
    saved const file{path, "m", shape};
    prompt[270] = 1;
    says(message_of([&] { file.expect_beginning_of("question.txt", prompt); }),
        "question.txt: does not begin with the 300 tokens of the saved prompt; it shares at least the first 256");
    says(message_of([&] { file.expect_beginning_of("question.txt", std::span{prompt}.first(20)); }),
        "at least the first 0");
    says(message_of([&] {
        static_cast<void>(saved{folder.write("text", "hello"), "m", shape});
    }),
        "does not begin with");
    says(message_of([&] { static_cast<void>(saved{folder.file("gone"), "m", shape}); }), "cannot be opened");
}

TEST_CASE("policies whose caches have another form are not saved")
{
    CHECK(runner::find_policy("best").makes_packed());
    CHECK(runner::find_policy("full").makes_packed());
    CHECK(runner::find_policy("keydiff").makes_packed());
    support::synthetic_llama const llama{{.layers = 2}};
    auto const model = runner::language_model::load(llama.writer().file());
    for (std::string const policy : {"think", "h2o_decode"})
    {
        CAPTURE(policy);
        CHECK(!runner::find_policy(policy).makes_packed());
        std::vector<float> logits;
        auto const cache = read_prompt<mdkv::half>(model, text(60), policy, logits);
        says(message_of([&] { static_cast<void>(cache.layers_to_write()); }), "its caches cannot be saved");
    }
}
