#include "policies/policy_prompt.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

#include <mdkv/core/types.hpp>

#include "policies/prompt_layer.hpp"
#include "runner/language_model.hpp"
#include "runner/layers.hpp"
#include "runner/policies.hpp"
#include "runner/prefill.hpp"
#include "runner/scratch_memory.hpp"
#include "support/oracle.hpp"
#include "support/random.hpp"

namespace
{

using support::oracle::matrix;

constexpr runner::model_shape shape{.layers = 1,
    .embedding                              = 1,
    .feed_forward                           = 1,
    .query_heads                            = 4,
    .kv_heads                               = 2,
    .key_dim                                = 8,
    .value_dim                              = 8,
    .vocabulary                             = 1,
    .context                                = 1,
    .rms_epsilon                            = 0,
    .rope_base                              = 500};
constexpr std::int64_t tokens = 150;
constexpr std::int64_t past   = 143;

/// One layer of a prompt whose vectors are known before their positions are encoded.
struct prompt
{
    runner::rotary rotation;
    std::vector<float> plain;   // queries [tokens, query_heads, D]
    std::vector<float> queries; // the same, encoded
    std::vector<float> keys;    // [kv_heads, tokens, D], encoded
    std::vector<float> values;  // [kv_heads, tokens, D]

    explicit prompt(mdkv::rotary_pairs pairs = mdkv::rotary_pairs::neighbours)
        : rotation{shape.key_dim, 500.0, {}, pairs}
    {
        support::source random{"replayed losses"};
        auto const fill = [&](std::vector<float>& all, std::int64_t heads) {
            all.resize(static_cast<std::size_t>(heads * tokens * 8));
            for (float& x : all) { x = static_cast<float>(random.normal()); }
        };
        fill(plain, shape.query_heads);
        fill(keys, shape.kv_heads);
        fill(values, shape.kv_heads);
        queries = plain;
        for (std::int64_t t = 0; t < tokens; ++t)
        {
            for (std::int64_t h = 0; h < shape.query_heads; ++h) { turn(queries, (t * shape.query_heads + h) * 8, t); }
            for (std::int64_t h = 0; h < shape.kv_heads; ++h) { turn(keys, (h * tokens + t) * 8, t); }
        }
    }

    void turn(std::vector<float>& rows, std::int64_t at, std::int64_t position) const
    {
        std::vector<float> table(static_cast<std::size_t>(rotation.table_size()));
        rotation.angles(position, table.data());
        rotation.turn(rows.data() + at, table.data());
    }

    /// e^logit of a key by a query of one of its head's query heads.
    [[nodiscard]] double weight(
        std::vector<float> const& rows, std::int64_t at, std::int64_t kv_head, std::int64_t key) const
    {
        double logit = 0;
        for (std::int64_t d = 0; d < 8; ++d)
        {
            logit += double{rows[static_cast<std::size_t>(at + d)]}
                     * double{keys[static_cast<std::size_t>((kv_head * tokens + key) * 8 + d)]};
        }
        return std::exp(logit / std::sqrt(8.0));
    }

    /// Losses, prefill's chunks being of this length.
    [[nodiscard]] std::vector<float> scored(runner::policy const& chosen, std::int64_t chunk) const
    {
        runner::prompt_layer<float> layer;
        layer.heads     = shape.kv_heads;
        layer.group     = shape.query_heads / shape.kv_heads;
        layer.tokens    = tokens;
        layer.window    = tokens - past;
        layer.key_dim   = shape.key_dim;
        layer.value_dim = shape.value_dim;
        layer.rotation  = &rotation;
        runner::policy_prompt<float> read{chosen, layer, 1};
        runner::scratch_memory scratch;
        for (std::int64_t first = 0; first < tokens; first += chunk)
        {
            std::int64_t const count = std::min(chunk, tokens - first);
            read.read(0, layer,
                {.layer      = 0,
                    .first   = first,
                    .count   = count,
                    .tokens  = tokens,
                    .keys    = keys.data(),
                    .values  = values.data(),
                    .queries = queries.data() + first * shape.query_heads * 8},
                {}, scratch);
        }
        auto const losses = read->losses_of(0); // [H, R, past]
        return {losses.data_handle(), losses.data_handle() + losses.required_span_size()};
    }
};

} // namespace

TEST_CASE(
    "replayed losses are those of the prompt's queries encoded anew so far ahead, each seeing its chunk and sinks")
{
    using enum mdkv::rotary_pairs;
    for (auto const& [text, power, pairs] : {std::tuple{"evict[rows=replay+chunk=32+over=max]", INFINITY, neighbours},
             std::tuple{"evict[rows=both+chunk=64+ahead=1000+over=rms]", 2.0F, halves},
             std::tuple{"evict[rows=replay+chunk=256+over=sum]", 1.0F, neighbours}})
    {
        CAPTURE(text);
        prompt const x{pairs};
        auto const chosen = runner::parse_policy(text);
        auto const got    = x.scored(chosen, 512);
        for (std::int64_t h = 0; h < shape.kv_heads; ++h)
        {
            for (std::int64_t first = 0; first < past; first += chosen.chunk)
            {
                auto const count = std::min(chosen.chunk, past - first);
                auto const sinks = std::min<std::int64_t>(first, 4);
                matrix queries{2 * count, 8}, keys{count + sinks, 8}, values{count, 8};
                auto const none = matrix{0, 0};
                for (std::int64_t i = 0; i < count; ++i)
                {
                    for (std::int64_t g = 0; g < 2; ++g)
                    {
                        std::vector<float> ahead = x.plain;
                        auto const at            = ((first + i) * shape.query_heads + h * 2 + g) * 8;
                        x.turn(ahead, at, first + i + chosen.ahead);
                        for (int d = 0; d < 8; ++d)
                        {
                            queries(g * count + i, d) =
                                static_cast<support::real>(ahead[static_cast<std::size_t>(at + d)]);
                        }
                    }
                }
                for (std::int64_t i = 0; i < count + sinks; ++i)
                {
                    auto const at = static_cast<std::size_t>((h * tokens + (i < count ? first + i : i - count)) * 8);
                    for (std::size_t d = 0; d < 8; ++d)
                    {
                        auto const c = static_cast<support::oracle::count>(d);
                        keys(i, c)   = static_cast<support::real>(x.keys[at + d]);
                        if (i < count) { values(i, c) = static_cast<support::real>(x.values[at + d]); }
                    }
                }
                auto const want = support::oracle::losses(queries, count, keys, values, none, none, {{0, 0}, {8, 8}},
                    1 / std::sqrt(support::real{8}), count + sinks, {.power = static_cast<support::real>(power)});
                double worst    = 0;
                for (std::int64_t i = 0; i < count; ++i)
                {
                    auto const loss    = double{got[static_cast<std::size_t>(h * 2 * past + first + i)]};
                    auto const exactly = static_cast<double>(want.dropped[static_cast<std::size_t>(i)]);
                    worst              = std::max(worst, std::abs(loss - exactly) / exactly);
                    CHECK(got[static_cast<std::size_t>((h * 2 + 1) * past + first + i)] == 0.0F); // kept
                }
                CHECK(worst < 2e-5);
            }
        }
    }
}

TEST_CASE("rows that see a replay's own tokens share their attention with them: sinks, and of the chunk those up to "
          "their own")
{
    prompt const x;
    std::int64_t const chunk = 64;
    auto const got = x.scored(runner::parse_policy("evict[rows=replay+own=yes+ahead=90+over=max+chunk=64]"), 512);
    for (std::int64_t h = 0; h < shape.kv_heads; ++h)
    {
        double worst = 0;
        for (std::int64_t first = 0; first < past; first += chunk)
        {
            auto const count = std::min(chunk, past - first);
            std::vector<double> largest(static_cast<std::size_t>(count)); // over rows, of P
            for (std::int64_t row = 0; row < 2 * count; ++row)
            {
                std::int64_t const head  = h * 2 + row / count;
                std::int64_t const token = first + row % count;
                std::vector<float> ahead = x.plain;
                auto const at            = (token * shape.query_heads + head) * 8;
                x.turn(ahead, at, token + 90);
                std::vector<double> weights;
                double sum = 0; // of the reading's own tokens: as far from each other as the prompt's
                for (std::int64_t t = 0; t < std::min<std::int64_t>(first, 4); ++t)
                {
                    sum += x.weight(x.queries, at, h, t);
                }
                for (std::int64_t t = first; t <= token; ++t) { sum += x.weight(x.queries, at, h, t); }
                for (std::int64_t t = 0; t < count; ++t)
                {
                    weights.push_back(x.weight(ahead, at, h, first + t));
                    sum += weights.back();
                }
                for (std::size_t t = 0; t < weights.size(); ++t)
                {
                    largest[t] = std::max(largest[t], weights[t] / sum);
                }
            }
            for (std::int64_t t = 0; t < count; ++t)
            {
                double squared = 0;
                for (std::int64_t d = 0; d < 8; ++d)
                {
                    double const v = double{x.values[static_cast<std::size_t>((h * tokens + first + t) * 8 + d)]};
                    squared += v * v;
                }
                double const want = 2 * largest[static_cast<std::size_t>(t)] * std::sqrt(squared);
                double const loss = double{got[static_cast<std::size_t>(h * 2 * past + first + t)]};
                worst             = std::max(worst, std::abs(loss - want) / want);
            }
        }
        CHECK(worst < 2e-5);
    }
}

TEST_CASE("replayed losses have the same bits however long prefill's chunks are")
{
    prompt const x;
    for (char const* const text : {"by_window[rows=replay+chunk=32]", "by_window[rows=replay+chunk=32+own=yes]"})
    {
        auto const chosen = runner::parse_policy(text);
        auto const want   = x.scored(chosen, 512);
        CHECK(std::all_of(want.begin(), want.end(), [](float loss) { return loss >= 0; }));
        for (std::int64_t const chunk : {32, 64, 128}) { CHECK(x.scored(chosen, chunk) == want); }
    }
}
