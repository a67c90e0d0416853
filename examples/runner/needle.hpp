/// \file needle.hpp: mdkv_run needle: a sentence hidden in a long text, asked for through every policy's cache
#pragma once

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chat.hpp"
#include "common_options.hpp"
#include "decode.hpp"
#include "file_bytes.hpp"
#include "greedy.hpp"
#include "policies.hpp"
#include "prefill.hpp"
#include "sequence_cache.hpp"
#include "session.hpp"
#include "terminal.hpp"

namespace runner
{

struct needle_options
{
    std::vector<std::string> text_paths;            // haystacks, each by itself
    std::vector<std::int64_t> lengths{1024, 2048};  // tokens of the whole prompt
    std::vector<double> depths{10, 30, 50, 70, 90}; // percent of the haystack before the needle
    std::string hidden   = "number";                // or sentence
    std::string question = "both";                  // in the prompt, later, or both
    std::string policies = "full,best,any_question,by_window,paper,snapkv";
    std::vector<std::int64_t> kv_sizes{128, 256};
    std::uint64_t seed = 0; // seed of the numbers
    std::string json_path;  // a line for each answer
};

/// A sentence, a question about it, and the part of an answer that is looked for, in small letters.
struct needle
{
    std::string text, question, wanted;
};

/// The sentence of gkamradt/LLMTest_NeedleInAHaystack, or a number of seven digits that depends on seed and depth alone.
[[nodiscard]] inline needle make_needle(std::string const& hidden, std::uint64_t seed, double depth)
{
    constexpr char const* how = " Don't give information outside the document or repeat your findings";
    if (hidden == "sentence")
    {
        return {"\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.\n",
            std::string{"\n\nWhat is the best thing to do in San Francisco?"} + how,
            "eat a sandwich and sit in dolores park on a sunny day"};
    }
    mdkv::expects(hidden == "number", "needle: \"", hidden, "\" is unknown; there are number, sentence");
    std::uint64_t x = seed + static_cast<std::uint64_t>(std::llround(depth * 1000)) + 0x9E3779B97F4A7C15U;
    x               = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U; // splitmix64 (Steele, Lea, Flood 2014)
    x               = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    x ^= x >> 31;
    std::string const number = std::to_string(1'000'000 + x % 9'000'000U);
    return {"\nThe secret number of this book is " + number + ".\n",
        std::string{"\n\nWhat is the secret number of this book?"} + how, number};
}

/// Tokens up to the end of the haystack, and those behind it.
struct needle_prompt
{
    std::vector<std::int32_t> context, question;
};

/// A prompt of exactly `length` tokens, in the model's chat form where it has one: the haystack repeated as often as that
/// takes, and in it the needle behind the last full stop before its depth.
/// \throws mdkv::invalid_argument   the length leaves no room for the haystack
[[nodiscard]] inline needle_prompt make_needle_prompt(
    tokenizer const& words, std::string const& haystack, needle const& hidden, std::int64_t length, double depth)
{
    std::string const before =
        "You are a helpful AI bot that answers questions for a user. Keep your response short and direct\n\n";
    needle_prompt prompt;
    std::vector<std::int32_t> close;
    if (chat_form_of(words) != chat_form::none)
    {
        prompt.context  = encode_chat(words, std::nullopt, "");
        auto const turn = std::find_if(prompt.context.rbegin(), prompt.context.rend(), [&](std::int32_t token) {
            return words.is_end_of_generation(token);
        }).base() - 1; // which ends the question
        close.assign(turn, prompt.context.end());
        prompt.context.erase(turn, prompt.context.end());
    }
    else if (words.add_bos() && words.bos()) { prompt.context = {*words.bos()}; }
    auto const append = [](std::vector<std::int32_t>& to, std::span<std::int32_t const> tokens) {
        to.insert(to.end(), tokens.begin(), tokens.end());
    };
    append(prompt.context, words.encode(before));
    append(prompt.question, words.encode(hidden.question));
    append(prompt.question, close);
    auto const put = words.encode(hidden.text);
    auto const hay = length - std::ssize(prompt.context) - std::ssize(prompt.question) - std::ssize(put);
    mdkv::expects(
        hay > 0, "needle: length ", length, " leaves nothing of the text beside the other ", length - hay, " tokens");
    mdkv::expects(depth >= 0 && depth <= 100, "needle: depth is ", depth, ", not within 0 and 100");
    auto tokens = words.encode(haystack);
    mdkv::expects(!tokens.empty(), "needle: the text is empty");
    for (std::size_t i = 0; std::ssize(tokens) < hay; ++i) { tokens.push_back(tokens[i]); }
    tokens.resize(static_cast<std::size_t>(hay));
    auto at              = tokens.begin() + static_cast<std::ptrdiff_t>(static_cast<double>(hay) * depth / 100);
    auto const full_stop = [&](std::int32_t token) { return words.decode_one(token) == "."; };
    while (at != tokens.begin() && at != tokens.end() && !full_stop(at[-1])) { --at; }
    append(prompt.context, {tokens.begin(), at});
    append(prompt.context, put);
    append(prompt.context, {at, tokens.end()});
    return prompt;
}

/// One policy at one budget, answering.
template <mdkv::element T>
struct needle_lane
{
    std::int64_t kv_size;
    sequence_cache<T> cache;
    std::int32_t next = 0;
    bool done         = false;
    std::string answer{};

    /// Takes the token that the model made; an answer is one line.
    void take(std::span<float const> logits, tokenizer const& words)
    {
        next = greedy_token(logits);
        done = done || words.is_end_of_generation(next) || words.decode_one(next).find('\n') != std::string_view::npos;
        if (!done) { answer += words.decode_one(next); }
    }
    [[nodiscard]] bool finds(std::string const& wanted) const
    {
        std::string small = answer;
        for (char& c : small) { c = static_cast<char>(std::tolower(static_cast<unsigned char>(c))); }
        return small.find(wanted) != std::string::npos;
    }
};

/// Answers one prompt through all lanes: compressed with the question in it, or before it.
template <mdkv::element T>
void answer_needle(session& run, needle_prompt const& prompt, bool later, std::int64_t window,
    std::vector<needle_lane<T>>& lanes, scratch_memory& scratch)
{
    constexpr int most_tokens = 30;
    auto tokens               = prompt.context;
    if (!later) { tokens.insert(tokens.end(), prompt.question.begin(), prompt.question.end()); }
    std::int64_t queries = 0;
    for (auto const& lane : lanes)
    {
        queries = std::max(queries, queries_to_keep(lane.cache.chosen(), window, std::ssize(tokens)));
    }
    auto const stop = [] {
        if (interrupt_requested()) { throw interrupted{}; }
    };
    auto const read = prefill<T>(
        run.model(), tokens, queries, run.executor(),
        [&](layer_kv<T> const& kv) {
            for (auto& lane : lanes) { lane.cache.compress_layer(kv, run.executor(), scratch); }
        },
        [&](std::int64_t, std::int64_t) { return stop(), true; },
        [&](layer_chunk<T> const& chunk) {
            for (auto& lane : lanes) { lane.cache.score_chunk(chunk, chunk.tokens, run.executor(), scratch); }
        });
    for (auto& lane : lanes)
    {
        auto own = read;
        if (lane.cache.chosen().while_reading)
        {
            own = lane.cache.read(tokens, run.executor(), [&](std::int64_t, std::int64_t) { stop(); });
        }
        if (!later) { lane.take(own, run.words()); }
    }
    auto const vocabulary = static_cast<std::size_t>(run.model().shape().vocabulary);
    std::vector<float> logits(lanes.size() * vocabulary);
    decode_workspace space;
    auto const asked = later ? prompt.question.size() : 0; // tokens to feed before an answer
    for (std::size_t step = 0; step + 1 < asked + most_tokens; ++step)
    {
        stop();
        if (std::all_of(lanes.begin(), lanes.end(), [](auto const& lane) { return lane.done; })) { break; }
        std::vector<std::int32_t> fed;
        for (auto const& lane : lanes) { fed.push_back(step < asked ? prompt.question[step] : lane.next); }
        std::vector<std::int64_t> const positions(lanes.size(), std::ssize(tokens) + static_cast<std::int64_t>(step));
        decode_step(
            run.model(), fed, positions, run.executor(),
            [&](std::int64_t layer, std::int64_t b, float const* query, float const* key, float const* value,
                float* out) { lanes[static_cast<std::size_t>(b)].cache.attend(layer, query, key, value, out, {}); },
            logits, space);
        for (std::size_t b = 0; b < lanes.size() && step + 1 >= asked; ++b)
        {
            lanes[b].take(std::span{logits}.subspan(b * vocabulary, vocabulary), run.words());
        }
    }
}

/// \return the process's exit status
template <mdkv::element T>
int run_needle(session& run, common_options const& common, needle_options const& options)
{
    std::vector<policy> policies;
    for (std::string const& text : split_policies(options.policies, !common.head_scores.empty()))
    {
        policies.push_back(chosen_policy(text, common));
    }
    mdkv::expects(options.question == "both" || options.question == "prompt" || options.question == "later",
        "question: \"", options.question, "\" is unknown; there are prompt, later, both");
    std::vector<bool> places; // whether the question comes later
    if (options.question != "later") { places.push_back(false); }
    if (options.question != "prompt") { places.push_back(true); }
    std::ofstream file;
    if (!options.json_path.empty()) { file.open(options.json_path); }

    struct cell
    {
        std::int64_t right = 0, asked = 0;
    };
    std::vector<std::string> head{"policy", "KV size"};
    std::vector<std::vector<cell>> cells; // [policies and sizes][places and lengths]
    progress_bar bar{"needle"};
    std::int64_t done = 0;
    auto const total =
        std::ssize(places) * std::ssize(options.lengths) * std::ssize(options.depths) * std::ssize(options.text_paths);
    for (bool const later : places)
    {
        for (std::int64_t const length : options.lengths)
        {
            auto const column = head.size() - 2;
            head.push_back(std::to_string(length) + (later ? ", later" : ", in the prompt"));
            for (std::size_t text = 0; text < options.text_paths.size(); ++text)
            {
                std::string const haystack = read_text(options.text_paths[text]);
                for (double const depth : options.depths)
                {
                    bar.show(done++, total);
                    needle const hidden = make_needle(options.hidden, options.seed + 1000003 * text, depth);
                    auto const prompt   = make_needle_prompt(run.words(), haystack, hidden, length, depth);
                    std::vector<needle_lane<T>> lanes;
                    for (policy const& one : policies)
                    {
                        for (std::int64_t const size : options.kv_sizes)
                        {
                            auto const limit = one.whole() ? mdkv::budget::fraction(1, 1) : mdkv::budget::kv_size(size);
                            lanes.push_back({size, sequence_cache<T>{run.model(), one, limit, common.window, 128}});
                            if (one.whole()) { break; }
                        }
                    }
                    scratch_memory scratch;
                    answer_needle(run, prompt, later, common.window, lanes, scratch);
                    cells.resize(lanes.size());
                    for (std::size_t i = 0; i < lanes.size(); ++i)
                    {
                        auto const& lane = lanes[i];
                        bool const right = lane.finds(hidden.wanted);
                        cells[i].resize(column + 1);
                        cells[i][column].right += right ? 1 : 0;
                        ++cells[i][column].asked;
                        nlohmann::json const line{{"policy", lane.cache.chosen().label}, {"kv_size", lane.kv_size},
                            {"question", later ? "later" : "prompt"}, {"length", length}, {"depth", depth},
                            {"text", options.text_paths[text]}, {"wanted", hidden.wanted}, {"answer", lane.answer},
                            {"right", right}, {"resident_bytes", lane.cache.resident_bytes()},
                            {"full_bytes", lane.cache.full_bytes()}};
                        file << line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
                    }
                }
            }
        }
    }
    table shown{head};
    std::size_t row = 0;
    for (policy const& one : policies)
    {
        for (std::int64_t const size : options.kv_sizes)
        {
            std::vector<std::string> line{one.label, one.whole() ? "all" : std::to_string(size)};
            for (cell const& c : cells.at(row))
            {
                line.push_back(fixed(100.0 * static_cast<double>(c.right) / static_cast<double>(c.asked), 0));
            }
            shown.add(line);
            ++row;
            if (one.whole()) { break; }
        }
    }
    std::printf("%s%% of %lld answers that hold the %s; prompts by tokens; the question in the prompt that is "
                "compressed, or asked later\n",
        shown.text().c_str(), static_cast<long long>(std::ssize(options.depths) * std::ssize(options.text_paths)),
        options.hidden.c_str());
    mdkv::expects(options.json_path.empty() || file.flush(), options.json_path, ": cannot be written");
    return 0;
}

} // namespace runner
