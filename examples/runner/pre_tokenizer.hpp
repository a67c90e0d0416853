/// \file pre_tokenizer.hpp: cutting text into the words inside which byte pairs may merge
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#if !defined(PCRE2_CODE_UNIT_WIDTH)
#    define PCRE2_CODE_UNIT_WIDTH 8 // PCRE2 asks its users for this
#endif
#include <pcre2.h>

namespace runner
{

namespace detail
{

/// Where a match begins and ends.
struct match_range
{
    std::size_t begin;
    std::size_t end;
};

/// A compiled pattern; matching is const and may be done by many threads at once.
class regular_expression
{
public:
    explicit regular_expression(std::string const& pattern)
    {
        int error        = 0;
        PCRE2_SIZE place = 0;
        code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), PCRE2_UTF | PCRE2_UCP,
            &error, &place, nullptr));
        if (!code_) { throw std::runtime_error("pattern " + pattern + ": " + message(error)); }
        // Without just-in-time compilation, as PCRE2 may have been built, matching works the same but slower.
        static_cast<void>(pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE));
    }

    /// Calls `found(range)` for every match in `text`, from left to right. `text` must be valid UTF-8.
    template <class Found>
    void each_match(std::string_view text, Found const& found) const
    {
        std::unique_ptr<pcre2_match_data, match_deleter> const data(
            pcre2_match_data_create_from_pattern(code_.get(), nullptr));
        if (!data) { throw std::bad_alloc(); }
        std::size_t at = 0;
        while (auto const range = next_match(text, at, data.get()))
        {
            found(*range);
            at = range->end;
        }
    }

private:
    struct code_deleter
    {
        void operator()(pcre2_code* p) const noexcept { pcre2_code_free(p); }
    };
    struct match_deleter
    {
        void operator()(pcre2_match_data* p) const noexcept { pcre2_match_data_free(p); }
    };

    std::optional<match_range> next_match(std::string_view text, std::size_t from, pcre2_match_data* data) const
    {
        auto const subject          = reinterpret_cast<PCRE2_SPTR>(text.data());
        std::uint32_t const options = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
        int result                  = pcre2_match(code_.get(), subject, text.size(), from, options, data, nullptr);
        if (result == PCRE2_ERROR_JIT_STACKLIMIT)
        { // the interpreter backtracks on the heap
            result = pcre2_match(code_.get(), subject, text.size(), from, options | PCRE2_NO_JIT, data, nullptr);
        }
        if (result == PCRE2_ERROR_NOMATCH) { return std::nullopt; }
        if (result < 0) { throw std::runtime_error("splitting text into words: " + message(result)); }
        PCRE2_SIZE const* const ends = pcre2_get_ovector_pointer(data);
        return match_range{ends[0], ends[1]};
    }

    static std::string message(int error)
    {
        PCRE2_UCHAR text[256] = {};
        pcre2_get_error_message(error, text, sizeof text);
        return reinterpret_cast<char const*>(text);
    }

    std::unique_ptr<pcre2_code, code_deleter> code_;
};

/// White space as Unicode has it. PCRE2's own \s takes U+180E with it, which Unicode has not counted since 6.3.
inline constexpr std::string_view white_space =
    R"(\x09-\x0D\x20\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";

/// Writes `white_space` for every `\s` inside or outside of brackets, and its complement for `\S`.
[[nodiscard]] inline std::string with_unicode_space(std::string_view pattern)
{
    std::string out;
    bool in_brackets = false;
    for (std::size_t i = 0; i < pattern.size(); ++i)
    {
        std::string_view const two = pattern.substr(i, 2);
        if (two == "\\s")
        {
            out += in_brackets ? "" : "[";
            out += white_space;
            out += in_brackets ? "" : "]";
        }
        else if (two == "\\S")
        {
            out += "[^";
            out += white_space;
            out += "]";
        }
        else if (two[0] == '\\') { out += two; }
        else
        {
            if (two[0] == '[') { in_brackets = true; }
            if (two[0] == ']') { in_brackets = false; }
            out += two[0];
            continue;
        }
        ++i; // two characters were used
    }
    return out;
}

} // namespace detail

/// Cuts text by patterns in turn: each cuts every piece the ones before left into its matches and what lies between
/// them. A piece is matched alone, so that looking ahead ends where the piece ends.
class pre_tokenizer
{
public:
    /// \param name   as in `tokenizer.ggml.pre`: "smollm", "llama-bpe", "qwen2" or "default"
    /// \throws std::invalid_argument   another name
    explicit pre_tokenizer(std::string_view name)
    {
        for (std::string const& pattern : patterns_of(name))
        {
            patterns_.emplace_back(detail::with_unicode_space(pattern));
        }
    }

    [[nodiscard]] static bool knows(std::string_view name) noexcept
    {
        return name == "smollm" || name == "llama-bpe" || name == "qwen2" || name == "default";
    }

    /// The words of `text`, which together are `text`; `text` must be valid UTF-8.
    [[nodiscard]] std::vector<std::string_view> split(std::string_view text) const
    {
        std::vector<std::string_view> pieces;
        if (!text.empty()) { pieces.push_back(text); }
        for (detail::regular_expression const& pattern : patterns_)
        {
            std::vector<std::string_view> finer;
            for (std::string_view const piece : pieces)
            {
                std::size_t done = 0;
                pattern.each_match(piece, [&](detail::match_range const& match) {
                    if (match.begin > done) { finer.push_back(piece.substr(done, match.begin - done)); }
                    finer.push_back(piece.substr(match.begin, match.end - match.begin));
                    done = match.end;
                });
                if (done < piece.size()) { finer.push_back(piece.substr(done)); }
            }
            pieces = std::move(finer);
        }
        return pieces;
    }

private:
    static std::vector<std::string> patterns_of(std::string_view name)
    {
        // GPT-2's pattern, from the release of that model.
        std::string const gpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
        if (name == "smollm") { return {R"(\p{N})", gpt2}; } // every digit alone, then as GPT-2
        if (name == "llama-bpe" || name == "qwen2")
        { // from the tokenizer.json of Llama 3 and Qwen 2: three digits or one to a word
            std::string const digits = name == "qwen2" ? R"(\p{N})" : R"(\p{N}{1,3})";
            return {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|)" + digits
                    + R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"};
        }
        if (name == "default")
        { // what llama.cpp applies where a file names no other: its "default"
            return {R"([\p{P}\$\+<=>\^~\|]+)", gpt2, R"(\p{N}+)", R"([0-9][0-9][0-9])"};
        }
        throw std::invalid_argument(
            "pre_tokenizer: name is \"" + std::string(name) + "\", not smollm, llama-bpe, qwen2 or default");
    }

    std::vector<detail::regular_expression> patterns_;
};

} // namespace runner
