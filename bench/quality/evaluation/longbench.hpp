/// \file longbench.hpp: samples from the lines of LongBench: the prompt filled, cut in the middle where it is too long
#pragma once

#include <mdkv/core/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runner/tokenizer.hpp"
#include "longbench_file.hpp"
#include "longbench_tasks.hpp"
#include "lossy_utf8.hpp"
#include "sample.hpp"

namespace runner
{

/// A filled prompt in its two parts.
struct longbench_prompt
{
    std::string context;         // up to the end of what stands for {context}
    std::string question;        // all behind it
    std::int64_t whole_tokens{}; // of both in one, before anything was cut
    bool cut = false;
};

/// The task's prompt with {context} and {input} replaced; nothing is looked for in what they are replaced by.
[[nodiscard]] inline longbench_prompt fill_longbench_prompt(
    longbench_task const& task, std::string_view context, std::string_view input)
{
    constexpr std::string_view context_mark = "{context}";
    constexpr std::string_view input_mark   = "{input}";
    std::size_t const at                    = task.prompt.find(context_mark);
    std::string_view const behind           = task.prompt.substr(at + context_mark.size());
    longbench_prompt out;
    out.context  = std::string(task.prompt.substr(0, at)) + std::string(context);
    out.question = std::string(behind);
    if (std::size_t const mark = behind.find(input_mark); mark != std::string_view::npos)
    {
        out.question.replace(mark, input_mark.size(), input);
    }
    return out;
}

/// The public rule (LongBench/pred.py): a prompt of more than `max_length` tokens becomes the text of its first and its
/// last int(max_length / 2) tokens. Counted as there: the prompt tokenised in one, and a beginning-of-sequence token,
/// where the model wants one, is the first token of the first half. A character cut through becomes U+FFFD, as there.
/// What is returned is text, which can make a few tokens more or fewer when it is read; a chat form comes on top.
///
/// The parts remain what they were: what is left of the context's bytes is the context, what is left of the question's
/// is the question. The question is whole unless it alone is longer than a half.
/// \throws mdkv::invalid_argument   max_length is below 2
[[nodiscard]] inline longbench_prompt cut_in_the_middle(
    tokenizer const& words, longbench_prompt prompt, std::int64_t max_length)
{
    mdkv::expects(max_length >= 2, "longbench: max_length is ", max_length, ", not at least 2");
    std::vector<std::int32_t> const ids = words.encode(prompt.context + prompt.question);
    std::int64_t const first            = words.add_bos() ? 1 : 0;
    prompt.whole_tokens                 = std::ssize(ids) + first;
    if (prompt.whole_tokens <= max_length) { return prompt; }

    auto const half        = static_cast<std::size_t>(max_length / 2);
    std::span const all    = ids;
    std::string const head = words.decode(all.first(half - static_cast<std::size_t>(first)));
    std::string const tail = words.decode(all.last(half));
    // What no token stands for is not in these, so the parts' sizes are counted without it.
    std::size_t const context_bytes  = prompt.context.size() - words.bytes_without_token(prompt.context);
    std::size_t const question_bytes = prompt.question.size() - words.bytes_without_token(prompt.question);
    prompt.cut                       = true;
    if (question_bytes <= tail.size())
    {
        std::size_t const context_end = tail.size() - question_bytes;
        prompt.context                = lossy_utf8(head) + lossy_utf8(tail.substr(0, context_end));
        prompt.question               = lossy_utf8(tail.substr(context_end));
        return prompt;
    }
    std::size_t const context_end = std::min(head.size(), context_bytes);
    prompt.context                = lossy_utf8(head.substr(0, context_end));
    prompt.question               = lossy_utf8(head.substr(context_end)) + lossy_utf8(tail);
    return prompt;
}

/// \param max_length   tokens of the prompt beyond which its middle is cut out: 7950 in the HeadKV runs of Llama-3,
///                     31500 in those of Mistral, 3500 of a model of 4,096 tokens. Leave room for the answer and the
///                     chat form.
/// \throws mdkv::invalid_argument   max_length is below 2
[[nodiscard]] inline sample make_longbench_sample(
    tokenizer const& words, longbench_task const& task, longbench_item const& item, std::int64_t max_length)
{
    longbench_prompt prompt =
        cut_in_the_middle(words, fill_longbench_prompt(task, item.context, item.input), max_length);
    sample out;
    out.task            = std::string(task.name);
    out.id              = item.id;
    out.context         = std::move(prompt.context);
    out.question        = std::move(prompt.question);
    out.answers         = item.answers;
    out.classes         = item.classes;
    out.max_new_tokens  = task.max_new_tokens;
    out.stop_at_newline = task.stop_at_newline;
    out.min_new_tokens  = task.stop_at_newline ? 1 : 0; // the public program asks for it
    out.chat            = task.chat;
    out.about           = {{"line", item.line}, {"whole_tokens", prompt.whole_tokens}, {"cut", prompt.cut}};
    if (item.length >= 0) { out.about["length"] = item.length; }
    if (!item.language.empty()) { out.about["language"] = item.language; }
    return out;
}

/// The samples of one task, in the order of its file.
///
/// \param path   the file, or the folder the tasks' files lie in
/// \throws file_error               see read_longbench()
/// \throws mdkv::invalid_argument   max_length is below 2
[[nodiscard]] inline std::vector<sample> make_longbench_samples(
    tokenizer const& words, longbench_task const& task, std::string const& path, std::int64_t max_length)
{
    mdkv::expects(max_length >= 2, "longbench: max_length is ", max_length, ", not at least 2");
    std::vector<sample> samples;
    for (longbench_item const& item : read_longbench(path, task))
    {
        samples.push_back(make_longbench_sample(words, task, item, max_length));
    }
    return samples;
}

} // namespace runner
