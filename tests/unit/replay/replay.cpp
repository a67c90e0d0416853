// Tolerance against the oracle: that of score (tests/unit/stages/score.cpp), for the same rows: those that advance turned, rounded to
// their element type as replay rounds them.
#include <mdkv/replay/replay.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/cpu/thread_pool.hpp>
#include <mdkv/presets.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"
#include "support/oracle.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <limits>
#include <string>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::layer;
using support::layer_sizes;
using support::tensor;
using support::worst_error;
using host    = cpu::backend;
using options = replay_options<host>;

constexpr double tolerance = 3e-5;
std::vector<rung> const rungs{drop, full_int4, full_int8, full};

/// A chunk is a layer with as many queries as tokens; its window stands for the sinks.
layer<half> chunk_of(index_t tokens, index_t sinks)
{
    return layer<half>{{.queries = tokens, .tokens = tokens, .window = sinks, .first_query = tokens + sinks}};
}

template <class T>
std::vector<float> replayed(layer<T> const& x, options const& choice, cpu::executor_ref threads = {})
{
    tensor<float, 3> loss{{x.sizes.heads, 4, x.sizes.tokens}};
    support::run(
        [&](host const& on) {
            replay(on, x.queries.in(), x.keys.in(), x.values.in(), x.window_keys.in(), bit_ratios, choice, loss.out());
        },
        threads);
    return loss.elements();
}

template <class T>
void turn(tensor<T, 3>& rows, options const& choice)
{
    support::run([&](host const& on) { advance(on, rows.in(), choice.ahead, choice.encoding, rows.out()); });
}

/// The same layer as a second reading sees it: its queries turned, and with `own` its window the sinks and all keys, turned.
layer<half> second_reading(layer<half> const& x, options const& choice)
{
    layer<half> read{x.sizes}; // the same numbers
    turn(read.queries, choice);
    if (!choice.own) { return read; }
    layer_sizes const& s = x.sizes;
    read.window_keys     = tensor<half, 3>{{s.heads, s.window + s.tokens, s.dim}};
    for (index_t h = 0; h < s.heads; ++h)
    {
        for (index_t i = 0; i < s.window + s.tokens; ++i)
        {
            for (index_t d = 0; d < s.dim; ++d)
            {
                auto const key = i < s.window ? x.window_keys.get(h, i, d) : x.keys.get(h, i - s.window, d);
                read.window_keys.set(key, h, i, d);
            }
        }
    }
    turn(read.window_keys, choice);
    return read;
}

worst_error against_oracle(layer<half> const& x, options const& choice)
{
    auto const read = second_reading(x, choice);
    auto const loss = replayed(x, choice);
    worst_error error;
    auto at                                 = loss.begin();
    constexpr support::oracle::real maximum = std::numeric_limits<support::oracle::real>::infinity();
    for (index_t h = 0; h < x.sizes.heads; ++h)
    {
        auto const want = support::expected_scores(read, h, rungs,
            {.power = choice.norm == row_norm::maximum     ? maximum
                      : choice.norm == row_norm::euclidean ? 2
                                                           : 1});
        for (index_t r = 0; r < 4; ++r)
        {
            for (index_t t = 0; t < x.sizes.tokens; ++t)
            {
                // A value that is the mean itself is off from it by a rounding.
                long double const size = want.dropped[static_cast<std::size_t>(t)] + want.loss(r, t) + 2e-3L;
                error.add(static_cast<long double>(*at++), want.loss(r, t), size, (h * 100 + r) * 1000000 + t);
            }
        }
    }
    return error;
}

} // namespace

TEST_CASE("replayed losses are those of the chunk's queries so many positions later, which see all of its keys")
{
    for (index_t const tokens : {1, 40, 200})
    {
        for (index_t const sinks : {0, 4})
        {
            for (bool const own : {false, true})
            {
                for (row_norm const norm : {row_norm::sum, row_norm::euclidean, row_norm::maximum})
                {
                    CAPTURE(tokens);
                    CAPTURE(sinks);
                    CAPTURE(own);
                    options const choice{.ahead = 300, .own = own, .norm = norm};
                    worst_error const error = against_oracle(chunk_of(tokens, sinks), choice);
                    CAPTURE(error);
                    CHECK(error.within(tolerance));
                }
            }
        }
    }
    options const neighbours{.encoding = {.base = 5e5, .rotating = 20, .pairs = rotary_pairs::neighbours}};
    worst_error const error = against_oracle(chunk_of(60, 4), neighbours);
    CAPTURE(error);
    CHECK(error.within(tolerance));
}

TEST_CASE("tokens of the reading itself draw attention away from the chunk")
{
    auto const x       = chunk_of(100, 4);
    auto const without = replayed(x, {});
    auto const with    = replayed(x, {.own = true});
    for (std::size_t i = 0; i < 100; ++i) { CHECK(with[i] < without[i]); } // of the first head, dropped
}

TEST_CASE("queries may be of another element type, and losses do not depend on threads")
{
    auto const x = chunk_of(300, 4);
    tensor<float, 3> queries{{4, 300, 32}};
    for (index_t h = 0; h < 4; ++h)
    {
        for (index_t i = 0; i < 300; ++i)
        {
            for (index_t d = 0; d < 32; ++d) { queries.set(widen(x.queries.get(h, i, d)), h, i, d); }
        }
    }
    tensor<float, 3> loss{{2, 4, 300}};
    support::run([&](host const& on) {
        replay(on, queries.in(), x.keys.in(), x.values.in(), x.window_keys.in(), bit_ratios, {.ahead = 0}, loss.out());
    });
    CHECK(support::same_bits(loss.elements(), replayed(x, {.ahead = 0}))); // nothing is rounded anew
    cpu::thread_pool three{3};
    for (bool const own : {false, true})
    {
        CHECK(support::same_bits(replayed(x, {.own = own}, three), replayed(x, {.own = own})));
    }
}

TEST_CASE("the presets' options are those of replay")
{
    rotary_encoding<host> const encoding{.base = 7};
    auto const best = presets::best.replay(encoding);
    auto const any  = presets::any_question.replay(encoding);
    CHECK(best.encoding.base == 7);
    CHECK_FALSE(best.own);
    CHECK(any.own);
    CHECK(any.ahead == presets::any_question.replayed->ahead);
    CHECK(any.norm == row_norm::euclidean);
}

TEST_CASE("replay refuses projected rungs, and an encoding that does not fit the head dimension")
{
    auto const x      = chunk_of(8, 4);
    auto const refuse = [&](ratio_set const& ratios, options const& choice) {
        tensor<float, 3> loss{{2, static_cast<index_t>(ratios.size()), 8}};
        return error_text<invalid_argument>([&] {
            support::run([&](host const& on) {
                replay(on, x.queries.in(), x.keys.in(), x.values.in(), x.window_keys.in(), ratios, choice, loss.out());
            });
        });
    };
    CHECK(refuse(paper_ratios, {}).starts_with("replay: the ratio set has a projected rung"));
    CHECK(refuse(bit_ratios, {.encoding = {.rotating = 3}}).find("3 of 32") != std::string::npos);
}
