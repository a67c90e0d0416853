/// \file chat.hpp: one question to a model in the form of conversation it was trained on, whole or in parts
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

/// Known forms; which one a model speaks is told by its control tokens, or by its template where it has none for that.
enum class chat_form
{
    none,   // none of these
    chatml, // <|im_start|>ROLE\nTEXT<|im_end|>\n
    llama3, // <|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|>
    mistral // [INST] TEXT [/INST]
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
    // Llama 2 writes [INST] too, but trims the texts, and has marks of its own for the system text.
    bool const writes_inst = words.chat_template().find("[INST]") != std::string::npos
                             && words.chat_template().find("<<SYS>>") == std::string::npos;
    if (words.has_sentence_pieces() && words.bos() && writes_inst) { return chat_form::mistral; }
    return chat_form::none;
}

/// System texts that templates put first where the caller gives none: SmolLM2's and Qwen 2.5's.
inline constexpr std::string_view default_system_texts[] = {
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."};

/// Whether the file's template is, byte for byte, one that `encode_chat` is known to reproduce. Templates are programs
/// which are not run here; where this says no, the form was chosen by its marks alone.
[[nodiscard]] inline bool chat_template_is_known(tokenizer const& words) noexcept
{
    std::uint64_t hash = 0xCBF29CE484222325U; // FNV-1a
    for (char const c : words.chat_template()) { hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3U; }
    return hash == 0x45EC583D4D25BC3AU     // SmolLM2-Instruct
           || hash == 0xC2B27EE60F1B8775U; // Qwen2.5-Instruct
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

/// Tokens, and where the user's text is in them.
struct marked_tokens
{
    std::vector<std::int32_t> ids;
    std::size_t first = 0; // token of the piece of text that the user's text is in
    std::size_t lead  = 0; // bytes of that piece's tokens before the user's
};

/// Collects control tokens by name and text in which control tokens are not looked for.
class chat_writer
{
public:
    explicit chat_writer(tokenizer const& words)
        : words_(words)
    {}
    void token(std::int32_t id) { out_.ids.push_back(id); }
    void control(std::string_view name) { token(words_.find_control(name).value()); }
    void text(std::string const& text)
    {
        std::vector<std::int32_t> const more = words_.encode(text);
        out_.ids.insert(out_.ids.end(), more.begin(), more.end());
    }
    /// One piece of text, of which `user` came from outside and is looked for again later.
    void user_text(std::string const& lead, std::string_view user, std::string const& behind = {})
    {
        out_.first = out_.ids.size();
        out_.lead  = words_.space_prefix().size() + lead.size();
        text(lead + std::string(user) + behind);
    }
    [[nodiscard]] marked_tokens take() { return std::move(out_); }

private:
    tokenizer const& words_;
    marked_tokens out_;
};

/// A question, and behind it where the answer begins.
inline void write_chatml_question(chat_writer& out, std::string_view user)
{
    out.control("<|im_start|>");
    out.user_text("user\n", user);
    out.control("<|im_end|>");
    out.text("\n");
    out.control("<|im_start|>");
    out.text("assistant\n");
}

inline marked_tokens encode_chatml(
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
    write_chatml_question(out, user);
    return out.take();
}

inline void write_llama3_header(chat_writer& out, std::string const& role)
{
    out.control("<|start_header_id|>");
    out.text(role);
    out.control("<|end_header_id|>");
}

/// A question, and behind it where the answer begins.
inline void write_llama3_question(chat_writer& out, std::string_view user)
{
    write_llama3_header(out, "user");
    out.user_text("\n\n", trimmed(user));
    out.control("<|eot_id|>");
    write_llama3_header(out, "assistant");
    out.text("\n\n");
}

inline marked_tokens encode_llama3(
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
    write_llama3_question(out, user);
    return out.take();
}

/// A question up to where the answer begins, the system text in front of it.
inline void write_mistral_question(
    chat_writer& out, tokenizer const& words, std::string const& lead, std::string_view user)
{
    if (words.find_control("[INST]") && words.find_control("[/INST]"))
    {
        out.control("[INST]");
        out.user_text(lead, user);
        out.control("[/INST]");
    }
    else { out.user_text("[INST] " + lead, user, " [/INST]"); }
}

/// As mistral_common encodes it: the system text is the beginning of the question, nothing is trimmed, and [INST] is
/// ordinary text in the vocabulary of the models up to v0.2, a control token since v0.3.
inline marked_tokens encode_mistral(
    tokenizer const& words, std::optional<std::string_view> system, std::string_view user)
{
    chat_writer out(words);
    std::string const lead = system && !system->empty() ? std::string(*system) + "\n\n" : "";
    out.token(words.bos().value());
    write_mistral_question(out, words, lead, user);
    return out.take();
}

/// The tokens of what an answer begins with, behind the conversation or the bare text that asks for it.
[[nodiscard]] inline std::vector<std::int32_t> encode_answer(
    tokenizer const& words, std::string_view prefix, chat_form form)
{
    if (form != chat_form::mistral) { return words.encode_continued(prefix); }
    // An answer of Mistral is a text that begins, and one space separates it from [/INST].
    if (prefix.starts_with(' ')) { prefix.remove_prefix(1); }
    return words.encode(prefix);
}

/// How many of the tokens from `first` on lie within the first `bytes` bytes of the text they were made of.
[[nodiscard]] inline std::size_t tokens_within(
    tokenizer const& words, std::vector<std::int32_t> const& ids, std::size_t first, std::size_t bytes)
{
    std::size_t count = 0;
    for (std::size_t i = first; i < ids.size(); ++i, ++count)
    {
        std::size_t const size = words.decode_one(ids[i]).size();
        if (size > bytes) { break; }
        bytes -= size;
    }
    return count;
}

[[nodiscard]] inline marked_tokens encode_chat_marked(
    tokenizer const& words, std::optional<std::string_view> system, std::string_view user)
{
    switch (chat_form_of(words))
    {
        case chat_form::chatml:
            return encode_chatml(words, system, user);
        case chat_form::llama3:
            return encode_llama3(words, system, user);
        case chat_form::mistral:
            return encode_mistral(words, system, user);
        case chat_form::none:
            break;
    }
    throw std::invalid_argument("encode_chat: the model speaks no known form of conversation");
}

} // namespace detail

/// A conversation of at most a system text and one question, up to where the answer begins. The texts come from
/// outside: a control token's name in them is just text, so that nobody can end a turn by writing it (but for Mistral up
/// to v0.2, whose [/INST] is text itself).
///
/// \param system   none: the default of the model's template, where that is known
/// \throws std::invalid_argument   the vocabulary knows none of the forms
[[nodiscard]] inline std::vector<std::int32_t> encode_chat(
    tokenizer const& words, std::optional<std::string_view> system, std::string_view user)
{
    return detail::encode_chat_marked(words, system, user).ids;
}

/// What comes behind an answer for the conversation to go on: the end of the answer's turn, which is not among the
/// answer's tokens, the next question, and where its answer begins. A text comes from outside, as with encode_chat.
///
/// \param chat   in the model's form of conversation; a model without a known form, or false: a line of bare text
[[nodiscard]] inline std::vector<std::int32_t> encode_next_question(
    tokenizer const& words, std::string_view question, bool chat)
{
    detail::chat_writer out(words);
    switch (chat ? chat_form_of(words) : chat_form::none)
    {
        case chat_form::chatml:
            out.control("<|im_end|>");
            out.text("\n");
            detail::write_chatml_question(out, question);
            break;
        case chat_form::llama3:
            out.control("<|eot_id|>");
            detail::write_llama3_question(out, question);
            break;
        case chat_form::mistral:
            if (words.eos()) { out.token(*words.eos()); }
            detail::write_mistral_question(out, words, {}, question);
            break;
        case chat_form::none:
            return words.encode_continued("\n" + std::string(question) + "\n");
    }
    return out.take().ids;
}

/// A prompt in two pieces, one after the other.
struct prompt_parts
{
    std::vector<std::int32_t> context;  // up to the end of the context, whatever the form puts before it included
    std::vector<std::int32_t> question; // the question, what the form puts behind it, and the beginning of the answer

    [[nodiscard]] std::vector<std::int32_t> whole() const
    {
        std::vector<std::int32_t> all = context;
        all.insert(all.end(), question.begin(), question.end());
        return all;
    }
};

/// The tokens of `context + question`, cut where the context ends, and after them those of `answer_prefix`. A token that
/// reaches across the cut counts as the question's, so that the tokens are the same wherever the cut is.
///
/// \param chat   in the model's form of conversation, the prefix being what the answer begins with; a model without a
///               known form, or false: the bare texts, after a beginning-of-sequence token where the model wants one
[[nodiscard]] inline prompt_parts encode_parts(tokenizer const& words, std::string_view context,
    std::string_view question, std::string_view answer_prefix, bool chat)
{
    std::string const user = std::string(context) + std::string(question);
    detail::marked_tokens all;
    std::size_t ahead    = context.size(); // bytes of the context in the text that was encoded
    chat_form const form = chat ? chat_form_of(words) : chat_form::none;
    if (form != chat_form::none)
    {
        all = detail::encode_chat_marked(words, std::nullopt, user);
        if (form == chat_form::llama3) // which trims the text
        {
            std::string_view const kept = detail::trimmed(user);
            std::size_t const cut       = kept.empty() ? ahead : static_cast<std::size_t>(kept.data() - user.data());
            ahead                       = std::min(ahead - std::min(ahead, cut), kept.size());
            context                     = kept.substr(0, ahead);
        }
    }
    else
    {
        all.ids  = words.encode(user);
        all.lead = words.space_prefix().size();
        if (words.add_bos() && words.bos())
        {
            all.ids.insert(all.ids.begin(), *words.bos());
            all.first = 1;
        }
    }
    // Bytes no token stands for are in the text, but not in its tokens.
    std::size_t const bytes = all.lead + ahead - words.bytes_without_token(context.substr(0, ahead));
    auto const cut = static_cast<std::ptrdiff_t>(all.first + detail::tokens_within(words, all.ids, all.first, bytes));
    prompt_parts parts;
    parts.context.assign(all.ids.begin(), all.ids.begin() + cut);
    parts.question.assign(all.ids.begin() + cut, all.ids.end());
    std::vector<std::int32_t> const more = detail::encode_answer(words, answer_prefix, form);
    parts.question.insert(parts.question.end(), more.begin(), more.end());
    return parts;
}

} // namespace runner
