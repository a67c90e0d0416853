#include "runner/model.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/thread_pool.hpp>
#include <nlohmann/json.hpp>

#include "runner/gguf.hpp"
#include "runner/greedy.hpp"
#include "support/compare.hpp"
#include "support/full_cache.hpp"
#include "support/gguf_writer.hpp"
#include "support/message.hpp"
#include "support/reference_model.hpp"
#include "support/synthetic_llama.hpp"

namespace
{

using support::llama_sizes;
using support::message_of;
using support::synthetic_llama;

/// Copies of what one layer's prefill handed out.
template <class T>
struct kept_layer
{
    std::vector<T> keys, values, queries;
    std::vector<float> lse;
};

template <class T>
struct kept_prefill
{
    std::vector<float> logits;
    std::vector<kept_layer<T>> layers;
};

bool never_cancel(std::int64_t /*done*/, std::int64_t /*total*/)
{
    return true;
}

template <class T>
kept_prefill<T> prefill_all(runner::language_model const& model, std::span<std::int32_t const> tokens,
    std::int64_t window, mdkv::cpu::executor_ref executor = {})
{
    kept_prefill<T> out;
    runner::model_shape const& s = model.shape();
    auto const keep              = [&](runner::layer_kv<T> const& kv) {
        CHECK(kv.layer == static_cast<std::int64_t>(out.layers.size()));
        CHECK(kv.tokens == std::ssize(tokens));
        CHECK(kv.window == std::min(window, std::ssize(tokens)));
        out.layers.push_back({{kv.keys, kv.keys + s.kv_heads * kv.tokens * s.key_dim},
            {kv.values, kv.values + s.kv_heads * kv.tokens * s.value_dim},
            {kv.queries, kv.queries + s.query_heads * kv.window * s.key_dim},
            {kv.lse, kv.lse + s.query_heads * kv.window}});
    };
    out.logits = runner::prefill<T>(model, tokens, window, executor, keep, never_cancel);
    return out;
}

/// Logits after each of `tokens`, fed one at a time to a cache that already holds what came before.
template <class T>
std::vector<std::vector<float>> step_through(runner::language_model const& model, support::full_cache<T>& cache,
    std::span<std::int32_t const> tokens, std::int64_t position, mdkv::cpu::executor_ref executor = {})
{
    runner::decode_workspace space;
    std::vector<std::vector<float>> out;
    for (std::int32_t const token : tokens)
    {
        std::vector<float> logits(static_cast<std::size_t>(model.shape().vocabulary));
        std::int64_t const here = position++;
        runner::decode_step(
            model, std::span(&token, 1), std::span(&here, 1), executor,
            [&](std::int64_t layer, std::int64_t, float const* q, float const* k, float const* v, float* attended) {
                cache.attend(layer, q, k, v, attended);
            },
            logits, space);
        out.push_back(logits);
    }
    return out;
}

/// Heads of [heads, rows, dim] against rows of [heads * dim] from row `first` on.
void compare_heads(support::worst_error& worst, std::vector<float> const& got,
    std::vector<std::vector<double>> const& want, std::int64_t first, std::int64_t dim)
{
    std::int64_t const rows  = std::ssize(want) - first;
    std::int64_t const heads = std::ssize(got) / (rows * dim);
    for (std::int64_t i = 0; i < std::ssize(got); ++i)
    {
        std::int64_t const head = i / (rows * dim);
        auto const& row         = want[static_cast<std::size_t>(first + i / dim % rows)];
        worst.add(got[static_cast<std::size_t>(i)], row[static_cast<std::size_t>(head * dim + i % dim)], 1, i);
    }
    CHECK(heads * dim == std::ssize(want[0]));
}

bool mentions(std::string const& message, std::vector<std::string> const& parts)
{
    return std::all_of(
        parts.begin(), parts.end(), [&](std::string const& part) { return message.find(part) != std::string::npos; });
}

std::vector<llama_sizes> interesting_sizes()
{
    return {{}, // grouped queries, D_k != D_v, an output matrix of its own, rope factors
        {.query_heads = 3, .kv_heads = 3, .value_dim = 8, .rope_factors = false, .own_output = false},
        {.layers = 1, .embedding = 37, .query_heads = 4, .kv_heads = 1, .key_dim = 10, .value_dim = 5, .rotated = 6},
        {.query_heads = 7, .kv_heads = 1, .key_dim = 10, .rotated = 6, .rope_factors = false, .qwen2 = true},
        {.value_dim = 8, .rope_factors = false, .own_output = false, .qwen2 = true}};
}

} // namespace

TEST_CASE("a prefill hands out what the definition gives: keys, values, window queries, log-sum-exps and logits")
{
    for (std::int64_t const count : {1, 63, 300, 700})
    { // one block, several key blocks, more than one chunk
        for (llama_sizes const& sizes : interesting_sizes())
        {
            CAPTURE(count);
            CAPTURE(sizes.kv_heads);
            synthetic_llama const reference(sizes, count);
            auto const tokens          = support::random_tokens(count, sizes.vocabulary, count);
            auto const model           = runner::language_model::load(reference.writer().file());
            std::int64_t const window  = 7;
            std::int64_t const visible = std::min(window, count);
            auto const got             = prefill_all<float>(model, tokens, window);
            auto const want            = reference.run(tokens);

            REQUIRE(std::ssize(got.layers) == sizes.layers);
            support::worst_error keys, values, queries, lse, logits;
            for (std::size_t l = 0; l < got.layers.size(); ++l)
            {
                compare_heads(keys, got.layers[l].keys, want.keys[l], 0, sizes.key_dim);
                compare_heads(values, got.layers[l].values, want.values[l], 0, sizes.value_dim);
                compare_heads(queries, got.layers[l].queries, want.queries[l], count - visible, sizes.key_dim);
                compare_heads(lse, got.layers[l].lse, want.lse[l], count - visible, 1);
            }
            for (std::size_t i = 0; i < got.logits.size(); ++i) { logits.add(got.logits[i], want.logits.back()[i], 1); }
            CHECK_MESSAGE(keys.within(5e-5), keys);
            CHECK_MESSAGE(values.within(5e-5), values);
            CHECK_MESSAGE(queries.within(5e-5), queries);
            CHECK_MESSAGE(lse.within(5e-5), lse);
            CHECK_MESSAGE(logits.within(5e-5), logits);
        }
    }
}

TEST_CASE("steps on a plain cache agree with the definition at every position")
{
    for (llama_sizes const& sizes : interesting_sizes())
    {
        synthetic_llama const reference(sizes, 1);
        auto const tokens = support::random_tokens(40, sizes.vocabulary, 2);
        auto const model  = runner::language_model::load(reference.writer().file());
        support::full_cache<float> cache(model.shape());
        auto const got  = step_through<float>(model, cache, tokens, 0);
        auto const want = reference.run(tokens);
        support::worst_error worst;
        for (std::size_t t = 0; t < tokens.size(); ++t)
        {
            for (std::size_t i = 0; i < got[t].size(); ++i) { worst.add(got[t][i], want.logits[t][i], 1); }
        }
        CHECK_MESSAGE(worst.within(5e-5), worst);
    }
}

TEST_CASE_TEMPLATE("a prefill continued by steps equals the prefill of the longer text", T, float, mdkv::half)
{
    // With a narrow element a last-bit difference can flip the rounding of a key: one unit of 2^-11 or 2^-8.
    double const tolerance = std::is_same_v<T, float> ? 5e-5 : std::is_same_v<T, mdkv::half> ? 5e-3 : 4e-2;
    llama_sizes const sizes;
    synthetic_llama const reference(sizes, 3);
    auto const tokens = support::random_tokens(310, sizes.vocabulary, 3);
    auto const model  = runner::language_model::load(reference.writer().file());
    support::full_cache<T> cache(model.shape());
    std::span const all(tokens);
    (void)runner::prefill<T>(
        model, all.first(290), 0, {}, [&](runner::layer_kv<T> const& kv) { cache.load(kv); }, never_cancel);
    auto const stepped = step_through<T>(model, cache, all.subspan(290), 290);
    auto const whole   = prefill_all<T>(model, tokens, 0);
    support::worst_error worst;
    for (std::size_t i = 0; i < whole.logits.size(); ++i) { worst.add(stepped.back()[i], whole.logits[i], 1); }
    CHECK_MESSAGE(worst.within(tolerance), worst);
}

TEST_CASE_TEMPLATE("a narrow element rounds keys, values and queries and little else", T, mdkv::half)
{
    double const unit = std::is_same_v<T, mdkv::half> ? 0x1p-11 : 0x1p-8;
    llama_sizes const sizes{.layers = 1};
    synthetic_llama const reference(sizes, 4);
    auto const tokens  = support::random_tokens(100, sizes.vocabulary, 4);
    auto const model   = runner::language_model::load(reference.writer().file());
    auto const narrow  = prefill_all<T>(model, tokens, 9);
    auto const wide    = prefill_all<float>(model, tokens, 9);
    auto const compare = [&](std::vector<T> const& got, std::vector<float> const& want) {
        REQUIRE(got.size() == want.size());
        support::worst_error worst;
        for (std::size_t i = 0; i < got.size(); ++i)
        {
            worst.add(mdkv::widen(got[i]), mdkv::widen(mdkv::narrow<T>(want[i])), 1 + std::abs(want[i]));
        }
        CHECK_MESSAGE(worst.within(1e-6), worst); // nothing precedes the first layer's rounding, so it is the same
    };
    compare(narrow.layers[0].keys, wide.layers[0].keys);
    compare(narrow.layers[0].values, wide.layers[0].values);
    compare(narrow.layers[0].queries, wide.layers[0].queries);
    support::worst_error worst;
    for (std::size_t i = 0; i < wide.logits.size(); ++i) { worst.add(narrow.logits[i], wide.logits[i], 1); }
    CHECK_MESSAGE(worst.within(20 * unit), worst);
    CHECK(worst.value() > 0);
}

TEST_CASE_TEMPLATE("a prefill's bits do not depend on the number of threads", T, float, mdkv::half)
{
    llama_sizes const sizes;
    synthetic_llama const reference(sizes, 5);
    auto const tokens = support::random_tokens(600, sizes.vocabulary, 5);
    auto const model  = runner::language_model::load(reference.writer().file());
    auto const serial = prefill_all<T>(model, tokens, 11);
    for (int const threads : {2, 3, 5})
    {
        mdkv::cpu::thread_pool pool(threads);
        auto const got = prefill_all<T>(model, tokens, 11, pool);
        CHECK(support::same_bits(got.logits, serial.logits));
        for (std::size_t l = 0; l < got.layers.size(); ++l)
        {
            CHECK(support::same_bits(got.layers[l].keys, serial.layers[l].keys));
            CHECK(support::same_bits(got.layers[l].values, serial.layers[l].values));
            CHECK(support::same_bits(got.layers[l].queries, serial.layers[l].queries));
            CHECK(support::same_bits(got.layers[l].lse, serial.layers[l].lse));
        }
    }
}

TEST_CASE("sequences in lock step get what each gets alone, at their own positions, on any number of threads")
{
    llama_sizes const sizes;
    synthetic_llama const reference(sizes, 6);
    auto const model              = runner::language_model::load(reference.writer().file());
    std::int64_t const vocabulary = sizes.vocabulary;
    for (std::int64_t const batch : {2, 5, 20})
    { // 20: matrix products instead of dot products
        CAPTURE(batch);
        std::vector<support::full_cache<float>> together, alone;
        std::vector<std::int32_t> next;
        std::vector<std::int64_t> positions;
        for (std::int64_t b = 0; b < batch; ++b)
        { // sequence b has b + 1 tokens behind it
            auto const before = support::random_tokens(b + 1, vocabulary, 100 + b);
            together.emplace_back(model.shape());
            (void)runner::prefill<float>(
                model, before, 0, {}, [&](runner::layer_kv<float> const& kv) { together.back().load(kv); },
                never_cancel);
            alone.push_back(together.back());
            next.push_back(static_cast<std::int32_t>(b % vocabulary));
            positions.push_back(b + 1);
        }
        std::vector<float> logits(static_cast<std::size_t>(batch * vocabulary));
        runner::decode_workspace space;
        mdkv::cpu::thread_pool pool(3);
        runner::decode_step(
            model, next, positions, pool,
            [&](std::int64_t layer, std::int64_t b, float const* q, float const* k, float const* v, float* attended) {
                together[static_cast<std::size_t>(b)].attend(layer, q, k, v, attended);
            },
            logits, space);
        support::worst_error worst;
        for (std::size_t b = 0; b < alone.size(); ++b)
        {
            auto const want = step_through<float>(model, alone[b], std::span(next).subspan(b, 1), positions[b]);
            for (std::size_t i = 0; i < want[0].size(); ++i)
            {
                worst.add(logits[b * want[0].size() + i], want[0][i], 1);
            }
        }
        CHECK_MESSAGE(worst.within(1e-5), worst);
    }
}

TEST_CASE("progress counts up to the whole and can cancel between chunks")
{
    llama_sizes const sizes;
    synthetic_llama const reference(sizes, 7);
    auto const tokens = support::random_tokens(600, sizes.vocabulary, 7);
    auto const model  = runner::language_model::load(reference.writer().file());
    std::vector<std::int64_t> done;
    auto const ignore = [](runner::layer_kv<float> const&) {};
    (void)runner::prefill<float>(model, tokens, 1, {}, ignore, [&](std::int64_t now, std::int64_t total) {
        CHECK(total == 1200);
        done.push_back(now);
        return true;
    });
    CHECK(done == std::vector<std::int64_t>{512, 600, 1112, 1200});

    std::int64_t layers = 0;
    CHECK_THROWS_AS((void)runner::prefill<float>(
                        model, tokens, 1, {}, [&](runner::layer_kv<float> const&) { ++layers; },
                        [](std::int64_t now, std::int64_t) { return now < 1112; }),
        runner::prefill_cancelled);
    CHECK(layers == 1);
}

TEST_CASE("a bad prefill or step names the argument, its value and the limit, before anything is called")
{
    llama_sizes const sizes{.context = 16};
    synthetic_llama const reference(sizes, 8);
    auto const model   = runner::language_model::load(reference.writer().file());
    auto const prefill = [&](std::vector<std::int32_t> const& tokens, std::int64_t window) {
        return message_of([&] {
            (void)runner::prefill<float>(
                model, tokens, window, {}, [](runner::layer_kv<float> const&) { FAIL("was called"); },
                [](std::int64_t, std::int64_t) -> bool { throw std::logic_error("was called"); });
        });
    };
    CHECK(mentions(prefill({}, 1), {"prefill", "no tokens"}));
    CHECK(mentions(prefill({1, 50}, 1), {"prefill", "token 50", "vocabulary of 50"}));
    CHECK(mentions(prefill({1, -1}, 1), {"prefill", "token -1", "vocabulary of 50"}));
    CHECK(mentions(prefill({1, 2}, -3), {"prefill", "window", "-3"}));
    CHECK(mentions(prefill(std::vector<std::int32_t>(17, 1), 1), {"prefill", "17 tokens", "16 tokens"}));

    auto const step = [&](std::vector<std::int32_t> const& tokens, std::vector<std::int64_t> const& positions,
                          std::size_t room) {
        std::vector<float> logits(room);
        runner::decode_workspace space;
        return message_of([&] {
            runner::decode_step(
                model, tokens, positions, {},
                [](std::int64_t, std::int64_t, float const*, float const*, float const*, float*) {
                    FAIL("was called");
                },
                logits, space);
        });
    };
    CHECK(mentions(step({}, {}, 0), {"decode_step", "no sequences"}));
    CHECK(mentions(step({1, 2}, {3}, 100), {"decode_step", "1 positions", "2 tokens"}));
    CHECK(mentions(step({1, 2}, {3, 4}, 99), {"decode_step", "logits", "99", "100"}));
    CHECK(mentions(step({1}, {16}, 50), {"decode_step", "position 16", "16"}));
    CHECK(mentions(step({1}, {-1}, 50), {"decode_step", "position -1"}));
    CHECK(mentions(step({99}, {1}, 50), {"decode_step", "token 99", "vocabulary of 50"}));
}

TEST_CASE("a model that would be computed wrongly is refused by key and value")
{
    auto const refusal = [](std::function<void(support::gguf_writer&)> const& change, llama_sizes const& sizes = {}) {
        return message_of([&] {
            support::gguf_writer writer = synthetic_llama(sizes).writer();
            change(writer);
            (void)runner::language_model::load(writer.file());
        });
    };
    CHECK(mentions(refusal([](auto& w) { w.text("llama.rope.scaling.type", "yarn"); }),
        {"synthetic.gguf", "llama.rope.scaling.type", "yarn", "none"}));
    CHECK(mentions(refusal([](auto& w) { w.u32("llama.expert_count", 8); }), {"llama.expert_count", "8"}));
    CHECK(mentions(refusal([](auto& w) { w.u32("llama.attention.sliding_window", 4096); }),
        {"llama.attention.sliding_window", "4096"}));
    CHECK(mentions(refusal([](auto& w) { w.f32("llama.rope.scale_linear", 4); }), {"llama.rope.scale_linear", "4"}));
    CHECK(mentions(
        refusal([](auto& w) { w.boolean("llama.attention.causal", false); }), {"llama.attention.causal", "false"}));
    CHECK(mentions(refusal([](auto&) {}, {.query_heads = 6, .kv_heads = 4}), {"head_count_kv", "4", "6"}));
    CHECK(mentions(refusal([](auto&) {}, {.rotated = 7}), {"llama.rope.dimension_count", "7"}));
    CHECK(mentions(refusal([](auto&) {}, {.rotated = 10}), {"llama.rope.dimension_count", "10", "8"}));
    CHECK(mentions(refusal([](auto&) {}, {.layers = 0}), {"llama.block_count", "0", "1 to"}));

    // Harmless forms of the same keys, and the defaults.
    CHECK(refusal([](auto& w) {
        w.text("llama.rope.scaling.type", "none");
        w.u32("llama.expert_count", 0);
    }) == "(nothing was thrown)");
    CHECK(refusal([](auto& w) {
        w.text("llama.rope.scaling.type", "linear");
        w.f32("llama.rope.scaling.factor", 1);
        w.f32("llama.rope.scaling.attn_factor", 1);
        w.u32("llama.rope.scaling.original_context_length", 512);
        w.boolean("llama.rope.scaling.finetuned", true);
        w.u64("llama.expert_used_count", 0);
        w.boolean("llama.attention.causal", true);
        w.u32("llama.attention.sliding_window", 0);
        w.f32("llama.logit_scale", 1);
        w.f32("llama.attn_logit_softcapping", 0);
        w.u32("llama.vocab_size", 50);
        w.text("llama.tensor_data_layout", "Meta AI original pth");
    }) == "(nothing was thrown)");
    // Keys of other prefixes are other programs' business.
    CHECK(refusal([](auto& w) {
        w.text("general.name", "a model");
        w.u32("general.quantization_version", 2);
        w.f32("gemma.final_logit_softcapping", 30);
        w.u32("llama2.expert_count", 8);
        w.text("quantize.imatrix.file", "calibration.dat");
        w.u32("split.count", 0);
    }) == "(nothing was thrown)");

    // One step beside a harmless value, values of another type, and keys that no list can know.
    CHECK(mentions(refusal([](auto& w) { w.f32("llama.rope.scaling.attn_factor", 1.2F); }),
        {"synthetic.gguf", "llama.rope.scaling.attn_factor", "1.2", "limit 1"}));
    CHECK(mentions(refusal([](auto& w) { w.f32("llama.rope.scaling.attn_factor", std::nextafter(1.0F, 2.0F)); }),
        {"llama.rope.scaling.attn_factor", "1.0000001"}));
    CHECK(mentions(refusal([](auto& w) { w.f32("llama.rope.scaling.factor", 0.25F); }),
        {"llama.rope.scaling.factor", "0.25", "limit 0 or 1"}));
    CHECK(mentions(refusal([](auto& w) { w.f32("llama.final_logit_softcapping", 30); }),
        {"llama.final_logit_softcapping", "30", "limit 0"}));
    CHECK(mentions(refusal([](auto& w) { w.text("llama.tensor_data_layout", "transposed"); }),
        {"llama.tensor_data_layout", "transposed", "Meta AI original pth"}));
    CHECK(mentions(refusal([](auto& w) { w.u32("llama.attention.causal", 1); }), {"llama.attention.causal", "1"}));
    std::vector<std::string> const pattern{"local", "global"};
    CHECK(mentions(refusal([&](auto& w) { w.texts("llama.attention.pattern", pattern); }),
        {"llama.attention.pattern", "array of 2", "unknown", "limit absent"}));
    for (std::string const key : {"llama.a", "llama.", "llama.rope.scaling.type2", "llama.attention.head_count_k",
             "llama.rope.scaling.invented_tomorrow"})
    {
        CAPTURE(key);
        CHECK(mentions(refusal([&](auto& w) { w.f32(key, 0); }), {"\"" + key + "\"", "unknown", ": 0 ", "absent"}));
    }

    // Another architecture's keys are known by the same names.
    llama_sizes const qwen2{.rope_factors = false, .qwen2 = true};
    CHECK(mentions(refusal([](auto& w) { w.text("qwen2.rope.scaling.type", "yarn"); }, qwen2),
        {"qwen2.rope.scaling.type", "yarn", "none"}));
    CHECK(mentions(refusal([](auto& w) { w.u32("qwen2.attention.sliding_window", 4096); }, qwen2),
        {"qwen2.attention.sliding_window", "4096"}));
    CHECK(mentions(refusal([](auto& w) { w.u32("qwen2.invented", 1); }, qwen2), {"qwen2.invented", "unknown"}));
    // Rows in llama's order would be turned by the wrong pairs.
    CHECK(mentions(refusal([](auto& w) { w.text("qwen2.tensor_data_layout", "Meta AI original pth"); }, qwen2),
        {"qwen2.tensor_data_layout", "Meta AI original pth", "reference"}));
    CHECK(mentions(refusal([](auto& w) { w.text("llama.tensor_data_layout", "reference"); }),
        {"llama.tensor_data_layout", "reference", "Meta AI original pth"}));
    CHECK(refusal([](auto& w) { w.u32("llama.expert_count", 8); }, qwen2) == "(nothing was thrown)");

    support::gguf_writer other;
    other.text("general.architecture", "mamba");
    CHECK(mentions(message_of([&] { (void)runner::language_model::load(other.file()); }),
        {"general.architecture", "mamba", "llama or qwen2"}));
}

TEST_CASE("a tensor that no step of the computation reads is refused by name")
{
    for (std::string const name :
        {"blk.1.attn_k.bias", "blk.0.ffn_down.bias", "output.bias", "blk.0.attn_q_norm.weight",
            "blk.1.post_attention_norm.weight", "blk.0.attn_sinks.weight", "blk.2.attn_q.weight",
            "blk.00.attn_q.weight", "rope_factors_long.weight", "blk.0.ffn_gate_inp.weight", "token_types.weight", "a"})
    {
        CAPTURE(name);
        support::gguf_writer writer = synthetic_llama({}).writer();
        writer.tensor(name, {16}, std::vector<float>(16));
        CHECK(mentions(message_of([&] { (void)runner::language_model::load(writer.file()); }),
            {"synthetic.gguf: tensor \"" + name + "\"", "not supported", "reads it"}));
    }

    // An architecture with biases has them in every layer, and no others.
    auto const qwen2 = [](std::string const& name, std::int64_t size) {
        support::gguf_writer writer = synthetic_llama({.rope_factors = false, .qwen2 = true}).writer();
        writer.tensor(name, {static_cast<std::uint64_t>(size)}, std::vector<float>(static_cast<std::size_t>(size)));
        return message_of([&] { (void)runner::language_model::load(writer.file()); });
    };
    for (std::string const name : {"blk.0.attn_output.bias", "output.bias", "blk.0.attn_q_norm.weight"})
    {
        CHECK(mentions(qwen2(name, 24), {"tensor \"" + name + "\"", "not supported", "reads it"}));
    }
    // A file of more layers than its key counts would be computed without the last ones, one without biases without them.
    auto const load = [](std::string const& own, std::vector<std::string> const& blocks) {
        support::gguf_writer writer;
        writer.text("general.architecture", own);
        for (char const* key : {".block_count", ".attention.head_count", ".context_length"})
        {
            writer.u32(own + key, 1);
        }
        for (char const* key : {".embedding_length", ".feed_forward_length"}) { writer.u32(own + key, 4); }
        writer.f32(own + ".attention.layer_norm_rms_epsilon", 1e-5F);
        writer.tensor("token_embd.weight", {4, 3}, std::vector<float>(12));
        for (std::string const& block : blocks)
        {
            for (char const* part : {"attn_norm", "ffn_norm"})
            {
                writer.tensor(block + part + ".weight", {4}, std::vector<float>(4));
            }
            for (char const* part : {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"})
            {
                writer.tensor(block + part + ".weight", {4, 4}, std::vector<float>(16));
            }
        }
        writer.tensor("output_norm.weight", {4}, std::vector<float>(4));
        return message_of([&] { (void)runner::language_model::load(writer.file()); });
    };
    CHECK(load("llama", {"blk.0."}) == "(nothing was thrown)");
    CHECK(mentions(load("llama", {"blk.0.", "blk.1."}), {"\"blk.1.", "reads it"}));
    CHECK(mentions(load("qwen2", {"blk.0."}), {"blk.0.attn_q.bias", "absent"}));
}

TEST_CASE("a vocabulary of more or fewer tokens than the embedding has rows is refused, naming both")
{
    llama_sizes const sizes;
    auto const load = [&](std::size_t count) {
        std::vector<std::string> tokens;
        for (std::size_t i = 0; i < count; ++i) { tokens.push_back("token " + std::to_string(i)); }
        support::gguf_writer writer = synthetic_llama(sizes).writer();
        writer.texts("tokenizer.ggml.tokens", tokens);
        return message_of([&] { (void)runner::language_model::load(writer.file()); });
    };
    auto const rows = static_cast<std::size_t>(sizes.vocabulary);
    CHECK(load(rows) == "(nothing was thrown)");
    for (std::size_t const count : {rows + 1, rows + 900, rows - 1, std::size_t{0}})
    {
        CAPTURE(count);
        CHECK(mentions(load(count), {"synthetic.gguf", "tokenizer.ggml.tokens", "token_embd.weight",
                                        ": " + std::to_string(count), "limit 50"}));
    }
}

TEST_CASE("absent or misshapen tensors are refused by name, shape and expected shape")
{
    support::gguf_writer writer;
    writer.text("general.architecture", "llama");
    for (char const* key : {"llama.block_count", "llama.attention.head_count", "llama.context_length"})
    {
        writer.u32(key, 1);
    }
    for (char const* key : {"llama.embedding_length", "llama.feed_forward_length"}) { writer.u32(key, 4); }
    writer.f32("llama.attention.layer_norm_rms_epsilon", 1e-5F);
    CHECK(mentions(
        message_of([&] { (void)runner::language_model::load(writer.file()); }), {"token_embd.weight", "absent"}));
    writer.tensor("token_embd.weight", {4, 3}, std::vector<float>(12));
    writer.tensor("blk.0.attn_norm.weight", {5}, std::vector<float>(5));
    CHECK(mentions(
        message_of([&] { (void)runner::language_model::load(writer.file()); }), {"blk.0.attn_norm.weight", "5", "4"}));
    support::gguf_writer narrow;
    narrow.text("general.architecture", "llama");
    for (char const* key : {"llama.block_count", "llama.attention.head_count", "llama.context_length"})
    {
        narrow.u32(key, 1);
    }
    for (char const* key : {"llama.embedding_length", "llama.feed_forward_length"}) { narrow.u32(key, 4); }
    narrow.f32("llama.attention.layer_norm_rms_epsilon", 1e-5F);
    narrow.tensor("token_embd.weight", {3, 4}, std::vector<float>(12));
    CHECK(mentions(message_of([&] { (void)runner::language_model::load(narrow.file()); }),
        {"token_embd.weight", "3 x 4", "4 x 4"}));
}

namespace
{

/// Compares a model with what tests/tools/reference_forward.py recorded of it.
void expect_recorded_logits(std::string const& path, std::string const& record)
{
    std::ifstream in(MDKV_TEST_DATA_DIR + record);
    auto const recorded = nlohmann::json::parse(in);
    auto const ids      = recorded.at("ids").get<std::vector<std::int32_t>>();
    auto const fixed    = recorded.at("fixed_ids").get<std::vector<std::size_t>>();
    auto const model    = runner::language_model::load(runner::gguf_file::open(path));
    mdkv::cpu::thread_pool pool(2);

    support::worst_error worst;
    auto const compare = [&](std::vector<float> const& got, nlohmann::json const& position) {
        auto const top        = position.at("top_ids").get<std::vector<std::size_t>>();
        auto const top_logits = position.at("top_logits").get<std::vector<double>>();
        auto const others     = position.at("fixed_logits").get<std::vector<double>>();
        for (std::size_t i = 0; i < top.size(); ++i) { worst.add(got[top[i]], top_logits[i], 1); }
        for (std::size_t i = 0; i < fixed.size(); ++i) { worst.add(got[fixed[i]], others[i], 1); }
        CHECK(runner::greedy_token(got) == static_cast<std::int32_t>(top[0]));
    };
    for (auto const& position : recorded.at("positions"))
    {
        auto const tokens = std::span(ids).first(position.at("position").get<std::size_t>() + 1);
        compare(prefill_all<float>(model, tokens, 8, pool).logits, position);
    }

    support::full_cache<float> cache(model.shape());
    auto const stepped = step_through<float>(model, cache, ids, 0, pool);
    for (auto const& position : recorded.at("positions"))
    {
        compare(stepped[position.at("position").get<std::size_t>()], position);
    }
    CHECK_MESSAGE(worst.within(1e-3), worst);

    std::vector<std::int32_t> greedy = {runner::greedy_token(stepped.back())};
    auto const wanted                = recorded.at("greedy").get<std::vector<std::int32_t>>();
    while (greedy.size() < wanted.size())
    {
        auto const position = std::ssize(ids) + std::ssize(greedy) - 1;
        auto const logits   = step_through<float>(model, cache, std::span(greedy).last(1), position, pool);
        greedy.push_back(runner::greedy_token(logits[0]));
    }
    CHECK(greedy == wanted);
}

} // namespace

TEST_CASE("the reference model gives the recorded logits and continues the text with the recorded tokens")
{
    if (skipped_without_reference_model("recorded logits")) { return; }
    expect_recorded_logits(reference_model_path(), "/reference_logits.json");
}

TEST_CASE("the second model gives the recorded logits and continues the text with the recorded tokens")
{
    if (skipped_without_second_model("recorded logits of the second model")) { return; }
    expect_recorded_logits(second_model_path(), "/second_model_logits.json");
}
