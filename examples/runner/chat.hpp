/// \file chat.hpp: one question to a model in the form of conversation it was trained on
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

/// Known forms; which one a model speaks is told by its control tokens.
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

/// The system text SmolLM2's template puts first where the caller gives none.
inline constexpr std::string_view smollm2_system_text =
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face";

/// Whether the file's template is, byte for byte, one that `encode_chat` is known to reproduce. Templates are programs
/// which are not run here; where this says no, the form was chosen by the control tokens alone.
[[nodiscard]] inline bool chat_template_is_known(tokenizer const& words) noexcept
{
    std::uint64_t hash = 0xCBF29CE484222325U; // FNV-1a
    for (char const c : words.chat_template()) { hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3U; }
    return hash == 0x45EC583D4D25BC3AU; // SmolLM2-Instruct
}

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
    void control(std::string_view name) { ids_.push_back(words_.find_control(name).value()); }
    void text(std::string const& text)
    {
        std::vector<std::int32_t> const more = words_.encode(text);
        ids_.insert(ids_.end(), more.begin(), more.end());
    }
    [[nodiscard]] std::vector<std::int32_t> take() { return std::move(ids_); }

private:
    tokenizer const& words_;
    std::vector<std::int32_t> ids_;
};

inline std::vector<std::int32_t> encode_chatml(
    tokenizer const& words, std::optional<std::string_view> system, std::string_view user)
{
    chat_writer out(words);
    auto const turn = [&](std::string const& role, std::string_view text) {
        out.control("<|im_start|>");
        out.text(role + "\n" + std::string(text));
        out.control("<|im_end|>");
        out.text("\n");
    };
    if (!system && words.chat_template().find(smollm2_system_text) != std::string::npos)
    {
        system = smollm2_system_text;
    }
    if (system) { turn("system", *system); }
    turn("user", user);
    out.control("<|im_start|>");
    out.text("assistant\n");
    return out.take();
}

inline std::vector<std::int32_t> encode_llama3(
    tokenizer const& words, std::optional<std::string_view> system, std::string_view user)
{
    chat_writer out(words);
    auto const header = [&](std::string const& role, std::string_view text) {
        out.control("<|start_header_id|>");
        out.text(role);
        out.control("<|end_header_id|>");
        out.text("\n\n" + std::string(text));
    };
    out.control("<|begin_of_text|>");
    if (system)
    {
        header("system", trimmed(*system));
        out.control("<|eot_id|>");
    }
    header("user", trimmed(user));
    out.control("<|eot_id|>");
    header("assistant", "");
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
    throw std::invalid_argument("encode_chat: the model has the control tokens of no known form of conversation");
}

} // namespace runner
