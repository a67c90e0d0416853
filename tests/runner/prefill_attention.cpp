#include "runner/prefill_attention.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "support/compare.hpp"
#include "support/random.hpp"

namespace
{

/// Random inputs of one layer; `spread` is how far apart the logits are.
template <class T>
struct layer_inputs
{
    std::int64_t query_heads, kv_heads, key_dim, value_dim, tokens;
    std::vector<float> queries; // [tokens, query_heads * key_dim]
    std::vector<T> keys;        // [kv_heads, tokens, key_dim]
    std::vector<T> values;      // [kv_heads, tokens, value_dim]

    layer_inputs(std::int64_t q, std::int64_t h, std::int64_t d, std::int64_t dv, std::int64_t n, double spread)
        : query_heads{q}
        , kv_heads{h}
        , key_dim{d}
        , value_dim{dv}
        , tokens{n}
    {
        support::source random("attention", n);
        auto const element = [&](double scale) { return mdkv::narrow<T>(static_cast<float>(scale * random.normal())); };
        for (std::int64_t i = 0; i < n * q * d; ++i) { queries.push_back(mdkv::widen(element(spread))); }
        for (std::int64_t i = 0; i < h * n * d; ++i) { keys.push_back(element(1)); }
        for (std::int64_t i = 0; i < h * n * dv; ++i) { values.push_back(element(1)); }
    }

    [[nodiscard]] float const* query(std::int64_t token, std::int64_t head) const
    {
        return queries.data() + (token * query_heads + head) * key_dim;
    }
    [[nodiscard]] double key(std::int64_t head, std::int64_t token, std::int64_t d) const
    {
        return mdkv::widen(keys[static_cast<std::size_t>((head * tokens + token) * key_dim + d)]);
    }
    [[nodiscard]] double value(std::int64_t head, std::int64_t token, std::int64_t d) const
    {
        return mdkv::widen(values[static_cast<std::size_t>((head * tokens + token) * value_dim + d)]);
    }
};

struct layer_outputs
{
    std::vector<float> out; // [count, query_heads * value_dim]
    std::vector<float> lse; // [query_heads, lse_count]
};

template <class T>
layer_outputs attend(layer_inputs<T> const& in, std::int64_t first, std::int64_t count, std::int64_t lse_first,
    std::int64_t lse_count, mdkv::cpu::executor_ref executor = {})
{
    layer_outputs got{std::vector<float>(static_cast<std::size_t>(count * in.query_heads * in.value_dim), NAN),
        std::vector<float>(static_cast<std::size_t>(in.query_heads * lse_count), NAN)};
    runner::attend_causally<T>(executor, {.query_heads  = in.query_heads,
                                             .kv_heads  = in.kv_heads,
                                             .key_dim   = in.key_dim,
                                             .value_dim = in.value_dim,
                                             .first     = first,
                                             .count     = count,
                                             .tokens    = in.tokens,
                                             .queries   = in.query(first, 0),
                                             .keys      = in.keys.data(),
                                             .values    = in.values.data(),
                                             .out       = got.out.data(),
                                             .lse_first = lse_first,
                                             .lse_count = lse_count,
                                             .lse       = got.lse.data()});
    return got;
}

/// One query of one head by the definition, in double; returns the log-sum-exp.
template <class T>
double attend_naively(layer_inputs<T> const& in, std::int64_t token, std::int64_t head, std::vector<double>& out)
{
    std::int64_t const kv_head = head / (in.query_heads / in.kv_heads);
    std::vector<double> logits;
    for (std::int64_t t = 0; t <= token; ++t)
    {
        double logit = 0;
        for (std::int64_t d = 0; d < in.key_dim; ++d)
        {
            logit += double{in.query(token, head)[d]} * in.key(kv_head, t, d);
        }
        logits.push_back(logit / std::sqrt(static_cast<double>(in.key_dim)));
    }
    double const largest = *std::max_element(logits.begin(), logits.end());
    double total         = 0;
    out.assign(static_cast<std::size_t>(in.value_dim), 0.0);
    for (std::int64_t t = 0; t <= token; ++t)
    {
        double const weight = std::exp(logits[static_cast<std::size_t>(t)] - largest);
        total += weight;
        for (std::int64_t d = 0; d < in.value_dim; ++d)
        {
            out[static_cast<std::size_t>(d)] += weight * in.value(kv_head, t, d);
        }
    }
    for (double& value : out) { value /= total; }
    return largest + std::log(total);
}

} // namespace

TEST_CASE_TEMPLATE(
    "streamed attention equals the definition over block borders, chunks and head groups", T, float, mdkv::half)
{
    for (double const spread : {1.0, 300.0})
    { // 300: some weights are far below the smallest float
        CAPTURE(spread);
        layer_inputs<T> const in(4, 2, 24, 17, 330, spread);
        std::int64_t const first = 250;
        std::int64_t const count = 80;
        auto const got           = attend(in, first, count, 320, 10);
        support::worst_error outputs, lse;
        std::vector<double> want;
        for (std::int64_t i = 0; i < count; ++i)
        {
            for (std::int64_t head = 0; head < in.query_heads; ++head)
            {
                double const log_sum = attend_naively(in, first + i, head, want);
                for (std::int64_t d = 0; d < in.value_dim; ++d)
                {
                    std::int64_t const at = (i * in.query_heads + head) * in.value_dim + d;
                    outputs.add(got.out[static_cast<std::size_t>(at)], want[static_cast<std::size_t>(d)], 1, at);
                }
                if (first + i < 320) { continue; }
                std::int64_t const at = head * 10 + first + i - 320;
                lse.add(got.lse[static_cast<std::size_t>(at)], log_sum, std::max(1.0, std::abs(log_sum)), at);
            }
        }
        // A logit of size s is off by about s * 2^-23, and a weight by that much relative to itself.
        CHECK_MESSAGE(outputs.within(2e-6 * std::max(1.0, spread)), outputs);
        CHECK_MESSAGE(lse.within(2e-6), lse);
        CHECK(lse.compared() == 40);
    }
}

TEST_CASE("the first token attends itself alone")
{
    layer_inputs<float> const in(2, 1, 8, 8, 1, 1.0);
    auto const got = attend(in, 0, 1, 0, 1);
    for (std::size_t i = 0; i < got.out.size(); ++i) { CHECK(got.out[i] == in.values[i % 8]); }
}

TEST_CASE("attention's bits depend neither on threads nor on log-sum-exps being asked for")
{
    layer_inputs<mdkv::half> const in(6, 3, 16, 16, 290, 2.0);
    auto const serial = attend(in, 0, 290, 280, 10);
    for (int const threads : {2, 4})
    {
        mdkv::cpu::thread_pool pool(threads);
        auto const got = attend(in, 0, 290, 280, 10, pool);
        CHECK(support::same_bits(got.out, serial.out));
        CHECK(support::same_bits(got.lse, serial.lse));
    }
    CHECK(support::same_bits(attend(in, 0, 290, 290, 0).out, serial.out));
}
