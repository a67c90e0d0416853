#pragma once

/// \file allocation.hpp: layers for tests of allocate, and the oracle: a bisection (real.hpp) with loops of its own.

#include <mdkv/core/types.hpp>
#include <mdkv/stages/allocate.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <utility>
#include <vector>

#include "random.hpp"
#include "real.hpp"

namespace support
{

using mdkv::allocation;
using mdkv::index_t;

constexpr float nan      = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

inline std::size_t at(index_t i)
{
    return static_cast<std::size_t>(i);
}

/// Losses and costs of one layer.
struct layer
{
    index_t heads  = 1;
    index_t tokens = 0;
    std::vector<index_t> cost;
    std::vector<bool> projected     = std::vector<bool>(cost.size(), false);
    std::vector<index_t> projection = std::vector<index_t>(cost.size(), 0);
    std::vector<bool> rotated       = std::vector<bool>(cost.size(), false);
    index_t channels                = 0; ///< bytes of a head's channels
    std::vector<float> loss         = std::vector<float>(at(heads * rungs() * tokens), 0.0F);

    [[nodiscard]] index_t rungs() const { return static_cast<index_t>(cost.size()); }
    [[nodiscard]] float& of(index_t h, index_t r, index_t i) { return loss[at((h * rungs() + r) * tokens + i)]; }
    [[nodiscard]] float of(index_t h, index_t r, index_t i) const { return loss[at((h * rungs() + r) * tokens + i)]; }

    /// These rungs need projections of so many bytes.
    void project(std::initializer_list<index_t> rungs_in_basis, index_t bytes)
    {
        for (index_t const r : rungs_in_basis)
        {
            projected[at(r)]  = true;
            projection[at(r)] = bytes;
        }
    }

    [[nodiscard]] index_t most() const { return heads * tokens * cost.back(); }

    [[nodiscard]] bool finite(index_t h, index_t i) const
    {
        bool all = true;
        for (index_t r = 0; r < rungs(); ++r) { all = all && std::isfinite(of(h, r, i)); }
        return all;
    }

    [[nodiscard]] mdkv::rung_costs costs() const
    {
        mdkv::rung_costs c;
        c.rungs    = cost.size();
        c.channels = channels;
        for (std::size_t r = 0; r < cost.size(); ++r)
        {
            c.bytes[r]      = cost[r];
            c.projection[r] = projection[r];
            c.rotated[r]    = rotated[r];
        }
        return c;
    }
};

struct outcome
{
    std::vector<std::uint8_t> rung; ///< [H, N]
    std::vector<allocation> report;

    [[nodiscard]] allocation const& one() const { return report.front(); }
};

/// To the bit.
inline bool same(allocation const& a, allocation const& b)
{
    return a.status == b.status && a.multiplier == b.multiplier && a.loss == b.loss && a.dual == b.dual
           && a.limit == b.limit && a.token_bytes == b.token_bytes && a.charged_bytes == b.charged_bytes
           && a.tokens == b.tokens;
}

inline bool same(outcome const& a, outcome const& b)
{
    return a.rung == b.rung
           && std::equal(a.report.begin(), a.report.end(), b.report.begin(), b.report.end(),
               [](allocation const& x, allocation const& y) { return same(x, y); });
}

/// Loss and bytes of an allocation, counted anew; tokens whose losses say nothing count for nothing.
struct account
{
    real loss      = 0;
    real magnitude = 0; ///< of the summands: what rounding is measured by
    index_t bytes  = 0;
    mdkv::array<index_t, mdkv::max_rungs> tokens{};
};

inline account count(layer const& in, std::vector<std::uint8_t> const& rung)
{
    account sum;
    for (index_t h = 0; h < in.heads; ++h)
    {
        for (index_t i = 0; i < in.tokens; ++i)
        {
            index_t const r = rung[at(h * in.tokens + i)];
            sum.bytes += in.cost[at(r)];
            ++sum.tokens[at(r)];
            if (!in.finite(h, i)) { continue; }
            sum.loss += static_cast<real>(in.of(h, r, i));
            sum.magnitude += std::fabs(static_cast<real>(in.of(h, r, i)));
        }
    }
    return sum;
}

/// The oracle: bisection, its own loop over everything, two hundred halvings.
struct bisected
{
    real multiplier = 0;
    std::vector<std::uint8_t> rung;
};

/// Bytes of the projections that pack would store: of every head's widest projected rung in use.
inline index_t charged(layer const& in, std::vector<std::uint8_t> const& rung)
{
    index_t sum = 0;
    for (index_t h = 0; h < in.heads; ++h)
    {
        index_t widest = 0;
        for (index_t i = 0; i < in.tokens; ++i)
        {
            widest = std::max(widest, in.projection[rung[at(h * in.tokens + i)]]);
        }
        sum += widest;
    }
    return sum;
}

inline bisected bisect(layer const& in, index_t limit)
{
    auto const at_multiplier = [&](real m) {
        bisected b{m, std::vector<std::uint8_t>(at(in.heads * in.tokens))};
        for (index_t h = 0; h < in.heads; ++h)
        {
            for (index_t i = 0; i < in.tokens; ++i)
            {
                index_t best = 0;
                for (index_t r = 1; in.finite(h, i) && r < in.rungs(); ++r)
                {
                    real const saved = static_cast<real>(in.of(h, best, i)) - static_cast<real>(in.of(h, r, i));
                    best             = saved > m * static_cast<real>(in.cost[at(r)] - in.cost[at(best)]) ? r : best;
                }
                b.rung[at(h * in.tokens + i)] = static_cast<std::uint8_t>(best);
            }
        }
        return b;
    };
    bisected const free = at_multiplier(0);
    if (count(in, free.rung).bytes <= limit) { return free; }
    real low  = 0;
    real high = 1e6;
    for (int halvings = 0; halvings < 90; ++halvings)
    {
        real const middle                                                   = (low + high) / 2;
        (count(in, at_multiplier(middle).rung).bytes <= limit ? high : low) = middle;
    }
    return at_multiplier(high);
}

/// Losses as a real layer has them: many small, few large, falling with the rung.
inline layer heavy_tailed(source& random, index_t heads, index_t tokens, std::vector<index_t> cost)
{
    layer in{heads, tokens, std::move(cost)};
    for (index_t h = 0; h < heads; ++h)
    {
        for (index_t i = 0; i < tokens; ++i)
        {
            double x = std::exp(2.0 * random.normal());
            for (index_t r = 0; r < in.rungs(); ++r)
            {
                in.of(h, r, i) = r + 1 == in.rungs() ? 0.0F : static_cast<float>(x);
                x *= random.uniform(0.3, 1.02); // now and then a costlier rung loses more
            }
        }
    }
    return in;
}

/// Ascending costs from 0.
inline std::vector<index_t> some_costs(source& random, index_t rungs)
{
    std::vector<index_t> cost{random.below(2) * random.below(9)};
    while (static_cast<index_t>(cost.size()) < rungs) { cost.push_back(cost.back() + 1 + random.below(64)); }
    return cost;
}

/// Every kind of float, and few distinct ones, so that there are ties.
inline float nasty(source& random)
{
    static constexpr std::array<float, 18> values{0.0F, -0.0F, 1.0F, 1.0F, 2.0F, 3.0F, 0.5F, -1.0F, 1e30F, -1e30F,
        3e38F, -3e38F, 1e-40F, 3e-45F, nan, infinity, -infinity, 1e-30F};
    return random.below(3) == 0 ? static_cast<float>(random.normal()) : values[at(random.below(values.size()))];
}

/// A layer whose projections cost something, in every order: which rung is wide has nothing to do with its bytes.
inline layer with_projections(source& random, index_t heads, index_t tokens, index_t rungs)
{
    layer in = heavy_tailed(random, heads, tokens, some_costs(random, rungs));
    for (index_t r = random.below(4) == 0 ? 0 : 1; r < in.rungs(); ++r)
    {
        if (random.below(2) == 0) { in.project({r}, random.below(3) * random.below(20 + 2 * tokens)); }
    }
    if (random.below(3) == 0)
    {
        for (float& x : in.loss) { x = std::round(4 * x) / 4; }
    }
    return in;
}

/// As little as there can be, and a random part of what there is beyond.
inline index_t some_limit(source& random, layer const& in)
{
    index_t const least = in.heads * (in.tokens * in.cost.front() + in.projection.front());
    index_t const most  = in.most() + in.heads * *std::max_element(in.projection.begin(), in.projection.end());
    index_t const range = std::max<index_t>(most - least, 1) / (1 + random.below(8));
    return least + random.below(range + 1);
}

} // namespace support
