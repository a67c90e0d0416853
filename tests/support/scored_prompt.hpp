/// \file scored_prompt.hpp: a random layer with all that policies score tokens by, and its softmax by the definition
#pragma once

#include <mdkv/core/types.hpp>

#include "runner/layers.hpp"
#include "runner/systems/prompt_layer.hpp"
#include "support/prompt.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace support
{

/// A layer with memory of its own; may be moved, not copied.
template <class T>
struct scored_prompt
{
    source random;
    std::vector<T> keys, values, queries;
    std::vector<float> lse;
    std::unique_ptr<runner::rotary> rotation; // of all but the last quarter of the coordinates
    runner::prompt_layer<T> layer;

    /// The last `query_tokens` queries are at hand.
    scored_prompt(prompt_sizes const& s, std::int64_t query_tokens)
        : random{"scored prompt", s.tokens + 1000 * s.group}
        , keys{random_rows<T>(random, s.heads * s.tokens * s.key_dim)}
        , values{random_rows<T>(random, s.heads * s.tokens * s.value_dim)}
        , queries{random_rows<T>(random, s.heads * s.group * query_tokens * s.key_dim, 2.0)} // attention has peaks
        , rotation{std::make_unique<runner::rotary>(s.key_dim / 4 * 3, 100.0, std::span<float const>{})}
        , layer{layer_of<T>(s, query_tokens)}
    {
        layer.layer  = 3;
        layer.layers = 5;
        connect();
    }

    /// The same layer as most policies' authors cache it: a head for every query head, keys and values repeated.
    [[nodiscard]] scored_prompt repeated() const
    {
        scored_prompt each{{layer.heads * layer.group, 1, layer.tokens, layer.window, layer.key_dim, layer.value_dim},
            layer.query_tokens};
        auto const repeat = [&](std::vector<T> const& from, std::vector<T>& to) {
            auto const size = static_cast<std::size_t>(std::ssize(from) / layer.heads);
            for (std::size_t h = 0; h < static_cast<std::size_t>(each.layer.heads); ++h)
            {
                std::size_t const of = h / static_cast<std::size_t>(layer.group);
                std::copy_n(from.data() + of * size, size, to.data() + h * size);
            }
        };
        repeat(keys, each.keys);
        repeat(values, each.values);
        each.queries = queries;
        each.connect();
        return each;
    }

    /// Lets the layer point at the vectors, and finds the log-sum-exps again after keys or queries were changed.
    void connect()
    {
        layer.keys     = keys.data();
        layer.values   = values.data();
        layer.queries  = queries.data();
        layer.rotation = rotation.get();
        lse.clear();
        for (std::int64_t head = 0; head < layer.heads * layer.group; ++head)
        {
            for (std::int64_t row = 0; row < layer.query_tokens; ++row)
            {
                double sum = 0;
                for (double const logit : logits(head, row)) { sum += std::exp(logit); }
                lse.push_back(static_cast<float>(std::log(sum)));
            }
        }
        layer.lse = lse.data();
    }

    [[nodiscard]] double key(std::int64_t head, std::int64_t token, std::int64_t d) const
    {
        return double{mdkv::widen(layer.keys[(head * layer.tokens + token) * layer.key_dim + d])};
    }
    [[nodiscard]] double value(std::int64_t head, std::int64_t token, std::int64_t d) const
    {
        return double{mdkv::widen(layer.values[(head * layer.tokens + token) * layer.value_dim + d])};
    }
    [[nodiscard]] double query(std::int64_t query_head, std::int64_t row, std::int64_t d) const
    {
        return double{mdkv::widen(layer.queries[(query_head * layer.query_tokens + row) * layer.key_dim + d])};
    }

    /// Of one query row, with the keys up to its own token.
    [[nodiscard]] std::vector<double> logits(std::int64_t query_head, std::int64_t row) const
    {
        std::vector<double> all;
        for (std::int64_t t = 0; t <= layer.tokens - layer.query_tokens + row; ++t)
        {
            double logit = 0;
            for (std::int64_t d = 0; d < layer.key_dim; ++d)
            {
                logit += query(query_head, row, d) * key(query_head / layer.group, t, d);
            }
            all.push_back(logit / std::sqrt(static_cast<double>(layer.key_dim)));
        }
        return all;
    }

    /// [heads, past]  sum over the rows and the group of the softmax; of past keys alone where `window_counts` is off.
    [[nodiscard]] std::vector<double> received(
        std::int64_t first_row, std::int64_t rows, bool window_counts = true) const
    {
        std::vector<double> sums(static_cast<std::size_t>(layer.heads * layer.past()), 0.0);
        for (std::int64_t head = 0; head < layer.heads * layer.group; ++head)
        {
            for (std::int64_t row = first_row; row < first_row + rows; ++row)
            {
                std::vector<double> p = logits(head, row);
                if (!window_counts) { p.resize(std::min(p.size(), static_cast<std::size_t>(layer.past()))); }
                double total = 0;
                for (double& x : p) { total += x = std::exp(x); }
                for (std::int64_t t = 0; t < std::min(layer.past(), static_cast<std::int64_t>(p.size())); ++t)
                {
                    sums[static_cast<std::size_t>(head / layer.group * layer.past() + t)] +=
                        p[static_cast<std::size_t>(t)] / total;
                }
            }
        }
        return sums;
    }
};

} // namespace support
