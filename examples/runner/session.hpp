/// \file session.hpp: what every command of mdkv_run starts from: the options they share, the model, its tokenizer, the threads
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include <cstdint>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gguf.hpp"
#include "llama_model.hpp"
#include "policies.hpp"
#include "tokenizer.hpp"

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
    std::optional<std::string> ratios;
    std::string head_scores; // file
};

/// The policy of that text (see `parse_policy`), with the options' parameters where the text leaves them open and the
/// policy has them.
/// \throws mdkv::invalid_argument   the text cannot be read, or the policy needs head scores and has none
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
    set("ratios", options.ratios);
    set("scores", options.head_scores.empty() ? std::nullopt : std::optional{options.head_scores});
    bool const bare = text.find('[') == std::string::npos;
    policy chosen   = more.empty() ? named
                      : bare       ? parse_policy(text + "[" + more + "]")
                                   : parse_policy(text.substr(0, text.size() - 1) + "+" + more + "]");
    mdkv::expects(chosen.share != sharing::head_scores || !chosen.head_scores.empty(), "policy ", chosen.name,
        " needs head scores: give --head-scores FILE; mdkv_run head-scores makes one");
    return chosen;
}

/// A loaded model, ready to run.
class session
{
public:
    explicit session(common_options const& options)
        : file_{gguf_file::open(
            options.model_path, {.access = options.map_file ? file_access::map : file_access::read})}
        , words_{file_}
        , model_{llama_model::load(file_)}
        , pool_{options.threads > 0 ? options.threads : machine_threads()}
    {}

    [[nodiscard]] tokenizer const& words() const noexcept { return words_; }
    [[nodiscard]] llama_model const& model() const noexcept { return model_; }
    [[nodiscard]] mdkv::cpu::executor_ref executor() noexcept { return pool_; }
    [[nodiscard]] int threads() const noexcept { return pool_.threads(); }

private:
    [[nodiscard]] static int machine_threads() noexcept
    {
        auto const count = static_cast<int>(std::thread::hardware_concurrency());
        return count > 0 ? count : 1;
    }

    gguf_file file_;
    tokenizer words_;
    llama_model model_;
    mdkv::cpu::thread_pool pool_;
};

/// \throws mdkv::error   the file cannot be read
[[nodiscard]] inline std::string read_text(std::string const& path)
{
    std::ifstream file{path, std::ios::binary};
    std::string text{std::istreambuf_iterator<char>{file}, std::istreambuf_iterator<char>{}};
    if (!file.good() && !file.eof()) { throw mdkv::error{path + ": cannot be read"}; }
    if (!file.is_open()) { throw mdkv::error{path + ": cannot be opened"}; }
    return text;
}

/// The first `count` tokens of a text, without a beginning-of-sequence token.
/// \throws mdkv::error   the text is shorter
[[nodiscard]] inline std::vector<std::int32_t> first_tokens(
    tokenizer const& words, std::string const& path, std::int64_t count, std::string const& why)
{
    std::vector<std::int32_t> tokens = words.encode(read_text(path));
    if (std::ssize(tokens) < count)
    {
        throw mdkv::error{path + " has " + std::to_string(tokens.size()) + " tokens; " + std::to_string(count)
                          + " are needed (" + why + ")"};
    }
    tokens.resize(static_cast<std::size_t>(count));
    return tokens;
}

/// Calls `body.operator()<T>()` with the element type of that name.
/// \throws mdkv::invalid_argument   no such element type
template <class Body>
auto with_element(std::string const& name, Body const& body)
{
    if (name == "f16") { return body.template operator()<mdkv::half>(); }
    if (name == "bf16") { return body.template operator()<mdkv::bfloat16>(); }
    if (name == "f32") { return body.template operator()<float>(); }
    throw mdkv::invalid_argument{"element: \"" + name + "\" is unknown; there are f16, bf16, f32"};
}

} // namespace runner
