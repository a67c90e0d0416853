/// \file generate.hpp: mdkv_run generate: answers a prompt from a compressed cache, token by token
#pragma once

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "chat.hpp"
#include "common_options.hpp"
#include "decode.hpp"
#include "file_bytes.hpp"
#include "file_error.hpp"
#include "greedy.hpp"
#include "policies.hpp"
#include "prefill.hpp"
#include "sequence_cache.hpp"
#include "session.hpp"
#include "terminal.hpp"
#include "utf8.hpp"

namespace runner
{

struct generate_options
{
    std::string prompt_path;
    std::string policy_name = "best";
    std::optional<std::int64_t> kv_size;
    std::optional<std::string> budget;
    std::int64_t max_tokens = 128;
    bool raw                = false; // no chat form around the prompt
    bool while_reading      = false; // compressed while it is read
};

namespace detail
{

/// Prints text as it comes, holding back a character until all of its bytes are there.
class text_stream
{
public:
    void add(std::string_view bytes)
    {
        pending_ += bytes;
        std::size_t const whole = complete_prefix();
        std::fwrite(pending_.data(), 1, whole, stdout);
        std::fflush(stdout);
        pending_.erase(0, whole);
    }

    void finish()
    {
        std::fwrite(pending_.data(), 1, pending_.size(), stdout);
        std::fputc('\n', stdout);
        std::fflush(stdout);
        pending_.clear();
    }

private:
    /// Up to a character whose last bytes are still to come; at most three bytes are held back.
    [[nodiscard]] std::size_t complete_prefix() const noexcept
    {
        for (std::size_t back = 1; back <= 3 && back <= pending_.size(); ++back)
        {
            auto const byte = static_cast<unsigned char>(pending_[pending_.size() - back]);
            if ((byte & 0xC0U) == 0x80U) { continue; } // inside a character
            std::size_t const length = byte >= 0xF0U ? 4 : byte >= 0xE0U ? 3 : byte >= 0xC0U ? 2 : 1;
            return length > back ? pending_.size() - back : pending_.size();
        }
        return pending_.size();
    }

    std::string pending_;
};

/// \throws file_error   the file cannot be read, or there is nothing in it to begin with
[[nodiscard]] inline std::vector<std::int32_t> prompt_tokens(tokenizer const& words, generate_options const& options)
{
    std::string const text = read_text(options.prompt_path);
    if (!options.raw && chat_form_of(words) != chat_form::none) { return encode_chat(words, std::nullopt, text); }
    std::vector<std::int32_t> tokens = words.encode(text);
    if (words.add_bos() && words.bos()) { tokens.insert(tokens.begin(), *words.bos()); }
    if (tokens.empty())
    {
        throw file_error(options.prompt_path, text.empty() ? "is empty" : "holds no byte that a token stands for");
    }
    return tokens;
}

[[nodiscard]] inline policy policy_of(generate_options const& options, common_options const& common)
{
    if (!options.while_reading) { return chosen_policy(options.policy_name, common); }
    std::string const& name = options.policy_name;
    std::string const more  = "while_reading=yes]";
    return chosen_policy(
        name.ends_with(']') ? name.substr(0, name.size() - 1) + "+" + more : name + "[" + more, common);
}

template <mdkv::element T>
[[nodiscard]] sequence_cache<T> make_cache(
    language_model const& model, policy const& chosen, std::int64_t window, generate_options const& options)
{
    mdkv::budget const limit =
        options.budget ? parse_budget(*options.budget) : mdkv::budget::kv_size(options.kv_size.value_or(512));
    return {model, chosen, limit, window, options.max_tokens};
}

/// What the cache took.
template <mdkv::element T>
void print_size(sequence_cache<T> const& cache)
{
    std::fprintf(stderr, "KV cache of the prompt: %s, %.1f %% of the full cache's %s (policy %s, %s%s)\n",
        size_text(cache.resident_bytes()).c_str(),
        100.0 * static_cast<double>(cache.resident_bytes()) / static_cast<double>(cache.full_bytes()),
        size_text(cache.full_bytes()).c_str(), cache.chosen().label.c_str(), mdkv::element_name<T>(),
        cache.chosen().backend == backend_kind::cuda ? ", on the GPU" : "");
}

} // namespace detail

/// \return the process's exit status: 0, or 130 after Ctrl-C
template <mdkv::element T>
int run_generate(session& run, common_options const& common, generate_options const& options)
{
    std::vector<std::int32_t> const prompt = detail::prompt_tokens(run.words(), options);
    auto const now                         = [] { return std::chrono::steady_clock::now(); };
    auto const seconds                     = [](auto span) { return std::chrono::duration<double>(span).count(); };

    model_shape const& shape = run.model().shape();
    auto const start         = now();
    policy const chosen      = detail::policy_of(options, common);
    auto cache               = detail::make_cache<T>(run.model(), chosen, common.window, options);
    scratch_memory scratch;
    std::vector<float> logits;
    decode_workspace space;
    auto const step = [&](std::int32_t token, std::int64_t position) {
        decode_step(
            run.model(), std::span{&token, 1}, std::span{&position, 1}, run.executor(),
            [&](std::int64_t layer, std::int64_t, float const* query, float const* key, float const* value,
                float* out) { cache.attend(layer, query, key, value, out, run.executor()); },
            logits, space);
    };
    if (chosen.while_reading) { logits = read_showing_progress(cache, prompt, run.executor()); }
    else
    {
        progress_bar bar{"reading " + std::to_string(prompt.size()) + " tokens"};
        logits = prefill<T>(
            run.model(), prompt, queries_to_keep(chosen, common.window, std::ssize(prompt)), run.executor(),
            [&](layer_kv<T> const& kv) { cache.compress_layer(kv, run.executor(), scratch); },
            [&](std::int64_t done, std::int64_t total) {
                bar.show(done, total);
                if (interrupt_requested()) { throw interrupted{}; }
                return true;
            },
            [&](layer_chunk<T> const& chunk) { cache.score_chunk(chunk, chunk.tokens, run.executor(), scratch); });
    }
    auto const read = now();

    detail::text_stream text;
    std::int64_t made = 0;
    auto position     = std::ssize(prompt);
    while (made < options.max_tokens && !interrupt_requested())
    {
        std::int32_t const token = greedy_token(logits);
        if (run.words().is_end_of_generation(token)) { break; }
        text.add(run.words().decode_one(token));
        ++made;
        if (made == options.max_tokens || position >= shape.context) { break; }
        step(token, position);
        ++position;
    }
    text.finish();
    auto const end = now();
    std::fprintf(stderr, "\n%zu tokens read in %.1f s (%.2f s of it compressing), %lld made at %.1f a second\n",
        prompt.size(), seconds(read - start), cache.compress_seconds(), static_cast<long long>(made),
        made > 1 ? static_cast<double>(made - 1) / seconds(end - read) : 0.0);
    detail::print_size(cache);
    return interrupt_requested() ? 130 : 0;
}

} // namespace runner
