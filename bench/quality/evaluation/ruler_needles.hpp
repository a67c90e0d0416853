/// \file ruler_needles.hpp: RULER's needles in a haystack (niah_*): values under keys, hidden in noise, prose or their like
#pragma once

#include <mdkv/core/error.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "python_text.hpp"
#include "random.hpp"
#include "ruler_sizing.hpp"
#include "ruler_tasks.hpp"
#include "ruler_text.hpp"
#include "ruler_words.hpp"
#include "runner/file_error.hpp"

namespace runner::ruler
{

inline constexpr std::string_view noise_sentence =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

enum class hay_kind
{
    noise,
    essay,
    needle
};

enum class needle_part
{
    words,
    numbers,
    uuids
};

struct needle_config
{
    std::string_view task;
    hay_kind hay;
    needle_part key;
    needle_part value;
    std::int64_t keys;
    std::int64_t values;
    std::int64_t queries;
};

/// NVIDIA/RULER scripts/synthetic.yaml; a task with more queries than keys has as many keys.
[[nodiscard]] inline needle_config needle_config_of(std::string_view task)
{
    using enum needle_part;
    static constexpr needle_config configs[] = {
        {"niah_single_1", hay_kind::noise, words, numbers, 1, 1, 1},
        {"niah_single_2", hay_kind::essay, words, numbers, 1, 1, 1},
        {"niah_single_3", hay_kind::essay, words, uuids, 1, 1, 1},
        {"niah_multikey_1", hay_kind::essay, words, numbers, 4, 1, 1},
        {"niah_multikey_2", hay_kind::needle, words, numbers, 1, 1, 1},
        {"niah_multikey_3", hay_kind::needle, uuids, uuids, 1, 1, 1},
        {"niah_multivalue", hay_kind::essay, words, numbers, 1, 4, 1},
        {"niah_multiquery", hay_kind::essay, words, numbers, 4, 1, 4},
    };
    auto const* const found = std::find_if(
        std::begin(configs), std::end(configs), [&](needle_config const& one) { return one.task == task; });
    if (found == std::end(configs))
    {
        throw mdkv::invalid_argument{joined("task: ", runner::quoted(task), " hides no needles")};
    }
    return *found;
}

/// Several queries as the public template names them: "a, b, c, and d".
[[nodiscard]] inline std::string listed(std::vector<std::string> names)
{
    if (names.size() < 2) { return joined_with(names, ""); }
    names.back().insert(0, "and ");
    return joined_with(names, ", ");
}

class needle_hay
{
public:
    needle_hay(needle_config const& config, ruler_options const& options)
        : config_{config}
        , short_{options.max_length < 4096}
        , seed_{options.seed}
        , random_{options.seed}
    {
        if (config.key == needle_part::words || config.value == needle_part::words)
        {
            lists_ = load_word_lists(options.words_folder);
        }
        if (config.hay != hay_kind::essay) { return; }
        essay_       = read_utf8(options.essay_path, "name a text file with English prose");
        essay_words_ = python_text::split(essay_);
        if (essay_words_.empty())
        {
            throw file_error(options.essay_path, "holds no word; name a text file with English prose");
        }
    }
    needle_hay(needle_hay const&)            = delete; // the words are views of the essay
    needle_hay& operator=(needle_hay const&) = delete;

    [[nodiscard]] size_plan plan() const
    {
        std::int64_t const increment = config_.hay == hay_kind::essay ? 500 : short_ ? 5 : 25;
        return {.increment = increment, .estimate_at = increment};
    }

    [[nodiscard]] std::int64_t minimum(std::int64_t /*index*/) const noexcept
    {
        return config_.hay == hay_kind::essay ? 1 : config_.keys * config_.values; // each needle has its own place
    }

    [[nodiscard]] prompt make(std::int64_t size, std::int64_t /*index*/)
    {
        std::vector<std::string> keys;
        std::vector<std::vector<std::string>> values;
        std::vector<std::string> needles;
        for (std::int64_t k = 0; k < config_.keys; ++k)
        {
            keys.push_back(unlike(keys));
            auto& own = values.emplace_back();
            for (std::int64_t v = 0; v < config_.values; ++v)
            {
                own.push_back(part(config_.value));
                needles.push_back(needle(keys.back(), own.back()));
            }
        }
        portable_random{seed_}.shuffle(needles); // the same permutation in every sample, as in the public generator
        std::string const text =
            config_.hay == hay_kind::essay ? in_essay(size, needles) : in_lines(size, needles, keys);

        std::vector<std::string> queries;
        prompt out;
        for (std::int64_t const k : random_.sample(config_.keys, config_.queries))
        {
            queries.push_back(keys[static_cast<std::size_t>(k)]);
            auto const& own = values[static_cast<std::size_t>(k)];
            out.answers.insert(out.answers.end(), own.begin(), own.end());
        }
        std::string const query  = listed(queries);
        prompt_template const as = template_of(family::needles);
        out.context              = joined(worded(as.introduction, query), text, as.separator);
        out.question             = worded(as.question, query);
        out.answer_prefix        = worded(as.answer_prefix, query);
        return out;
    }

private:
    [[nodiscard]] std::string word()
    {
        // Every pair of the lists is another word, so that two draws are one draw from all pairs.
        std::string const& adjective = random_.choice(lists_.adjectives);
        std::string const& noun      = random_.choice(lists_.nouns);
        return joined(adjective, "-", noun);
    }

    /// A random UUID of version 4 (RFC 9562, section 5.4).
    [[nodiscard]] std::string uuid()
    {
        constexpr std::string_view digits = "0123456789abcdef";
        std::uint64_t const high          = (random_.bits() & 0xFFFF'FFFF'FFFF'0FFFU) | 0x4000U;
        std::uint64_t const low           = (random_.bits() & 0x3FFF'FFFF'FFFF'FFFFU) | 0x8000'0000'0000'0000U;
        std::string text;
        for (int i = 0; i < 32; ++i)
        {
            if (i == 8 || i == 12 || i == 16 || i == 20) { text += '-'; }
            text += digits[(i < 16 ? high >> (60 - 4 * i) : low >> (60 - 4 * (i - 16))) & 15U];
        }
        return text;
    }

    [[nodiscard]] std::string part(needle_part kind)
    {
        switch (kind)
        {
            case needle_part::words:
                return word();
            case needle_part::numbers:
                return std::to_string(random_.between(1'000'000, 9'999'999));
            case needle_part::uuids:
                break;
        }
        return uuid();
    }

    /// A key other than those; the public generator leaves it to chance.
    [[nodiscard]] std::string unlike(std::vector<std::string> const& keys)
    {
        for (int attempt = 0; attempt < 1000; ++attempt)
        {
            std::string key = part(config_.key);
            if (std::find(keys.begin(), keys.end(), key) == keys.end()) { return key; }
        }
        throw mdkv::invalid_argument{
            joined("words_folder: its lists make too few words for the keys of ", config_.task)};
    }

    [[nodiscard]] std::string_view type() const noexcept
    {
        return config_.value == needle_part::words     ? "words"
               : config_.value == needle_part::numbers ? "numbers"
                                                       : "uuids";
    }

    /// Plural whatever the question's form.
    [[nodiscard]] std::string needle(std::string_view key, std::string_view value) const
    {
        return joined("One of the special magic ", type(), " for ", key, " is: ", value, ".");
    }

    /// The template's text, in the singular where there is one answer.
    [[nodiscard]] std::string worded(std::string_view text, std::string_view query) const
    {
        if (config_.queries * config_.values > 1)
        {
            return filled(text, {{"{type_needle_v}", type()}, {"{query}", query}});
        }
        std::string const single = replaced(replaced(replaced(text, "Some", "A"), "are all", "is"), "are", "is");
        return filled(single, {{"{type_needle_v}", type().substr(0, type().size() - 1)}, {"{query}", query}});
    }

    [[nodiscard]] std::string in_lines(
        std::int64_t size, std::vector<std::string> const& needles, std::vector<std::string> const& keys)
    {
        std::vector<std::string> lines;
        for (std::int64_t i = 0; i < size; ++i)
        {
            if (config_.hay == hay_kind::noise) { lines.emplace_back(noise_sentence); }
            else
            {
                std::string const key = unlike(keys);
                lines.push_back(needle(key, part(config_.value)));
            }
        }
        std::vector<std::int64_t> places = random_.sample(size, std::ssize(needles));
        std::sort(places.rbegin(), places.rend());
        for (std::size_t i = 0; i < needles.size(); ++i) { lines.insert(lines.begin() + places[i], needles[i]); }
        return joined_with(lines, "\n");
    }

    [[nodiscard]] std::string in_essay(std::int64_t size, std::vector<std::string> const& needles)
    {
        std::vector<std::string_view> words;
        for (std::int64_t i = 0; i < size; ++i)
        {
            words.push_back(essay_words_[static_cast<std::size_t>(i) % essay_words_.size()]);
        }
        std::vector<std::string> const sentences = sentences_of(words);
        std::vector<std::size_t> places;
        for (std::int64_t const step : random_.sample(40, std::ssize(needles)))
        {
            double const depth =
                std::round(static_cast<double>(step) * 100 / 39); // 40 even steps from 0 to 100 percent
            places.push_back(static_cast<std::size_t>(static_cast<double>(sentences.size()) * (depth / 100)));
        }
        std::sort(places.begin(), places.end());
        places.push_back(sentences.size());
        std::vector<std::string> parts;
        std::size_t begin = 0;
        for (std::size_t i = 0; i < places.size(); ++i)
        {
            auto const at = [&](std::size_t place) { return sentences.begin() + static_cast<std::ptrdiff_t>(place); };
            parts.push_back(joined_with({at(begin), at(places[i])}, " ")); // empty between needles of one place
            if (i < needles.size()) { parts.push_back(needles[i]); }
            begin = places[i];
        }
        return joined_with(parts, " ");
    }

    needle_config config_;
    bool short_;
    std::uint64_t seed_;
    portable_random random_;
    word_lists lists_;
    std::string essay_;
    std::vector<std::string_view> essay_words_;
};

} // namespace runner::ruler
