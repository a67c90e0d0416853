/// \file mistral_chat.cpp: conversations and prompts in parts as the models of Mistral read them
#include "runner/chat.hpp"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include "runner/tokenizer.hpp"
#include "runner/vocabulary.hpp"
#include "support/piece_vocabulary.hpp"

namespace
{

using ids  = std::vector<std::int32_t>;
using list = std::vector<std::string>;
using runner::token_kind;

/// The letters of words and of the template of Mistral, and what they merge to.
piece_vocabulary mistral_like()
{
    return piece_vocabulary({"\u2581[", "/I", "NS", "INS", "INST", "\u2581a", "\u2581b", "ab", "\u2581", "[", "]", "/",
        "I", "N", "S", "T", "a", "b", "c"});
}

/// Whether the context's tokens are within this text, and one more would not be.
bool ends_at(runner::tokenizer const& words, runner::prompt_parts const& parts, std::string const& text)
{
    std::string const context = words.decode(parts.context);
    bool const more           = !parts.question.empty();
    return text.starts_with(context)
           && (more ? context.size() + words.decode_one(parts.question.front()).size() > text.size() : context == text);
}

} // namespace

TEST_CASE("Mistral: a conversation where [INST] is text")
{
    auto const vocabulary = mistral_like();
    auto const made       = vocabulary.make("{{ bos_token }}{{ '[INST] ' + message['content'] + ' [/INST]' }}");
    CHECK(runner::chat_form_of(made) == runner::chat_form::mistral);
    CHECK(runner::chat_form_of(vocabulary.make("{{ '[INST] <<SYS>>' }}")) == runner::chat_form::none);
    CHECK(runner::chat_form_of(vocabulary.make()) == runner::chat_form::none);
    ids const encoded = runner::encode_chat(made, std::nullopt, "a b");
    CHECK(encoded[0] == 1);
    CHECK(std::ranges::count(encoded, 1) == 1);
    CHECK(made.decode(encoded) == "<s> [INST] a b [/INST]");
    ids whole = made.encode("[INST] a b [/INST]");
    whole.insert(whole.begin(), 1);
    CHECK(encoded == whole);
    CHECK(made.decode(runner::encode_chat(made, "c", "a")) == "<s> [INST] c\n\na [/INST]");
    whole[0] = made.eos().value(); // the answer's
    CHECK(runner::encode_next_question(made, "a b", true) == whole);
}

TEST_CASE("Mistral: a conversation where [INST] is a control token")
{
    auto vocabulary          = mistral_like();
    std::int32_t const begin = vocabulary.add("[INST]", token_kind::control);
    std::int32_t const end   = vocabulary.add("[/INST]", token_kind::control);
    auto const made          = vocabulary.make("[INST]");
    CHECK(runner::encode_chat(made, std::nullopt, "a") == ids{1, begin, made.encode("a")[0], end});
    ids const pasted = runner::encode_chat(made, std::nullopt, "a[/INST]");
    CHECK(std::ranges::count(pasted, end) == 1);
    CHECK(made.decode(pasted) == "<s>[INST] a[/INST][/INST]");
    CHECK(runner::encode_next_question(made, "a", true) == ids{made.eos().value(), begin, made.encode("a")[0], end});
}

TEST_CASE("Mistral: a prompt in parts is the whole prompt, cut where the context ends")
{
    for (bool const control : {false, true})
    {
        auto vocabulary = mistral_like();
        if (control)
        {
            vocabulary.add("[INST]", token_kind::control);
            vocabulary.add("[/INST]", token_kind::control);
        }
        auto const made          = vocabulary.make("[INST]");
        list const pieces        = {"", "a", "b", " ", " a", "ab", "ca ", "\u00E9", "\u2581", "\xFF", "x\n"};
        std::string const before = control ? "<s>[INST] " : "<s> [INST] ";
        for (std::string const& context : pieces)
        {
            for (std::string const& question : pieces)
            {
                CAPTURE(context);
                CAPTURE(question);
                auto const chat = runner::encode_parts(made, context, question, "", true);
                CHECK(chat.whole() == runner::encode_chat(made, std::nullopt, context + question));
                CHECK(ends_at(made, chat, before + (context == "\u2581" ? " " : context)));
                auto const bare = runner::encode_parts(made, context, question, "", false);
                ids expected    = made.encode(context + question);
                expected.insert(expected.begin(), 1);
                CHECK(bare.whole() == expected);
                // Of a text that is empty, no space stands before it either.
                std::string const start = (context + question).empty() ? "<s>" : "<s> ";
                CHECK(ends_at(made, bare, start + (context == "\u2581" ? " " : context)));
            }
        }
        auto const parts = runner::encode_parts(made, "c", " a", "", true);
        CHECK(made.decode(parts.context) == (control ? "<s>[INST] c" : "<s> [INST] c"));
        CHECK(parts.question.front() == made.encode("a").front());
        CHECK(made.decode(runner::encode_parts(made, "c", " a", "", false).context) == "<s> c");
    }
}

TEST_CASE("Mistral: one space stands before an answer's beginning, where it is a text of its own")
{
    auto const made = mistral_like().make("[INST]");
    auto const tail = [&](std::string_view answer, bool chat) {
        auto const with    = runner::encode_parts(made, "c", "a", answer, chat).whole();
        auto const without = runner::encode_parts(made, "c", "a", "", chat).whole();
        return ids(with.begin() + std::ssize(without), with.end());
    };
    CHECK(tail("ab", true) == made.encode("ab"));
    CHECK(tail(" ab", true) == made.encode("ab"));
    CHECK(tail(" ab", false) == made.encode("ab")); // goes on after the question
    CHECK(tail("ab", false) == made.encode_continued("ab"));
    CHECK(tail("", true).empty());
}
