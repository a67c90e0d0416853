/// \file common_options.hpp: the options that all commands of mdkv_run share, and the policy they make of its text
#pragma once

#include <mdkv/core/error.hpp>

#include <cstdint>
#include <optional>
#include <string>

#include "policies.hpp"

namespace runner
{

/// Options that mean the same in every command.
struct common_options
{
    std::string model_path;
    bool map_file       = false;
    int threads         = 0; // 0: as many as the machine has
    std::string element = "f16";
    std::int64_t window = 32;
    std::optional<std::int64_t> pool;
    std::optional<std::string> pooling;
    std::optional<std::string> ratios;
    std::optional<std::int64_t> score_queries;
    std::string head_scores;     // file
    std::string backend = "cpu"; // of the commands that let one choose
};

/// \throws mdkv::invalid_argument   no such backend
[[nodiscard]] inline backend_kind parse_backend(std::string const& text)
{
    mdkv::expects(text == "cpu" || text == "cuda", "backend: \"", text, "\" is unknown; there are cpu, cuda");
    return text == "cuda" ? backend_kind::cuda : backend_kind::cpu;
}

/// The policy of that text (see `parse_policy`), with the options' parameters where the text leaves them open and the
/// policy has them.
/// \throws mdkv::invalid_argument   the text cannot be read, the policy needs head scores and has none, or it does not run
///                                  on the backend
[[nodiscard]] inline policy chosen_policy(std::string const& text, common_options const& options)
{
    policy const named = parse_policy(text);
    std::string more;
    auto const set = [&](char const* parameter, std::optional<std::string> const& value) {
        std::string const part = std::string{parameter} + "=";
        if (!value || !named.has_parameter(parameter) || text.find(part) != std::string::npos) { return; }
        more += (more.empty() ? "" : "+") + part + *value;
    };
    set("pool", options.pool ? std::optional{std::to_string(*options.pool)} : std::nullopt);
    set("pooling", options.pooling);
    set("ratios", options.ratios);
    set("queries", options.score_queries ? std::optional{std::to_string(*options.score_queries)} : std::nullopt);
    set("scores", options.head_scores.empty() ? std::nullopt : std::optional{options.head_scores});
    bool const bare = text.find('[') == std::string::npos;
    policy chosen   = more.empty() ? named
                      : bare       ? parse_policy(text + "[" + more + "]")
                                   : parse_policy(text.substr(0, text.size() - 1) + "+" + more + "]");
    mdkv::expects(chosen.share != sharing::head_scores || !chosen.head_scores.empty(), "policy ", chosen.name,
        " needs head scores: give --head-scores FILE; bench/quality/head_scores.py makes one");
    chosen.backend = parse_backend(options.backend);
    mdkv::expects(chosen.backend == backend_kind::cpu || chosen.runs_on_device(), "--backend cuda: policy ",
        chosen.label,
        " runs on the CPU only; paper, paper_literal, evict, by_window, best and any_question run on the device");
    return chosen;
}

} // namespace runner
