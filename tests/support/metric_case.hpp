/// \file metric_case.hpp: one metric of an evaluation on one answer, described in JSON as tests/tools/public_metrics.py does
#pragma once

#include <nlohmann/json.hpp>

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "evaluation/metrics.hpp"
#include "evaluation/porter_stemmer.hpp"
#include "evaluation/rouge.hpp"

namespace support
{

/// `{"metric", "answer", "references", "classes"}`, the last two where the metric has them.
[[nodiscard]] inline nlohmann::json metric_value(nlohmann::json const& one)
{
    using texts           = std::vector<std::string>;
    auto const metric     = one.at("metric").get<std::string>();
    auto const answer     = one.at("answer").get<std::string>();
    auto const references = one.value("references", texts{});
    auto const classes    = one.value("classes", texts{});
    auto const best       = [&](auto const& score) {
        return runner::best_of(references, [&](std::string const& reference) { return score(answer, reference); });
    };

    if (metric == "stem") { return runner::porter_stem(answer); }
    if (metric == "first_line") { return runner::first_line(answer); }
    if (metric == "rouge_1") { return runner::rouge_1(answer, references.at(0)); }
    if (metric == "rouge_l") { return best(runner::rouge_l); }
    if (metric == "word_recall") { return runner::word_recall(answer, references.at(0)); }
    if (metric == "string_match_all") { return runner::string_match_all(answer, references); }
    if (metric == "string_match_part") { return runner::string_match_part(answer, references); }
    if (metric == "token_f1") { return best(runner::token_f1); }
    if (metric == "retrieval") { return best(runner::retrieval_score); }
    if (metric == "count") { return best(runner::count_score); }
    if (metric == "classification")
    {
        return best([&](std::string const& text, std::string const& reference) {
            return runner::classification_score(text, reference, classes);
        });
    }
    if (metric == "code_difflib" || metric == "code_levenshtein")
    {
        auto const matcher =
            metric == "code_difflib" ? runner::line_matcher::difflib : runner::line_matcher::levenshtein;
        return best([matcher](std::string const& text, std::string const& reference) {
            return runner::code_similarity(text, reference, matcher);
        });
    }
    throw std::runtime_error("metric: no such one: " + metric);
}

} // namespace support
