/// \file ruler_tasks.hpp: RULER's 13 tasks: their names, prompts and limits, and the options of their generator
#pragma once

#include <mdkv/core/error.hpp>

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "runner/file_error.hpp"

namespace runner
{

/// How many tokens a text has, without a beginning-of-sequence token.
using token_counter = std::function<std::int64_t(std::string_view)>;

struct ruler_options
{
    std::int64_t max_length      = 4096; // tokens of the prompt and of the answer together
    std::int64_t samples         = 500;
    std::uint64_t seed           = 42;
    std::int64_t template_tokens = 0; // of max_length, kept free for the model's chat form
    /// Shrink a sample that does not fit by a fiftieth instead of by the public increments, which near 1024 tokens may
    /// leave next to nothing of its prose (500 words) and near 4096 half of niah_multikey_3 (25 lines).
    bool close_fit = false;
    std::string words_folder;    // niah_*, cwe: adjectivelist.txt, nounlist.txt, verblist.txt
    std::string more_words_path; // cwe at lengths for which those do not suffice: one word a line
    std::string essay_path;      // niah_* in essays: any English prose
    std::string squad_path;      // qa_1: SQuAD's dev-v2.0.json
    std::string hotpot_path;     // qa_2: HotpotQA's hotpot_dev_distractor_v1.json
};

namespace ruler
{

enum class family
{
    needles,
    tracking,
    common_words,
    frequent_words,
    documents
};

struct task
{
    std::string_view name;
    ruler::family family;
    std::int64_t tokens_to_generate;
};

/// In the order of the public configuration (NVIDIA/RULER scripts/synthetic.yaml).
inline constexpr std::array<task, 13> tasks = {{
    {"niah_single_1", family::needles, 128},
    {"niah_single_2", family::needles, 128},
    {"niah_single_3", family::needles, 128},
    {"niah_multikey_1", family::needles, 128},
    {"niah_multikey_2", family::needles, 128},
    {"niah_multikey_3", family::needles, 128},
    {"niah_multivalue", family::needles, 128},
    {"niah_multiquery", family::needles, 128},
    {"vt", family::tracking, 30},
    {"cwe", family::common_words, 120},
    {"fwe", family::frequent_words, 50},
    {"qa_1", family::documents, 32},
    {"qa_2", family::documents, 32},
}};

/// \throws mdkv::invalid_argument   no such task
[[nodiscard]] inline task const& find_task(std::string_view name)
{
    std::string known;
    for (task const& one : tasks)
    {
        if (one.name == name) { return one; }
        known += joined(known.empty() ? "" : ", ", one.name);
    }
    throw mdkv::invalid_argument{joined("task: ", runner::quoted(name), " is unknown; RULER has ", known)};
}

/// A family's prompt: `introduction`, the haystack, `separator`, `question`, `answer_prefix`.
struct prompt_template
{
    std::string_view introduction;
    std::string_view separator;
    std::string_view question;
    std::string_view answer_prefix;
};

/// The prompts are the protocol, so they are quoted (NVIDIA/RULER scripts/data/synthetic/constants.py).
[[nodiscard]] constexpr prompt_template template_of(family kind) noexcept
{
    switch (kind)
    {
        case family::needles:
            return {"Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize "
                    "it. I will "
                    "quiz you about the {type_needle_v} afterwards.\n",
                "\n", "What are all the special magic {type_needle_v} for {query} mentioned in the provided text?",
                " The special magic {type_needle_v} for {query} mentioned in the provided text are"};
        case family::tracking:
            return {"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n", "\n",
                "Question: Find all variables that are assigned the value {query} in the text above.",
                " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are "
                "assigned "
                "the value {query}, they are: "};
        case family::common_words:
            return {"Below is a numbered list of words. In these words, some appear more often than others. Memorize "
                    "the ones "
                    "that appear most often.\n",
                "\n", "Question: What are the 10 most common words in the above list?",
                " Answer: The top 10 words that appear most often in the list are:"};
        case family::frequent_words:
            return {"Read the following coded text and track the frequency of each coded word. Find the three most "
                    "frequently "
                    "appeared coded words. ",
                "\n",
                "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
                "frequently "
                "appeared words in the above coded text?",
                " Answer: According to the coded text above, the three most frequently appeared words are:"};
        case family::documents:
            break;
    }
    return {"Answer the question based on the given documents. Only give me the answer and do not output any other "
            "words.\n\nThe following are given documents.\n\n",
        "\n\n",
        "Answer the question based on the given documents. Only give me the answer and do not output any other "
        "words.\n\nQuestion: {query}",
        " Answer:"};
}

/// One sample's prompt and what it asks for, as a family makes them.
struct prompt
{
    std::string context;
    std::string question;
    std::string answer_prefix;
    std::vector<std::string> answers;
};

/// The public generator counts the whole prompt at once. Apart is how the parts are run, so the limit holds for what is
/// run. The two differ by a token where a tokenizer joins line breaks at the end of a text that it keeps apart within
/// one (qa).
[[nodiscard]] inline std::int64_t tokens_of(prompt const& text, token_counter const& count)
{
    return count(text.context) + count(text.question) + count(text.answer_prefix);
}

} // namespace ruler

/// The names of the 13 tasks, in the public order.
[[nodiscard]] inline std::vector<std::string> ruler_task_names()
{
    std::vector<std::string> names;
    for (ruler::task const& one : ruler::tasks) { names.emplace_back(one.name); }
    return names;
}

} // namespace runner
