#include "policies/criticalkv.hpp"
#include "policies/expected_attention.hpp"
#include "policies/keydiff.hpp"
#include "policies/snapkv.hpp"
#include "policies/tova.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/stages/pool.hpp>

#include "policies/keep.hpp"
#include "runner/layers.hpp"
#include "support/compare.hpp"

namespace
{

/// The layer that NVIDIA's kvpress scored, and its scores (tests/tools/record_press.py): the recorded ones, or those of the
/// file that MDKV_PRESS_SCORES names.
struct recorded_press
{
    nlohmann::json record;
    std::vector<float> keys, values, queries, weights;
    runner::rotary rotation;
    runner::prompt_layer<float> layer;
    runner::scratch_memory scratch;

    recorded_press()
    {
        char const* const named = std::getenv("MDKV_PRESS_SCORES");
        std::string const path  = named != nullptr ? named : std::string(MDKV_TEST_DATA_DIR) + "/press_scores.json";
        std::ifstream in(path);
        REQUIRE_MESSAGE(in.good(), path, " cannot be read");
        record   = nlohmann::json::parse(in);
        keys     = record.at("keys").get<std::vector<float>>();
        values   = record.at("values").get<std::vector<float>>();
        queries  = record.at("queries").get<std::vector<float>>();
        weights  = record.at("output_weights").get<std::vector<float>>();
        rotation = runner::rotary{number("dim"), record.at("rope_base").get<double>(), {}};

        layer.heads          = number("heads");
        layer.group          = number("group");
        layer.tokens         = number("tokens");
        layer.window         = number("window");
        layer.key_dim        = number("dim");
        layer.value_dim      = number("dim");
        layer.keys           = keys.data();
        layer.values         = values.data();
        layer.queries        = queries.data();
        layer.query_tokens   = layer.tokens;
        layer.output_weights = weights.data();
        layer.embedding      = number("embedding");
        layer.rotation       = &rotation;
    }

    [[nodiscard]] std::int64_t number(char const* key) const { return record.at(key).get<std::int64_t>(); }

    /// kvpress scores all tokens; what it gives the window, or to the last token alone, only says that they stay.
    [[nodiscard]] nlohmann::json const& score(char const* press, std::int64_t head, std::int64_t token) const
    {
        return record.at(press).at(static_cast<std::size_t>(head * layer.tokens + token));
    }

    [[nodiscard]] support::worst_error error(
        char const* press, std::vector<float> const& got, std::int64_t first_token = 0) const
    {
        support::worst_error worst;
        REQUIRE(std::ssize(got) == layer.heads * layer.past());
        for (std::int64_t h = 0; h < layer.heads; ++h)
        {
            for (std::int64_t t = first_token; t < layer.past(); ++t)
            {
                double const want = score(press, h, t).get<double>();
                worst.add(got[static_cast<std::size_t>(h * layer.past() + t)], want, std::fabs(want), t);
            }
        }
        return worst;
    }
};

} // namespace

TEST_CASE("SnapKV scores as kvpress does")
{
    recorded_press press;
    auto const worst = press.error("snapkv",
        runner::snapkv_scores(press.layer, {.pooling = {5, mdkv::pooling::mean}, .mean = true}, {}, press.scratch));
    CHECK_MESSAGE(worst.within(1e-5), worst);
}

TEST_CASE("TOVA scores as kvpress does")
{
    recorded_press press;
    auto const worst = press.error("tova", runner::tova_scores(press.layer, {}, press.scratch));
    CHECK_MESSAGE(worst.within(1e-5), worst);
}

TEST_CASE("KeyDiff scores as kvpress does")
{
    recorded_press press;
    auto const got = runner::keydiff_scores(press.layer, {}, press.scratch);
    support::worst_error worst;
    for (std::int64_t h = 0; h < press.layer.heads; ++h)
    {
        for (std::int64_t t = 0; t < press.layer.past(); ++t)
        {
            worst.add(got[static_cast<std::size_t>(h * press.layer.past() + t)],
                press.score("keydiff", h, t).get<double>(), 1.0); // cosines
        }
    }
    CHECK_MESSAGE(worst.within(1e-6), worst);
}

TEST_CASE("Expected Attention scores as kvpress does, and puts the sinks first as it does")
{
    recorded_press press;
    runner::expected_attention_options const options;
    auto const got   = runner::expected_attention_scores(press.layer, options, {}, press.scratch);
    auto const worst = press.error("expected_attention", got, 0);
    CHECK_MESSAGE(worst.within(1e-4), worst); // exponentials of logits up to 20
}

TEST_CASE("CriticalKV scores as kvpress does, its first stage included")
{
    recorded_press press;
    std::vector<std::int64_t> const counts(
        static_cast<std::size_t>(press.layer.heads), press.number("kept") - press.layer.window);
    auto const got = runner::criticalkv_scores(press.layer, counts, {}, {}, press.scratch);
    support::worst_error worst;
    std::int64_t first_stage = 0;
    for (std::int64_t h = 0; h < press.layer.heads; ++h)
    {
        for (std::int64_t t = 0; t < press.layer.past(); ++t)
        {
            float const score          = got[static_cast<std::size_t>(h * press.layer.past() + t)];
            nlohmann::json const& want = press.score("criticalkv", h, t);
            REQUIRE(std::isinf(score) == want.is_null()); // null: the largest number
            first_stage += want.is_null();
            if (!want.is_null()) { worst.add(score, want.get<double>(), want.get<double>(), t); }
        }
    }
    CHECK(first_stage == 2 * press.layer.heads); // half of 20, less the window's 8
    CHECK_MESSAGE(worst.within(1e-5), worst);
}
