/// \file oddness.hpp: how odd the surroundings of a prompt's tokens are, by the leverage of their keys (arXiv 2507.08143)
#pragma once

#include <mdkv/basis.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/basis.hpp>
#include <mdkv/cpu/executor.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "../runner/eigen.hpp"
#include "../runner/element_rows.hpp"
#include "../runner/scratch_memory.hpp"
#include "prompt_layer.hpp"

namespace runner
{

/// Adds the statistical leverage of a layer's keys among those of their head, k' (K'K + lambda I)^-1 k, to `sums` [past]:
/// near 1 where a key has a direction for itself, little where it shares it with many. Compactor ranks tokens by it,
/// before position encoding and approximately; here keys are taken as they are cached. lambda is a thousandth of the mean
/// energy of a direction.
/// \order   bitwise reproducible, for any number of threads
template <mdkv::element T>
void add_leverages(
    prompt_layer<T> const& layer, mdkv::cpu::executor_ref executor, scratch_memory& scratch, std::span<double> sums)
{
    std::int64_t const dim = layer.key_dim;
    std::vector<float> bases(static_cast<std::size_t>(layer.heads * dim * dim));
    std::vector<float> energies(static_cast<std::size_t>(layer.heads * dim));
    scratch.run(executor, [&](mdkv::cpu::backend on) {
        mdkv::fit_basis(on, mdkv::in(on, layer.keys, layer.heads, layer.tokens, dim),
            mdkv::out(on, bases.data(), layer.heads, dim, dim), mdkv::out(on, energies.data(), layer.heads, dim));
        return 0;
    });
    for (std::int64_t head = 0; head < layer.heads; ++head) // directions of length 1 / sqrt(energy + lambda)
    {
        float* const energy = energies.data() + head * dim;
        float const lambda  = 1e-3F * std::accumulate(energy, energy + dim, 0.0F) / static_cast<float>(dim);
        for (std::int64_t i = 0; i < dim; ++i)
        {
            float const square = energy[i] + lambda;
            row_view(bases.data() + (head * dim + i) * dim, dim) *= square > 0 ? 1 / std::sqrt(square) : 0.0F;
        }
    }
    constexpr std::int64_t piece = 256; // tokens
    executor.parallel_for((layer.past() + piece - 1) / piece, [&](std::int64_t index) {
        std::int64_t const first = index * piece;
        std::int64_t const count = std::min(piece, layer.past() - first);
        float_matrix keys(count, dim), turned(count, dim);
        for (std::int64_t head = 0; head < layer.heads; ++head)
        {
            widen_row(layer.keys + (head * layer.tokens + first) * dim, count * dim, keys.data());
            const_matrix_view const basis{bases.data() + head * dim * dim, dim, dim, Eigen::OuterStride<>(dim)};
            turned.noalias() = keys * basis.transpose();
            for (std::int64_t i = 0; i < count; ++i)
            {
                sums[static_cast<std::size_t>(first + i)] += double{turned.row(i).squaredNorm()};
            }
        }
    });
}

/// The mean of a token's neighbourhood, as many tokens to each side as `reach` or as there are, in units of the mean of
/// all: 1 everywhere where no token stands out.
[[nodiscard]] inline std::vector<double> surroundings(std::span<double const> of_tokens, std::int64_t reach)
{
    auto const tokens  = std::ssize(of_tokens);
    double const total = std::accumulate(of_tokens.begin(), of_tokens.end(), 0.0);
    double const unit  = total > 0 ? static_cast<double>(tokens) / total : 0.0;
    std::vector<double> means;
    for (std::int64_t i = 0; i < tokens; ++i)
    {
        auto const first = of_tokens.begin() + std::max<std::int64_t>(0, i - reach);
        auto const last  = of_tokens.begin() + std::min(tokens, i + reach + 1);
        means.push_back(total > 0 ? std::accumulate(first, last, 0.0) / static_cast<double>(last - first) * unit : 1.0);
    }
    return means;
}

} // namespace runner
