/// \file layer.hpp: one layer's queries, keys and values with the structure of real ones, and the oracle's opinion of them
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>

#include "support/host.hpp"
#include "support/oracle.hpp"
#include "support/random.hpp"

#include <cmath>
#include <cstddef>
#include <optional>
#include <vector>

namespace support
{

struct layer_sizes
{
    index_t heads                      = 2;  // H
    index_t group                      = 2;  // G
    index_t queries                    = 8;  // Q
    index_t tokens                     = 64; // N
    index_t window                     = 8;  // W
    index_t dim                        = 32; // D
    index_t value_dim                  = 32; // Dv
    std::optional<index_t> first_query = std::nullopt;
    index_t rank                       = 1 << 20; ///< of keys and values
    double decay                       = 0.9;     ///< of the strength from one direction to the next
    double logits                      = 3.0;     ///< their typical size
    std::int64_t salt                  = 0;
};

/// Keys and values of decaying spectrum; the first token is a sink that every query likes, every hundredth a needle that
/// one query likes.
template <class T>
struct layer
{
    layer_sizes sizes;
    tensor<T, 3> queries;         // [H*G, Q, D]
    tensor<T, 3> keys;            // [H, N, D]
    tensor<T, 3> values;          // [H, N, Dv]
    tensor<T, 3> window_keys;     // [H, W, D]
    tensor<T, 3> window_values;   // [H, W, Dv]
    tensor<float, 3> key_basis;   // [H, D, D]    the hidden directions, strongest first
    tensor<float, 3> value_basis; // [H, Dv, Dv]

    explicit layer(layer_sizes const& s, placement how = {})
        : sizes{s}
        , queries{{s.heads * s.group, s.queries, s.dim}, how}
        , keys{{s.heads, s.tokens, s.dim}, how}
        , values{{s.heads, s.tokens, s.value_dim}, how}
        , window_keys{{s.heads, s.window, s.dim}, how}
        , window_values{{s.heads, s.window, s.value_dim}, how}
        , key_basis{{s.heads, s.dim, s.dim}}
        , value_basis{{s.heads, s.value_dim, s.value_dim}}
    {
        source random{"layer", s.salt * 1000003 + s.dim * 31 + s.value_dim};
        for (index_t h = 0; h < s.heads; ++h) { fill_head(random, h); }
    }

    [[nodiscard]] double scale() const { return 1.0 / std::sqrt(static_cast<double>(sizes.dim)); }
    [[nodiscard]] index_t first_query() const
    {
        return sizes.first_query.value_or(sizes.tokens + sizes.window - sizes.queries);
    }

private:
    template <class U>
    static void put(tensor<U, 3>& to, index_t h, index_t row, std::vector<double> const& v)
    {
        for (std::size_t d = 0; d < v.size(); ++d)
        {
            to.set(mdkv::narrow<U>(static_cast<float>(v[d])), h, row, static_cast<index_t>(d));
        }
    }

    void fill_head(source& random, index_t h)
    {
        spectrum const key_shape{random, sizes.dim, sizes.decay, sizes.rank};
        spectrum const value_shape{random, sizes.value_dim, sizes.decay, sizes.rank};
        for (index_t i = 0; i < sizes.dim; ++i) { put(key_basis, h, i, key_shape.direction(i)); }
        for (index_t i = 0; i < sizes.value_dim; ++i) { put(value_basis, h, i, value_shape.direction(i)); }

        // q.k * scale is then of the size asked for.
        double const query_size    = sizes.logits / scale() / key_shape.typical_product();
        std::vector<double> common = key_shape.draw(random, query_size);
        std::vector<double> wanted;
        for (index_t g = 0; g < sizes.group; ++g)
        {
            for (index_t i = 0; i < sizes.queries; ++i)
            {
                std::vector<double> q = key_shape.draw(random, query_size);
                for (std::size_t d = 0; d < q.size(); ++d) { q[d] = 0.5 * common[d] + 0.8 * q[d]; }
                put(queries, h * sizes.group + g, i, q);
                wanted = q;
            }
        }
        auto const liked_by = [&](std::vector<double> q) {
            double square = 0;
            for (double const x : q) { square += x * x; }
            for (double& x : q) { x *= 2.0 * sizes.logits / (square * scale() + 1e-30); }
            return q;
        };
        for (index_t t = 0; t < sizes.tokens; ++t)
        {
            bool const sink   = t == 0;
            bool const needle = t % 100 == 50;
            put(keys, h, t, sink ? liked_by(common) : needle ? liked_by(wanted) : key_shape.draw(random));
            put(values, h, t, value_shape.draw(random, sink ? 0.1 : 1.0 + random.uniform()));
        }
        for (index_t t = 0; t < sizes.window; ++t)
        {
            put(window_keys, h, t, key_shape.draw(random));
            put(window_values, h, t, value_shape.draw(random));
        }
    }
};

/// Rows of one head as the oracle wants them.
template <class T>
[[nodiscard]] oracle::matrix rows_of(tensor<T, 3> const& from, index_t head)
{
    oracle::matrix m{from.extent(1), from.extent(2)};
    for (index_t i = 0; i < m.rows; ++i)
    {
        for (index_t d = 0; d < m.cols; ++d) { m(i, d) = static_cast<oracle::real>(mdkv::widen(from.get(head, i, d))); }
    }
    return m;
}

/// b below a.
[[nodiscard]] inline oracle::matrix stacked(oracle::matrix a, oracle::matrix const& b)
{
    a.rows += b.rows;
    a.cols = b.cols;
    a.data.insert(a.data.end(), b.data.begin(), b.data.end());
    return a;
}

/// All queries of one KV head, one query head after another.
template <class T>
[[nodiscard]] oracle::matrix queries_of(layer<T> const& x, index_t head)
{
    oracle::matrix all{0, x.sizes.dim};
    for (index_t g = 0; g < x.sizes.group; ++g)
    {
        all = stacked(std::move(all), rows_of(x.queries, head * x.sizes.group + g));
    }
    return all;
}

/// num/den of the coordinates, rounded down to at least one unless dropped: the definition, spelt out once more.
[[nodiscard]] inline oracle::coordinates kept_of(mdkv::rung const& u, index_t dim, index_t value_dim)
{
    auto const part = [&](index_t d) {
        index_t const kept = d * u.num / u.den;
        return u.num > 0 && kept == 0 ? index_t{1} : kept;
    };
    int const bits = u.kind == mdkv::storage::int8 ? 8 : u.kind == mdkv::storage::int4 ? 4 : 0;
    return {part(dim), part(value_dim), bits};
}

template <class T>
[[nodiscard]] oracle::scores expected_scores(
    layer<T> const& x, index_t head, std::vector<mdkv::rung> const& rungs, oracle::scoring const& how = {})
{
    std::vector<oracle::coordinates> kept;
    for (mdkv::rung const& u : rungs) { kept.push_back(kept_of(u, x.sizes.dim, x.sizes.value_dim)); }
    return oracle::losses(queries_of(x, head), x.sizes.queries,
        stacked(rows_of(x.keys, head), rows_of(x.window_keys, head)), rows_of(x.values, head),
        rows_of(x.key_basis, head), rows_of(x.value_basis, head), kept, static_cast<oracle::real>(x.scale()),
        x.first_query(), how);
}

} // namespace support
