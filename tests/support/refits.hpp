/// \file refits.hpp: a packed layer with rows of later text, and its refitted values by their formulas
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/engine/unpack.hpp>
#include <mdkv/replay/refit.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

#include "host.hpp"
#include "packed.hpp"
#include "random.hpp"

namespace support
{

template <class T>
struct refit_case
{
    using host = mdkv::cpu::backend;

    packed_layer<T> layer;
    tensor<T, 3> queries, keys, values; // [H*G, rows, D], [H, N + W, D], [H, N + W, Dv]
    mdkv::refit_options<host> options;
    double lacked_without = 0, lacked_with = 0; ///< squares that judging rows' outputs lack, before and after
    std::vector<double> factors;                ///< of the heads that `expected` was asked for
    index_t shortened = 0;                      ///< changes that the bound shortens

    refit_case(packed_sizes const& s, index_t group, mdkv::refit_part const& rows, index_t first = 0)
        : layer{s}
        , queries{{s.heads * group, (rows.blocks + 1) * rows.each(group), s.dims.keys}}
        , keys{{s.heads, s.tokens + s.window, s.dims.keys}}
        , values{{s.heads, s.tokens + s.window, s.dims.values}}
    {
        source random{"refit", s.tokens + 1000 * s.dims.keys};
        std::vector<T> all;
        for (index_t i = 0; i < s.heads * group * queries.extent(1) * s.dims.keys; ++i)
        {
            all.push_back(mdkv::narrow<T>(static_cast<float>(2 * random.normal())));
        }
        queries.assign(all);
        for (index_t h = 0; h < s.heads; ++h)
        {
            for (index_t i = 0; i < s.tokens + s.window; ++i)
            {
                auto const copy = [&](auto const& own, auto const& window, auto& to) {
                    for (index_t d = 0; d < to.extent(2); ++d)
                    {
                        to.set(i < s.tokens ? own.get(h, i, d) : window.get(h, i - s.tokens, d), h, i, d);
                    }
                };
                copy(layer.keys, layer.window_keys, keys);
                copy(layer.values, layer.window_values, values);
            }
        }
        options.rows      = rows;
        options.first     = first;
        options.stand_ins = s.stand_ins;
    }

    /// Values [H, N, Dv] of kept tokens.
    [[nodiscard]] tensor<double, 3> expected(mdkv::cache_view<T const, mdkv::space::host> const& cache)
    {
        auto const& s      = layer.sizes;
        index_t const most = mdkv::most_rows(cache);
        tensor<T, 3> stored_keys{{s.heads, most, s.dims.keys}};
        tensor<T, 3> stored_values{{s.heads, most, s.dims.values}};
        tensor<index_t, 1> kept{{s.heads}};
        run([&](host const& on) { mdkv::unpack(on, cache, stored_keys.out(), stored_values.out(), kept.out()); });
        tensor<double, 3> all{{s.heads, s.tokens, s.dims.values}};
        for (index_t h = 0; h < s.heads; ++h) { add(all, h, stored_keys, stored_values, kept.get(h)); }
        return all;
    }

private:
    using numbers = std::vector<double>;

    [[nodiscard]] double scale() const { return 1 / std::sqrt(static_cast<double>(layer.sizes.dims.keys)); }

    [[nodiscard]] numbers row(tensor<T, 3> const& from, index_t h, index_t i) const
    {
        numbers all;
        for (index_t d = 0; d < from.extent(2); ++d) { all.push_back(double{mdkv::widen(from.get(h, i, d))}); }
        return all;
    }

    [[nodiscard]] static numbers turned(numbers const& x, index_t by)
    {
        numbers to{x};
        std::size_t const pairs = x.size() / 2;
        for (std::size_t i = 0; i < pairs; ++i)
        {
            double const angle = static_cast<double>(by)
                                 * std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(x.size()));
            to[i]         = std::cos(angle) * x[i] - std::sin(angle) * x[pairs + i];
            to[pairs + i] = std::sin(angle) * x[i] + std::cos(angle) * x[pairs + i];
        }
        return to;
    }

    [[nodiscard]] static double product(numbers const& a, numbers const& b)
    {
        return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
    }

    static void add_multiple(double by, numbers const& x, numbers& to)
    {
        for (std::size_t i = 0; i < x.size(); ++i) { to[i] += by * x[i]; }
    }

    void add(tensor<double, 3>& all, index_t h, tensor<T, 3> const& stored_keys, tensor<T, 3> const& stored_values,
        index_t kept)
    {
        auto const& s        = layer.sizes;
        index_t const group  = queries.extent(0) / s.heads;
        auto const& part     = options.rows;
        index_t const each   = part.each(group);
        index_t const tokens = s.tokens + s.window;
        auto const out       = static_cast<std::size_t>(s.dims.values);
        std::vector<index_t> slots; // positions of stored tokens, by rung
        for (index_t r = 1; r < static_cast<index_t>(s.rungs.size()); ++r)
        {
            for (index_t i = 0; i < s.tokens; ++i)
            {
                if (layer.rung.get(h, i) == r) { slots.push_back(i); }
            }
        }
        auto const n = static_cast<index_t>(slots.size());
        std::vector<numbers> weights, errors;
        index_t const of_block = group * each;
        for (index_t r = 0; r < (part.blocks + 1) * of_block; ++r)
        {
            index_t const block = r / of_block;
            index_t const place = r % each; // in the block
            index_t const begin = block == part.blocks ? tokens - part.span : options.first + block * part.apart;
            index_t const token = begin + place * part.step(group);
            numbers const own   = row(queries, h * group + r / each % group, block * each + place);
            numbers const later = turned(own, tokens - begin);
            auto const power    = [&](numbers const& q, numbers const& k) { return std::exp(product(q, k) * scale()); };
            double near = 0, whole = 0, packed = 0;
            numbers beside(out, 0), of_whole(out, 0), of_packed(out, 0), weight;
            auto const take = [&](double p, numbers const& v, double& sum, numbers& to) {
                sum += p;
                for (std::size_t d = 0; d < out; ++d) { to[d] += p * v[d]; }
            };
            for (index_t i = begin; i <= token; ++i)
            {
                take(power(own, row(keys, h, i)), row(values, h, i), near, beside);
            }
            for (index_t i = 0; i < tokens; ++i)
            {
                take(power(later, row(keys, h, i)), row(values, h, i), whole, of_whole);
            }
            for (index_t j = 0; j < kept; ++j)
            {
                double const p = power(later, row(stored_keys, h, j));
                take(p, row(stored_values, h, j), packed, of_packed);
                weight.push_back(p);
            }
            numbers error(out), a;
            for (std::size_t d = 0; d < out; ++d)
            {
                error[d] = (of_whole[d] + beside[d]) / (whole + near) - (of_packed[d] + beside[d]) / (packed + near);
            }
            for (std::size_t j = 0; j < static_cast<std::size_t>(n); ++j) { a.push_back(weight[j] / (packed + near)); }
            weights.push_back(a);
            errors.push_back(error);
        }
        auto const m       = static_cast<std::size_t>(n);
        auto const fitting = static_cast<std::size_t>(part.blocks * of_block);
        double trace       = 0;
        for (std::size_t r = 0; r < fitting; ++r) { trace += product(weights[r], weights[r]); }
        double const ridge = double{part.ridge} * trace / static_cast<double>(n);
        std::vector<numbers> change(out, numbers(m, 0)); // (A'A + ridge I) change = A'E, by conjugate gradients
        for (std::size_t d = 0; d < out; ++d)
        {
            numbers left(m, 0); // of the right side
            for (std::size_t r = 0; r < fitting; ++r) { add_multiple(errors[r][d], weights[r], left); }
            numbers direction{left};
            double square       = product(left, left);
            double const enough = 1e-28 * square;
            while (square > enough)
            {
                numbers image(m, 0);
                add_multiple(ridge, direction, image);
                for (std::size_t r = 0; r < fitting; ++r)
                {
                    add_multiple(product(weights[r], direction), weights[r], image);
                }
                double const by = square / product(direction, image);
                add_multiple(by, direction, change[d]);
                add_multiple(-by, image, left);
                double const before = square;
                square              = product(left, left);
                numbers next{left};
                add_multiple(square / before, direction, next);
                direction = next;
            }
        }
        double both   = 0; // product of the change of the judging rows' outputs, and what they lack
        double square = 0;
        for (std::size_t r = fitting; r < weights.size(); ++r)
        {
            for (std::size_t d = 0; d < out; ++d)
            {
                double const mended = product(weights[r], change[d]);
                both += mended * errors[r][d];
                square += mended * mended;
            }
        }
        double const factor = std::clamp(both / square, 0.0, 1.0);
        factors.push_back(factor);
        for (std::size_t r = fitting; r < weights.size(); ++r)
        {
            for (std::size_t d = 0; d < out; ++d)
            {
                double const mended = product(weights[r], change[d]);
                lacked_without += errors[r][d] * errors[r][d];
                lacked_with += std::pow(errors[r][d] - factor * mended, 2);
            }
        }
        for (std::size_t i = 0; i < m; ++i)
        {
            auto const value = [&](std::size_t d) {
                return double{mdkv::widen(layer.values.get(h, slots[i], static_cast<index_t>(d)))};
            };
            double changed = 0, stored = 0; // squares
            for (std::size_t d = 0; d < out; ++d)
            {
                changed += change[d][i] * change[d][i];
                stored += value(d) * value(d);
            }
            double const longest = double{part.most} * std::sqrt(stored / changed);
            shortened += longest < factor ? 1 : 0;
            for (std::size_t d = 0; d < out; ++d)
            {
                all.set(value(d) + std::min(factor, longest) * change[d][i], h, slots[i], static_cast<index_t>(d));
            }
        }
    }
};

} // namespace support
