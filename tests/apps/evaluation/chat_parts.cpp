#include "runner/chat.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "support/byte_vocabulary.hpp"
#include "support/random.hpp"

namespace
{

using ids = std::vector<std::int32_t>;

std::vector<std::string> const chatml{"<bos>", "<|im_start|>", "<|im_end|>"};
std::vector<std::string> const llama3{
    "<bos>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"};
std::vector<std::string> const merges{"a b", "ab c", "\u010A \u010A", "c \u0120", "\u0120 a"}; // Ċ: line end, Ġ: blank

ids joined_ids(ids first, ids const& second)
{
    first.insert(first.end(), second.begin(), second.end());
    return first;
}

/// Pieces that meet in tokens, are trimmed, pretend to be control tokens or are no text at all.
std::string random_text(support::source& random)
{
    std::vector<std::string> const pieces{
        "a", "b", "c", " ", "\n", "\n\n", "abc", "<|im_end|>", "<|eot_id|>", "\xC3\xA9", "\xFF", "."};
    std::string text;
    for (auto left = random.below(8); left > 0; --left)
    {
        text += pieces[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(pieces.size())))];
    }
    return text;
}

} // namespace

TEST_CASE("the parts of a prompt, put together, are the conversation, and the answer's beginning after it")
{
    for (auto const* control : {&chatml, &llama3})
    {
        auto const words = byte_vocabulary(merges, false, "smollm", *control);
        support::source random("chat parts", static_cast<std::int64_t>(control->size()));
        for (int i = 0; i < 300; ++i)
        {
            std::string const context = random_text(random), question = random_text(random);
            CAPTURE(context);
            CAPTURE(question);
            auto const parts = runner::encode_parts(words, context, question, " ab", true);
            CHECK(parts.whole()
                  == joined_ids(runner::encode_chat(words, std::nullopt, context + question), words.encode(" ab")));
        }
    }
}

TEST_CASE("the context's part of a conversation ends where the context does")
{
    auto const words = byte_vocabulary({}, false, "smollm", chatml);
    auto const parts = runner::encode_parts(words, "book", " what?", "It is", true);
    CHECK(words.decode(parts.context) == "<|im_start|>user\nbook");
    CHECK(words.decode(parts.question) == " what?<|im_end|>\n<|im_start|>assistant\nIt is");

    auto const trimming = byte_vocabulary({}, false, "smollm", llama3);
    auto const trimmed  = runner::encode_parts(trimming, " \nbook\n", " what? ", "", true);
    CHECK(trimming.decode(trimmed.context) == "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nbook\n");
    CHECK(trimming.decode(trimmed.question) == " what?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n");
    auto const nothing = runner::encode_parts(trimming, "book \n", " ", "", true); // the cut itself is trimmed away
    CHECK(trimming.decode(nothing.context) == "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nbook");
}

TEST_CASE("texts never become control tokens, in whatever part they are")
{
    for (auto const* control : {&chatml, &llama3})
    {
        auto const words = byte_vocabulary({}, false, "smollm", *control);
        auto const plain = runner::encode_parts(words, "a", "b", "c", true).whole();
        auto const bad =
            runner::encode_parts(words, "a<|im_end|><|eot_id|>", "<|im_start|>", "<|eot_id|>", true).whole();
        auto const controls = [&](ids const& all) {
            return std::ranges::count_if(all, [](std::int32_t id) { return id >= 256; });
        };
        CHECK(controls(plain) == controls(bad));
    }
}

TEST_CASE("a next question ends the answer's turn and begins the next one's")
{
    auto const chat = byte_vocabulary({}, false, "smollm", chatml);
    CHECK(chat.decode(runner::encode_next_question(chat, "and<|im_end|>? ", true))
          == "<|im_end|>\n<|im_start|>user\nand<|im_end|>? <|im_end|>\n<|im_start|>assistant\n");
    ids const next = runner::encode_next_question(chat, "<|im_end|>", true);
    CHECK(std::ranges::count(next, chat.find_control("<|im_end|>").value()) == 2);
    auto const trimming = byte_vocabulary({}, false, "smollm", llama3);
    CHECK(trimming.decode(runner::encode_next_question(trimming, " and? ", true))
          == "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nand?<|eot_id|>"
             "<|start_header_id|>assistant<|end_header_id|>\n\n");
    // Bare text, asked for or for want of a form; no beginning-of-sequence token stands within.
    auto const bare = byte_vocabulary({}, true, "smollm", {"<bos>"});
    CHECK(chat.decode(runner::encode_next_question(chat, "and?", false)) == "\nand?\n");
    CHECK(bare.decode(runner::encode_next_question(bare, "and?", true)) == "\nand?\n");
}

TEST_CASE("a token across the cut is the question's, so that the tokens are the same wherever the cut is")
{
    auto const words = byte_vocabulary({"a b"});
    auto const parts = runner::encode_parts(words, "xa", "by", "", false);
    CHECK(parts.context == ids{'x'});
    CHECK(parts.question == ids{256, 'y'});
    CHECK(runner::encode_parts(words, "xab", "y", "", false).whole() == parts.whole());
}

TEST_CASE("bare texts begin with the token the model wants there; bytes without a token do not move the cut")
{
    auto const words = byte_vocabulary({}, true, "smollm", {"<bos>"}, 128);
    auto const parts = runner::encode_parts(words, "\xFFno\xFF", "\xFFte", "!", false);
    CHECK(words.decode(parts.context) == "<bos>no");
    CHECK(words.decode(parts.question) == "te!");
    // A model without a known form gets bare texts, asked for a conversation or not.
    CHECK(runner::encode_parts(words, "a", "b", "c", true).whole()
          == runner::encode_parts(words, "a", "b", "c", false).whole());
}
