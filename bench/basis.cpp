// Fitting a layer's key bases: blocked Gram products in registers and eigenvectors of our own, against Eigen's rank
// update and solver (float; one thread). Llama-3-8B's layer: 8 KV heads, D = 128, f16.

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/stages/basis.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <random>
#include <vector>

#include <Eigen/Core>
#include <Eigen/Eigenvalues>

#include <benchmark/benchmark.h>

#include "bench.hpp"

namespace
{

using namespace mdkv;

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr index_t heads = 8;
constexpr index_t dim   = 128;

std::vector<half> keys_of(index_t tokens)
{
    std::mt19937 random{1};
    std::normal_distribution<float> normal;
    std::vector<half> keys(static_cast<std::size_t>(heads * tokens * dim));
    for (std::size_t i = 0; i < keys.size(); ++i)
    {
        auto const coordinate = static_cast<float>(i % static_cast<std::size_t>(dim));
        keys[i]               = narrow<half>(normal(random) * 3.0F / (1.0F + 0.2F * coordinate));
    }
    return keys;
}

/// What one would write with the library alone: widen a head, update a triangle, solve.
void by_eigen(std::vector<half> const& keys, index_t tokens, std::vector<float>& energy)
{
    matrix rows(tokens, dim);
    for (index_t h = 0; h < heads; ++h)
    {
        cpu::tile::widen_row(keys.data() + h * tokens * dim, rows.data(), tokens * dim);
        matrix gram = matrix::Zero(dim, dim);
        gram.selfadjointView<Eigen::Lower>().rankUpdate(rows.transpose());
        Eigen::SelfAdjointEigenSolver<matrix> const solver{gram};
        for (index_t i = 0; i < dim; ++i)
        {
            energy[static_cast<std::size_t>(h * dim + i)] = solver.eigenvalues()[dim - 1 - i];
        }
    }
}

/// a: fit_basis; b: Eigen alone. Argument: tokens; of 128 the eigenvectors are most of the work.
void fit_basis_against_eigen(benchmark::State& state)
{
    index_t const tokens         = state.range(0);
    std::vector<half> const keys = keys_of(tokens);
    std::vector<float> basis(static_cast<std::size_t>(heads * dim * dim));
    std::vector<float> energy(static_cast<std::size_t>(heads * dim));
    std::vector<float> expected(energy.size());
    workspace scratch{cpu::host_memory{}};
    cpu::backend const on{&scratch};
    bench::measure_pair(
        state,
        [&] {
            fit_basis(on, in(on, keys.data(), heads, tokens, dim), out(on, basis.data(), heads, dim, dim),
                out(on, energy.data(), heads, dim));
        },
        [&] { by_eigen(keys, tokens, expected); });
    double worst = 0;
    for (std::size_t i = 0; i < energy.size(); ++i)
    {
        worst = std::max(worst, std::abs(double{energy[i]} - double{expected[i]}) / double{expected[0]});
    }
    if (!(worst < 1e-4)) { state.SkipWithError("the two disagree"); }
    state.counters["worst_difference"] = worst;
}

BENCHMARK(fit_basis_against_eigen)
    ->ArgName("tokens")
    ->Arg(128)
    ->Arg(2048)
    ->Arg(32768)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond)
    ->Iterations(9);

} // namespace

BENCHMARK_MAIN();
