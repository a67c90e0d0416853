/// \file ruler.hpp: the samples of RULER's 13 tasks, generated as the public generator does (NVIDIA/RULER scripts/data)
#pragma once

#include <mdkv/core/error.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ruler_counting.hpp"
#include "ruler_documents.hpp"
#include "ruler_needles.hpp"
#include "ruler_sizing.hpp"
#include "ruler_tasks.hpp"
#include "ruler_tracking.hpp"
#include "runner/file_error.hpp"
#include "sample.hpp"

namespace runner
{

namespace ruler
{

inline void check(ruler_options const& options, task const& which)
{
    constexpr std::int64_t longest = std::int64_t{1} << 24;
    if (options.max_length < 1 || options.max_length > longest)
    {
        throw mdkv::invalid_argument{joined("max_length: ", std::to_string(options.max_length),
            " tokens are asked for; there must be 1 to ", std::to_string(longest))};
    }
    if (options.samples < 1)
    {
        throw mdkv::invalid_argument{
            joined("samples: ", std::to_string(options.samples), " are asked for; there must be 1 or more")};
    }
    if (options.template_tokens < 0 || options.template_tokens >= options.max_length - which.tokens_to_generate)
    {
        throw mdkv::invalid_argument{joined("template_tokens: ", std::to_string(options.template_tokens),
            " of a max_length of ", std::to_string(options.max_length), " leave no room for ", which.name,
            " and its answer of ", std::to_string(which.tokens_to_generate), " tokens")};
    }
    auto const need = [&](std::string const& path, std::string_view option, std::string_view what) {
        if (!path.empty()) { return; }
        throw mdkv::invalid_argument{joined(option, ": is empty; ", which.name, " needs ", what)};
    };
    bool const needles = which.family == family::needles;
    if (needles && needle_config_of(which.name).hay == hay_kind::essay)
    {
        need(options.essay_path, "essay_path", "a text file with English prose");
    }
    if (which.family == family::common_words || (needles && needle_config_of(which.name).key == needle_part::words))
    {
        need(options.words_folder, "words_folder", "the word lists that `bash examples/setup.sh words` fetches");
    }
    if (which.name == "qa_1") { need(options.squad_path, "squad_path", "SQuAD's dev-v2.0.json"); }
    if (which.name == "qa_2") { need(options.hotpot_path, "hotpot_path", "HotpotQA's hotpot_dev_distractor_v1.json"); }
}

[[nodiscard]] inline sample sample_of(
    fitted_prompt made, task const& which, ruler_options const& options, std::int64_t index, token_counter const& count)
{
    sample out;
    out.task = which.name;
    out.id = joined(std::to_string(options.max_length), "-", std::to_string(options.seed), "-", std::to_string(index));
    out.max_new_tokens = which.tokens_to_generate;
    out.about = {{"length", made.length}, {"max_length", options.max_length}, {"seed", options.seed}, {"index", index},
        {"haystack_size", made.size}};
    if (which.family == family::needles)
    {
        std::size_t const place            = made.prompt.context.find(made.prompt.answers.front());
        std::string_view const before      = std::string_view(made.prompt.context).substr(0, place);
        out.about["token_position_answer"] = count(before);
        out.about["depth"] =
            std::lround(100 * static_cast<double>(before.size()) / static_cast<double>(made.prompt.context.size()));
    }
    out.context       = std::move(made.prompt.context);
    out.question      = std::move(made.prompt.question);
    out.answer_prefix = std::move(made.prompt.answer_prefix);
    out.answers       = std::move(made.prompt.answers);
    return out;
}

template <haystack Haystack>
[[nodiscard]] std::vector<sample> samples_from(
    Haystack&& hay, task const& which, ruler_options const& options, token_counter const& count)
{
    length_limit const limit{
        which.name, options.max_length, options.template_tokens, which.tokens_to_generate, options.close_fit};
    std::int64_t const size = largest_size(hay, limit, count);
    std::vector<sample> samples;
    for (std::int64_t i = 0; i < options.samples; ++i)
    {
        samples.push_back(sample_of(make_fitting(hay, size, i, limit, count), which, options, i, count));
    }
    return samples;
}

} // namespace ruler

/// Samples of a task; equal arguments make equal samples on every machine, and fewer samples are the first of more.
///
/// Prompts, distributions, counts and sizes are the public generator's. Different are: the random numbers, so that the
/// samples are others of the same kind; the prose, which its user brings, and the rule that cuts it into sentences;
/// keys, which are never equal by chance; lengths that the public search never ends at, which go on below its smallest
/// size or are refused.
///
/// Where a question is asked before the context as well, that belongs to the context, as do the solved examples of vt
/// and cwe. `about` has length (tokens of prompt and answer), max_length, seed, index and haystack_size (sentences,
/// words or documents), for needles also token_position_answer (as the public files) and depth (percent of the
/// context's bytes).
/// \param count   tokens of a text; called once for each part of a prompt
/// \throws mdkv::invalid_argument   an option is out of range or missing, no such task, max_length too small
/// \throws file_error               a file of words, prose or questions cannot be used
[[nodiscard]] inline std::vector<sample> make_ruler_samples(
    ruler_options const& options, std::string_view task_name, token_counter const& count)
{
    ruler::task const& which = ruler::find_task(task_name);
    ruler::check(options, which);
    switch (which.family)
    {
        case ruler::family::needles:
            return ruler::samples_from(
                ruler::needle_hay{ruler::needle_config_of(task_name), options}, which, options, count);
        case ruler::family::tracking:
            return ruler::samples_from(ruler::tracking_hay{options, count}, which, options, count);
        case ruler::family::common_words:
            return ruler::samples_from(ruler::common_words_hay{options}, which, options, count);
        case ruler::family::documents:
            return ruler::samples_from(
                ruler::document_hay{task_name == "qa_1" ? ruler::load_squad(options.squad_path)
                                                        : ruler::load_hotpot(options.hotpot_path),
                    options},
                which, options, count);
        case ruler::family::frequent_words:
            break;
    }
    ruler::length_limit const limit{which.name, options.max_length, options.template_tokens, which.tokens_to_generate};
    ruler::frequent_words_maker maker{options, limit, count};
    std::vector<sample> samples;
    for (std::int64_t i = 0; i < options.samples; ++i)
    {
        samples.push_back(ruler::sample_of(maker.make(), which, options, i, count));
    }
    return samples;
}

} // namespace runner
