/// \file dump_added_error.cpp: what attend's arithmetic on codes adds to what the codes lost, on every layer of a model (docs/numerics.md)
///
///   dump_added_error MODEL TEXT [CONTEXT [QUERIES]]
///
/// The model reads CONTEXT tokens of the text (2,048), which are stored, and QUERIES more (64), whose queries attend to
/// those stored. With a the attention over the original keys and values, b over those that the codes stand for, both in
/// double, and c the one of attend: `loss` is the root mean square of b - a (of outputs divided by that of a), `share` that
/// of c - b divided by that of b - a. Tokens that the policy dropped are missing from a, too.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <mdkv/mdkv.hpp>

#include "runner/common_options.hpp"
#include "runner/eigen.hpp"
#include "runner/policies.hpp"
#include "runner/prefill.hpp"
#include "runner/scratch_memory.hpp"
#include "runner/sequence_cache.hpp"
#include "runner/session.hpp"
#include "runner/systems/packed_cache.hpp"
#include "support/packed.hpp"

namespace
{

using mdkv::index_t;
using double_matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// One layer: the tokens to store, their rungs by the policy, and the queries that read them.
struct real_layer
{
    std::vector<mdkv::half> keys;    // [kv_heads, context, key_dim]
    std::vector<mdkv::half> values;  // [kv_heads, context, value_dim]
    std::vector<mdkv::half> queries; // [query_heads, queries, key_dim]
    std::vector<std::uint8_t> rungs; // [kv_heads, context - window]
};

struct real_layers
{
    index_t heads, group, context, queries;
    mdkv::head_dims dims;
    mdkv::ratio_set ratios; // of the policy
    index_t window;         // of the policy
    std::vector<real_layer> all;
};

/// Entries [first, first + count) of [rows, entries, dim].
template <class T>
std::vector<T> cut(T const* from, index_t rows, index_t entries, index_t dim, index_t first, index_t count)
{
    std::vector<T> to;
    to.reserve(static_cast<std::size_t>(rows * count * dim));
    for (index_t i = 0; i < rows; ++i)
    {
        T const* const row = from + (i * entries + first) * dim;
        to.insert(to.end(), row, row + count * dim);
    }
    return to;
}

real_layers read_layers(runner::session& run, std::string const& text, index_t context, index_t queries)
{
    runner::common_options const common;
    runner::policy const chosen      = runner::find_policy("best");
    runner::model_shape const& shape = run.model().shape();
    runner::sequence_cache<mdkv::half> cache{run.model(), chosen, mdkv::budget::kv_size(context / 4), common.window, 0};
    real_layers layers{shape.kv_heads, shape.query_heads / shape.kv_heads, context, queries,
        {shape.key_dim, shape.value_dim}, chosen.ratios, cache.window(), {}};
    layers.all.resize(static_cast<std::size_t>(shape.layers));
    index_t const scoring = runner::queries_to_keep(chosen, common.window, context);
    auto const tokens     = runner::first_tokens(run.words(), text, context + queries, "context and queries");
    runner::scratch_memory scratch;
    static_cast<void>(runner::prefill<mdkv::half>(
        run.model(), tokens, scoring + queries, run.executor(),
        [&](runner::layer_kv<mdkv::half> const& kv) {
            real_layer& layer = layers.all[static_cast<std::size_t>(kv.layer)];
            layer.keys        = cut(kv.keys, layers.heads, kv.tokens, layers.dims.keys, 0, context);
            layer.values      = cut(kv.values, layers.heads, kv.tokens, layers.dims.values, 0, context);
            layer.queries     = cut(kv.queries, shape.query_heads, kv.window, layers.dims.keys, scoring, queries);
            layer.rungs.resize(static_cast<std::size_t>(layers.heads * (context - layers.window)));
            auto const of_context = cut(kv.queries, shape.query_heads, kv.window, layers.dims.keys, 0, scoring);
            auto const lse        = cut(kv.lse, shape.query_heads, kv.window, 1, 0, scoring);
            cache.compress_layer(
                {kv.layer, context, scoring, layer.keys.data(), layer.values.data(), of_context.data(), lse.data()},
                run.executor(), scratch, layer.rungs.data());
        },
        [](std::int64_t, std::int64_t) { return true; },
        [&](runner::layer_chunk<mdkv::half> const& chunk) {
            cache.score_chunk(chunk, context, run.executor(), scratch);
        }));
    return layers;
}

/// Attention of rows of queries by the definition.
struct exact_attention
{
    double_matrix output;
    Eigen::VectorXd lse;

    exact_attention(double_matrix const& queries, double_matrix const& keys, double_matrix const& values)
    {
        double_matrix weights         = queries * keys.transpose() / std::sqrt(static_cast<double>(keys.cols()));
        Eigen::VectorXd const largest = weights.rowwise().maxCoeff();
        weights                       = (weights.colwise() - largest).array().exp().matrix();
        Eigen::VectorXd const sums    = weights.rowwise().sum();
        output                        = sums.cwiseInverse().asDiagonal() * (weights * values);
        lse                           = largest + sums.array().log().matrix();
    }
};

/// Sums of squares.
struct errors
{
    double size       = 0; ///< of the outputs
    double lost       = 0;
    double added      = 0;
    double lse_lost   = 0;
    double lse_added  = 0;
    std::int64_t rows = 0;

    void add(exact_attention const& original, exact_attention const& stored, double_matrix const& output,
        Eigen::VectorXd const& lse_of_output)
    {
        *this += {original.output.squaredNorm(), (stored.output - original.output).squaredNorm(),
            (output - stored.output).squaredNorm(), (stored.lse - original.lse).squaredNorm(),
            (lse_of_output - stored.lse).squaredNorm(), original.lse.size()};
    }
    errors& operator+=(errors const& e)
    {
        size += e.size;
        lost += e.lost;
        added += e.added;
        lse_lost += e.lse_lost;
        lse_added += e.lse_added;
        rows += e.rows;
        return *this;
    }
    [[nodiscard]] double loss() const { return std::sqrt(lost / size); }
    [[nodiscard]] double share() const { return std::sqrt(added / lost); }
    [[nodiscard]] double lse_loss() const { return std::sqrt(lse_lost / static_cast<double>(rows)); }
    [[nodiscard]] double lse_share() const { return std::sqrt(lse_added / lse_lost); }
};

/// The rows of [_, dim] whose numbers are listed.
double_matrix widened(mdkv::half const* from, std::vector<index_t> const& rows, index_t dim)
{
    double_matrix to(std::ssize(rows), dim);
    for (index_t i = 0; i < to.rows(); ++i)
    {
        for (index_t d = 0; d < dim; ++d)
        {
            mdkv::half const x = from[rows[static_cast<std::size_t>(i)] * dim + d];
            to(i, d)           = static_cast<double>(mdkv::widen(x));
        }
    }
    return to;
}

/// The layer with its first tokens at the rungs given, and the tokens behind those as they are.
class stored_layer
{
public:
    stored_layer(
        real_layers const& of, real_layer const& layer, mdkv::ratio_set const& ratios, std::vector<std::uint8_t> rungs)
        : of_{of}
        , layer_{layer}
        , ratios_{ratios}
        , rungs_{std::move(rungs)}
        , past_{std::ssize(rungs_) / of.heads}
        , cache_{runner::pack_layer<mdkv::half>({}, scratch_,
              {.heads        = of.heads,
                  .group     = of.group,
                  .tokens    = of.context,
                  .window    = of.context - past_,
                  .key_dim   = of.dims.keys,
                  .value_dim = of.dims.values,
                  .keys      = layer.keys.data(),
                  .values    = layer.values.data()},
              ratios, {}, rungs_)}
    {}

    [[nodiscard]] errors measure()
    {
        errors sum;
        attend();
        auto const [dim, value_dim] = of_.dims;
        index_t const rows          = of_.group * of_.queries; // of one KV head
        for (index_t h = 0; h < of_.heads; ++h)
        {
            double_matrix const queries     = widened(layer_.queries.data(), numbers(h * rows, rows), dim);
            std::vector<index_t> const kept = kept_tokens(h);
            exact_attention const original{
                queries, widened(layer_.keys.data(), kept, dim), widened(layer_.values.data(), kept, value_dim)};
            auto const tokens = support::reconstructed_tokens(cache_.view(), h);
            double_matrix keys(std::ssize(tokens), dim);
            double_matrix values(std::ssize(tokens), value_dim);
            for (index_t t = 0; t < keys.rows(); ++t)
            {
                auto const& [key, value] = tokens[static_cast<std::size_t>(t)];
                keys.row(t)              = Eigen::Map<Eigen::RowVectorXd const>(key.data(), dim);
                values.row(t)            = Eigen::Map<Eigen::RowVectorXd const>(value.data(), value_dim);
            }
            exact_attention const stored{queries, keys, values};
            sum.add(original, stored, output_.middleRows(h * rows, rows), lse_.segment(h * rows, rows));
        }
        return sum;
    }

private:
    static std::vector<index_t> numbers(index_t first, index_t count)
    {
        std::vector<index_t> all(static_cast<std::size_t>(count));
        std::iota(all.begin(), all.end(), first);
        return all;
    }

    /// Rows of [kv_heads, context] that head h has stored.
    [[nodiscard]] std::vector<index_t> kept_tokens(index_t h) const
    {
        std::vector<index_t> all = numbers(h * of_.context, of_.context);
        std::erase_if(all, [&](index_t row) {
            index_t const t = row - h * of_.context;
            return t < past_ && ratios_[rungs_[static_cast<std::size_t>(h * past_ + t)]].dropped();
        });
        return all;
    }

    /// All queries, each of the `queries` tokens by itself.
    void attend()
    {
        auto const [dim, value_dim] = of_.dims;
        index_t const heads         = of_.heads * of_.group;
        std::vector<float> query(static_cast<std::size_t>(heads * dim));
        std::vector<float> output(static_cast<std::size_t>(heads * value_dim));
        std::vector<float> lse(static_cast<std::size_t>(heads));
        output_.resize(heads * of_.queries, value_dim);
        lse_.resize(heads * of_.queries);
        for (index_t q = 0; q < of_.queries; ++q)
        {
            for (index_t i = 0; i < heads * dim; ++i)
            {
                index_t const at                   = (i / dim * of_.queries + q) * dim + i % dim;
                query[static_cast<std::size_t>(i)] = mdkv::widen(layer_.queries[static_cast<std::size_t>(at)]);
            }
            scratch_.run({}, [&](mdkv::cpu::backend const& on) {
                mdkv::attend(on, mdkv::in(on, query.data(), heads, dim), cache_.view(), {},
                    mdkv::out(on, output.data(), heads, value_dim), mdkv::out(on, lse.data(), heads));
                return 0;
            });
            for (index_t i = 0; i < heads; ++i)
            {
                auto const row = Eigen::Map<Eigen::RowVectorXf const>(output.data() + i * value_dim, value_dim);
                output_.row(i * of_.queries + q) = row.cast<double>();
                lse_(i * of_.queries + q)        = static_cast<double>(lse[static_cast<std::size_t>(i)]);
            }
        }
    }

    real_layers const& of_;
    real_layer const& layer_;
    mdkv::ratio_set ratios_;
    std::vector<std::uint8_t> rungs_; // [kv_heads, past]
    index_t past_;
    runner::scratch_memory scratch_;
    mdkv::cpu::cache<mdkv::half> cache_;
    double_matrix output_; // [kv_heads * group * queries, value_dim], of attend
    Eigen::VectorXd lse_;  // [kv_heads * group * queries]
};

constexpr std::array<char const*, 3> cases{"int4", "int8", "best"};
using layer_errors = std::array<errors, cases.size()>;

layer_errors measure(real_layers const& of, real_layer const& layer)
{
    std::vector<std::uint8_t> const coded(static_cast<std::size_t>(of.heads * of.context), 1);
    return {stored_layer{of, layer, {mdkv::drop, mdkv::full_int4}, coded}.measure(),
        stored_layer{of, layer, {mdkv::drop, mdkv::full_int8}, coded}.measure(),
        stored_layer{of, layer, of.ratios, layer.rungs}.measure()};
}

void print_row(char const* name, layer_errors const& row)
{
    std::printf("%-7s", name);
    for (errors const& e : row)
    {
        std::printf(" | %8.2e %6.4f  %8.2e %6.4f", e.loss(), e.share(), e.lse_loss(), e.lse_share());
    }
    std::printf("\n");
}

void print(std::vector<layer_errors> const& layers)
{
    std::printf("       ");
    for (char const* const name : cases)
    {
        std::printf(" | %-15s  %-15s", (std::string{name} + " outputs").c_str(), "log-sum-exps");
    }
    std::printf("\nlayer  ");
    for (std::size_t i = 0; i < cases.size(); ++i) { std::printf(" | loss     share   loss     share "); }
    std::printf("\n");
    layer_errors all{};
    for (std::size_t i = 0; i < layers.size(); ++i)
    {
        print_row(std::to_string(i).c_str(), layers[i]);
        for (std::size_t c = 0; c < cases.size(); ++c) { all[c] += layers[i][c]; }
    }
    print_row("all", all);
    auto const print_shares = [&](char const* name, auto const& choose) {
        std::printf("%-7s", name);
        for (std::size_t c = 0; c < cases.size(); ++c)
        {
            std::vector<double> outputs;
            std::vector<double> lses;
            for (layer_errors const& layer : layers)
            {
                outputs.push_back(layer[c].share());
                lses.push_back(layer[c].lse_share());
            }
            std::ranges::sort(outputs);
            std::ranges::sort(lses);
            std::printf(" | %8s %6.4f  %8s %6.4f", "", choose(outputs), "", choose(lses));
        }
        std::printf("\n");
    };
    print_shares("median", [](std::vector<double> const& sorted) { return sorted[sorted.size() / 2]; });
    print_shares("largest", [](std::vector<double> const& sorted) { return sorted.back(); });
}

} // namespace

int main(int argc, char** argv)
{
    std::vector<std::string> const arguments(argv + 1, argv + argc);
    if (arguments.size() < 2 || arguments.size() > 4)
    {
        std::fputs("usage: dump_added_error MODEL TEXT [CONTEXT [QUERIES]]\n", stderr);
        return 2;
    }
    try
    {
        index_t const context = arguments.size() > 2 ? std::stoll(arguments[2]) : 2048;
        index_t const queries = arguments.size() > 3 ? std::stoll(arguments[3]) : 64;
        runner::common_options common;
        common.model_path = arguments[0];
        runner::session run{common};
        real_layers const layers = read_layers(run, arguments[1], context, queries);
        std::vector<layer_errors> results(layers.all.size());
        run.executor().parallel_for(std::ssize(results), [&](index_t i) {
            auto const at = static_cast<std::size_t>(i);
            results[at]   = measure(layers, layers.all[at]);
        });
        std::printf("vectors of %d floats, %td tokens, KV %td for best, %td queries a head\n", mdkv::cpu::simd::lanes,
            context, context / 4, queries);
        print(results);
    }
    catch (std::exception const& error)
    {
        std::fprintf(stderr, "dump_added_error: %s\n", error.what());
        return 1;
    }
    return 0;
}
