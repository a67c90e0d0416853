/// \file ruler_documents.hpp: RULER's questions about documents (qa_1 from SQuAD, qa_2 from HotpotQA)
#pragma once

#include <mdkv/core/error.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "json_place.hpp"
#include "random.hpp"
#include "ruler_sizing.hpp"
#include "ruler_tasks.hpp"
#include "ruler_text.hpp"
#include "runner/file_error.hpp"

namespace runner::ruler
{

struct document_question
{
    std::string query;
    std::vector<std::string> answers;
    std::vector<std::int64_t> gold; // documents that the answer is in
    std::vector<std::int64_t> more; // others of the same article
};

struct question_set
{
    std::vector<std::string> documents; // sorted, each once
    std::vector<document_question> questions;

    [[nodiscard]] std::int64_t number_of(std::string_view document) const
    {
        return std::lower_bound(documents.begin(), documents.end(), document) - documents.begin();
    }

    void sort_documents()
    {
        std::sort(documents.begin(), documents.end());
        documents.erase(std::unique(documents.begin(), documents.end()), documents.end());
    }
};

namespace squad
{

/// The answerable questions of one paragraph.
inline void add_questions(
    question_set& set, json_place const& paragraph, std::int64_t gold, std::vector<std::int64_t> more)
{
    std::erase(more, gold);
    json_place const all = paragraph.at("qas");
    for (std::size_t q = 0; q < all.size(); ++q)
    {
        json_place const one = all.at(q);
        if (one.at("is_impossible").boolean()) { continue; }
        json_place const answers = one.at("answers");
        document_question question{one.at("question").text(), {}, {gold}, more};
        for (std::size_t a = 0; a < answers.size(); ++a)
        {
            json_place const answer = answers.at(a);
            question.answers.push_back(answer.at("text").text());
        }
        if (question.answers.empty()) { answers.fail("is empty though the question is not marked as impossible"); }
        set.questions.push_back(std::move(question));
    }
}

} // namespace squad

/// \throws file_error   the file is missing, cut short, no JSON, or not laid out as SQuAD's dev-v2.0.json
[[nodiscard]] inline question_set load_squad(std::string const& path)
{
    json_source const source{path,
        "qa_1 needs SQuAD's dev-v2.0.json (https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json)", {}};
    nlohmann::json const parsed = source.parse(read_utf8(path, source.remedy));
    json_place const root{source, parsed};
    json_place const articles = root.at("data");
    auto const paragraphs_of  = [&](auto const& use) {
        for (std::size_t a = 0; a < articles.size(); ++a)
        {
            json_place const article    = articles.at(a);
            json_place const paragraphs = article.at("paragraphs");
            use(paragraphs);
        }
    };
    auto const text_of = [](json_place const& paragraphs, std::size_t p) -> std::string const& {
        json_place const paragraph = paragraphs.at(p);
        return paragraph.at("context").text();
    };
    question_set set;
    paragraphs_of([&](json_place const& paragraphs) {
        for (std::size_t p = 0; p < paragraphs.size(); ++p) { set.documents.push_back(text_of(paragraphs, p)); }
    });
    set.sort_documents();
    paragraphs_of([&](json_place const& paragraphs) {
        std::vector<std::int64_t> article;
        for (std::size_t p = 0; p < paragraphs.size(); ++p)
        {
            article.push_back(set.number_of(text_of(paragraphs, p)));
        }
        for (std::size_t p = 0; p < paragraphs.size(); ++p)
        {
            json_place const paragraph = paragraphs.at(p);
            squad::add_questions(set, paragraph, article[p], article);
        }
    });
    if (set.questions.empty()) { source.fail("holds no question that has an answer"); }
    return set;
}

namespace hotpot
{

/// The documents of one question: title, line break, sentences.
[[nodiscard]] inline std::vector<std::string> documents_of(json_place const& question)
{
    json_place const context = question.at("context");
    std::vector<std::string> documents;
    for (std::size_t d = 0; d < context.size(); ++d)
    {
        json_place const document = context.at(d);
        if (document.size() != 2) { document.fail("is not a pair of a title and its sentences"); }
        json_place const sentences = document.at(std::size_t{1});
        std::string text           = joined(document.at(std::size_t{0}).text(), "\n");
        for (std::size_t s = 0; s < sentences.size(); ++s) { text += sentences.at(s).text(); }
        documents.push_back(std::move(text));
    }
    return documents;
}

} // namespace hotpot

/// \throws file_error   the file is missing, cut short, no JSON, or not laid out as HotpotQA's dev distractor file
[[nodiscard]] inline question_set load_hotpot(std::string const& path)
{
    json_source const source{
        path, "qa_2 needs HotpotQA's hotpot_dev_distractor_v1.json (http://curtis.ml.cmu.edu/datasets/hotpot/)", {}};
    nlohmann::json const parsed = source.parse(read_utf8(path, source.remedy));
    json_place const root{source, parsed};
    question_set set;
    for (std::size_t q = 0; q < root.size(); ++q)
    {
        json_place const one = root.at(q);
        for (std::string& document : hotpot::documents_of(one)) { set.documents.push_back(std::move(document)); }
    }
    set.sort_documents();
    for (std::size_t q = 0; q < root.size(); ++q)
    {
        json_place const one = root.at(q);
        document_question question{one.at("question").text(), {one.at("answer").text()}, {}, {}};
        for (std::string const& document : hotpot::documents_of(one))
        {
            question.gold.push_back(set.number_of(document));
        }
        set.questions.push_back(std::move(question));
    }
    if (set.questions.empty()) { source.fail("holds no question"); }
    return set;
}

/// Sample i asks question i of the file.
class document_hay
{
public:
    document_hay(question_set set, ruler_options const& options)
        : set_{std::move(set)}
        , seed_{options.seed}
        , random_{options.seed}
    {
        if (options.samples > std::ssize(set_.questions))
        {
            throw mdkv::invalid_argument{joined("samples: ", std::to_string(options.samples),
                " are wanted, the file of questions has ", std::to_string(set_.questions.size()))};
        }
    }

    [[nodiscard]] size_plan plan() const { return {}; }

    [[nodiscard]] std::int64_t minimum(std::int64_t index) const
    {
        return std::clamp<std::int64_t>(std::ssize(question(index).gold), 1, std::ssize(set_.documents));
    }

    [[nodiscard]] prompt make(std::int64_t size, std::int64_t index)
    {
        document_question const& asked    = question(index);
        std::vector<std::int64_t> numbers = chosen(size, asked);
        portable_random{seed_}.shuffle(numbers);
        std::vector<std::string> documents;
        for (std::size_t i = 0; i < numbers.size(); ++i)
        {
            documents.push_back(joined(
                "Document ", std::to_string(i + 1), ":\n", set_.documents[static_cast<std::size_t>(numbers[i])]));
        }
        prompt_template const as = template_of(family::documents);
        prompt out;
        out.context       = joined(as.introduction, joined_with(documents, "\n\n"), as.separator);
        out.question      = filled(as.question, {{"{query}", asked.query}});
        out.answer_prefix = as.answer_prefix;
        out.answers       = asked.answers;
        return out;
    }

private:
    [[nodiscard]] document_question const& question(std::int64_t index) const
    {
        return set_.questions[static_cast<std::size_t>(index)];
    }

    /// The gold documents, then others of their article, then any; all of them, over and over, where more are wanted
    /// than there are.
    [[nodiscard]] std::vector<std::int64_t> chosen(std::int64_t size, document_question const& asked)
    {
        std::int64_t const all = std::ssize(set_.documents);
        std::vector<std::int64_t> numbers;
        if (size >= all)
        {
            for (std::int64_t i = 0; i < size; ++i) { numbers.push_back(i % all); }
            return numbers;
        }
        numbers                    = asked.gold;
        std::int64_t const missing = size - std::ssize(numbers);
        if (missing <= std::ssize(asked.more))
        {
            for (std::int64_t const i : random_.sample(std::ssize(asked.more), missing))
            {
                numbers.push_back(asked.more[static_cast<std::size_t>(i)]);
            }
            return numbers;
        }
        numbers.insert(numbers.end(), asked.more.begin(), asked.more.end());
        std::vector<bool> taken(static_cast<std::size_t>(all));
        for (std::int64_t const i : numbers) { taken[static_cast<std::size_t>(i)] = true; }
        std::vector<std::int64_t> others;
        for (std::int64_t i = 0; i < all; ++i)
        {
            if (!taken[static_cast<std::size_t>(i)]) { others.push_back(i); }
        }
        for (std::int64_t const i : random_.sample(std::ssize(others), size - std::ssize(numbers)))
        {
            numbers.push_back(others[static_cast<std::size_t>(i)]);
        }
        return numbers;
    }

    question_set set_;
    std::uint64_t seed_;
    portable_random random_;
};

} // namespace runner::ruler
