/// \file answer_lane.hpp: one policy's way through one sample: which token comes next, and where an answer ends
#pragma once

#include <mdkv/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runner/policies.hpp"
#include "runner/sampler.hpp"
#include "runner/sequence_cache.hpp"
#include "runner/tokenizer.hpp"
#include "answer_log.hpp"
#include "sample.hpp"

namespace runner
{

/// One policy at one size, asked in one way.
struct entrant
{
    policy chosen;
    std::int64_t kv_size    = 0; // tokens per KV head; 0 for the whole cache
    question_place question = question_place::window;
};

namespace detail
{

/// One entrant's way through one sample.
template <mdkv::element T>
struct lane
{
    entrant const* who;
    sequence_cache<T> cache;
    std::int64_t position;  // of the next token, be it a question's or an answer's
    std::int32_t token = 0; // made last, to be fed next
    std::int64_t made  = 0;
    bool done          = false;
    std::string text{};
    std::vector<std::int32_t> reading{}; // to be fed before another token is made, the next one last
    bool next_asked = false;             // the sample's second question, if it has one
    std::string before{};                // the answer to the first one then, as a line
};

/// The likeliest token, or, where the answer must go on, the likeliest that does not end it.
[[nodiscard]] inline std::int32_t chosen_token(
    std::span<float const> logits, tokenizer const& words, sample const& one, std::int64_t made)
{
    std::int32_t const likeliest = greedy_token(logits);
    auto const ends              = [&](std::int32_t token) {
        return words.is_end_of_generation(token)
               || (one.stop_at_newline && words.decode_one(token).find('\n') != std::string_view::npos);
    };
    if (made >= one.min_new_tokens || !ends(likeliest)) { return likeliest; }
    std::vector<float> others{logits.begin(), logits.end()};
    for (std::size_t token = 0; token < others.size(); ++token)
    {
        if (ends(static_cast<std::int32_t>(token))) { others[token] = -std::numeric_limits<float>::infinity(); }
    }
    return greedy_token(others);
}

/// A token the model made: its text, and whether the answer ends with it.
template <mdkv::element T>
void take_token(lane<T>& at, std::int32_t token, tokenizer const& words, sample const& one)
{
    if (words.is_end_of_generation(token))
    {
        at.done = true;
        return;
    }
    std::string_view const piece = words.decode_one(token);
    if (words.find_control(piece) != token) { at.text += piece; }
    at.token = token;
    at.done  = ++at.made >= one.max_new_tokens;
    if (std::size_t const line = at.text.find('\n'); one.stop_at_newline && line != std::string::npos)
    {
        at.text.resize(line);
        at.done = true;
    }
}

/// Lets a lane that has answered the first question read the second one. The answer's last token is still to be fed,
/// but for one that ends the turn: the question begins with such a one.
/// \param last       token of the answer
/// \param question   encode_next_question()'s tokens
template <mdkv::element T>
void ask_next(lane<T>& at, std::int32_t last, tokenizer const& words, std::span<std::int32_t const> question)
{
    at.reading.assign(question.rbegin(), question.rend());
    if (!words.is_end_of_generation(last)) { at.reading.push_back(last); }
    at.next_asked = true;
    at.before     = at.text + "\n";
    at.text.clear();
    at.made = 0;
    at.done = false;
}

} // namespace detail

} // namespace runner
