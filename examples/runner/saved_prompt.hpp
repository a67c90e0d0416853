/// \file saved_prompt.hpp: a prompt that was read once, in a file: its caches, its tokens' hashes and the logits after it
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/engine/stored.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "file_bytes.hpp"
#include "file_error.hpp"
#include "file_replacement.hpp"
#include "language_model.hpp"
#include "policies.hpp"

namespace runner
{

/// What the runner keeps beside the caches, as a stored cache's attachment: two sizes, then text and numbers.
struct saved_answer
{
    std::string policy;          // the policy's label
    std::int64_t full_bytes{};   // bytes of the model's uncompressed cache
    std::vector<float> logits{}; // logits of the token after the prompt

    [[nodiscard]] std::vector<std::byte> bytes() const
    {
        std::vector<std::byte> all;
        auto const add = [&](void const* from, std::size_t size) {
            auto const* const first = static_cast<std::byte const*>(from);
            all.insert(all.end(), first, first + size);
        };
        std::uint64_t const sizes[]{policy.size(), static_cast<std::uint64_t>(full_bytes)};
        add(sizes, sizeof sizes);
        add(policy.data(), policy.size());
        add(logits.data(), logits.size() * sizeof(float));
        return all;
    }

    /// \throws file_error   the bytes are no attachment of the runner's, for a vocabulary of this size
    [[nodiscard]] static saved_answer of(
        std::string const& path, std::span<std::byte const> bytes, std::int64_t vocabulary)
    {
        std::uint64_t sizes[2]{};
        auto const numbers = static_cast<std::size_t>(vocabulary) * sizeof(float);
        bool good          = bytes.size() >= sizeof sizes + numbers;
        if (good) { std::memcpy(sizes, bytes.data(), sizeof sizes); }
        good = good && bytes.size() - sizeof sizes - numbers == sizes[0];
        if (!good) { throw file_error{path, "holds caches, but no prompt that mdkv_run saved with this vocabulary"}; }
        saved_answer made{std::string(static_cast<std::size_t>(sizes[0]), '\0'), static_cast<std::int64_t>(sizes[1]),
            std::vector<float>(static_cast<std::size_t>(vocabulary))};
        std::memcpy(made.policy.data(), bytes.data() + sizeof sizes, made.policy.size());
        std::memcpy(made.logits.data(), bytes.data() + sizeof sizes + made.policy.size(), numbers);
        return made;
    }
};

/// Writes caches, which take the place of an older file all at once.
/// \param model   see session::fingerprint
/// \throws file_error   the disk is full
template <mdkv::element T>
void save_prompt(file_replacement& file, std::string const& model, std::vector<mdkv::layer_to_write<T>> const& layers,
    std::span<std::int32_t const> tokens, saved_answer const& answer)
{
    std::vector<std::byte> const beside = answer.bytes();
    auto const heads                    = layers.empty() ? 0 : layers.front().cache.layout.heads;
    mdkv::write([&](std::span<std::byte const> bytes) { file.write(bytes); }, {.model = model},
        {.model_layers = std::ssize(layers), .model_heads = heads, .tokens = tokens, .attachment = beside},
        std::span{layers});
    file.commit();
}

/// A saved prompt, mapped: the caches' views point into the file's pages.
template <mdkv::element T>
class saved_prompt
{
public:
    /// \throws file_error    the file cannot be read, or is no prompt of this model and element type
    /// \throws mdkv::error   it is damaged, or of another model (naming both)
    saved_prompt(std::string const& path, std::string const& model, model_shape const& shape)
        : file_{load_file(path, "mdkv", std::uint64_t{1} << 40, file_access::map)}
        , caches_{opened(path, file_.bytes, model)}
        , answer_{saved_answer::of(path, caches_.attachment(), shape.vocabulary)}
    {
        bool good = caches_.layers() == shape.layers && caches_.first_layer() == 0
                    && (caches_.heads() == shape.kv_heads || caches_.heads() == shape.query_heads);
        for (std::int64_t i = 0; good && i < shape.layers; ++i)
        {
            good = caches_.layer(i).layout.dims == mdkv::head_dims{shape.key_dim, shape.value_dim};
        }
        if (!good) { throw file_error{path, "holds caches of another shape than this model's"}; }
    }

    [[nodiscard]] mdkv::stored_caches<T> const& caches() const noexcept { return caches_; }
    [[nodiscard]] saved_answer const& answer() const noexcept { return answer_; }

    /// A policy under the saved one's name, which makes no caches.
    [[nodiscard]] policy shown_policy(model_shape const& shape) const
    {
        policy shown         = find_policy("full");
        shown.label          = printable(answer_.policy);
        shown.per_query_head = caches_.heads() != shape.kv_heads;
        return shown;
    }

    /// \throws file_error   the prompt does not begin with the saved one
    void expect_beginning_of(std::string const& prompt_path, std::span<std::int32_t const> prompt) const
    {
        std::int64_t const shared = caches_.tokens_shared(prompt);
        if (shared == caches_.tokens()) { return; }
        throw file_error{
            prompt_path, joined("does not begin with the ", std::to_string(caches_.tokens()),
                             " tokens of the saved prompt; it shares at least the first ", std::to_string(shared))};
    }

private:
    static mdkv::stored_caches<T> opened(
        std::string const& path, std::span<std::byte const> bytes, std::string const& model)
    {
        try
        {
            return mdkv::read<T>(bytes, {.model = model});
        }
        catch (mdkv::error const& problem)
        {
            throw file_error{path, problem.what()};
        }
    }

    file_bytes file_;
    mdkv::stored_caches<T> caches_;
    saved_answer answer_;
};

} // namespace runner
