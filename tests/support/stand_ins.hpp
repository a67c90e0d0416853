/// \file stand_ins.hpp: a layer of which tokens have been dropped, and its stand-ins by their formulas (real.hpp)
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/replay/stand_in.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "host.hpp"
#include "layer.hpp"
#include "random.hpp"
#include "real.hpp"

namespace support
{

template <class T>
struct stand_in_case
{
    layer<T> prompt;
    tensor<std::uint8_t, 2> rungs; // [H, N], three of four tokens dropped
    tensor<float, 2> lse;          // [H*G, Q]

    explicit stand_in_case(layer_sizes const& sizes, mdkv::stand_in_options const& options = {})
        : prompt{sizes}
        , rungs{{sizes.heads, sizes.tokens}}
        , lse{{sizes.heads * sizes.group, sizes.queries}}
        , scale{options.scale > 0 ? static_cast<real>(options.scale) : 1 / std::sqrt(static_cast<real>(sizes.dim))}
    {
        source random{"stand_ins", sizes.dim * 7919 + sizes.tokens};
        for (index_t h = 0; h < sizes.heads; ++h)
        {
            for (index_t i = 0; i < sizes.tokens; ++i)
            {
                rungs.set(static_cast<std::uint8_t>(random.uniform() < 0.75 ? 0 : 2), h, i);
            }
        }
        for (index_t q = 0; q < sizes.heads * sizes.group; ++q)
        {
            for (index_t t = 0; t < sizes.queries; ++t)
            {
                real sum = 0;
                for (index_t i = 0; i <= last(t) && i < sizes.tokens + sizes.window; ++i)
                {
                    sum += std::exp(logit(q, t, i));
                }
                lse.set(static_cast<float>(std::log(sum)), q, t);
            }
        }
    }

    struct rows
    {
        std::vector<double> keys, values; // [H, M, D]  zeros beyond a head's last stand-in
    };

    [[nodiscard]] mdkv::index_t dropped(mdkv::index_t h) const
    {
        mdkv::index_t count = 0;
        for (mdkv::index_t i = 0; i < prompt.sizes.tokens; ++i) { count += rungs.get(h, i) == 0 ? 1 : 0; }
        return count;
    }

    [[nodiscard]] rows expected(index_t clusters) const
    {
        rows made;
        for (index_t h = 0; h < prompt.sizes.heads; ++h)
        {
            index_t const own = std::min(clusters, dropped(h));
            auto const of     = clusters_of(h, own);
            for (index_t j = 0; j < own; ++j) { add(made, h, j, of); }
            made.keys.resize(static_cast<std::size_t>((h + 1) * clusters * prompt.sizes.dim), 0);
            made.values.resize(static_cast<std::size_t>((h + 1) * clusters * prompt.sizes.value_dim), 0);
        }
        return made;
    }

private:
    using index_t = mdkv::index_t;

    [[nodiscard]] index_t last(index_t t) const { return prompt.first_query() + t; }
    [[nodiscard]] real logit(index_t q, index_t t, index_t i) const
    {
        index_t const h = q / prompt.sizes.group;
        real sum        = 0;
        for (index_t d = 0; d < prompt.sizes.dim; ++d)
        {
            sum += real{mdkv::widen(prompt.queries.get(q, t, d))}
                   * real{mdkv::widen(i < prompt.sizes.tokens ? prompt.keys.get(h, i, d)
                                                              : prompt.window_keys.get(h, i - prompt.sizes.tokens, d))};
        }
        return sum * scale;
    }

    /// [N], the dropped tokens' clusters; -1 for others.
    [[nodiscard]] std::vector<index_t> clusters_of(index_t h, index_t clusters) const
    {
        std::vector<index_t> dropped;
        for (index_t i = 0; i < prompt.sizes.tokens; ++i)
        {
            if (rungs.get(h, i) == 0) { dropped.push_back(i); }
        }
        std::vector<index_t> of(static_cast<std::size_t>(prompt.sizes.tokens), -1);
        for (index_t const i : dropped)
        {
            real least = 0;
            for (index_t j = 0; j < clusters; ++j)
            {
                auto const n       = static_cast<index_t>(dropped.size());
                index_t const seed = dropped[static_cast<std::size_t>((2 * j + 1) * n / (2 * clusters))];
                real distance      = 0;
                for (index_t d = 0; d < prompt.sizes.dim; ++d)
                {
                    real const x =
                        real{mdkv::widen(prompt.keys.get(h, i, d))} - real{mdkv::widen(prompt.keys.get(h, seed, d))};
                    distance += x * x;
                }
                if (j == 0 || distance < least)
                {
                    of[static_cast<std::size_t>(i)] = j;
                    least                           = distance;
                }
            }
        }
        return of;
    }

    void add(rows& made, index_t h, index_t j, std::vector<index_t> const& of) const
    {
        layer_sizes const& s = prompt.sizes;
        auto const dim       = static_cast<std::size_t>(s.dim);
        std::vector<real> key(dim, 0), value(static_cast<std::size_t>(s.value_dim), 0);
        std::vector<real> shares;
        real total = 0;
        for (index_t g = 0; g < s.group; ++g)
        {
            for (index_t t = 0; t < s.queries; ++t)
            {
                real share = 0;
                for (index_t i = 0; i < s.tokens && i <= last(t); ++i)
                {
                    if (of[static_cast<std::size_t>(i)] != j) { continue; }
                    real const a = std::exp(logit(h * s.group + g, t, i) - real{lse.get(h * s.group + g, t)});
                    share += a;
                    for (index_t d = 0; d < s.dim; ++d)
                    {
                        key[static_cast<std::size_t>(d)] += a * real{mdkv::widen(prompt.keys.get(h, i, d))};
                    }
                    for (index_t d = 0; d < s.value_dim; ++d)
                    {
                        value[static_cast<std::size_t>(d)] += a * real{mdkv::widen(prompt.values.get(h, i, d))};
                    }
                }
                total += share;
                shares.push_back(share < real{0x1p-126} ? 0 : share); // as in float
            }
        }
        for (real& x : key) { x = total > 0 ? x / total : 0; }
        for (real& x : value) { x = total > 0 ? x / total : 0; }
        std::vector<real> direction(dim, 0);
        auto const lacking = [&](index_t g, index_t t, real share, real got) {
            return share > 0 ? real{lse.get(h * s.group + g, t)} + std::log(share) - got : real{0};
        };
        auto const product = [&](index_t g, index_t t, std::vector<real> const& with) {
            real sum = 0;
            for (index_t d = 0; d < s.dim; ++d)
            {
                sum += scale * real{mdkv::widen(prompt.queries.get(h * s.group + g, t, d))}
                       * with[static_cast<std::size_t>(d)];
            }
            return sum;
        };
        for (index_t g = 0; g < s.group; ++g)
        {
            for (index_t t = 0; t < s.queries; ++t)
            {
                real const share = shares[static_cast<std::size_t>(g * s.queries + t)];
                real const lacks = lacking(g, t, share, product(g, t, key));
                for (index_t d = 0; d < s.dim; ++d)
                {
                    direction[static_cast<std::size_t>(d)] +=
                        share * lacks * scale * real{mdkv::widen(prompt.queries.get(h * s.group + g, t, d))};
                }
            }
        }
        real squares = 0;
        real bends   = 0;
        real longest = INFINITY;
        for (real const x : direction) { squares += x * x; }
        for (index_t g = 0; g < s.group; ++g)
        {
            for (index_t t = 0; t < s.queries; ++t)
            {
                real const along = product(g, t, direction);
                real const share = shares[static_cast<std::size_t>(g * s.queries + t)];
                real const lacks = lacking(g, t, share, product(g, t, key));
                bends += share * along * along;
                if (along > 0) { longest = std::fmin(longest, std::fmax(lacks + std::log(real{8}), real{0}) / along); }
            }
        }
        for (std::size_t d = 0; d < dim; ++d)
        {
            real const step = bends > 0 ? std::fmin(squares / bends, longest) : 0;
            made.keys.push_back(static_cast<double>(key[d] + step * direction[d]));
        }
        for (real const x : value) { made.values.push_back(static_cast<double>(x)); }
    }

    real scale;
};

} // namespace support
