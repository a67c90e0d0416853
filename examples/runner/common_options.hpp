/// \file common_options.hpp: the options that all commands of mdkv_run share, and the policy they make of its text
#pragma once

#include <mdkv/core/error.hpp>

#include <cstdint>
#include <string>

#include "policies.hpp"

namespace runner
{

/// Options that mean the same in every command.
struct common_options
{
    std::string model_path;
    int threads         = 0; // 0: as many as the machine has
    std::string element = "f16";
    std::int64_t window = 32;
    std::string head_scores;     // file
    std::string backend = "cpu"; // of the commands that let one choose
};

/// \throws mdkv::invalid_argument   no such backend
[[nodiscard]] inline backend_kind parse_backend(std::string const& text)
{
    mdkv::expects(text == "cpu" || text == "cuda", "backend: \"", text, "\" is unknown; there are cpu, cuda");
    return text == "cuda" ? backend_kind::cuda : backend_kind::cpu;
}

/// The policy of that text (see `parse_policy`), with the file of head scores if the text names none and the policy needs one.
/// \throws mdkv::invalid_argument   the text cannot be read, the policy needs head scores and has none, or it does not run
///                                  on the backend
[[nodiscard]] inline policy chosen_policy(std::string const& text, common_options const& options)
{
    policy chosen = parse_policy(text);
    if (chosen.has_parameter("scores") && chosen.head_scores.empty()) { chosen.head_scores = options.head_scores; }
    mdkv::expects(chosen.share != sharing::head_scores || !chosen.head_scores.empty(), "policy ", chosen.name,
        " needs head scores: give --head-scores FILE; bench/quality/head_scores.py makes one");
    chosen.backend = parse_backend(options.backend);
    mdkv::expects(chosen.backend == backend_kind::cpu || chosen.runs_on_device(), "--backend cuda: policy ",
        chosen.label,
        " runs on the CPU only; paper, paper_literal, evict, by_window, best and any_question run on the device");
    return chosen;
}

} // namespace runner
