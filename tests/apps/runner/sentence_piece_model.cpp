/// \file sentence_piece_model.cpp: text to token ids and back by SentencePiece vocabularies, good and bad
#include "runner/sentence_piece_model.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include "runner/chat.hpp"
#include "runner/file_error.hpp"
#include "runner/tokenizer.hpp"
#include "runner/vocabulary.hpp"
#include "support/gguf_bytes.hpp"
#include "support/message.hpp"
#include "support/piece_vocabulary.hpp"

namespace
{

using ids  = std::vector<std::int32_t>;
using list = std::vector<std::string>;
using runner::token_kind;

/// The texts of the tokens of a text.
list texts(runner::tokenizer const& words, std::string_view text)
{
    list out;
    for (std::int32_t const id : words.encode(text)) { out.emplace_back(words.decode_one(id)); }
    return out;
}

std::string refusal(gguf_parts const& parts)
{
    auto const file = parse_gguf(parts.bytes());
    return support::message_of([&] { static_cast<void>(runner::tokenizer(file)); });
}

} // namespace

TEST_CASE("SentencePiece: a text begins with a space unless the file says otherwise")
{
    auto const vocabulary = piece_vocabulary({"\u2581a", "\u2581\u2581", "\u2581", "a"});
    auto const made       = vocabulary.make();
    CHECK(made.has_sentence_pieces());
    CHECK(made.add_bos());
    CHECK(made.space_prefix() == " ");
    CHECK(texts(made, "a a") == list{" a", " a"});
    CHECK(texts(made, " a") == list{" ", " a"});
    CHECK(texts(made, "   ") == list{"  ", "  "});
    CHECK(texts(made, "") == list{});
    gguf_parts parts = vocabulary.parts();
    parts.boolean("tokenizer.ggml.add_space_prefix", false);
    runner::tokenizer const bare(parse_gguf(parts.bytes()));
    CHECK(bare.space_prefix().empty());
    CHECK(texts(bare, "a a") == list{"a", " a"});
    CHECK(bare.decode(bare.encode(" a")) == " a");
}

TEST_CASE("SentencePiece: text that goes on, and text behind plain text, gets no second space")
{
    auto vocabulary          = piece_vocabulary({"\u2581a", "\u2581", "a"});
    std::int32_t const space = 259 + 1, letter = 259 + 2, both = 259;
    std::int32_t const plain = vocabulary.add("aa a", token_kind::user_defined);
    auto const made          = vocabulary.make();
    CHECK(made.encode_continued("a") == ids{letter});
    CHECK(made.encode_continued(" a") == ids{both});
    CHECK(made.encode("aa aa") == ids{space, plain, letter});
    CHECK(made.decode_one(plain) == "aa a");
    // Behind a control token a text begins.
    CHECK(made.encode("<s>a</s>a", true) == ids{1, both, 2, both});
    CHECK(std::ranges::count(made.encode("<s>a"), 1) == 0);
}

TEST_CASE("SentencePiece: decoding takes off the space that encoding put there, and no other")
{
    auto const made = piece_vocabulary({"\u2581a", "\u2581\u2581", "\u2581", "a", "b"}).make();
    for (std::string const text : {"a", " a", "  a ", "", " ", "a\nb", "\u00E9", "\xFF", "<s>", "<0x0A>"})
    {
        CAPTURE(text);
        CHECK(made.decode(made.encode(text)) == text);
    }
    CHECK(rc::check([&](std::string const& text) {
        RC_ASSERT(made.decode(made.encode(text)) == text);
        RC_ASSERT(made.bytes_without_token(text) == 0U);
    }));
    CHECK(made.decode_one(made.encode("a")[0]) == " a");
    CHECK(made.decode(ids{1, made.encode("a")[0]}) == "<s> a");
    CHECK(made.decode(made.encode("a\u2581b")) == "a b"); // as SentencePiece, which cannot tell them apart
    CHECK(made.bytes_without_token("a\u2581b") == 2);
}

TEST_CASE("SentencePiece: a character that is no piece becomes its bytes, never a token of that name")
{
    auto const made = piece_vocabulary({"\u2581", "a", "\u4E2D"}).make();
    CHECK(made.encode_continued("\u00E9\n\u4E2D\xFF") == ids{3 + 0xC3, 3 + 0xA9, 3 + '\n', 261, 3 + 0xFF});
    CHECK(made.decode_one(3 + 0xC3) == "\xC3");
    for (std::int32_t const id : made.encode("<0x0A><unk></s>")) { CHECK(id > 2); }
    CHECK(std::ranges::count(made.encode("<0x0A>"), 3 + 0x0A) == 0);
    // A space that is no piece is a byte too.
    CHECK(piece_vocabulary({"a"}).make().encode("a a") == ids{3 + ' ', 259, 3 + ' ', 259});
}

TEST_CASE("SentencePiece: without byte tokens unknown characters in a row become one unknown token")
{
    auto const made = piece_vocabulary({"\u2581", "a"}, false).make();
    CHECK(made.encode("ax\u00E9a\xFF") == ids{3, 4, 0, 4, 0});
    CHECK(made.decode_one(0).empty());
    CHECK(made.bytes_without_token("ax\u00E9a\xFF") == 4);
    CHECK(made.bytes_without_token("a a") == 0);
    // Where the unknown token is may be a key of the file.
    auto vocabulary  = piece_vocabulary({"\u2581"}, false);
    auto const other = vocabulary.add("<other>", token_kind::unknown);
    gguf_parts parts = vocabulary.parts();
    parts.integer("tokenizer.ggml.unknown_token_id", static_cast<std::uint32_t>(other));
    CHECK(runner::tokenizer(parse_gguf(parts.bytes())).encode("x") == ids{3, other});
}

TEST_CASE("SentencePiece: control and unused tokens are made by no text")
{
    auto vocabulary = piece_vocabulary({"\u2581", "s", "t"});
    vocabulary.add("st", token_kind::unused);
    vocabulary.add("ts", token_kind::control);
    auto const made = vocabulary.make();
    CHECK(made.encode_continued("stst") == ids{260, 261, 260, 261});
    CHECK(made.encode("ts", true) == ids{263});
    CHECK(made.find_control("ts") == 263);
}

TEST_CASE("SentencePiece: of tokens written alike the first is taken")
{
    auto vocabulary = piece_vocabulary({"\u2581", "a", "a"});
    CHECK(vocabulary.make().encode_continued("a") == ids{260});
}

TEST_CASE("SentencePiece: a text of many thousand characters without a space is encoded")
{
    auto const made = piece_vocabulary({"aa", "aaaa", "aaaaaaaa", "\u2581", "a"}).make();
    std::string const text(1'000'005, 'a');
    CHECK(made.encode(text).size() == 1 + 1'000'005 / 8 + 2); // the space; five letters are left: four and one
    CHECK(made.decode(made.encode(text)) == text);
    for (std::string const unit : {" ", "\n", "\u4E2D", "\xFF", "a ", "b"})
    {
        std::string many;
        for (int i = 0; i < 100'000; ++i) { many += unit; }
        CAPTURE(unit);
        CHECK(made.decode(made.encode(many)) == many);
    }
}

TEST_CASE("SentencePiece: contradictory vocabularies are refused with the key and the value that is wrong")
{
    auto const with = [](std::function<void(piece_vocabulary&)> const& spoil) {
        piece_vocabulary vocabulary({"a"});
        spoil(vocabulary);
        return refusal(vocabulary.parts());
    };
    support::says(with([](auto& v) { v.scores.pop_back(); }),
        "\"tokenizer.ggml.scores\" has another length than tokenizer.ggml.tokens at byte");
    support::says(with([](auto& v) { v.scores.push_back(0); }), "261 (limit 260)");
    support::says(
        with([](auto& v) { v.scores[5] = std::numeric_limits<float>::quiet_NaN(); }), "has no number in entry 5");
    support::says(with([](auto& v) {
        v.kinds[0]        = token_kind::normal;
        v.kinds[3 + 0x41] = token_kind::normal;
    }),
        "\"tokenizer.ggml.unknown_token_id\" is absent, but no token stands for the byte 65");
    auto const with_parts = [](piece_vocabulary const& vocabulary, std::function<void(gguf_parts&)> const& spoil) {
        gguf_parts parts = vocabulary.parts();
        spoil(parts);
        return refusal(parts);
    };
    piece_vocabulary const good({"a"});
    piece_vocabulary const no_bytes({"a"}, false);
    support::says(
        with_parts(good, [](auto& p) { p.pairs.erase(p.pairs.begin() + 3); }), "\"tokenizer.ggml.scores\" is absent");
    support::says(with_parts(good, [](auto& p) { p.pairs.erase(p.pairs.begin() + 2); }),
        "\"tokenizer.ggml.token_type\" is absent");
    support::says(with_parts(good,
                      [](auto& p) {
                          p.pairs.erase(p.pairs.begin() + 3);
                          p.integers("tokenizer.ggml.scores", {1, 2});
                      }),
        "has another type");
    support::says(
        with_parts(good, [](auto& p) { p.pairs.erase(p.pairs.begin() + 4); }), "wants this token before a text");
    support::says(
        with_parts(good, [](auto& p) { p.integer("tokenizer.ggml.unknown_token_id", 260); }), "260 (limit 259)");
    support::says(with_parts(no_bytes, [](auto& p) { p.integer("tokenizer.ggml.unknown_token_id", 2); }),
        "is a token of another kind, and no token stands for the byte 0");
    support::says(with_parts(good, [](auto& p) { p.boolean("tokenizer.ggml.remove_extra_whitespaces", true); }),
        "\"tokenizer.ggml.remove_extra_whitespaces\" is not supported");
}

TEST_CASE("SentencePiece: a vocabulary with any bit of it flipped is refused or can be used")
{
    piece_vocabulary vocabulary({"\u2581", "a", "b", "ab"}, false);
    vocabulary.add("[INST]", token_kind::control);
    vocabulary.add("[/INST]", token_kind::control);
    vocabulary.add("a b", token_kind::user_defined);
    std::string const whole = vocabulary.parts("[INST]").bytes();
    std::size_t used        = 0;
    for (std::size_t i = 0; i < 8 * whole.size(); ++i)
    {
        std::string spoilt = whole;
        spoilt[i / 8]      = static_cast<char>(spoilt[i / 8] ^ (1 << (i % 8)));
        try
        {
            runner::tokenizer const made(parse_gguf(spoilt));
            static_cast<void>(made.decode(made.encode("ab a b[INST] 12\xFF", true)));
            static_cast<void>(made.bytes_without_token("ab \xFF\u2581"));
            static_cast<void>(runner::encode_parts(made, "ab\xFF", "ab", "a", true));
            ++used;
        }
        catch (runner::file_error const&)
        {}
    }
    CHECK(used > 0);
}
