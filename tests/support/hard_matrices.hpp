/// \file hard_matrices.hpp: Gram matrices whose eigenvalues are equal, zero, huge, tiny or far apart.
#pragma once

#include <mdkv/core/types.hpp>

#include "support/host.hpp"

#include <cmath>

namespace support
{

/// [9, dim, dim]: 2 I; 1e-30 I; 1 + I; rank one of 1e30; zeros; below double's normal range; a diagonal that falls from 1 by
/// a factor of 8 a row, and its mirror image, each with as much beside it as leaves it positive; rows 0 and dim - 1 alone.
inline tensor<double, 3> hard_matrices(mdkv::index_t dim)
{
    using mdkv::index_t;
    tensor<double, 3> gram{{9, dim, dim}};
    for (index_t i = 0; i < dim; ++i)
    {
        for (index_t j = 0; j < dim; ++j)
        {
            double const same = i == j ? 1.0 : 0.0;
            auto const fall   = [](index_t a, index_t b) {
                return std::ldexp(a == b ? 1.0 : 0.25, static_cast<int>(-3 * (a > b ? 2 * a - b : 2 * b - a)));
            };
            gram.set(2.0 * same, 0, i, j);
            gram.set(1e-30 * same, 1, i, j);
            gram.set(1.0 + same, 2, i, j);
            gram.set(1e30 * static_cast<double>((i + 1) * (j + 1)), 3, i, j);
            gram.set(0.0, 4, i, j);
            gram.set(1e-310 * same, 5, i, j);
            gram.set(fall(i, j), 6, i, j);
            gram.set(fall(dim - 1 - i, dim - 1 - j), 7, i, j);
            gram.set((i == 0 || i == dim - 1) && (j == 0 || j == dim - 1) ? 1.0 : 0.0, 8, i, j);
        }
    }
    return gram;
}

} // namespace support
