/// \file chat.hpp: one question to a model in the form of conversation that it was trained on
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer.hpp"

namespace runner
{

/// Known forms; a model's control tokens tell which one it speaks.
enum class chat_form
{
    none,   // none of these
    chatml, // <|im_start|>ROLE\nTEXT<|im_end|>\n
    llama3  // <|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|>
};

[[nodiscard]] inline chat_form chat_form_of(tokenizer const& words)
{
    auto const has_all = [&](std::initializer_list<std::string_view> names) {
        return std::all_of(names.begin(), names.end(), [&](auto name) { return words.find_control(name).has_value(); });
    };
    if (has_all({"<|im_start|>", "<|im_end|>"})) { return chat_form::chatml; }
    if (has_all({"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}))
    {
        return chat_form::llama3;
    }
    return chat_form::none;
}

/// System texts that templates put first where the caller gives none: SmolLM2's and Qwen 2.5's.
inline constexpr std::string_view default_system_texts[] = {
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."};

namespace detail
{

[[nodiscard]] inline std::string_view trimmed(std::string_view text) noexcept
{
    constexpr std::string_view space = " \t\n\v\f\r";
    std::size_t const first          = text.find_first_not_of(space);
    if (first == std::string_view::npos) { return {}; }
    return text.substr(first, text.find_last_not_of(space) - first + 1);
}

/// Texts and control tokens of a form: BEGIN, and of each turn OPEN ROLE BEHIND_ROLE GAP TEXT END BETWEEN.
struct chat_marks
{
    std::string_view begin, open, behind_role, gap, end, between;
    bool trims; // texts are put in without white space around them
};

inline constexpr chat_marks chatml_marks{"", "<|im_start|>", "", "\n", "<|im_end|>", "\n", false};
inline constexpr chat_marks llama3_marks{
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "\n\n", "<|eot_id|>", "", true};

} // namespace detail

/// A conversation of at most a system text and one question, up to where the answer begins. The texts come from
/// outside: a control token's name in them is just text, so that nobody can end a turn by writing it.
///
/// \param system   none: the default of the model's template, where that is known
/// \throws std::invalid_argument   the vocabulary knows none of the forms
[[nodiscard]] inline std::vector<std::int32_t> encode_chat(
    tokenizer const& words, std::optional<std::string_view> system, std::string_view user)
{
    chat_form const form = chat_form_of(words);
    if (form == chat_form::none)
    {
        throw std::invalid_argument("encode_chat: the model speaks no known form of conversation");
    }
    detail::chat_marks const& marks = form == chat_form::chatml ? detail::chatml_marks : detail::llama3_marks;
    for (std::string_view const text : default_system_texts)
    {
        if (form == chat_form::chatml && !system && words.chat_template().find(text) != std::string::npos)
        {
            system = text;
        }
    }
    std::vector<std::int32_t> tokens;
    auto const control = [&](std::string_view name) {
        if (!name.empty()) { tokens.push_back(words.find_control(name).value()); }
    };
    auto const plain = [&](std::string const& text) { // control tokens are not looked for
        auto const more = words.encode(text);
        tokens.insert(tokens.end(), more.begin(), more.end());
    };
    auto const turn = [&](std::string const& role, std::string_view text) {
        std::string const rest = std::string{marks.gap} + std::string{marks.trims ? detail::trimmed(text) : text};
        control(marks.open);
        if (marks.behind_role.empty()) { return plain(role + rest); }
        plain(role);
        control(marks.behind_role);
        plain(rest);
    };
    auto const end = [&] {
        control(marks.end);
        plain(std::string{marks.between});
    };
    control(marks.begin);
    if (system)
    {
        turn("system", *system);
        end();
    }
    turn("user", user);
    end();
    turn("assistant", "");
    return tokens;
}

} // namespace runner
