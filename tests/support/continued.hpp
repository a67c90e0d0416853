/// \file continued.hpp: a text fed to a model token by token, through caches of any kind
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runner/decode.hpp"
#include "runner/language_model.hpp"
#include "runner/prefill.hpp"
#include "runner/scratch_memory.hpp"
#include "runner/sequence_cache.hpp"

namespace support
{

/// Logits of the tokens after `context`, fed one by one through whatever cache `load` and `attend` stand for.
template <class T, class Load, class Attend, class OnChunk = runner::ignore_chunks>
std::vector<float> continue_with(runner::language_model const& model, std::vector<std::int32_t> const& tokens,
    std::int64_t context, Load load, Attend attend, std::int64_t queries = 8, OnChunk on_chunk = {})
{
    auto const first = std::span{tokens}.first(static_cast<std::size_t>(context));
    static_cast<void>(runner::prefill<T>(
        model, first, queries, {}, load, [](std::int64_t, std::int64_t) { return true; }, on_chunk));
    std::vector<float> all, logits(static_cast<std::size_t>(model.shape().vocabulary));
    runner::decode_workspace space;
    for (auto position = context; position < std::ssize(tokens); ++position)
    {
        std::int32_t const token = tokens[static_cast<std::size_t>(position)];
        runner::decode_step(
            model, std::span{&token, 1}, std::span{&position, 1}, {},
            [&](std::int64_t layer, std::int64_t, float const* q, float const* k, float const* v, float* out) {
                attend(layer, q, k, v, out);
            },
            logits, space);
        all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
}

/// The same through a cache that is made of the first `context` tokens.
template <class T>
std::vector<float> continue_compressed(runner::language_model const& model, std::vector<std::int32_t> const& tokens,
    std::int64_t context, runner::sequence_cache<T>& cache, std::int64_t window = 8)
{
    runner::scratch_memory scratch;
    return continue_with<T>(
        model, tokens, context, [&](runner::layer_kv<T> const& kv) { cache.compress_layer(kv, {}, scratch); },
        [&](std::int64_t layer, float const* q, float const* k, float const* v, float* out) {
            cache.attend(layer, q, k, v, out, {});
        },
        runner::queries_to_keep(cache.chosen(), window, context),
        [&](runner::layer_chunk<T> const& chunk) { cache.score_chunk(chunk, context, {}, scratch); });
}

} // namespace support
