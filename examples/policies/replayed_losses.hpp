/// \file replayed_losses.hpp: losses of a prompt's tokens by its own queries, replayed chunk by chunk, or by those of a second reading
#pragma once

#include <mdkv/advance.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/replay.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "../runner/language_model.hpp"
#include "../runner/layers.hpp"
#include "../runner/policies.hpp"
#include "../runner/prefill.hpp"
#include "../runner/scratch_memory.hpp"

namespace runner
{

inline constexpr std::int64_t replay_sinks = 4; // first keys of a prompt, seen from every chunk
static_assert(detail::chunk_tokens == prefill_chunk);

/// A layer's losses, scored while prefill has its queries. Takes the memory of the losses and of a chunk's queries.
template <mdkv::element T>
class replayed_losses
{
public:
    /// \param chunk    of prefill, which may reach beyond `past` and the prompt that is compressed
    /// \param past     its first tokens, which may be dropped
    void add(policy const& chosen, model_shape const& shape, rotary const& rotation, layer_chunk<T> const& chunk,
        std::int64_t past, mdkv::cpu::executor_ref executor, scratch_memory& scratch)
    {
        auto const rungs = static_cast<std::int64_t>(chosen.ratios.size());
        losses_.resize(static_cast<std::size_t>(shape.kv_heads * rungs * past));
        std::int64_t const end = std::min(chunk.first + chunk.count, past);
        for (std::int64_t first = chunk.first; first < end; first += chosen.chunk)
        {
            std::int64_t const count = std::min(chosen.chunk, end - first);
            scratch.run(executor, [&](mdkv::cpu::backend on) {
                using mdkv::in;
                using mdkv::slice;
                std::span<double const> const frequencies = rotation.frequencies();
                auto const [H, Hq, D] = std::array{shape.kv_heads, shape.query_heads, shape.key_dim};
                auto const queries    = in(on, chunk.queries, {Hq, chunk.count, D}, {D, Hq * D, 1});
                auto const keys       = in(on, chunk.keys, H, chunk.tokens, D);
                auto const values     = in(on, chunk.values, H, chunk.tokens, shape.value_dim);
                mdkv::replay(on, slice<1>(queries, first - chunk.first, count), slice<1>(keys, first, count),
                    slice<1>(values, first, count), slice<1>(keys, 0, std::min(first, replay_sinks)), chosen.ratios,
                    {.ahead           = chosen.ahead,
                        .own          = chosen.own,
                        .encoding     = {.rotating = 2 * std::ssize(frequencies),
                                .pairs             = rotation.pairs(),
                                .frequencies       = in(on, frequencies.data(), std::ssize(frequencies))},
                        .quantisation = chosen.quantisation,
                        .over         = chosen.over},
                    slice<2>(mdkv::out(on, losses_.data(), H, rungs, past), first, count));
            });
        }
    }

    /// Losses by the queries of a second reading, the last ones of `kv`: they see everything before them.
    void add_real(policy const& chosen, model_shape const& shape, layer_kv<T> const& kv, std::int64_t past,
        mdkv::cpu::executor_ref executor, scratch_memory& scratch)
    {
        auto const rungs = static_cast<std::int64_t>(chosen.ratios.size());
        losses_.resize(static_cast<std::size_t>(shape.kv_heads * rungs * past));
        scratch.run(executor, [&](mdkv::cpu::backend on) {
            using mdkv::in;
            using mdkv::slice;
            auto const keys   = in(on, kv.keys, shape.kv_heads, kv.tokens, shape.key_dim);
            auto const values = in(on, kv.values, shape.kv_heads, kv.tokens, shape.value_dim);
            auto const none   = in(on, static_cast<float const*>(nullptr), 0, 0, 0);
            mdkv::score(on, in(on, kv.queries, shape.query_heads, kv.window, shape.key_dim), slice<1>(keys, 0, past),
                slice<1>(values, 0, past), slice<1>(keys, past, kv.tokens - past), none, none, chosen.ratios,
                {.first_query     = kv.tokens - kv.window,
                    .lse          = in(on, kv.lse, shape.query_heads, kv.window),
                    .quantisation = chosen.quantisation,
                    .over         = chosen.over},
                mdkv::out(on, losses_.data(), shape.kv_heads, rungs, past));
        });
    }

    /// [heads, R, past]
    [[nodiscard]] std::vector<float> const& all() const noexcept { return losses_; }

private:
    std::vector<float> losses_;
};

} // namespace runner
