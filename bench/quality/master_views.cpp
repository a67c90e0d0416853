/// \file master_views.cpp: two questions about one stored prefix, each asked of the prefix as it was stored: of one compressed
/// cache; of a master with nothing dropped; of a view of it that recompress makes by the question
#include <mdkv/core/budget.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/engine/stored.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/recompress.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "policies/packed_cache.hpp"
#include "policies/stored_cache.hpp"
#include "runner/decode.hpp"
#include "runner/file_bytes.hpp"
#include "runner/prefill.hpp"
#include "runner/sequence_cache.hpp"
#include "runner/session.hpp"

namespace
{

using element                 = mdkv::half;
constexpr std::int64_t window = 32;

double milliseconds(std::chrono::steady_clock::time_point since)
{
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - since).count();
}

/// One way to keep the prefix.
struct row
{
    char const* name;
    char const* policy;
    double share;         // of the full cache's bytes
    std::int64_t view_kv; // KV size of a question's view; 0: none
};

struct figures
{
    double stored = 0, view = 0; // bytes
    double question = 0, made = 0,
           each = 0; // milliseconds: to read the question; to make the view; of an answer's token
    int right = 0, asked = 0;
};

/// The caches of all layers in a file's bytes, and the turn of one question.
class stored_prefix
{
public:
    stored_prefix(runner::session& run, std::vector<std::byte> const& bytes)
        : run_{run}
        , memory_{runner::detail::allocate_bytes(bytes.size())}
        , caches_{(std::copy(bytes.begin(), bytes.end(), memory_.get()),
              mdkv::read<element>({memory_.get(), bytes.size()}, {}))}
    {}

    std::string answer(std::vector<std::int32_t> const& question, std::int64_t position, row const& how, figures& sum)
    {
        runner::model_shape const& shape = run_.model().shape();
        std::vector<std::unique_ptr<runner::layer_cache>> layers;
        for (std::int64_t i = 0; i < caches_.layers(); ++i)
        {
            auto const cache = caches_.layer(i);
            sum.stored += static_cast<double>(cache.arena_bytes);
            layers.push_back(std::make_unique<runner::stored_cache<element>>(
                cache, shape.query_heads / shape.kv_heads, std::ssize(question)));
        }
        auto const count = std::ssize(question);
        std::vector<element> queries(
            static_cast<std::size_t>(caches_.layers() * shape.query_heads * count * shape.key_dim));
        std::vector<float> logits(static_cast<std::size_t>(shape.vocabulary));
        auto const query_of = [&](std::int64_t layer, std::int64_t head, std::int64_t token) {
            return queries.data() + ((layer * shape.query_heads + head) * count + token) * shape.key_dim;
        };
        auto const step = [&](std::int32_t token, std::int64_t number) {
            auto const at = position + number;
            runner::decode_step(
                run_.model(), std::span{&token, 1}, std::span{&at, 1}, run_.executor(),
                [&](std::int64_t layer, std::int64_t, float const* q, float const* k, float const* v, float* out) {
                    for (std::int64_t h = 0; number < count && h < shape.query_heads; ++h)
                    {
                        std::transform(q + h * shape.key_dim, q + (h + 1) * shape.key_dim, query_of(layer, h, number),
                            mdkv::narrow<element>);
                    }
                    layers[static_cast<std::size_t>(layer)]->attend(run_.executor(), scratch_, q, k, v, out);
                },
                logits, space_);
        };
        auto since = std::chrono::steady_clock::now();
        for (std::int64_t i = 0; i < count; ++i) { step(question[static_cast<std::size_t>(i)], i); }
        sum.question += milliseconds(since);
        since = std::chrono::steady_clock::now();
        for (std::int64_t i = 0; how.view_kv > 0 && i < caches_.layers(); ++i)
        {
            auto& layer = layers[static_cast<std::size_t>(i)];
            mdkv::cpu::cache<element> made;
            scratch_.run(run_.executor(), [&](mdkv::cpu::backend on) {
                return mdkv::recompress(on, mdkv::in(on, query_of(i, 0, 0), shape.query_heads, count, shape.key_dim),
                    mdkv::bit_ratios,
                    {.limit = mdkv::budget::kv_size(how.view_kv), .pooling = mdkv::presets::by_window.pooling},
                    dynamic_cast<runner::stored_cache<element> const&>(*layer).view(), made);
            });
            sum.view += static_cast<double>(made.arena_bytes());
            layer = std::make_unique<runner::packed_cache<element>>(
                std::move(made), shape.query_heads / shape.kv_heads, 32);
        }
        sum.made += milliseconds(since);
        since = std::chrono::steady_clock::now();
        std::string text;
        constexpr std::int64_t most = 12;
        for (std::int64_t i = 0; i < most; ++i)
        {
            auto const token =
                static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
            text += run_.words().decode_one(token);
            if (i + 1 < most) { step(token, count + i); }
        }
        sum.each += milliseconds(since) / (most - 1);
        return text;
    }

private:
    runner::session& run_;
    std::shared_ptr<std::byte> memory_;
    mdkv::stored_caches<element> caches_;
    runner::scratch_memory scratch_;
    runner::decode_workspace space_;
};

std::string number_of(std::uint64_t x)
{
    x = (x + 0x9E3779B97F4A7C15U) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
    return std::to_string(1'000'000 + (x ^ (x >> 31U)) % 9'000'000U);
}

int run(std::string const& model, std::string const& text_path, std::int64_t samples, std::int64_t context)
{
    runner::common_options options;
    options.model_path = model;
    runner::session session{options};
    auto const& words       = session.words();
    std::string const book  = runner::read_text(text_path);
    char const* const whole = "by_window[ratios=1:int4,1:int8,1]"; // nothing dropped
    std::array<row, 7> const rows{
        {{"full cache", "full", 1, 0}, {"best", "best", 1 / 16.0, 0}, {"any_question", "any_question", 1 / 16.0, 0},
            {"any_question", "any_question", 1 / 8.0, 0}, {"master", whole, 0.3, 0},
            {"master and views", whole, 0.3, context / 16}, {"master and views", whole, 0.3, context / 8}}};
    std::array<figures, rows.size()> all{};
    std::array<char const*, 2> const names{"Amber", "Willow"};
    for (std::int64_t s = 0; s < samples; ++s)
    {
        std::string const part = book.substr(static_cast<std::size_t>(s) * 8000 % (book.size() - 8000), 8000);
        std::vector<std::int32_t> const base = words.encode(part);
        std::vector<std::int32_t> prompt;
        std::array<std::string, 2> numbers;
        for (std::size_t i = 0; i < 2; ++i)
        {
            numbers[i]       = number_of(static_cast<std::uint64_t>(2 * s) + i);
            auto const begin = static_cast<std::int64_t>(prompt.empty() ? 0 : prompt.size());
            auto const upto  = context * (i == 0 ? 2 + s % 3 : 6 + s % 3) / 10;
            auto const needle =
                words.encode("\nThe special magic number of " + std::string{names[i]} + " is " + numbers[i] + ".\n");
            for (auto t = begin; t < upto && t < std::ssize(base); ++t)
            {
                prompt.push_back(base[static_cast<std::size_t>(t)]);
            }
            prompt.insert(prompt.end(), needle.begin(), needle.end());
        }
        for (auto t = std::ssize(prompt); t < context && t < std::ssize(base); ++t)
        {
            prompt.push_back(base[static_cast<std::size_t>(t)]);
        }
        for (std::size_t r = 0; r < rows.size(); ++r)
        {
            runner::sequence_cache<element> cache{session.model(), runner::parse_policy(rows[r].policy),
                mdkv::budget::bytes(static_cast<std::int64_t>(
                    rows[r].share
                    * static_cast<double>(std::ssize(prompt) * session.model().shape().kv_heads
                                          * (session.model().shape().key_dim + session.model().shape().value_dim)
                                          * 2))),
                window, 0};
            runner::scratch_memory scratch;
            static_cast<void>(runner::prefill<element>(
                session.model(), prompt, runner::queries_to_keep(cache.chosen(), window, std::ssize(prompt)),
                session.executor(),
                [&](runner::layer_kv<element> const& kv) { cache.compress_layer(kv, session.executor(), scratch); },
                [](std::int64_t, std::int64_t) { return true; },
                [&](runner::layer_chunk<element> const& chunk) {
                    cache.score_chunk(chunk, chunk.tokens, session.executor(), scratch);
                }));
            std::vector<std::byte> bytes;
            auto const layers = cache.layers_to_write();
            mdkv::write([&](std::span<std::byte const> some) { bytes.insert(bytes.end(), some.begin(), some.end()); },
                {}, {.model_layers = std::ssize(layers), .model_heads = session.model().shape().kv_heads},
                std::span{layers});
            stored_prefix prefix{session, bytes};
            for (std::size_t i = 0; i < 2; ++i)
            {
                auto const question =
                    words.encode("\nQuestion: What is the special magic number of " + std::string{names[i]}
                                 + "?\nAnswer: The special magic number of " + names[i] + " is");
                std::string const answer = prefix.answer(question, std::ssize(prompt), rows[r], all[r]);
                all[r].right += answer.find(numbers[i]) != std::string::npos ? 1 : 0;
                ++all[r].asked;
            }
        }
        std::fprintf(stderr, "%lld of %lld\n", static_cast<long long>(s + 1), static_cast<long long>(samples));
    }
    std::puts("| prefix kept as | stored, MB | view, MB | right | question read, ms | view made, ms | a token, ms "
              "|\n|:--|--:|--:|--:|--:|--:|--:|");
    for (std::size_t r = 0; r < rows.size(); ++r)
    {
        figures const& sum = all[r];
        double const turns = sum.asked;
        std::printf("| %s, %.1f %%%s | %.2f | %.2f | %d of %d | %.0f | %.0f | %.1f |\n", rows[r].name,
            100 * sum.stored / all[0].stored,
            rows[r].view_kv == 0 ? "" : (" of KV " + std::to_string(rows[r].view_kv)).c_str(), sum.stored / turns / 1e6,
            sum.view / turns / 1e6, sum.right, sum.asked, sum.question / turns, sum.made / turns, sum.each / turns);
    }
    return 0;
}

} // namespace

int main(int argc, char** argv)
{
    if (argc != 5)
    {
        std::fprintf(stderr, "%s MODEL TEXT SAMPLES CONTEXT\n", argv[0]);
        return 2;
    }
    try
    {
        return run(argv[1], argv[2], std::atoll(argv[3]), std::atoll(argv[4]));
    }
    catch (std::exception const& problem)
    {
        std::fprintf(stderr, "%s\n", problem.what());
        return 1;
    }
}
