/// \file ruler_tracking.hpp: RULER's variable tracking (vt): which names end up with a value, through a chain of assignments
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "random.hpp"
#include "ruler_needles.hpp"
#include "ruler_sizing.hpp"
#include "ruler_tasks.hpp"
#include "ruler_text.hpp"
#include "runner/file_error.hpp"

namespace runner::ruler
{

inline constexpr std::int64_t chain_names = 5; // 4 hops

/// One chain of assignments between lines of noise. Its places can be kept while its names and its value change.
struct chain_in_noise
{
    std::int64_t lines = 0;
    std::vector<std::int64_t> places; // the lines before which the assignments stand, ascending

    static chain_in_noise random(std::int64_t lines, portable_random& random)
    {
        chain_in_noise made{lines, random.sample(lines, chain_names)};
        std::sort(made.places.begin(), made.places.end());
        return made;
    }

    [[nodiscard]] prompt with(std::vector<std::string> const& names, std::string const& value) const
    {
        std::vector<std::string> text(static_cast<std::size_t>(lines), std::string(noise_sentence));
        for (std::size_t i = 0; i < names.size(); ++i)
        {
            std::string const assignment = i == 0 ? joined("VAR ", names[0], " = ", value)
                                                  : joined("VAR ", names[i], " = VAR ", names[i - 1], " ");
            text.insert(text.begin() + places[i] + static_cast<std::ptrdiff_t>(i), assignment);
        }
        prompt_template const as = template_of(family::tracking);
        std::string const count  = std::to_string(names.size());
        prompt out;
        out.context       = joined(as.introduction, joined_with(text, "\n"), as.separator);
        out.question      = filled(as.question, {{"{query}", value}});
        out.answer_prefix = filled(as.answer_prefix, {{"{query}", value}, {"{num_v}", count}});
        out.answers       = names;
        return out;
    }
};

[[nodiscard]] inline std::vector<std::string> random_names(std::size_t letters, portable_random& random)
{
    std::vector<std::string> names;
    while (std::ssize(names) < chain_names)
    {
        std::string name;
        for (std::size_t i = 0; i < letters; ++i) { name += static_cast<char>('A' + random.between(0, 25)); }
        if (name != "VAR" && std::find(names.begin(), names.end(), name) == names.end()) { names.push_back(name); }
    }
    return names;
}

[[nodiscard]] inline std::string random_value(portable_random& random)
{
    return std::to_string(random.between(10'000, 99'998));
}

/// The example that goes before every sample, of at most 500 tokens; sized by itself.
class tracking_example_hay
{
public:
    explicit tracking_example_hay(portable_random& random)
        : random_{&random}
    {}

    [[nodiscard]] size_plan plan() const { return {.increment = 5, .estimate_at = 5}; }
    [[nodiscard]] std::int64_t minimum(std::int64_t /*index*/) const noexcept { return chain_names; }
    [[nodiscard]] prompt make(std::int64_t size, std::int64_t /*index*/)
    {
        last_ = chain_in_noise::random(size, *random_);
        return last_.with(random_names(3, *random_), "12345");
    }
    [[nodiscard]] chain_in_noise const& last() const noexcept { return last_; }

private:
    portable_random* random_;
    chain_in_noise last_;
};

class tracking_hay
{
public:
    tracking_hay(ruler_options const& options, token_counter const& count)
        : short_{options.max_length < 4096}
        , random_{options.seed}
    {
        tracking_example_hay example{random_};
        length_limit const limit{"the example of vt", 500, options.template_tokens, 0};
        std::int64_t const size = largest_size(example, limit, count);
        (void)make_fitting(example, size, 0, limit, count);
        example_ = example.last();
    }

    [[nodiscard]] size_plan plan() const
    {
        std::int64_t const increment = short_ ? 5 : 10;
        return {.increment = increment, .estimate_at = increment};
    }
    [[nodiscard]] std::int64_t minimum(std::int64_t /*index*/) const noexcept { return chain_names; }

    /// The example keeps its places and gets names and a value of its own in every sample.
    [[nodiscard]] prompt make(std::int64_t size, std::int64_t /*index*/)
    {
        std::string const value = random_value(random_);
        prompt out              = chain_in_noise::random(size, random_).with(random_names(5, random_), value);
        std::string other       = random_value(random_);
        while (other == value) { other = random_value(random_); }
        prompt const example = example_.with(random_names(3, random_), other);
        out.context          = joined(example.context, example.question, example.answer_prefix, " ",
                     joined_with(example.answers, " "), "\n\n", out.context);
        return out;
    }

private:
    bool short_;
    portable_random random_;
    chain_in_noise example_;
};

} // namespace runner::ruler
