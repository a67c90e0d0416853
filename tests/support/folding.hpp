/// \file folding.hpp: a cache that grows and is folded, and everything that recompress promises about single tokens of it
#pragma once

#include <mdkv/append.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <type_traits>
#include <vector>

namespace support
{

/// Rungs of every kind, for elements of two bytes and dimensions of 40 and 24.
inline std::vector<mdkv::rung> const every_kind{mdkv::drop, mdkv::fraction(1, 4).as(mdkv::storage::int8),
    mdkv::fraction(1, 4), mdkv::full_int4, mdkv::fraction(3, 4).as(mdkv::storage::int8), mdkv::full};

[[nodiscard]] inline std::vector<mdkv::rung> listed(auto const& ratios)
{
    return {ratios.begin(), ratios.end()};
}

/// Codes of rotated coordinates, and dimensions whose groups are rotated, of more than one group.
inline std::vector<mdkv::rung> const turned_kinds{mdkv::drop, mdkv::full_int4, mdkv::full_int8, mdkv::full};
inline constexpr mdkv::head_dims turned_dims{128, 80};

/// Heads of 10 and 6 tokens at 1/8, of whose bytes the projections are most. `short_limit` holds 10 + 10 full tokens
/// beside the window, or the projections and 8 tokens at 1/8, but not what is stored.
inline constexpr mdkv::index_t short_limit = (2 * 4 + 32 + 1) * 512;
[[nodiscard]] inline packed_layer<mdkv::half> short_heads()
{
    packed_layer<mdkv::half> layer{
        {.heads = 2, .tokens = 10, .window = 4, .dims = {128, 128}, .rungs = listed(mdkv::paper_ratios)}, 1};
    for (index_t t = 6; t < 10; ++t) { layer.rung.set(0, 1, t); }
    return layer;
}

/// A cache that tokens are appended to; head 0 uses no projection.
template <class T>
struct growing_cache
{
    static constexpr index_t group = 2;

    packed_layer<T> layer;
    mdkv::cpu::cache<T> cache;
    source random{"recompress"};

    explicit growing_cache(std::vector<mdkv::rung> const& rungs, index_t tail = 24,
        std::pmr::memory_resource* resource = std::pmr::get_default_resource(), mdkv::head_dims dims = {40, 24})
        : layer{packed_sizes{.heads = 3, .tokens = 70, .window = 4, .dims = dims, .rungs = rungs}}
    {
        for (index_t t = 0; t < layer.sizes.tokens; ++t)
        {
            std::size_t r = layer.rung.get(0, t);
            while (layer.ratios[r].projected()) { --r; }
            layer.rung.set(static_cast<std::uint8_t>(r), 0, t);
        }
        cache = layer.packed(tail, {}, resource);
    }

    [[nodiscard]] auto view() const { return cache.view(); }
    /// Of one token in all heads, exact.
    [[nodiscard]] index_t token_bytes() const
    {
        return 3 * (layer.sizes.dims.keys + layer.sizes.dims.values) * index_t{sizeof(T)};
    }
    [[nodiscard]] index_t window_bytes() const { return 4 * token_bytes(); }

    tensor<T, 3> draw(index_t rows, index_t count, index_t dim)
    {
        tensor<T, 3> x{{rows, count, dim}};
        for (index_t h = 0; h < rows; ++h)
        {
            for (index_t t = 0; t < count; ++t)
            {
                for (index_t d = 0; d < dim; ++d)
                {
                    x.set(mdkv::narrow<T>(static_cast<float>(random.normal())), h, t, d);
                }
            }
        }
        return x;
    }

    /// One row a head, most of it along the head's leading directions.
    tensor<T, 3> draw_token(tensor<float, 3> const& basis)
    {
        tensor<T, 3> x{{1, 3, basis.extent(2)}};
        for (index_t h = 0; h < 3; ++h)
        {
            std::vector<double> row(static_cast<std::size_t>(basis.extent(2)));
            for (index_t c = 0; c < basis.extent(1); ++c)
            {
                double const size = random.normal() * 2 * std::pow(0.6, static_cast<double>(c));
                for (index_t d = 0; d < basis.extent(2); ++d)
                {
                    row[static_cast<std::size_t>(d)] += size * double{basis.get(h, c, d)};
                }
            }
            for (index_t d = 0; d < basis.extent(2); ++d)
            {
                x.set(mdkv::narrow<T>(static_cast<float>(row[static_cast<std::size_t>(d)])), 0, h, d);
            }
        }
        return x;
    }

    void append(index_t count)
    {
        for (index_t i = 0; i < count; ++i)
        {
            auto const key = draw_token(layer.key_basis);
            add(key, draw_token(layer.value_basis));
        }
    }

    /// Appends [1, H, D] and [1, H, Dv].
    void add(tensor<T, 3> const& key, tensor<T, 3> const& value)
    {
        run([&, this](mdkv::cpu::backend const& on) {
            mdkv::append(on, mdkv::in(on, key.data(), 3, key.extent(2)), mdkv::in(on, value.data(), 3, value.extent(2)),
                cache.view());
        });
    }
};

/// What must be the same where nothing was changed.
template <class T>
struct cache_contents
{
    std::vector<std::byte> arena;
    std::vector<mdkv::head_entry> heads;
    mdkv::cache_layout layout;
    index_t appended = 0;

    explicit cache_contents(mdkv::cpu::cache<T> const& cache)
        : arena{cache.view().arena, cache.view().arena + cache.arena_bytes()}
        , heads{cache.view().heads, cache.view().heads + cache.layout().heads}
        , layout{cache.layout()}
        , appended{cache.appended()}
    {}
    friend bool operator==(cache_contents const&, cache_contents const&) = default;
};

/// The vectors of one side of a token, as it was and as it is: numbers stored, and what they stand for.
struct change
{
    std::vector<double> const& stored_before;
    std::vector<double> const& stored_after;
    std::vector<double> const& before;
    std::vector<double> const& after;
    std::vector<double> mean; ///< of every channel of keys, which codes of their own coordinates lack; zeros for values
    std::vector<double> scale; ///< by which these are divided; ones for values
};

/// How far rounding to codes may take a vector's coordinate c.
[[nodiscard]] inline double rounding(std::vector<double> const& x, std::size_t c, mdkv::storage kind)
{
    if (kind == mdkv::storage::plain) { return 0; }
    auto const begin = x.begin() + static_cast<std::ptrdiff_t>(c / 64 * 64);
    auto const end   = x.begin() + static_cast<std::ptrdiff_t>(std::min(x.size(), c / 64 * 64 + 64));
    auto const range = std::minmax_element(begin, end);
    return 0.505 * (*range.second - *range.first) / (kind == mdkv::storage::int8 ? 255 : 15);
}

/// Errors of a token that went down, in units of what rounding allows: its vector's coordinates, turned where they are
/// stored so, or those in the basis.
/// \param unit   of the element type, in units of a half's
inline void add_errors(worst_error& worst, change const& x, mdkv::rung const& now, bool projected_before,
    tensor<float, 3> const& basis, index_t h, double unit)
{
    double norm = 0;
    for (double const v : x.before) { norm += v * v; }
    double const slack         = unit * (4e-3 * std::sqrt(norm) + 1e-3); // elements, and projections of them
    std::vector<double> wanted = x.before;
    if (now.projected())
    {
        wanted = x.stored_before;
        for (std::size_t c = 0; c < x.stored_after.size() && !projected_before; ++c)
        {
            double sum = 0;
            for (std::size_t d = 0; d < x.before.size(); ++d)
            {
                sum += x.before[d] * double{basis.get(h, static_cast<index_t>(c), static_cast<index_t>(d))};
            }
            wanted[c] = sum;
        }
        wanted.resize(x.stored_after.size());
    }
    std::vector<double> got = x.stored_after;
    if (now.quantised() && !now.projected()) // half a step of what was coded
    {
        for (std::size_t c = 0; c < wanted.size(); ++c)
        {
            got[c]    = (got[c] - x.mean[c]) / x.scale[c];
            wanted[c] = (wanted[c] - x.mean[c]) / x.scale[c];
        }
        got    = rotated(got);
        wanted = rotated(wanted);
    }
    for (std::size_t c = 0; c < wanted.size(); ++c)
    {
        worst.add(static_cast<long double>(got[c]), static_cast<long double>(wanted[c]),
            static_cast<long double>(slack + rounding(wanted, c, now.kind)));
    }
}

template <class T>
[[nodiscard]] std::size_t rung_of(growing_cache<T> const& g, stored_token<T> const& token)
{
    return token.rung < 0 ? g.layer.ratios.size() - 1 : static_cast<std::size_t>(token.rung);
}

/// Everything a fold promises about single tokens.
template <class T>
struct fold_check
{
    std::vector<std::vector<stored_token<T>>> tokens; // [H] before
    std::vector<std::vector<whole_token>> whole;
    std::vector<mdkv::head_entry> heads;
    worst_error worst;
    index_t stayed = 0, lowered = 0, dropped = 0, up = 0, changed = 0, misplaced = 0;
    index_t from_turned = 0; ///< of those lowered

    explicit fold_check(growing_cache<T> const& g)
        : heads{g.view().heads, g.view().heads + 3}
    {
        for (index_t h = 0; h < 3; ++h)
        {
            tokens.push_back(stored_tokens(g.view(), h));
            whole.push_back(reconstructed_tokens(g.view(), h));
        }
    }

    void compare(growing_cache<T> const& g, tensor<std::int32_t, 2> const& sources)
    {
        for (index_t h = 0; h < 3; ++h)
        {
            auto const at      = static_cast<std::size_t>(h);
            auto const now     = stored_tokens(g.view(), h);
            auto const current = reconstructed_tokens(g.view(), h);
            std::vector<bool> seen(tokens[at].size());
            for (std::size_t i = 0; i < now.size(); ++i)
            {
                auto const from = static_cast<std::size_t>(sources.get(h, static_cast<index_t>(i)));
                if (from >= seen.size() || seen[from])
                {
                    ++misplaced;
                    continue;
                }
                seen[from] = true;
                compare(g, h, tokens[at][from], now[i], whole[at][from], current[i]);
            }
            for (index_t i = static_cast<index_t>(now.size()); i < sources.extent(1); ++i)
            {
                misplaced += sources.get(h, i) == -1 ? 0 : 1;
            }
            dropped += static_cast<index_t>(seen.size() - now.size());
            // The window is the last tokens there were.
            for (std::size_t i = 1; i <= 4; ++i)
            {
                auto const from = sources.get(h, static_cast<index_t>(now.size() - i));
                misplaced += from == static_cast<std::int32_t>(seen.size() - i) ? 0 : 1;
            }
            CHECK(g.view().heads[h].key_columns <= heads[at].key_columns);
            CHECK(g.view().heads[h].value_columns <= heads[at].value_columns);
        }
    }

private:
    static constexpr double unit = std::is_same_v<T, mdkv::bfloat16> ? 8 : 1;

    void compare(growing_cache<T> const& g, index_t h, stored_token<T> const& before, stored_token<T> const& after,
        whole_token const& old_vectors, whole_token const& new_vectors)
    {
        std::size_t const was = rung_of(g, before);
        std::size_t const is  = rung_of(g, after);
        mdkv::rung const& now = g.layer.ratios[is];
        up += is > was ? 1 : 0;
        if (is == was)
        {
            ++stayed;
            bool const same = same_bits(before.key, after.key) && same_bits(before.value, after.value)
                              && before.key_numbers == after.key_numbers && before.value_numbers == after.value_numbers;
            changed += same ? 0 : 1;
            return;
        }
        ++lowered;
        from_turned += was < g.layer.layout.rungs && g.layer.layout.rotated(was) ? 1 : 0;
        bool const cut = before.projected && now.projected() && !before.key.empty() && !now.quantised();
        if (cut)
        {
            bool const leading =
                std::equal(after.key_numbers.begin(), after.key_numbers.end(), before.key_numbers.begin())
                && std::equal(after.value_numbers.begin(), after.value_numbers.end(), before.value_numbers.begin());
            changed += leading ? 0 : 1;
        }
        std::vector<double> mean(static_cast<std::size_t>(g.layer.sizes.dims.keys));
        std::vector<double> scale(mean.size(), 1.0);
        for (std::size_t c = 0; now.rotated() && c < mean.size(); ++c)
        {
            mean[c]  = key_mean<T>(g.view(), h, static_cast<index_t>(c));
            scale[c] = key_scale<T>(g.view(), h, static_cast<index_t>(c));
        }
        add_errors(worst, {before.key_numbers, after.key_numbers, old_vectors.key, new_vectors.key, mean, scale}, now,
            before.projected, g.layer.key_basis, h, unit);
        mean.assign(static_cast<std::size_t>(g.layer.sizes.dims.values), 0.0);
        scale.assign(mean.size(), 1.0);
        for (std::size_t c = 0; now.rotated() && c < mean.size(); ++c)
        {
            mean[c] = value_mean<T>(g.view(), h, static_cast<index_t>(c));
        }
        add_errors(worst,
            {before.value_numbers, after.value_numbers, old_vectors.value, new_vectors.value, mean, scale}, now,
            before.projected, g.layer.value_basis, h, unit);
    }
};

} // namespace support
