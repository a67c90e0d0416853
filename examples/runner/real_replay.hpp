/// \file real_replay.hpp: a prompt read a second time after a request to repeat it, so that its tokens are scored by what a replay asks
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "language_model.hpp"
#include "prefill.hpp"
#include "scratch_memory.hpp"
#include "sequence_cache.hpp"
#include "terminal.hpp"
#include "tokenizer.hpp"

namespace runner
{

/// The second prefill for caches whose policies really replay; nothing for others.
/// \param caches   of these tokens
/// \throws std::invalid_argument   twice the prompt is more than the model's context
template <mdkv::element T>
void replay_really(language_model const& model, tokenizer const& words, std::span<std::int32_t const> tokens,
    mdkv::cpu::executor_ref executor, scratch_memory& scratch, std::vector<sequence_cache<T>*> const& caches)
{
    auto const reads = [](sequence_cache<T>* one) { return one->chosen().replays_really(); };
    if (std::none_of(caches.begin(), caches.end(), reads)) { return; }
    std::vector<std::int32_t> twice{tokens.begin(), tokens.end()};
    auto const request = words.encode("\n\nRepeat the previous context exactly:\n\n");
    twice.insert(twice.end(), request.begin(), request.end());
    twice.insert(twice.end(), tokens.begin(), tokens.end());
    static_cast<void>(prefill<T>(
        model, twice, std::ssize(tokens), executor,
        [&](layer_kv<T> const& kv) {
            for (sequence_cache<T>* const one : caches)
            {
                one->score_replay(kv, std::ssize(tokens), executor, scratch);
            }
        },
        [&](std::int64_t, std::int64_t) {
            if (interrupt_requested()) { throw interrupted{}; }
            return true;
        }));
}

} // namespace runner
