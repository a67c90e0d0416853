/// \file longbench_tasks.hpp: the English tasks of LongBench (arXiv 2603.20616, LongBench table): prompt, score, limit
#pragma once

#include <mdkv/core/error.hpp>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace runner
{

/// How an answer is scored.
enum class longbench_metric
{
    f1,             // of words, after lower-casing and dropping punctuation and articles
    rouge_l,        // as the PyPI package rouge computes it
    classification, // which of the classes it names
    retrieval,      // share of the numbers in it that are the right paragraph's
    count,          // share of the numbers in it that are the right one
    code_similarity // of its first line of code
};

/// One task. Prompts, answer lengths and measures are those of THUDM/LongBench: LongBench/config/dataset2prompt.json
/// and dataset2maxlen.json, LongBench/eval.py (dataset2metric); which tasks go without the chat form, and how samsum
/// ends, LongBench/pred.py; the first-line rule, LongBench/eval.py (scorer).
struct longbench_task
{
    std::string_view name;
    longbench_metric metric;
    std::int64_t max_new_tokens;
    std::string_view prompt;      // with {context} once and {input} at most once behind it
    bool chat            = true;  // the prompt goes into the model's chat form
    bool first_line      = false; // only the answer's first line counts, empty ones before it dropped
    bool stop_at_newline = false; // the answer ends with its first line, which holds at least one token
};

namespace detail
{

inline constexpr std::string_view longbench_passages =
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:";

inline constexpr std::array<longbench_task, 16> longbench_table{{
    {"narrativeqa", longbench_metric::f1, 128,
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        "asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
        "Story: {context}\n\n"
        "Now, answer the question based on the story asconcisely as you can, using a single phrase if possible. Do not "
        "provide any explanation.\n\nQuestion: {input}\n\nAnswer:"},
    {"qasper", longbench_metric::f1, 128,
        "You are given a scientific article and a question. Answer the question as concisely as you can, using a "
        "single "
        "phrase or sentence if possible. If the question cannot be answered based on the information in the article, "
        "write \"unanswerable\". If the question is a yes/no question, answer \"yes\", \"no\", or \"unanswerable\". Do "
        "not provide any explanation.\n\n"
        "Article: {context}\n\n"
        " Answer the question based on the above article as concisely as you can, using a single phrase or sentence if "
        "possible. If the question cannot be answered based on the information in the article, write \"unanswerable\". "
        "If the question is a yes/no question, answer \"yes\", \"no\", or \"unanswerable\". Do not provide any "
        "explanation.\n\nQuestion: {input}\n\nAnswer:"},
    {"multifieldqa_en", longbench_metric::f1, 64,
        "Read the following text and answer briefly.\n\n{context}\n\n"
        "Now, answer the following question based on the above text, only give me the answer and do not output any "
        "other "
        "words.\n\nQuestion: {input}\nAnswer:"},
    {"hotpotqa", longbench_metric::f1, 32, longbench_passages},
    {"2wikimqa", longbench_metric::f1, 32, longbench_passages},
    {"musique", longbench_metric::f1, 32, longbench_passages},
    {"gov_report", longbench_metric::rouge_l, 512,
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:"},
    {"qmsum", longbench_metric::rouge_l, 512,
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or "
        "more sentences.\n\nTranscript:\n{context}\n\n"
        "Now, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:"},
    {"multi_news", longbench_metric::rouge_l, 512,
        "You are given several news passages. Write a one-page summary of all news. \n\n"
        "News:\n{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:"},
    {"trec", longbench_metric::classification, 64,
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        false, true},
    {"triviaqa", longbench_metric::f1, 32,
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The "
        "following are some examples.\n\n{context}\n\n{input}",
        false, true},
    {"samsum", longbench_metric::rouge_l, 128,
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        false, true, true},
    {"passage_count", longbench_metric::count, 32,
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, "
        "how many non-repeating paragraphs are there in total?\n\n{context}\n\n"
        "Please enter the final count of unique paragraphs after removing duplicates. The output format should only "
        "contain the number, such as 1, 2, 3, and so on.\n\nThe final answer is: "},
    {"passage_retrieval_en", longbench_metric::retrieval, 32,
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is "
        "from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\n"
        "Please enter the number of the paragraph that the abstract is from. The answer format must be like "
        "\"Paragraph "
        "1\", \"Paragraph 2\", etc.\n\nThe answer is: "},
    {"lcc", longbench_metric::code_similarity, 64,
        "Please complete the code given below. \n{context}Next line of code:\n", false},
    {"repobench-p", longbench_metric::code_similarity, 64,
        "Please complete the code given below. \n{context}{input}Next line of code:\n", false},
}};

} // namespace detail

/// The 16 English tasks, in the public order.
[[nodiscard]] inline std::span<longbench_task const> longbench_tasks() noexcept
{
    return detail::longbench_table;
}

/// \throws mdkv::invalid_argument   no such task; the message lists those there are
[[nodiscard]] inline longbench_task const& find_longbench_task(std::string_view name)
{
    std::string known;
    for (longbench_task const& task : longbench_tasks())
    {
        if (task.name == name) { return task; }
        known += (known.empty() ? "" : ", ") + std::string(task.name);
    }
    throw mdkv::invalid_argument{"longbench: task \"" + std::string(name) + "\" is unknown; there are " + known};
}

} // namespace runner
