#include <mdkv/presets.hpp>

#include <mdkv/compress.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/leverage.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/recompress.hpp>
#include <mdkv/replay/advance.hpp>
#include <mdkv/replay/replay.hpp>
#include <mdkv/stages/score.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <vector>

using namespace mdkv;

TEST_CASE("presets differ from the paper's in what their names say")
{
    static_assert(presets::paper.ratios.size() == 4);
    CHECK(std::string{presets::paper.name} == "paper");
    CHECK(presets::paper.pooling.width == 7);
    CHECK(presets::paper_literal.pooling.width == 1);
    CHECK(presets::paper_literal.charge == projection_charge::always);
    CHECK(presets::evict.ratios[1] == full);
    for (std::size_t r = 0; r < presets::by_window.ratios.size(); ++r)
    {
        CHECK(!presets::by_window.ratios[r].projected());
    }
    CHECK(!presets::by_window.replayed);
    CHECK(presets::best.replayed);
    CHECK(presets::best.replayed->join > 0);
    CHECK(presets::best.ratios.size() == presets::by_window.ratios.size());
    CHECK(presets::any_question.replayed);
    CHECK(presets::any_question.replayed->join == 0);
    CHECK(presets::any_question.odd() > 0);
    CHECK(presets::best.odd() == 0);
}

TEST_CASE("a preset's options reach compress")
{
    auto const options = presets::by_window.options<cpu::backend>(budget::kv_size(64));
    CHECK(options.pooling.kind == presets::by_window.pooling.kind);
    CHECK(options.pooling.width == presets::by_window.pooling.width);
    CHECK(
        presets::paper_literal.options<cpu::backend>(budget::bytes(1)).allocation.charge == projection_charge::always);
}

TEST_CASE("a preset's scale reaches every call that is not given a cache, and is 1/sqrt(D) unless it is set")
{
    preset own = presets::best;
    own.scale  = 0.3F;
    CHECK(own.options<cpu::backend>(budget::kv_size(64)).scoring.scale == 0.3F);
    CHECK(own.replay(rotary_encoding<cpu::backend>{}).scale == 0.3F);
    CHECK(own.stand_in().scale == 0.3F);
    CHECK(presets::best.options<cpu::backend>(budget::kv_size(64)).scoring.scale == 0.0F);
    CHECK(presets::best.replay(rotary_encoding<cpu::backend>{}).scale == 0.0F);
    CHECK(presets::best.stand_in().scale == 0.0F);
}

TEST_CASE("a preset's weights reach balance: those of odd tokens less where tokens are few")
{
    std::vector<leverage_sum> const leverages(4096);
    auto const options = [&](preset const& p, index_t tokens) {
        return p.balance<cpu::backend>(in(cpu::backend{}, leverages.data(), tokens));
    };
    auto const& any = presets::any_question;
    CHECK(options(any, 4096).odd == any.odd());
    CHECK(options(any, 2048).odd == any.odd());
    CHECK(options(any, 512).odd == any.odd() / 4);
    CHECK(options(any, 0).odd == 0);
    CHECK(options(any, 512).leverages->extent(0) == 512);
    CHECK(options(any, 512).depth == any.shared->depth);
    CHECK(options(presets::best, 512).odd == 0);
    CHECK(!options(presets::best, 512).leverages);
}

TEST_CASE("stand-ins take a sixteenth of a layer's limit at most")
{
    layer_shape const shape{.heads = 3, .group = 3, .tokens = 500, .window = 12, .dims = {64, 32}, .element_bytes = 2};
    index_t const each = 3 * (64 + 32) * 2;
    CHECK(stand_ins_within(8, 64 * each, shape) == 4);
    CHECK(stand_ins_within(8, 64 * each - 1, shape) == 3);
    CHECK(stand_ins_within(8, 1000 * each, shape) == 8);
    CHECK(stand_ins_within(0, 1000 * each, shape) == 0);
    CHECK(stand_ins_within(8, 0, shape) == 0);
    CHECK(stand_ins_within(8, -1, shape) == 0);
    CHECK(stand_ins_within(8, 1000, layer_shape{}) == 0);
}

TEST_CASE("queries whose attention is even count as a part of the others")
{
    CHECK(presets::by_window.even_queries(64) == doctest::Approx(0.1 * (32 + 32 * 0.2)));
    CHECK(presets::by_window.even_queries(20) == doctest::Approx(0.1 * 20));
    CHECK(presets::by_window.even_queries(0) == 0);
    CHECK(presets::paper.even_queries(32) == 0);
    CHECK(presets::best.even_queries(64) == 0);
}

TEST_CASE("the question's queries count fully and earlier ones as the preset says, however many there are")
{
    auto const& best = presets::best;
    CHECK(best.query_weight(0, best.queries) == best.early_weight);
    CHECK(best.query_weight(best.queries - best.question - 1, best.queries) == best.early_weight);
    CHECK(best.query_weight(best.queries - best.question, best.queries) == 1.0F);
    CHECK(best.query_weight(0, best.question) == 1.0F); // a short prompt is all question
    CHECK(best.query_weight(0, 5) == 1.0F);
    CHECK(presets::paper.query_weight(0, 100) == 1.0F);
}
