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
#include <utility>
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

/// Collects control tokens by name and text in which control tokens are not looked for.
class chat_writer
{
public:
    explicit chat_writer(tokenizer const& words)
        : words_(words)
    {}
    void control(std::string_view name) { out_.push_back(words_.find_control(name).value()); }
    void text(std::string const& text)
    {
        std::vector<std::int32_t> const more = words_.encode(text);
        out_.insert(out_.end(), more.begin(), more.end());
    }
    [[nodiscard]] std::vector<std::int32_t> take() { return std::move(out_); }

private:
    tokenizer const& words_;
    std::vector<std::int32_t> out_;
};

inline std::vector<std::int32_t> encode_chatml(
    tokenizer const& words, std::optional<std::string_view> system, std::string_view user)
{
    chat_writer out(words);
    for (std::string_view const text : default_system_texts)
    {
        if (!system && words.chat_template().find(text) != std::string::npos) { system = text; }
    }
    if (system)
    {
        out.control("<|im_start|>");
        out.text("system\n" + std::string(*system));
        out.control("<|im_end|>");
        out.text("\n");
    }
    out.control("<|im_start|>");
    out.text("user\n" + std::string(user));
    out.control("<|im_end|>");
    out.text("\n");
    out.control("<|im_start|>");
    out.text("assistant\n");
    return out.take();
}

inline void write_llama3_header(chat_writer& out, std::string const& role)
{
    out.control("<|start_header_id|>");
    out.text(role);
    out.control("<|end_header_id|>");
}

inline std::vector<std::int32_t> encode_llama3(
    tokenizer const& words, std::optional<std::string_view> system, std::string_view user)
{
    chat_writer out(words);
    out.control("<|begin_of_text|>");
    if (system)
    {
        write_llama3_header(out, "system");
        out.text("\n\n" + std::string(trimmed(*system)));
        out.control("<|eot_id|>");
    }
    write_llama3_header(out, "user");
    out.text("\n\n" + std::string(trimmed(user)));
    out.control("<|eot_id|>");
    write_llama3_header(out, "assistant");
    out.text("\n\n");
    return out.take();
}

} // namespace detail

/// A conversation of at most a system text and one question, up to where the answer begins. The texts come from
/// outside: a control token's name in them is just text, so that nobody can end a turn by writing it.
///
/// \param system   none: the default of the model's template, where that is known
/// \throws std::invalid_argument   the vocabulary knows none of the forms
[[nodiscard]] inline std::vector<std::int32_t> encode_chat(
    tokenizer const& words, std::optional<std::string_view> system, std::string_view user)
{
    switch (chat_form_of(words))
    {
        case chat_form::chatml:
            return detail::encode_chatml(words, system, user);
        case chat_form::llama3:
            return detail::encode_llama3(words, system, user);
        case chat_form::none:
            break;
    }
    throw std::invalid_argument("encode_chat: the model speaks no known form of conversation");
}

} // namespace runner
