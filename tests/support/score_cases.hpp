/// \file score_cases.hpp: inputs of score that the tests of both backends share
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>

#include "support/host.hpp"
#include "support/layer.hpp"

#include <cstddef>
#include <vector>

namespace support
{

inline std::vector<mdkv::rung> const paper_rungs{mdkv::drop, mdkv::fraction(1, 8), mdkv::fraction(1, 4), mdkv::full};

/// Every kind of rung, in order of bytes for halves at head dimension 64.
inline std::vector<mdkv::rung> const mixed_rungs{mdkv::drop, mdkv::fraction(1, 8).as(mdkv::storage::int8),
    mdkv::fraction(1, 8), mdkv::fraction(1, 4).as(mdkv::storage::int8), mdkv::fraction(1, 4),
    mdkv::fraction(3, 4).as(mdkv::storage::int8), mdkv::full_int8, mdkv::full};

inline std::vector<std::vector<mdkv::rung>> const quantised_sets{
    {mdkv::drop, mdkv::full_int4, mdkv::full_int8, mdkv::full},
    {mdkv::drop, mdkv::fraction(1, 4).as(mdkv::storage::int8), mdkv::full_int4, mdkv::full},
    {mdkv::drop, mdkv::fraction(1, 8), mdkv::fraction(3, 4).as(mdkv::storage::int8), mdkv::full}, mixed_rungs,
    {mdkv::full_int8}};

/// Bases whose products with short numbers are exact in float, so that all implementations quantise the same coordinates:
/// Hadamard's four by four, strewn over the dimensions.
inline void set_exact_basis(tensor<float, 3>& basis)
{
    index_t const dim = basis.extent(1); // a multiple of 4
    for (index_t h = 0; h < basis.extent(0); ++h)
    {
        for (index_t c = 0; c < dim; ++c)
        {
            for (index_t d = 0; d < dim; ++d)
            {
                bool const met  = c % (dim / 4) == (d + 3 * h) % (dim / 4);
                index_t const a = c / (dim / 4);
                index_t const b = d / (dim / 4);
                bool const odd  = ((a & b & 1) + (a & b & 2) / 2) % 2 != 0;
                basis.set(met ? (odd ? -0.5F : 0.5F) : 0.0F, h, c, d);
            }
        }
    }
}

template <class T>
[[nodiscard]] layer<T> exact_layer(layer_sizes const& sizes)
{
    layer<T> x{sizes};
    set_exact_basis(x.key_basis);
    set_exact_basis(x.value_basis);
    return x;
}

/// Natural log-sum-exps of all queries, as a flash prefill would hand them over.
template <class T>
[[nodiscard]] tensor<float, 2> lse_of(layer<T> const& x)
{
    tensor<float, 2> lse{{x.sizes.heads * x.sizes.group, x.sizes.queries}};
    for (index_t h = 0; h < x.sizes.heads; ++h)
    {
        auto const want = expected_scores(x, h, {mdkv::drop});
        for (index_t i = 0; i < x.sizes.group * x.sizes.queries; ++i)
        {
            lse.set(static_cast<float>(want.lse[static_cast<std::size_t>(i)]), h * x.sizes.group + i / x.sizes.queries,
                i % x.sizes.queries);
        }
    }
    return lse;
}

} // namespace support
