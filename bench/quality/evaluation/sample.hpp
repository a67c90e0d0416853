/// \file sample.hpp: one question of an evaluation, whatever it comes from
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace runner
{

/// The prompt is `context`, `question` and `answer_prefix`. Its tokens are cut where the context ends, so that a cache can be
/// compressed after the context alone or after everything and reads the same tokens either way.
struct sample
{
    std::string task; // the column of the table it counts in
    std::string id;   // unique within the task and the same in every run
    std::string context;
    std::string question;
    std::string answer_prefix;        // what the answer is made to begin with; follows the chat form's header
    std::vector<std::string> answers; // references
    std::string next_question{};      // asked of the same cache behind the answer, which ends at a line's end; or empty
    std::vector<std::string> next_answers{}; // references of that question's answer
    std::int64_t max_new_tokens = 32;
    std::int64_t min_new_tokens = 0; // so many cannot be the end, nor end the line where that ends the answer
    bool stop_at_newline        = false;
    bool chat                   = false; // the prompt goes into the model's chat form, where it has one
    nlohmann::json about        = nlohmann::json::object(); // length, depth ...: copied to the answer's line
};

} // namespace runner
