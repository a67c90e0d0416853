/// \file session.hpp: what every command of mdkv_run starts from: the model, its tokenizer, the threads
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "common_options.hpp"
#include "file_bytes.hpp"
#include "gguf.hpp"
#include "language_model.hpp"
#include "tokenizer.hpp"

namespace runner
{

/// A loaded model, ready to run.
class session
{
public:
    explicit session(common_options const& options)
        : file_{gguf_file::open(options.model_path)}
        , words_{file_}
        , model_{language_model::load(file_)}
        , pool_{options.threads > 0 ? options.threads : machine_threads()}
    {}

    [[nodiscard]] tokenizer const& words() const noexcept { return words_; }
    [[nodiscard]] language_model const& model() const noexcept { return model_; }
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
    language_model model_;
    mdkv::cpu::thread_pool pool_;
};

/// The first `count` tokens of a text, without a beginning-of-sequence token.
/// \param control   take the texts of control tokens for these tokens
/// \throws file_error    the file cannot be read
/// \throws mdkv::error   the text is shorter
[[nodiscard]] inline std::vector<std::int32_t> first_tokens(
    tokenizer const& words, std::string const& path, std::int64_t count, std::string const& why, bool control = false)
{
    std::vector<std::int32_t> tokens = words.encode(read_text(path), control);
    mdkv::expects<mdkv::error>(
        std::ssize(tokens) >= count, path, " has ", tokens.size(), " tokens; ", count, " are needed (", why, ")");
    tokens.resize(static_cast<std::size_t>(count));
    return tokens;
}

/// Calls `body.operator()<T>()` with the element type of that name.
/// \throws mdkv::invalid_argument   no such element type
template <class Body>
auto with_element(std::string const& name, Body const& body)
{
    if (name == "f16") { return body.template operator()<mdkv::half>(); }
    if (name == "f32") { return body.template operator()<float>(); }
    throw mdkv::invalid_argument{"element: \"" + name + "\" is unknown; there are f16, f32"};
}

} // namespace runner
