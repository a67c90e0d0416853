/// \file needle.hpp: samples that hide one sentence in a long book and ask for it (arXiv 2603.20616, needle figure)
#pragma once

#include <mdkv/core/error.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runner/chat.hpp"
#include "runner/tokenizer.hpp"
#include "lossy_utf8.hpp"
#include "needle_haystack.hpp"
#include "needle_options.hpp"
#include "sample.hpp"

namespace runner
{

/// What is hidden and what is asked.
struct needle_texts
{
    std::string needle;   // as it is put into the book
    std::string answer;   // the short one, by whose words an answer is scored
    std::string question; // as the form of the prompt asks it
};

/// The text before the book, and around the question behind it.
struct needle_frame
{
    std::string_view before_book;
    std::string_view before_question;
    std::string_view after_question;
    bool chat;
};

/// - original: the messages of gkamradt/LLMTest_NeedleInAHaystack, needlehaystack/providers/openai.py
///   (generate_prompt). It sends the first sentence as the system's and book and question as two turns of the user; the
///   chat form here has one turn, so blank lines stand between them.
/// - headkv: Zefan-Cai/KVCache-Factory, run_needle_in_haystack.py (generate_prompt). Its "<|im_start|>" is plain text.
[[nodiscard]] inline needle_frame frame_of(needle_form form) noexcept
{
    if (form == needle_form::original)
    {
        return {"You are a helpful AI bot that answers questions for a user. Keep your response short and direct\n\n",
            "\n\n", " Don't give information outside the document or repeat your findings", true};
    }
    return {"<|im_start|> This is a very long story book: <book> ",
        " </book>.\n Based on the content of the book, Question: ", "\nAnswer:", false};
}

/// As many digits as asked for, the first not 0, that depend on the seed and the place alone, on every machine.
[[nodiscard]] inline std::string needle_number(
    std::uint64_t seed, std::int64_t length, double depth, std::int64_t digits)
{
    constexpr std::int64_t drawn = 7; // at a time
    std::uint64_t x              = seed;
    auto const draw              = [&](std::uint64_t part) { // splitmix64 (Steele, Lea, Flood 2014)
        x += part + 0x9E3779B97F4A7C15U;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
        x ^= x >> 31;
    };
    draw(static_cast<std::uint64_t>(length));
    draw(static_cast<std::uint64_t>(std::llround(depth * 1000)));
    std::string number;
    while (std::ssize(number) < digits)
    {
        number += std::to_string(1'000'000 + x % 9'000'000U);
        draw(drawn);
    }
    return number.substr(0, static_cast<std::size_t>(digits));
}

/// The sandwich, its two questions and the words it is scored by are the public programs'; the number is this program's
/// own. Of a pair: the sandwich.
[[nodiscard]] inline needle_texts texts_of(needle_options const& options, std::int64_t length, double depth)
{
    bool const original = options.form == needle_form::original;
    if (options.kind != needle_kind::number)
    {
        return {"\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.\n",
            "eat a sandwich and sit in dolores park on a sunny day.",
            original ? "What is the best thing to do in San Francisco?" : "The best thing to do in San Francisco is: "};
    }
    std::string const number = needle_number(options.seed, length, depth, options.digits);
    return {"\nThe secret number of this book is " + number + ".\n", number,
        original ? "What is the secret number of this book?" : "The secret number of this book is: "};
}

/// The number that follows a pair's sandwich.
[[nodiscard]] inline needle_texts second_texts_of(needle_options options, std::int64_t length, double depth)
{
    options.kind = needle_kind::number;
    return texts_of(options, length, depth);
}

/// How many tokens stand around a prompt's texts when it is read: those of the chat form where the prompt goes into one
/// and the model has one, else a beginning-of-sequence token where the model wants it.
[[nodiscard]] inline std::int64_t tokens_around(tokenizer const& words, bool chat)
{
    if (chat && chat_form_of(words) != chat_form::none) { return std::ssize(encode_chat(words, std::nullopt, "")); }
    return words.add_bos() ? 1 : 0;
}

namespace detail
{

/// The shortest text of a depth that says it exactly: "11", "99.5".
[[nodiscard]] inline std::string depth_text(double depth)
{
    char digits[32];
    auto const end = std::to_chars(digits, digits + sizeof digits, depth);
    return {digits, end.ptr};
}

/// A prompt with its book filled, before it becomes a sample.
struct filled_book
{
    std::string context;         // up to the end of the book
    std::size_t needle_byte = 0; // of the context
    std::int64_t hay_from   = 0; // the first token of the haystack in it
    std::int64_t hay        = 0; // how many tokens of the haystack are in it
    std::int64_t needle_at  = 0; // before which of them the needle stands
    std::int64_t tokens     = 0; // of the whole prompt when it is read
};

/// A statement of the book, in tokens without special ones.
struct hidden_needle
{
    std::vector<std::int32_t> tokens;
    double depth = 0;
    bool first   = true; // to be asked for
};

/// Fills the book of one length and depth with more or less of the haystack.
class book_filler
{
public:
    book_filler(tokenizer const& words, std::span<std::int32_t const> haystack, needle_options const& options,
        std::vector<hidden_needle> needles, std::string_view question, std::int64_t length)
        : words_(words)
        , haystack_(haystack)
        , frame_(frame_of(options.form))
        , needles_(std::move(needles))
        , length_(length)
        , question_(question)
    {
        std::sort(needles_.begin(), needles_.end(), [](auto const& a, auto const& b) { return a.depth < b.depth; });
    }

    [[nodiscard]] std::int64_t needle_tokens() const noexcept
    {
        std::int64_t tokens = 0;
        for (hidden_needle const& one : needles_) { tokens += std::ssize(one.tokens); }
        return tokens;
    }

    /// Book and needle make `length - buffer` tokens.
    [[nodiscard]] filled_book with_buffer(std::int64_t buffer) const
    {
        mdkv::expects(buffer >= 0, "needle: buffer is ", buffer, ", not at least 0");
        mdkv::expects(length_ - buffer > needle_tokens(), "needle: length ", length_, " less the buffer of ", buffer,
            " leaves nothing of the haystack beside the needle's ", needle_tokens(),
            " tokens; take a longer prompt, a smaller buffer, or the exact fit");
        return fill(length_ - buffer - needle_tokens(), 0);
    }

    /// The whole prompt makes `length` tokens. Tokens that meet where texts were cut or joined can make others when the
    /// prompt is read, so the right amount of hay is searched. Where none is right (a token more makes two more), the
    /// hay begins a token later; if that never helps, the prompt stays below by as little as can be.
    [[nodiscard]] filled_book exact() const
    {
        std::int64_t const beside = fill(0, 0).tokens;
        mdkv::expects(length_ > beside, "needle: length ", length_, " leaves nothing of the haystack beside the ",
            beside, " tokens of prompt and needle; take a longer one");
        filled_book best;
        for (std::int64_t skipped = 0; skipped < 16 && best.tokens != length_; ++skipped)
        {
            filled_book found = search(length_ - beside, skipped);
            if (found.tokens <= length_ && found.tokens > best.tokens) { best = std::move(found); }
        }
        mdkv::expects(best.tokens > 0, "needle: no amount of this haystack makes a prompt of ", length_, " tokens");
        return best;
    }

private:
    /// The book nearest to the length, from below, with about `amount` tokens of hay behind the first `skipped`.
    [[nodiscard]] filled_book search(std::int64_t amount, std::int64_t skipped) const
    {
        filled_book best = fill(amount, skipped);
        for (int round = 0; round < 4 && best.tokens != length_; ++round)
        {
            amount += length_ - best.tokens;
            best = fill(amount, skipped);
        }
        for (std::int64_t step = 1; best.tokens != length_ && step <= 4; ++step)
        {
            for (std::int64_t const other : {amount - step, amount + step})
            {
                filled_book tried = fill(other, skipped);
                bool const fits   = tried.tokens <= length_;
                if (fits && (best.tokens > length_ || tried.tokens > best.tokens)) { best = std::move(tried); }
            }
        }
        return best;
    }

    [[nodiscard]] filled_book fill(std::int64_t amount, std::int64_t skipped) const
    {
        auto const begin = cut_between_characters(words_, haystack_, skipped);
        auto const rest  = haystack_.subspan(begin.size());
        auto const hay   = cut_between_characters(words_, rest, amount);
        filled_book book;
        book.hay_from    = std::ssize(begin);
        book.hay         = std::ssize(hay);
        book.context     = std::string(frame_.before_book);
        std::size_t from = 0;
        for (hidden_needle const& one : needles_)
        {
            auto const at = static_cast<std::size_t>(needle_position(words_, hay, one.depth));
            book.context += lossy_utf8(words_.decode(hay.subspan(from, at - from)));
            if (one.first)
            {
                book.needle_at   = static_cast<std::int64_t>(at);
                book.needle_byte = book.context.size();
            }
            book.context += words_.decode(one.tokens);
            from = at;
        }
        book.context += lossy_utf8(words_.decode(hay.subspan(from)));
        book.tokens = std::ssize(encode_parts(words_, book.context, question_, "", frame_.chat).whole());
        return book;
    }

    tokenizer const& words_;
    std::span<std::int32_t const> haystack_;
    needle_frame frame_;
    std::vector<hidden_needle> needles_; // in the book's order
    std::int64_t length_;
    std::string_view question_;
};

} // namespace detail

/// One needle in one haystack, or a pair. The context ends where the book does; the question is all behind it.
///
/// \param haystack   at least `length` tokens, from haystack_tokens()
/// \throws mdkv::invalid_argument   the length leaves nothing of the haystack, the haystack is shorter, the depth is no
///                                  percentage, or a pair is asked for in HeadKV's form
[[nodiscard]] inline sample make_needle_sample(tokenizer const& words, std::span<std::int32_t const> haystack,
    needle_options const& options, std::int64_t length, double depth)
{
    mdkv::expects(length <= std::ssize(haystack), "needle: length is ", length, ", but the haystack has only ",
        std::ssize(haystack), " tokens");
    mdkv::expects(depth >= 0 && depth <= 100, "needle: depth is ", depth, ", not within 0 and 100");
    bool const pair = options.kind == needle_kind::pair;
    mdkv::expects(!pair || options.form == needle_form::original,
        "needle: a pair is asked for in a conversation, and the prompt \"headkv\" is none; take the original one");
    needle_texts const texts = texts_of(options, length, depth);
    needle_frame const frame = frame_of(options.form);
    std::vector<detail::hidden_needle> needles{{words.encode(texts.needle), depth}};
    double const second_depth = depth + pair_distance - (depth + pair_distance > 100 ? 100 : 0);
    needle_texts const second = second_texts_of(options, length, second_depth);
    if (pair) { needles.push_back({words.encode(second.needle), second_depth, false}); }
    sample out;
    out.task     = "needle";
    out.question = std::string(frame.before_question) + texts.question + std::string(frame.after_question);
    detail::book_filler const filler(words, haystack, options, std::move(needles), out.question, length);
    bool const exact         = options.fit == needle_fit::exact;
    detail::filled_book book = exact ? filler.exact() : filler.with_buffer(options.buffer);

    bool const number = options.kind != needle_kind::sandwich;
    out.id = text_of(options.form) + "-" + (number ? text_of(options.kind) + "-" : "") + std::to_string(length) + "-"
             + detail::depth_text(depth) + (number ? "-" + std::to_string(options.seed) : "")
             + (number && options.digits != needle_options{}.digits ? "-" + std::to_string(options.digits) : "");
    out.context              = std::move(book.context);
    out.answers              = {texts.answer};
    out.max_new_tokens       = std::max<std::int64_t>(30, number ? options.digits + 20 : 0);
    out.stop_at_newline      = true;
    out.chat                 = frame.chat;
    out.about                = {{"length", length}, {"depth", depth}, {"prompt", text_of(options.form)},
                       {"needle_kind", text_of(options.kind)}, {"needle", texts.needle}, {"fit", text_of(options.fit)},
                       {"tokens", book.tokens}, {"haystack_from", book.hay_from}, {"haystack_tokens", book.hay},
                       {"needle_tokens", filler.needle_tokens()}, {"needle_at", book.needle_at}};
    out.about["needle_byte"] = book.needle_byte;
    if (depth == std::floor(depth)) { out.about["depth"] = static_cast<std::int64_t>(depth); }
    if (!exact) { out.about["buffer"] = options.buffer; }
    if (number)
    {
        out.about["seed"]   = options.seed;
        out.about["digits"] = options.digits;
    }
    if (pair)
    {
        out.next_question          = second.question + std::string(frame.after_question);
        out.next_answers           = {second.answer};
        out.about["second_needle"] = second.needle;
        out.about["second_depth"]  = second_depth;
    }
    return out;
}

/// A sample for every length and, within it, every depth.
/// \throws mdkv::invalid_argument   a list is empty, or names something twice
[[nodiscard]] inline std::vector<sample> make_needle_samples(
    tokenizer const& words, std::string const& haystack_text, needle_options const& options)
{
    mdkv::expects(!options.lengths.empty(), "needle: no lengths are given");
    mdkv::expects(!options.depths.empty(), "needle: no depths are given");
    std::int64_t longest = 0;
    for (std::int64_t const length : options.lengths)
    {
        mdkv::expects(length >= 1 && length <= longest_needle_prompt, "needle: length is ", length,
            ", not within 1 and ", longest_needle_prompt);
        longest = std::max(longest, length);
    }
    std::vector<std::int32_t> const haystack = haystack_tokens(words, haystack_text, longest);
    std::vector<sample> samples;
    std::set<std::string> ids;
    for (std::int64_t const length : options.lengths)
    {
        for (double const depth : options.depths)
        {
            samples.push_back(make_needle_sample(words, haystack, options, length, depth));
            mdkv::expects(ids.insert(samples.back().id).second, "needle: length ", length, " at depth ", depth,
                " is asked for twice");
        }
    }
    return samples;
}

} // namespace runner
