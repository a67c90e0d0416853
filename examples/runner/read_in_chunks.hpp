/// \file read_in_chunks.hpp: a prompt through the model chunk by chunk, its caches compressed while it is read
#pragma once

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/prompt.hpp>
#include <mdkv/reader.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "decode.hpp"
#include "element_rows.hpp"
#include "language_model.hpp"
#include "scratch_memory.hpp"

namespace runner
{

/// A prompt that was read: the caches of its layers, and the logits [vocabulary] of its last token.
template <mdkv::element T>
struct read_prompt
{
    std::vector<mdkv::cpu::cache<T>> caches; // [layers]
    std::vector<float> logits;
    mdkv::reader_report report;
    double compress_seconds = 0; // seconds that ends of chunks took
    std::int64_t most_bytes = 0; // that caches with their tails and losses took at any time, without scratch
};

/// Reads a prompt within the limit. Keys and values are rounded to T as they are stored.
/// \param progress   void(tokens read, bytes held) after each chunk; what it throws ends the reading
/// \throws mdkv::error, and what the library throws
template <mdkv::element T, class Progress>
[[nodiscard]] read_prompt<T> read_in_chunks(language_model const& model, std::span<std::int32_t const> tokens,
    mdkv::preset const& chosen, mdkv::rotary_encoding<mdkv::cpu::backend> const& encoding,
    mdkv::reader_options const& options, mdkv::cpu::executor_ref executor, scratch_memory& scratch,
    Progress const& progress)
{
    using host               = mdkv::cpu::backend;
    using reader             = mdkv::reader<host, mdkv::cpu::cache<T>, float>;
    model_shape const& shape = model.shape();
    std::int64_t const rows  = shape.query_heads;
    mdkv::expects(!tokens.empty(), "read_in_chunks: there are no tokens");
    expect_tokens(model, tokens, "read_in_chunks");
    mdkv::prompt_shape<host> const sizes{.layers = shape.layers,
        .heads                                   = shape.kv_heads,
        .group                                   = shape.query_heads / shape.kv_heads,
        .dims                                    = {shape.key_dim, shape.value_dim},
        .tokens                                  = std::ssize(tokens),
        .encoding                                = encoding};
    read_prompt<T> result;
    result.caches.resize(static_cast<std::size_t>(shape.layers));
    mdkv::workspace state{mdkv::cpu::host_memory{}};
    reader r{host{&state}, chosen, sizes, options, std::span{result.caches}};

    decode_workspace space;
    std::vector<T> keys(static_cast<std::size_t>(options.chunk * shape.kv_heads * shape.key_dim));
    std::vector<T> values(static_cast<std::size_t>(options.chunk * shape.kv_heads * shape.value_dim));
    std::vector<float> lse(static_cast<std::size_t>(rows * options.chunk));
    for (std::int64_t first = 0; first < std::ssize(tokens); first += options.chunk)
    {
        std::int64_t const n = std::min(options.chunk, std::ssize(tokens) - first);
        std::vector<std::int64_t> positions(static_cast<std::size_t>(n));
        std::iota(positions.begin(), positions.end(), first);
        auto const attention = [&](std::int64_t layer) {
            narrow_row(space.key.data(), n * shape.kv_heads * shape.key_dim, keys.data());
            narrow_row(space.value.data(), n * shape.kv_heads * shape.value_dim, values.data());
            scratch.run(executor, [&](host const& on) {
                using mdkv::in;
                using mdkv::out;
                auto const [D, Dv] = mdkv::head_dims{shape.key_dim, shape.value_dim};
                auto const H       = shape.kv_heads;
                r.attend(on, layer,
                    {in(on, static_cast<float const*>(space.query.data()), {rows, n, D}, {D, rows * D, 1}),
                        in(on, static_cast<T const*>(keys.data()), {H, n, D}, {D, H * D, 1}),
                        in(on, static_cast<T const*>(values.data()), {H, n, Dv}, {Dv, H * Dv, 1})},
                    out(on, space.attended.data(), {rows, n, Dv}, {Dv, rows * Dv, 1}), out(on, lse.data(), rows, n));
            });
        };
        detail::run_layers(model, tokens.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(n)),
            positions, executor, attention, space);
        std::int64_t held = 0;
        for (auto const& cache : result.caches) { held += cache.arena_bytes() + cache.tail_bytes(); }
        result.most_bytes = std::max(result.most_bytes, held + result.report.losses_bytes);
        bool const last   = first + n == std::ssize(tokens);
        auto const begun  = std::chrono::steady_clock::now();
        result.report = scratch.run(executor, [&](host const& on) { return last ? r.finish(on) : r.end_chunk(on); });
        result.compress_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
        progress(first + n, result.report.held_bytes);
    }
    result.logits.resize(static_cast<std::size_t>(shape.vocabulary));
    detail::find_logits(model, 1, executor, result.logits, space);
    return result;
}

} // namespace runner
