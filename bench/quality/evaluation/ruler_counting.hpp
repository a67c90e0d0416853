/// \file ruler_counting.hpp: RULER's counting of words: common ones of a list (cwe), frequent ones of a code (fwe)
#pragma once

#include <mdkv/core/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "random.hpp"
#include "ruler_sizing.hpp"
#include "ruler_tasks.hpp"
#include "ruler_text.hpp"
#include "ruler_words.hpp"
#include "runner/file_error.hpp"

namespace runner::ruler
{

inline constexpr std::int64_t common_words = 10;

/// How often the common and the other words stand in a list.
struct word_repeats
{
    std::int64_t common;
    std::int64_t other;
};

class common_words_hay
{
public:
    explicit common_words_hay(ruler_options const& options)
        : short_{options.max_length < 4096}
        , seed_{options.seed}
        , random_{options.seed}
        , words_{all_words(load_word_lists(options.words_folder))}
    {
        if (std::ssize(words_) < example_words())
        {
            throw mdkv::invalid_argument{joined("words_folder: ", runner::quoted(options.words_folder), " has ",
                std::to_string(words_.size()), " words; cwe needs ", std::to_string(example_words()), " or more")};
        }
        if (!options.more_words_path.empty())
        {
            more_words_ = load_words(options.more_words_path, "name a file with one word a line");
        }
    }

    [[nodiscard]] size_plan plan() const
    {
        std::int64_t const largest = std::max(std::ssize(words_), std::ssize(more_words_));
        return {.increment = common_words,
            .estimate_at   = 4096,
            .slack         = 2,
            .largest       = largest,
            .beyond        = joined("there are only ", std::to_string(largest),
                       " different words; name a longer list of words (one a line) as more_words_path")};
    }
    [[nodiscard]] std::int64_t minimum(std::int64_t /*index*/) const noexcept { return common_words; }

    [[nodiscard]] prompt make(std::int64_t size, std::int64_t /*index*/)
    {
        prompt const example = list(example_words(), short_ ? word_repeats{3, 1} : word_repeats{10, 3});
        prompt out           = list(size, short_ ? word_repeats{6, 1} : word_repeats{30, 3});
        out.context = joined(example.context, example.question, example.answer_prefix, " ", numbered(example.answers),
            "\n", out.context);
        return out;
    }

private:
    [[nodiscard]] std::int64_t example_words() const noexcept { return short_ ? 20 : 40; }

    [[nodiscard]] static std::string numbered(std::vector<std::string> const& words)
    {
        std::vector<std::string> items;
        for (std::size_t i = 0; i < words.size(); ++i)
        {
            items.push_back(joined(std::to_string(i + 1), ". ", words[i]));
        }
        return joined_with(items, " ");
    }

    [[nodiscard]] prompt list(std::int64_t size, word_repeats repeats)
    {
        auto const& from = size <= std::ssize(words_) ? words_ : more_words_;
        prompt out;
        std::vector<std::string> all;
        for (std::int64_t const i : random_.sample(std::ssize(from), size))
        {
            std::string const& word = from[static_cast<std::size_t>(i)];
            bool const common       = std::ssize(out.answers) < common_words;
            if (common) { out.answers.push_back(word); }
            all.insert(all.end(), static_cast<std::size_t>(common ? repeats.common : repeats.other), word);
        }
        portable_random{seed_}.shuffle(
            all); // the same permutation of every list of this length, as in the public generator
        prompt_template const as = template_of(family::common_words);
        out.context              = joined(as.introduction, numbered(all), as.separator);
        out.question             = as.question;
        out.answer_prefix        = as.answer_prefix;
        return out;
    }

    bool short_;
    std::uint64_t seed_;
    portable_random random_;
    std::vector<std::string> words_;
    std::vector<std::string> more_words_;
};

/// Words of six random letters, the one of rank k as often as Zipf's law with exponent 2 has it.
class frequent_words_maker
{
public:
    frequent_words_maker(ruler_options const& options, length_limit const& limit, token_counter count)
        : limit_{limit}
        , count_{std::move(count)}
        , seed_{options.seed}
        , random_{options.seed}
        , vocabulary_size_{limit.prompt_tokens() / 50}
    {
        if (vocabulary_size_ < 4) { fail_too_small(); }
        start_ = starting_words();
    }

    /// One sample; every one has its own words.
    /// \throws mdkv::invalid_argument   the text cannot be short enough and still have a third most frequent word
    [[nodiscard]] fitted_prompt make()
    {
        std::vector<std::string> const words = vocabulary();
        for (std::int64_t total = start_; total > 0; total -= increment())
        {
            prompt text               = coded_text(words, total);
            std::int64_t const tokens = tokens_of(text, count_);
            if (tokens > limit_.prompt_tokens()) { continue; }
            if (occurrences(total, 4) <= occurrences(total, 5))
            {
                break;
            } // the third would not be told from the fourth
            return {std::move(text), tokens + limit_.tokens_to_generate, total};
        }
        fail_too_small();
    }

    /// How often the word of a rank, from 1, occurs among `total`.
    [[nodiscard]] static std::int64_t occurrences(std::int64_t total, std::int64_t rank) noexcept
    {
        constexpr double zeta = std::numbers::pi * std::numbers::pi / 6; // Riemann's zeta function of 2
        auto const k          = static_cast<double>(rank);
        return static_cast<std::int64_t>(static_cast<double>(total) / (k * k) / zeta);
    }

private:
    [[nodiscard]] std::int64_t increment() const noexcept { return limit_.prompt_tokens() / 32; }

    [[noreturn]] void fail_too_small() const
    {
        throw mdkv::invalid_argument{joined("max_length: ", std::to_string(limit_.max_length),
            " is too small for fwe: after ", std::to_string(limit_.tokens_to_generate), " tokens for the answer and ",
            std::to_string(limit_.template_tokens),
            " for the model's chat form there is no room for words that differ in frequency; choose 1024 or more")};
    }

    /// The public search: upwards from a word for every six tokens, to one step below the first text that is too long.
    [[nodiscard]] std::int64_t starting_words()
    {
        std::vector<std::string> const words = vocabulary();
        std::int64_t total                   = limit_.prompt_tokens() / 6;
        while (tokens_of(coded_text(words, total), count_) < limit_.prompt_tokens()) { total += increment(); }
        return total - increment();
    }

    [[nodiscard]] std::vector<std::string> vocabulary()
    {
        std::set<std::string> drawn;
        while (std::ssize(drawn) < vocabulary_size_)
        {
            std::string word;
            for (int i = 0; i < 6; ++i) { word += static_cast<char>('a' + random_.between(0, 25)); }
            drawn.insert(word);
        }
        std::vector<std::string> words(drawn.begin(), drawn.end());
        portable_random{seed_}.shuffle(words);
        words[0] = "..."; // the most frequent one is noise
        return words;
    }

    [[nodiscard]] prompt coded_text(std::vector<std::string> const& words, std::int64_t total) const
    {
        std::vector<std::string> text;
        for (std::size_t i = 0; i < words.size(); ++i)
        {
            auto const times = static_cast<std::size_t>(occurrences(total, static_cast<std::int64_t>(i) + 1));
            text.insert(text.end(), times, words[i]);
        }
        portable_random{seed_}.shuffle(text);
        prompt_template const as = template_of(family::frequent_words);
        prompt out;
        out.context       = joined(as.introduction, joined_with(text, " "), as.separator);
        out.question      = as.question;
        out.answer_prefix = as.answer_prefix;
        out.answers       = {words.begin() + 1, words.begin() + 4};
        return out;
    }

    length_limit limit_;
    token_counter count_;
    std::uint64_t seed_;
    portable_random random_;
    std::int64_t vocabulary_size_;
    std::int64_t start_ = 0;
};

} // namespace runner::ruler
