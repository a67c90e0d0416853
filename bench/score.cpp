// Scoring: one streamed nested sweep pair against the paper's Algorithm 1 as one would write it with a matrix library:
// every matrix materialised, one rung after another (Eigen, float, the same threads: one); and codes of whole
// vectors against eviction.
#include <mdkv/cpu/score.hpp>

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/stages/basis.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <random>
#include <vector>

#include <Eigen/Core>

#include <benchmark/benchmark.h>

#include "bench.hpp"

namespace
{

using namespace mdkv;

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// One KV head of Llama-3-8B's layer: 4 query heads, a window of 32.
constexpr index_t group  = 4;
constexpr index_t window = 32;
constexpr index_t dim    = 128;

/// Keys and values whose spectra decay, so that projected rungs mean something.
struct head
{
    index_t tokens;
    matrix queries     = matrix(group * window, dim);
    matrix keys        = matrix(tokens, dim);
    matrix values      = matrix(tokens, dim);
    matrix window_keys = matrix(window, dim);
    matrix key_basis   = matrix(dim, dim); // rows are directions
    matrix value_basis = matrix(dim, dim);
    matrix lse         = matrix(group, window);

    explicit head(index_t n)
        : tokens{n}
    {
        std::mt19937 random{1};
        std::normal_distribution<float> normal;
        for (matrix* m : {&queries, &keys, &values, &window_keys})
        {
            for (index_t i = 0; i < m->size(); ++i)
            {
                float const decay = m == &queries ? 1.0F : 3.0F / (1.0F + 0.2F * static_cast<float>(i % dim));
                m->data()[i]      = normal(random) * decay;
            }
        }
        std::vector<float> energy(dim);
        run([&](cpu::backend const& on) {
            fit_basis(on, in(on, keys.data(), 1, tokens, dim), out(on, key_basis.data(), 1, dim, dim),
                out(on, energy.data(), 1, dim));
        });
        run([&](cpu::backend const& on) {
            fit_basis(on, in(on, values.data(), 1, tokens, dim), out(on, value_basis.data(), 1, dim, dim),
                out(on, energy.data(), 1, dim));
        });
    }

    template <class Call>
    void run(Call const& call)
    {
        call(cpu::backend{&scratch_});
    }

    [[nodiscard]] index_t scratch_bytes() const noexcept { return scratch_.peak(); }

private:
    workspace scratch_{cpu::host_memory{}};
};

/// Softmax over all keys a row sees, the window's among themselves causal; the window's columns are dropped. Returns P
/// [rows, tokens]; lse, if wanted, the rows' log-sum-exps.
matrix softmax(head const& h, matrix const& keys, matrix* lse = nullptr)
{
    float const scale = 1.0F / std::sqrt(static_cast<float>(dim));
    matrix p(h.queries.rows(), h.tokens);
    p.noalias() = h.queries * keys.transpose();
    p *= scale;
    matrix w(h.queries.rows(), window);
    w.noalias() = h.queries * h.window_keys.transpose();
    w *= scale;
    for (index_t row = 0; row < p.rows(); ++row)
    {
        auto const seen     = w.row(row).head(row % window + 1);
        float const highest = std::max(p.row(row).maxCoeff(), seen.maxCoeff());
        p.row(row)          = (p.row(row).array() - highest).exp().matrix();
        float const total   = p.row(row).sum() + (seen.array() - highest).exp().sum();
        p.row(row) /= total;
        if (lse != nullptr) { lse->data()[row] = highest + std::log(total); }
    }
    return p;
}

/// Algorithm 1, materialised.
void literal(head const& h, std::vector<float>& loss)
{
    Eigen::Map<matrix> out{loss.data(), static_cast<index_t>(paper_ratios.size()), h.tokens};
    matrix const p             = softmax(h, h.keys);
    Eigen::VectorXf const norm = h.values.rowwise().norm();
    Eigen::VectorXf const mass = p.colwise().sum().transpose();
    for (std::size_t r = 0; r < paper_ratios.size(); ++r)
    {
        auto row = out.row(static_cast<index_t>(r));
        if (paper_ratios[r].dropped()) { row = (2.0F * mass.cwiseProduct(norm)).transpose(); }
        else if (paper_ratios[r].full()) { row.setZero(); }
        else
        {
            index_t const kept       = paper_ratios.coordinates(r, dim);
            auto const uk            = h.key_basis.topRows(kept);
            auto const uv            = h.value_basis.topRows(kept);
            matrix const keys        = (h.keys * uk.transpose()).eval() * uk;
            matrix const values      = (h.values * uv.transpose()).eval() * uv;
            matrix const p_kept      = softmax(h, keys);
            Eigen::VectorXf const dp = (p_kept - p).cwiseAbs().colwise().sum().transpose();
            Eigen::VectorXf const dv = (h.values - values).rowwise().norm();
            row                      = (dp.cwiseProduct(norm) + mass.cwiseProduct(dv)).transpose();
        }
    }
}

void ours(head& h, ratio_set const& ratios, bool lse_given, std::vector<float>& loss)
{
    h.run([&](cpu::backend const& on) {
        score_options<cpu::backend> options;
        if (lse_given) { options.lse = in(on, h.lse.data(), group, window); }
        score(on, in(on, h.queries.data(), group, window, dim), in(on, h.keys.data(), 1, h.tokens, dim),
            in(on, h.values.data(), 1, h.tokens, dim), in(on, h.window_keys.data(), 1, window, dim),
            in(on, h.key_basis.data(), 1, dim, dim), in(on, h.value_basis.data(), 1, dim, dim), ratios, options,
            out(on, loss.data(), 1, static_cast<index_t>(ratios.size()), h.tokens));
    });
}

/// a: score; b: Algorithm 1 materialised. Arguments: tokens, whether the log-sum-exps are given.
void score_against_literal(benchmark::State& state)
{
    head h{state.range(0)};
    bool const lse_given = state.range(1) != 0;
    static_cast<void>(softmax(h, h.keys, &h.lse));
    auto const size = static_cast<std::size_t>(h.tokens) * paper_ratios.size();
    std::vector<float> a(size);
    std::vector<float> b(size);
    bench::measure_pair(
        state, [&] { ours(h, paper_ratios, lse_given, a); }, [&] { literal(h, b); });

    double difference = 0;
    double total      = 0;
    for (std::size_t i = 0; i < size; ++i)
    {
        difference += std::abs(double{a[i]} - double{b[i]});
        total += double{b[i]};
    }
    if (!(difference <= 1e-4 * total)) { state.SkipWithError("the two disagree"); }
    state.counters["relative_difference"] = difference / total;
    state.counters["scratch_MB"]          = static_cast<double>(h.scratch_bytes()) / 1e6;
}

BENCHMARK(score_against_literal)
    ->ArgNames({"tokens", "lse_given"})
    ->ArgsProduct({{8192, 32768}, {0, 1}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond)
    ->Iterations(9);

/// a: drop, int4, int8 and everything; b: drop or keep. Arguments: tokens, whether the log-sum-exps are given.
void bits_against_eviction(benchmark::State& state)
{
    head h{state.range(0)};
    bool const lse_given = state.range(1) != 0;
    static_cast<void>(softmax(h, h.keys, &h.lse));
    std::vector<float> a(static_cast<std::size_t>(h.tokens) * bit_ratios.size());
    std::vector<float> b(static_cast<std::size_t>(h.tokens) * evict_ratios.size());
    bench::measure_pair(
        state, [&] { ours(h, bit_ratios, lse_given, a); }, [&] { ours(h, evict_ratios, lse_given, b); });
    // With codes in the set losses of dropped tokens are centred; what is kept whole loses nothing in either.
    auto const whole = [&](std::vector<float> const& x) {
        return std::all_of(
            x.end() - static_cast<std::ptrdiff_t>(h.tokens), x.end(), [](float loss) { return loss == 0; });
    };
    if (!whole(a) || !whole(b)) { state.SkipWithError("a token that is kept whole has a loss"); }
}

BENCHMARK(bits_against_eviction)
    ->ArgNames({"tokens", "lse_given"})
    ->ArgsProduct({{8192}, {0, 1}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond)
    ->Iterations(9);

} // namespace

BENCHMARK_MAIN();
