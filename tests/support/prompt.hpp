/// \file prompt.hpp: random layers of a prompt as policies see them, and decode steps after them
#pragma once

#include <doctest/doctest.h>

#include <mdkv/core/types.hpp>

#include "runner/scratch_memory.hpp"
#include "runner/systems/layer_cache.hpp"
#include "runner/systems/prompt_layer.hpp"
#include "support/packed.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace support
{

struct prompt_sizes
{
    std::int64_t heads     = 2;
    std::int64_t group     = 2;
    std::int64_t tokens    = 60;
    std::int64_t window    = 8;
    std::int64_t key_dim   = 16;
    std::int64_t value_dim = 16;
};

/// Rows of normal numbers, rounded to T.
template <class T>
[[nodiscard]] std::vector<T> random_rows(source& random, std::int64_t count, double size = 1.0)
{
    std::vector<T> rows;
    for (std::int64_t i = 0; i < count; ++i)
    {
        rows.push_back(mdkv::narrow<T>(static_cast<float>(size * random.normal())));
    }
    return rows;
}

/// A layer of these sizes, the last `query_tokens` queries at hand, without its numbers.
template <class T>
[[nodiscard]] runner::prompt_layer<T> layer_of(prompt_sizes const& s, std::int64_t query_tokens)
{
    runner::prompt_layer<T> layer;
    layer.heads        = s.heads;
    layer.group        = s.group;
    layer.tokens       = s.tokens;
    layer.window       = s.window;
    layer.key_dim      = s.key_dim;
    layer.value_dim    = s.value_dim;
    layer.query_tokens = query_tokens;
    return layer;
}

/// A layer with memory of its own.
template <class T>
struct random_prompt
{
    source random;
    std::vector<T> keys, values, queries;
    std::vector<float> lse;
    runner::prompt_layer<T> layer;

    explicit random_prompt(prompt_sizes const& s)
        : random{"prompt", s.tokens + 1000 * s.key_dim}
        , keys{random_rows<T>(random, s.heads * s.tokens * s.key_dim)}
        , values{random_rows<T>(random, s.heads * s.tokens * s.value_dim)}
        , queries{random_rows<T>(random, s.heads * s.group * s.window * s.key_dim)}
        , lse(static_cast<std::size_t>(s.heads * s.group * s.window))
        , layer{layer_of<T>(s, s.window)}
    {
        layer.keys    = keys.data();
        layer.values  = values.data();
        layer.queries = queries.data();
        layer.lse     = lse.data();
    }
    random_prompt(random_prompt const&)            = delete;
    random_prompt& operator=(random_prompt const&) = delete;

    /// [heads, past], 1 for about that share of the tokens.
    [[nodiscard]] std::vector<std::uint8_t> some_tokens(double share)
    {
        std::vector<std::uint8_t> kept;
        for (std::int64_t i = 0; i < layer.heads * layer.past(); ++i) { kept.push_back(random.uniform() < share); }
        return kept;
    }
};

/// Token t of head h in double.
template <class T>
[[nodiscard]] whole_token token_of(runner::prompt_layer<T> const& layer, std::int64_t h, std::int64_t t)
{
    whole_token token;
    for (std::int64_t d = 0; d < layer.key_dim; ++d)
    {
        token.key.push_back(double{mdkv::widen(layer.keys[(h * layer.tokens + t) * layer.key_dim + d])});
    }
    for (std::int64_t d = 0; d < layer.value_dim; ++d)
    {
        token.value.push_back(double{mdkv::widen(layer.values[(h * layer.tokens + t) * layer.value_dim + d])});
    }
    return token;
}

/// One decode step's inputs.
struct decode_step_rows
{
    std::vector<float> query, key, value; // [heads * group * key_dim], [heads * key_dim], [heads * value_dim]

    template <class T>
    decode_step_rows(source& random, runner::prompt_layer<T> const& layer)
        : query{random_rows<float>(random, layer.heads * layer.group * layer.key_dim)}
        , key{random_rows<float>(random, layer.heads * layer.key_dim)}
        , value{random_rows<float>(random, layer.heads * layer.value_dim)}
    {}

    /// The token as a cache of T holds it.
    template <class T>
    [[nodiscard]] whole_token token(runner::prompt_layer<T> const& layer, std::int64_t h) const
    {
        auto const rounded = [](float const* from, std::int64_t count) {
            std::vector<double> row;
            for (std::int64_t d = 0; d < count; ++d) { row.push_back(double{mdkv::widen(mdkv::narrow<T>(from[d]))}); }
            return row;
        };
        return {rounded(key.data() + h * layer.key_dim, layer.key_dim),
            rounded(value.data() + h * layer.value_dim, layer.value_dim)};
    }

    [[nodiscard]] std::vector<double> query_row(std::int64_t row, std::int64_t key_dim) const
    {
        auto const first = query.begin() + row * key_dim;
        return {first, first + key_dim};
    }
};

/// The largest difference between a cache's output [heads * group, value_dim] and attention by the definition over each
/// head's tokens.
template <class T>
[[nodiscard]] double attention_error(runner::prompt_layer<T> const& layer, decode_step_rows const& step,
    std::vector<std::vector<whole_token>> const& tokens, std::vector<float> const& output)
{
    double const scale = 1.0 / std::sqrt(static_cast<double>(layer.key_dim));
    double worst       = 0;
    for (std::int64_t row = 0; row < layer.heads * layer.group; ++row)
    {
        auto const h = static_cast<std::size_t>(row / layer.group);
        naive_attention const expected{tokens[h], step.query_row(row, layer.key_dim), layer.value_dim, scale};
        for (std::int64_t d = 0; d < layer.value_dim; ++d)
        {
            double const found = double{output[static_cast<std::size_t>(row * layer.value_dim + d)]};
            worst              = std::max(worst, std::abs(found - expected.output[static_cast<std::size_t>(d)]));
        }
    }
    return worst;
}

/// Appends tokens and checks that each attends over its head's `tokens` and those appended before it.
template <class T>
void check_appended(runner::layer_cache& cache, runner::scratch_memory& scratch, random_prompt<T>& prompt,
    std::vector<std::vector<whole_token>> tokens, int steps)
{
    auto const& layer = prompt.layer;
    std::vector<float> output(static_cast<std::size_t>(layer.heads * layer.group * layer.value_dim));
    for (int step = 0; step < steps; ++step)
    {
        CAPTURE(step);
        decode_step_rows const rows{prompt.random, layer};
        for (std::int64_t h = 0; h < layer.heads; ++h)
        {
            tokens[static_cast<std::size_t>(h)].push_back(rows.token(layer, h));
        }
        cache.attend({}, scratch, rows.query.data(), rows.key.data(), rows.value.data(), output.data());
        CHECK(attention_error(layer, rows, tokens, output) < 1e-5);
    }
}

} // namespace support
