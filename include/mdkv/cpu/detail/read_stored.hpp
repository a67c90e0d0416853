/// \file read_stored.hpp: what a packed cache stands for, as vectors of the original dimension: stored projections as bases, tokens read back.
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/detail/stored_tokens.hpp>
#include <mdkv/cpu/detail/turn.hpp>
#include <mdkv/detail/narrow_within.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

namespace mdkv::cpu::detail
{

/// A head's stored projections as rows of bases, zero beyond the columns that are stored.
struct stored_bases
{
    float* of_keys    = nullptr; // [D, D]
    float* of_queries = nullptr; // [D, D]
    float* values     = nullptr; // [Dv, Dv]
};

/// Solves G x = b for every column b of `rows` [n, width], in place, G [n, n] symmetric and non-negative. A coordinate that
/// depends on those before it comes out as 0.
inline void solve_gram(double* gram, index_t n, double* rows, index_t width) noexcept
{
    constexpr double negligible = 1e-10;
    for (index_t j = 0; j < n; ++j)
    {
        double* const row = gram + j * n;
        double left       = row[j];
        for (index_t k = 0; k < j; ++k) { left -= row[k] * row[k]; }
        double const pivot = left > negligible * row[j] ? std::sqrt(left) : 0.0;
        row[j]             = pivot;
        for (index_t i = j + 1; i < n; ++i)
        {
            double sum = gram[i * n + j];
            for (index_t k = 0; k < j; ++k) { sum -= gram[i * n + k] * row[k]; }
            gram[i * n + j] = pivot > 0 ? sum / pivot : 0.0;
        }
    }
    auto const divide = [&](index_t i) {
        double const factor = gram[i * n + i] > 0 ? 1 / gram[i * n + i] : 0.0;
        for (index_t d = 0; d < width; ++d) { rows[i * width + d] *= factor; }
    };
    auto const subtract = [&](index_t i, index_t k, double factor) {
        for (index_t d = 0; d < width; ++d) { rows[i * width + d] -= factor * rows[k * width + d]; }
    };
    for (index_t i = 0; i < n; ++i)
    {
        for (index_t k = 0; k < i; ++k) { subtract(i, k, gram[i * n + k]); }
        divide(i);
    }
    for (index_t i = n; i-- > 0;)
    {
        for (index_t k = i + 1; k < n; ++k) { subtract(i, k, gram[k * n + i]); }
        divide(i);
    }
}

/// Reads a head's projections. What brings queries to coordinates is stored; what brought keys there is not, and need not
/// be the same: it is taken to be the one of least squares, which is the same where the rows are orthonormal, and which
/// gives a stored key's own coordinates in any case.
/// \param scratch   [2 * D * D]
template <element T>
void read_bases(cache_view<T, space::host> const& cache, index_t h, stored_bases const& to, double* scratch) noexcept
{
    head_entry const& entry     = cache.heads[h];
    auto const [dim, value_dim] = cache.layout.dims;
    auto const stored           = [&](index_t begin, index_t i) {
        T value;
        std::memcpy(static_cast<void*>(&value), cache.arena + begin + i * index_t{sizeof(T)}, sizeof value);
        return widen(value);
    };
    std::fill_n(to.of_keys, dim * dim, 0.0F);
    std::fill_n(to.of_queries, dim * dim, 0.0F);
    std::fill_n(to.values, value_dim * value_dim, 0.0F);
    for (index_t i = 0; i < entry.value_columns * value_dim; ++i) { to.values[i] = stored(entry.value_projection, i); }
    index_t const n    = entry.key_columns;
    double* const gram = scratch;
    double* const rows = scratch + n * n;
    for (index_t d = 0; d < dim; ++d)
    {
        for (index_t c = 0; c < n; ++c)
        {
            float const x              = stored(entry.key_projection, d * n + c);
            to.of_queries[c * dim + d] = x;
            rows[c * dim + d]          = double{x};
        }
    }
    for (index_t i = 0; i < n; ++i)
    {
        for (index_t j = 0; j <= i; ++j)
        {
            double sum = 0;
            for (index_t d = 0; d < dim; ++d) { sum += rows[i * dim + d] * rows[j * dim + d]; }
            gram[i * n + j] = gram[j * n + i] = sum;
        }
    }
    solve_gram(gram, n, rows, dim);
    for (index_t i = 0; i < n * dim; ++i) { to.of_keys[i] = static_cast<float>(rows[i]); }
}

/// A vector from its coordinates; `basis` null where they are the vector itself.
/// \param room          [dim]
template <element T>
void rebuild(float const* coordinates, index_t n, float const* basis, index_t dim, float* room, T* out) noexcept
{
    float const* vector = coordinates;
    if (basis != nullptr)
    {
        std::fill_n(room, dim, 0.0F);
        for (index_t c = 0; c < n; ++c)
        {
            for (index_t d = 0; d < dim; ++d) { room[d] += coordinates[c] * basis[c * dim + d]; }
        }
        vector = room;
    }
    for (index_t d = 0; d < dim; ++d)
    {
        T const x = mdkv::detail::narrow_within<T>(vector[d]);
        std::memcpy(static_cast<void*>(out + d), &x, sizeof x);
    }
}

/// Token `slot` of head h as key [D] and value [Dv]: exact ones bit for bit.
/// \param room   [2 * max(D, Dv)]
template <element T>
void read_token(cache_view<T, space::host> const& cache, index_t h, index_t slot, stored_bases const& bases,
    float* room, T* key, T* value) noexcept
{
    stored_token const token = token_at(cache, h, slot);
    if (token.rung == cache.layout.rungs)
    {
        token.copy_exact(key, value);
        return;
    }
    auto const [dim, value_dim] = cache.layout.dims;
    bool const in_basis         = cache.layout.projected(token.rung);
    bool const turned           = cache.layout.turned(token.rung);
    float* const more           = room + std::max(dim, value_dim);
    auto const read             = [&](stored_side const& from) {
        read_coordinates<T>(from, token.place, room);
        if (turned) { turn_row(room, from.coordinates); } // back
    };
    read(token.run.keys);
    rebuild(room, token.run.keys.coordinates, in_basis ? bases.of_queries : nullptr, dim, more, key);
    read(token.run.values);
    rebuild(room, token.run.values.coordinates, in_basis ? bases.values : nullptr, value_dim, more, value);
}

} // namespace mdkv::cpu::detail
