/// \file attention_scores.hpp: how much attention past tokens receive from a run of queries, by the library's own score
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/stages/pool.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "prompt_layer.hpp"
#include "runner/scratch_memory.hpp"

namespace runner
{

namespace detail
{

/// Query rows of one call of score: its scratch grows with them, and early rows need not pass over late keys.
inline constexpr std::int64_t attention_rows = 256;

/// Adds to received [heads, past] the attention that the rows give. The first `seen` tokens are scored. The tokens after
/// them, up to the last row's own, are the score's window, which takes part in the softmax alone.
template <mdkv::element T>
void add_received(prompt_layer<T> const& layer, std::int64_t first_row, std::int64_t rows,
    mdkv::cpu::executor_ref executor, scratch_memory& scratch, std::vector<float>& received)
{
    using mdkv::in;
    using mdkv::out;
    using mdkv::slice;
    std::int64_t const place       = layer.tokens - layer.query_tokens + first_row; // the first row's, in the prompt
    std::int64_t const seen        = std::min(layer.past(), place + rows);
    std::int64_t const query_heads = layer.heads * layer.group;

    // Dropping a token loses 2 P |v|: with |v| = 1/2 that is P itself, exactly.
    std::vector<T> const halves(static_cast<std::size_t>(seen), mdkv::narrow<T>(0.5F));
    std::vector<float> loss(static_cast<std::size_t>(2 * layer.heads * seen)); // [heads, 2, seen]
    constexpr std::array rungs{mdkv::drop, mdkv::full};
    mdkv::ratio_set const ratios{rungs}; // at run time, like mixed policies' sets: one instantiation serves both
    scratch.run(executor, [&](mdkv::cpu::backend on) {
        auto const keys = in(on, layer.keys, layer.heads, layer.tokens, layer.key_dim);
        mdkv::score_options<mdkv::cpu::backend> options{.first_query = place};
        if (layer.lse != nullptr)
        {
            options.lse = slice<1>(in(on, layer.lse, query_heads, layer.query_tokens), first_row, rows);
        }
        mdkv::score(on,
            slice<1>(in(on, layer.queries, query_heads, layer.query_tokens, layer.key_dim), first_row, rows),
            slice<1>(keys, 0, seen), in(on, halves.data(), {layer.heads, seen, 1}, {0, 1, 1}),
            slice<1>(keys, seen, place + rows - seen), in(on, static_cast<float const*>(nullptr), 0, 0, 0),
            in(on, static_cast<float const*>(nullptr), 0, 0, 0), ratios, options,
            out(on, loss.data(), layer.heads, 2, seen));
    });
    for (std::int64_t h = 0; h < layer.heads; ++h)
    {
        float const* const from = loss.data() + 2 * h * seen;
        float* const to         = received.data() + h * layer.past();
        for (std::int64_t t = 0; t < seen; ++t) { to[t] += from[t]; }
    }
}

} // namespace detail

/// The probabilities each past token receives, summed over rows [first_row, first_row + rows) of layer.queries and over
/// the query heads that share a cached head. A row's softmax runs over all keys up to its own token, the window's keys
/// included, which is the rule of SnapKV and its successors. If the layer's window is 0, all its tokens are scored.
///
/// \return [heads, past]
/// \throws mdkv::invalid_argument   the rows leave the layer's queries
template <mdkv::element T>
[[nodiscard]] std::vector<float> received_attention(prompt_layer<T> const& layer, std::int64_t first_row,
    std::int64_t rows, mdkv::cpu::executor_ref executor, scratch_memory& scratch)
{
    mdkv::expects(first_row >= 0 && rows >= 1 && first_row <= layer.query_tokens - rows, "received_attention: rows ",
        first_row, " to ", first_row + rows - 1, " leave the ", layer.query_tokens, " queries of the layer");
    std::vector<float> received(static_cast<std::size_t>(layer.heads * layer.past()), 0.0F);
    if (received.empty()) { return received; }
    for (std::int64_t row = first_row; row < first_row + rows; row += detail::attention_rows)
    {
        std::int64_t const count = std::min(detail::attention_rows, first_row + rows - row);
        detail::add_received(layer, row, count, executor, scratch, received);
    }
    return received;
}

/// Lets neighbours share their scores, each head apart.
///
/// \param scores   [heads, past]
/// \return [heads, past]
/// \throws mdkv::invalid_argument   the width is not odd, or the heads do not divide the scores
[[nodiscard]] inline std::vector<float> pooled_scores(std::vector<float> const& scores, std::int64_t heads,
    mdkv::pool_options options, mdkv::cpu::executor_ref executor, scratch_memory& scratch)
{
    auto const size = static_cast<std::int64_t>(scores.size());
    mdkv::expects(heads > 0 && size % heads == 0, "pooled_scores: ", size, " scores are no whole number of tokens for ",
        heads, " heads");
    std::vector<float> pooled(scores.size());
    scratch.run(executor, [&](mdkv::cpu::backend on) {
        mdkv::pool(on, mdkv::in(on, scores.data(), heads, 1, size / heads), options,
            mdkv::out(on, pooled.data(), heads, 1, size / heads));
    });
    return pooled;
}

} // namespace runner
