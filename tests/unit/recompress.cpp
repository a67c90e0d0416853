#include <mdkv/recompress.hpp>

#include <mdkv/attend.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/stages/allocate.hpp>
#include <mdkv/stages/pack.hpp>
#include <mdkv/stages/pool.hpp>

#include "support/compare.hpp"
#include "support/failing_resource.hpp"
#include "support/folding.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory_resource>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::every_kind;
using support::index_t;
using support::listed;
using support::packed_layer;
using support::packed_sizes;
using support::tensor;
using support::whole_token;
using host    = cpu::backend;
using options = recompress_options<host>;

/// A cache that the CPU folds.
struct growing : support::growing_cache<half>
{
    using growing_cache::growing_cache;

    /// Folds in one call.
    recompress_report fold(tensor<half, 3> const& queries, options choice, tensor<std::int32_t, 2>* sources,
        cpu::executor_ref threads = {})
    {
        if (sources != nullptr) { choice.sources = sources->out(); }
        recompress_report report;
        support::run(
            [&](host const& on) { report = recompress(on, queries.in(), layer.ratios, choice, cache); }, threads);
        return report;
    }
    recompress_report fold(index_t bytes, tensor<std::int32_t, 2>* sources = nullptr)
    {
        return fold(draw(3 * group, 4, layer.sizes.dims.keys),
            {.limit = budget::bytes(bytes), .allocation = {.charge = projection_charge::always}}, sources);
    }
};

using contents   = support::cache_contents<half>;
using fold_check = support::fold_check<half>;

/// attend's worst error against the definition over these tokens, relative.
double attention_error(growing& g, std::vector<std::vector<whole_token>> const& tokens)
{
    auto const drawn = g.draw(1, 3 * growing::group, 40);
    tensor<float, 2> queries{{3 * growing::group, 40}}, output{{3 * growing::group, 24}};
    tensor<float, 1> lse{{3 * growing::group}};
    std::vector<float> elements;
    for (half const x : drawn.elements()) { elements.push_back(widen(x)); }
    queries.assign(elements);
    double worst = 0;
    support::run([&](host const& on) { attend(on, queries.in(), g.view(), {}, output.out(), lse.out()); });
    for (index_t row = 0; row < 3 * growing::group; ++row)
    {
        std::vector<double> query;
        for (index_t d = 0; d < 40; ++d) { query.push_back(double{queries.get(row, d)}); }
        support::naive_attention const want{
            tokens[static_cast<std::size_t>(row / growing::group)], query, 24, 1 / std::sqrt(40.0)};
        for (index_t d = 0; d < 24; ++d)
        {
            worst = std::max(worst, std::abs(double{output.get(row, d)} - want.output[static_cast<std::size_t>(d)]));
        }
        worst = std::max(worst, std::abs(double{lse.get(row)} - want.lse));
    }
    return worst;
}

std::vector<std::vector<whole_token>> all_tokens(growing const& g)
{
    std::vector<std::vector<whole_token>> heads;
    for (index_t h = 0; h < 3; ++h) { heads.push_back(support::reconstructed_tokens(g.view(), h)); }
    return heads;
}

} // namespace

TEST_CASE(
    "fifty folds keep within the limit, spoil no token that keeps its rung, and lower none but from what is stored")
{
    for (std::vector<rung> const& rungs : {listed(bit_ratios), listed(paper_ratios), every_kind})
    {
        growing g{rungs};
        CAPTURE(rungs.size());
        double const integers = support::integer_rounding(g.view().layout);
        index_t lowered = 0, dropped = 0;
        for (int i = 0; i < 50; ++i)
        {
            CAPTURE(i);
            g.append(1 + g.random.below(24));
            fold_check check{g};
            tensor<std::int32_t, 2> sources{{3, most_slots(g.view()) + 2}};
            index_t const limit            = 10000 + g.random.below(1000);
            index_t const released         = 3 * g.cache.appended();
            recompress_report const report = g.fold(limit, &sources);
            REQUIRE(g.cache.arena_bytes() <= limit);
            REQUIRE(report.resident_bytes == g.cache.arena_bytes());
            REQUIRE(report.released == released);
            REQUIRE(g.cache.appended() == 0);
            REQUIRE(g.cache.tail_capacity() == 24);
            check.compare(g, sources);
            REQUIRE(check.up == 0);
            REQUIRE(check.changed == 0);
            REQUIRE(check.misplaced == 0);
            REQUIRE(check.worst.value() <= 1);
            REQUIRE(report.kept == check.stayed - 3 * 4);
            REQUIRE(report.lowered == check.lowered);
            REQUIRE(report.dropped == check.dropped);
            if (i % 10 == 0) { CHECK(attention_error(g, all_tokens(g)) < 2e-3 + integers); }
            lowered += check.lowered;
            dropped += check.dropped;
        }
        CHECK(lowered > 100);
        CHECK(dropped > 500);
        CHECK(g.view().heads[0].key_columns == 0);
    }
}

TEST_CASE("codes of turned coordinates are read back turned back, and copied as they are")
{
    growing g{support::turned_kinds, 24, std::pmr::get_default_resource(), support::turned_dims};
    REQUIRE(g.cache.layout().any_rotated());
    index_t from_codes = 0; // tokens that were codes of turned coordinates, and are something else
    for (index_t const limit : {28000, 22000, 18000})
    {
        g.append(12);
        fold_check check{g};
        tensor<std::int32_t, 2> sources{{3, most_slots(g.view())}};
        recompress_report const report = g.fold(limit, &sources);
        CHECK(report.resident_bytes <= limit);
        check.compare(g, sources);
        CHECK(check.up + check.changed + check.misplaced == 0);
        CHECK(check.worst.value() <= 1);
        from_codes += check.from_turned;
    }
    CHECK(from_codes > 10);
}

TEST_CASE("a limit that holds everything moves the tail in and leaves the rest as it is, and one byte less does not")
{
    growing g{every_kind};
    g.append(9);
    growing other{every_kind};
    other.append(9);
    index_t const need = g.cache.arena_bytes() + 3 * 9 * 64 * 2;
    fold_check check{g};
    tensor<std::int32_t, 2> sources{{3, most_slots(g.view())}};
    recompress_report const report = g.fold(need, &sources);
    CHECK(report.chosen.status == allocation_status::everything_kept);
    CHECK(report.resident_bytes == need);
    CHECK(report.lowered + report.dropped == 0);
    CHECK(report.window_bytes + report.chosen.token_bytes + report.chosen.charged_bytes == need);
    check.compare(g, sources);
    CHECK(check.changed + check.misplaced + check.dropped + check.up + check.lowered == 0);
    CHECK(attention_error(g, check.whole) < 4e-3);

    // What would be moved to the same place is the same to the bit.
    contents const once{g.cache};
    CHECK(g.fold(need).kept == report.kept);
    CHECK(contents{g.cache} == once);

    recompress_report const less = other.fold(need - 1);
    CHECK(less.resident_bytes < need);
    CHECK(less.lowered + less.dropped > 0);
}

TEST_CASE("a fold may make another window than the cache has: tokens of the tail, within half of the limit")
{
    support::packed_sizes const sizes{
        .heads = 2, .tokens = 60, .window = 3, .dims = {32, 32}, .rungs = listed(bit_ratios)};
    packed_layer<half> const layer{sizes};
    index_t const token = 2 * 64 * 2; // bytes, of both heads
    for (auto const& [wanted, limit, want] :
        {std::array<index_t, 3>{8, 60, 8}, {40, 60, 13}, {8, 10, 5}, {1, 60, 1}, {0, 60, 0}})
    {
        CAPTURE(wanted);
        CAPTURE(limit);
        auto cache = layer.packed(10);
        support::run([&](host const& on) {
            append(on, slice<1>(layer.keys.in(), 0, 10), slice<1>(layer.values.in(), 0, 10), cache.view());
        });
        std::vector<std::vector<support::stored_token<half>>> before;
        for (index_t h = 0; h < 2; ++h) { before.push_back(support::stored_tokens(cache.view(), h)); }
        support::run([&](host const& on) {
            auto const report = recompress(on, slice<1>(layer.keys.in(), 0, 4), layer.ratios,
                {.limit = budget::bytes(limit * token), .window = wanted}, cache);
            CHECK(report.window_bytes == want * token);
            CHECK(report.released == 2 * (13 - want));
        });
        CHECK(cache.layout().window == want);
        for (index_t h = 0; h < 2; ++h)
        {
            auto const after = support::stored_tokens(cache.view(), h);
            auto const& all  = before[static_cast<std::size_t>(h)];
            for (index_t i = 1; i <= want; ++i)
            {
                CHECK(support::same_bits(after.end()[-i].key, all.end()[-i].key));
                CHECK(support::same_bits(after.end()[-i].value, all.end()[-i].value));
            }
        }
    }
    auto cache = layer.packed(10);
    CHECK(error_text<invalid_argument>([&] {
        support::run([&](host const& on) {
            static_cast<void>(recompress(on, slice<1>(layer.keys.in(), 0, 2), layer.ratios, {.window = -1}, cache));
        });
    }) == "recompress: window is -1; it must not be negative");
    CHECK(!fold_options<host>(presets::any_question, budget::bytes(1), 4).window);
    CHECK(fold_options<host>(presets::best, budget::bytes(1), 4).window == 8); // its window may be in codes
}

TEST_CASE("stand-ins outlive folds bit for bit, have no slots, and take their bytes from the limit alone")
{
    std::vector<std::vector<rung>> const sets{listed(bit_ratios), every_kind, {drop, full_int4}};
    for (std::size_t set = 0; set < 2 * sets.size(); ++set)
    {
        auto const& rungs = sets[set / 2];
        bool const coded  = set % 2 != 0;
        CAPTURE(rungs.size());
        CAPTURE(coded);
        support::packed_sizes sizes{.heads = 3, .tokens = 70, .window = 4, .dims = {40, 24}, .rungs = rungs};
        packed_layer<half> plain{sizes};
        sizes.stand_ins       = 8;
        sizes.coded_stand_ins = coded;
        packed_layer<half> layer{sizes};
        for (index_t t = 0; t < 70; ++t)
        {
            if (t >= 3 && layer.rung.get(0, t) == 0) { layer.rung.set(1, 0, t); } // head 0 drops three at most
            if (layer.rung.get(1, t) == 0) { layer.rung.set(1, 1, t); }           // head 1 drops nothing
        }
        plain.rung.assign(layer.rung.elements());
        auto cache          = layer.packed(6);
        auto other          = plain.packed(6);
        index_t const bytes = cache.arena_bytes() - other.arena_bytes();
        REQUIRE(bytes == (layer.stand_ins(0) + 8) * (coded ? (40 + 24) / 2 + 2 * 4 : (40 + 24) * 2));
        index_t const heads    = layer.stand_ins(0) > 0 ? 2 : 1; // with stand-ins
        index_t const channels = coded ? heads * (2 * 40 + 24) * 2 : 0;
        std::vector<std::vector<support::stored_token<half>>> made;
        for (index_t h = 0; h < 3; ++h)
        {
            auto all = support::stored_tokens(cache.view(), h);
            made.emplace_back(all.end() - support::stand_ins_last(cache.view(), h, all), all.end());
        }
        for (int i = 0; i < 3; ++i)
        {
            support::run([&](host const& on) {
                auto const keys = slice<1>(layer.keys.in(), 6 * i, 6), values = slice<1>(layer.values.in(), 6 * i, 6);
                append(on, keys, values, cache.view());
                append(on, keys, values, other.view());
            });
            index_t const limit = other.arena_bytes() - 900 * i; // holds everything but the tail, then less
            index_t const most  = most_slots(other.view());
            REQUIRE(most_slots(cache.view()) == most);
            tensor<std::int32_t, 2> sources{{3, most}}, want{{3, most}};
            auto const fold = [&](auto& folded, index_t within, auto& to) {
                recompress_report report;
                support::run([&](host const& on) {
                    report = recompress(on, slice<1>(layer.keys.in(), 40, 4), layer.ratios,
                        {.limit = budget::bytes(within), .sources = to.out()}, folded);
                });
                return report;
            };
            auto const got      = fold(cache, limit + bytes, sources);
            auto const expected = fold(other, limit, want);
            CHECK(got.stand_in_bytes == bytes);
            CHECK(expected.stand_in_bytes == 0);
            CHECK(got.resident_bytes == cache.arena_bytes());
            CHECK(got.resident_bytes == expected.resident_bytes + bytes);
            CHECK(got.dropped == expected.dropped);
            CHECK(got.kept == expected.kept);
            CHECK(got.chosen.limit == expected.chosen.limit);
            CHECK(sources.elements() == want.elements());
            for (index_t h = 0; h < 3; ++h)
            {
                auto now        = support::stored_tokens(cache.view(), h);
                auto const text = support::stored_tokens(other.view(), h);
                CHECK(support::stand_ins_last(cache.view(), h, now) == std::ssize(made[static_cast<std::size_t>(h)]));
                auto const& stood = made[static_cast<std::size_t>(h)];
                bool same         = now.size() == text.size() + stood.size();
                for (std::size_t j = 0; same && j < now.size(); ++j)
                {
                    auto const& is = j < text.size() ? text[j] : stood[j - text.size()];
                    same = support::same_bits(now[j].key, is.key) && support::same_bits(now[j].value, is.value);
                }
                CHECK(same);
            }
        }
        index_t const least     = 3 * 4 * 128 + bytes + channels;
        std::string const error = error_text<invalid_argument>([&] {
            support::run([&](host const& on) {
                static_cast<void>(recompress(
                    on, slice<1>(layer.keys.in(), 40, 4), layer.ratios, {.limit = budget::bytes(least - 1)}, cache));
            });
        });
        CHECK(error
              == "recompress: a budget of " + std::to_string(least - 1)
                     + " bytes cannot hold the window of 4 tokens and the stand-ins; at least " + std::to_string(least)
                     + " bytes are needed");
    }
}

TEST_CASE(
    "a limit that holds every slot at the costliest rung raises no token, and makes none of a shorter head's padding")
{
    packed_layer<half> const layer = support::short_heads();
    auto cache                     = layer.packed();
    auto const tokens_of           = [&](index_t h) { return support::stored_tokens(cache.view(), h); };
    std::vector const before{tokens_of(0), tokens_of(1)};
    REQUIRE(before[0].size() == 10 + 4);
    REQUIRE(before[1].size() == 6 + 4);
    REQUIRE(cache.arena_bytes() > support::short_limit);
    tensor<std::int32_t, 2> sources{{2, 14}};
    recompress_report report;
    support::run([&](host const& on) {
        report = recompress(on, layer.window_keys.in(), layer.ratios,
            {.limit = budget::bytes(support::short_limit), .sources = sources.out()}, cache);
    });
    CHECK(report.resident_bytes <= support::short_limit);
    CHECK(report.resident_bytes == cache.arena_bytes());
    CHECK(report.lowered == 0);
    CHECK(report.kept == 8);
    CHECK(report.dropped == 8);
    CHECK(report.kept == cache.view().heads[0].runs[1].tokens + cache.view().heads[1].runs[1].tokens);
    for (index_t h = 0; h < 2; ++h)
    {
        auto const& old = before[static_cast<std::size_t>(h)];
        auto const now  = tokens_of(h);
        CHECK(cache.view().heads[h].exact.tokens == 4);
        REQUIRE(now.size() <= old.size());
        for (std::size_t i = 0; i < now.size(); ++i)
        {
            auto const from = static_cast<std::size_t>(sources.get(h, static_cast<index_t>(i)));
            REQUIRE(from < old.size());
            CHECK(now[i].rung == old[from].rung);
            CHECK(support::same_bits(now[i].key, old[from].key));
            CHECK(support::same_bits(now[i].value, old[from].value));
        }
    }
}

TEST_CASE("the tokens of each head are scored by themselves, against what is stored of them")
{
    growing g{listed(bit_ratios)};
    g.append(10);
    auto const queries = g.draw(3 * growing::group, 12, 40);
    auto const whole   = all_tokens(g);
    index_t const most = most_slots(g.view()) - 4;
    tensor<float, 2> elsewhere{{3 * growing::group, 12}}; // natural log-sum-exps
    for (index_t i = 0; i < 3 * growing::group * 12; ++i)
    {
        elsewhere.set(0.5F * static_cast<float>(i % 17), i / 12, i % 12);
    }
    options choice{.limit = budget::bytes(8000), .pooling = {5}};
    SUBCASE("alone")
    {}
    SUBCASE("beside queries whose attention is even")
    {
        choice.uniform_queries = 30;
    }
    SUBCASE("beside what each softmax has elsewhere")
    {
        choice.lse_elsewhere = elsewhere.in();
    }
    tensor<float, 3> loss{{3, 4, most}};
    for (index_t h = 0; h < 3; ++h)
    {
        auto const stored = support::stored_tokens(g.view(), h);
        auto const n      = static_cast<index_t>(stored.size()) - 4;
        tensor<half, 3> keys{{1, n, 40}}, values{{1, n, 24}}, window{{1, 4, 40}};
        for (index_t t = 0; t < n + 4; ++t)
        {
            auto const& token = whole[static_cast<std::size_t>(h)][static_cast<std::size_t>(t)];
            for (index_t d = 0; d < 40; ++d)
            {
                half const x = narrow<half>(static_cast<float>(token.key[static_cast<std::size_t>(d)]));
                if (t < n) { keys.set(x, 0, t, d); }
                else { window.set(x, 0, t - n, d); }
            }
            for (index_t d = 0; d < 24 && t < n; ++d)
            {
                values.set(narrow<half>(static_cast<float>(token.value[static_cast<std::size_t>(d)])), 0, t, d);
            }
        }
        tensor<float, 3> own{{1, 4, n}}, pooled{{1, 4, n}};
        tensor<float, 3> const none{{0, 0, 0}};
        score_options<host> scoring{.uniform_queries = choice.uniform_queries};
        if (choice.lse_elsewhere)
        {
            scoring.lse_elsewhere = slice<0>(elsewhere.in(), h * growing::group, growing::group);
        }
        support::run([&](host const& on) {
            score(on, slice<0>(queries.in(), h * growing::group, growing::group), keys.in(), values.in(), window.in(),
                none.in(), none.in(), bit_ratios, scoring, own.out());
        });
        index_t first = 0; // neighbours are those of the same run
        while (first < n)
        {
            auto const kind = [&](index_t t) {
                auto const& token = stored[static_cast<std::size_t>(t)];
                return token.rung >= 0 ? token.rung : t >= n - 10 ? -2 : -1;
            };
            index_t count = 1;
            while (first + count < n && kind(first + count) == kind(first)) { ++count; }
            support::run([&](host const& on) {
                pool(on, slice<2>(own.in(), first, count), {5, pooling::max}, slice<2>(pooled.out(), first, count));
            });
            first += count;
        }
        for (index_t t = 0; t < most; ++t)
        {
            for (index_t r = 0; r < 4; ++r)
            {
                bool const free = t >= n || r >= static_cast<index_t>(rung_of(g, stored[static_cast<std::size_t>(t)]));
                loss.set(free ? 0.0F : pooled.get(0, r, t), h, r, t);
            }
        }
    }
    tensor<index_t, 1> limits{{1}};
    tensor<std::uint8_t, 2> rung{{3, most}};
    tensor<allocation, 1> chosen{{1}};
    limits.set(8000 - g.window_bytes(), 0);
    support::run([&](host const& on) {
        allocate(on, {loss.in(), rung.out()}, rung_costs{bit_ratios, {40, 24}, 2}, limits.in(), {}, chosen.out());
    });
    recompress_report const report = g.fold(queries, choice, nullptr);
    CHECK(report.chosen.loss == doctest::Approx(chosen.get(0).loss).epsilon(1e-3));
    CHECK(report.chosen.loss > 0);
    index_t apart = 0;
    for (std::size_t r = 1; r < 4; ++r) { apart += std::abs(report.chosen.tokens[r] - chosen.get(0).tokens[r]); }
    CHECK(apart <= 2); // losses may differ in their last bits
}

TEST_CASE("what each softmax has elsewhere makes losses smaller, and nothing where it is minus infinity")
{
    constexpr float infinity = std::numeric_limits<float>::infinity();
    std::vector<double> losses;
    std::vector<contents> folded;
    tensor<float, 2> elsewhere{{3 * growing::group, 4}};
    for (float const lse : {0.0F, -infinity, 6.0F, 1e3F}) // 0: not given
    {
        growing g{listed(bit_ratios)};
        g.append(20);
        auto const queries = g.draw(3 * growing::group, 4, g.layer.sizes.dims.keys);
        options choice{.limit = budget::bytes(10000)};
        for (index_t i = 0; i < 3 * growing::group * 4; ++i) { elsewhere.set(lse, i / 4, i % 4); }
        if (lse != 0.0F) { choice.lse_elsewhere = elsewhere.in(); }
        losses.push_back(double{g.fold(queries, choice, nullptr).chosen.loss});
        folded.emplace_back(g.cache);
    }
    CHECK(folded[1] == folded[0]);
    CHECK(losses[1] == losses[0]);
    CHECK(losses[2] < 0.9 * losses[0]);
    CHECK(losses[2] > 0);
    CHECK(losses[3] < 1e-20); // all of it is there
}

TEST_CASE("queries of another element than the cache's fold it as the same numbers in its element do")
{
    growing one{listed(bit_ratios)};
    growing other{listed(bit_ratios)};
    for (growing* g : {&one, &other}) { g->append(20); }
    auto const queries = one.draw(3 * growing::group, 4, one.layer.sizes.dims.keys);
    options const choice{.limit = budget::bytes(10000)};
    recompress_report const wanted = one.fold(queries, choice, nullptr);
    recompress_report report;
    auto const wide = support::converted<float>(queries);
    support::run([&](host const& on) { report = recompress(on, wide.in(), other.layer.ratios, choice, other.cache); });
    CHECK(wanted.lowered > 0);
    CHECK(contents{one.cache} == contents{other.cache});
    CHECK(report.chosen.loss == wanted.chosen.loss);
}

TEST_CASE(
    "a layer that was stored uncompressed is folded under any set, and a rung in use that the set lacks is refused")
{
    growing g{listed(evict_ratios)};
    g.append(24);
    packed_layer<half> const bits{packed_sizes{.rungs = listed(bit_ratios)}};
    auto const queries = g.draw(3 * growing::group, 4, 40);
    recompress_report report;
    auto const fold = [&](auto const& ratios) {
        support::run([&](host const& on) {
            report = recompress(on, queries.in(), ratios, {.limit = budget::bytes(7000)}, g.cache);
        });
    };
    fold(bits.ratios);
    CHECK(report.resident_bytes <= 7000);
    CHECK(report.chosen.tokens[1] + report.chosen.tokens[2] > 0);
    CHECK(g.cache.layout() == cache_layout{bits.ratios, 3, 4, {40, 24}});
    contents const before{g.cache};
    CHECK(error_text<mismatch>([&] {
        fold(packed_layer<half>{packed_sizes{.rungs = listed(evict_ratios)}}.ratios);
    }).find("ratio set lacks")
          != std::string::npos);
    CHECK(contents{g.cache} == before);
}

TEST_CASE("bad input is refused by name, and nothing is changed")
{
    growing g{listed(bit_ratios)};
    g.append(5);
    contents const before{g.cache};
    auto const text = [&](tensor<half, 3> const& queries, options const& choice, tensor<std::int32_t, 2>* sources) {
        std::string const said = error_text<invalid_argument>([&] { g.fold(queries, choice, sources); });
        CHECK(contents{g.cache} == before);
        return said;
    };
    auto const says = [](std::string const& whole, char const* part) { return whole.find(part) != std::string::npos; };
    auto const good = g.draw(6, 9, 40);
    options const small{.limit = budget::bytes(6000)};
    CHECK(says(text(good, {.limit = budget::bytes(1535)}, nullptr), "at least 1536 bytes are needed"));
    CHECK(says(text(g.draw(6, 10, 40), small, nullptr), "Q = 10"));
    tensor<std::int32_t, 2> narrow_list{{3, most_slots(g.view()) - 1}};
    CHECK(says(text(good, small, &narrow_list), "options.sources"));
    for (index_t const bytes : {6000, 100000}) // the second holds everything, and nothing would be scored
    {
        CHECK(text(good, {.limit = budget::bytes(bytes), .uniform_queries = -2}, nullptr)
              == "recompress: uniform_queries is -2; it must be finite and not negative");
    }
    options beside = small;
    for (float const bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 3e38F})
    {
        tensor<float, 2> elsewhere{{6, 9}};
        for (index_t i = 0; i < 54; ++i) { elsewhere.set(i == 40 ? bad : 0.0F, i / 9, i % 9); }
        beside.lse_elsewhere = elsewhere.in();
        CHECK(
            says(error_text<non_finite_input>([&] { g.fold(good, beside, nullptr); }), "lse_elsewhere"));
        CHECK(contents{g.cache} == before);
    }
    auto spoilt = g.draw(6, 9, 40);
    spoilt.set(narrow<half>(std::numeric_limits<float>::infinity()), 2, 3, 4);
    CHECK(says(text(spoilt, small, nullptr), "queries: NaN or infinity in head 2, row 3"));

    packed_layer<half> const no_drop{packed_sizes{.rungs = {full_int4, full_int8, full}}};
    CHECK(says(error_text<invalid_argument>([&] {
        support::run([&](host const& on) { recompress(on, good.in(), no_drop.ratios, small, g.cache); });
    }),
        "no rung that drops"));

    // A token that is no number is refused where it would have to be scored, and moved where not.
    auto nan = g.draw(1, 3, 40);
    nan.set(narrow<half>(std::numeric_limits<float>::quiet_NaN()), 0, 1, 7);
    g.add(nan, g.draw(1, 3, 24));
    g.append(4);
    CHECK(says(error_text<non_finite_input>([&] { g.fold(good, small, nullptr); }), "keys by slot: NaN or infinity"));
    CHECK(g.fold(good, {.limit = budget::bytes(100000)}, nullptr).dropped == 0);
}

TEST_CASE("an allocation that fails, of the cache or of scratch, leaves the cache as it was")
{
    support::failing_resource resource;
    {
        growing g{listed(paper_ratios), 24, &resource};
        g.append(20);
        contents const before{g.cache};
        auto const queries = g.draw(6, 4, 40);
        options const choice{.limit = budget::bytes(6000)};
        tensor<std::int32_t, 2> sources{{3, most_slots(g.view())}};
        auto const untouched = sources.memory();
        for (int k = 0; k < 3; ++k)
        {
            resource.arm(support::failure::once, k);
            CHECK_THROWS_AS(g.fold(queries, choice, &sources), std::bad_alloc);
            CHECK(contents{g.cache} == before);
            CHECK(sources.memory() == untouched);
        }
        resource.arm(support::failure::never);

        support::failing_resource own;
        for (int k = 0, failed = 1; failed == 1; ++k)
        {
            own.arm(support::failure::from_on, k);
            workspace scratch{cpu::host_memory{&own}};
            recompress_report report;
            failed = error_text<std::bad_alloc>([&] {
                report = recompress(host{&scratch}, queries.in(), g.layer.ratios, choice, g.cache);
            }) == "threw nothing"
                         ? 0
                         : 1;
            CHECK((failed == 1 ? contents{g.cache} == before : report.resident_bytes <= 6000));
        }
    }
    CHECK(resource.outstanding() == 0);
}

TEST_CASE("into another cache: the source stays, and the result is that of folding a copy in place")
{
    for (std::vector<rung> const& rungs : {listed(bit_ratios), listed(paper_ratios), every_kind})
    {
        growing g{rungs};
        g.append(20);
        contents const before{g.cache};
        auto const source = std::as_const(g.cache).view();
        for (index_t const bytes :
            {index_t{9000}, index_t{14000}, index_t{1} << 30}) // of two questions, and of everything
        {
            auto const queries = g.draw(6, 4, 40);
            options const choice{.limit = budget::bytes(bytes)};
            auto in_place    = g.cache.copy();
            auto const& made = g.layer.ratios;
            cpu::cache<half> view{{}, 0, 0};
            recompress_report want, got;
            support::run([&](host const& on) { want = recompress(on, queries.in(), made, choice, in_place); });
            support::run([&](host const& on) { got = recompress(on, queries.in(), made, choice, source, view); });
            CHECK(contents{g.cache} == before);
            CHECK(contents{view} == contents{in_place});
            CHECK(view.tail_capacity() == 0);
            CHECK(view.layout() == in_place.layout());
            CHECK(got.resident_bytes == want.resident_bytes);
            CHECK(got.dropped == want.dropped);
            view.reserve_tail(3); // the room stays
            support::run([&](host const& on) { got = recompress(on, queries.in(), made, choice, source, view); });
            CHECK(view.tail_capacity() == 3);

            contents const kept{view};
            CHECK(error_text<invalid_argument>([&] {
                support::run([&](host const& on) {
                    recompress(on, queries.in(), made, options{.limit = budget::bytes(1)}, source, view);
                });
            }).find("cannot hold the window")
                  != std::string::npos);
            CHECK(contents{view} == kept);
        }
    }
    growing g{listed(bit_ratios)};
    auto const into = [&](cpu::cache<half> const& from) {
        support::run([&](host const& on) {
            recompress(on, g.draw(6, 4, 40).in(), g.layer.ratios, options{}, from.view(), g.cache);
        });
    };
    contents const before{g.cache};
    CHECK(error_text<invalid_argument>([&] { into({}); })
          == "recompress: the cache has no layout: nothing was packed into it, or it was moved from");
    CHECK(contents{g.cache} == before);
    into(cpu::cache<half>{cache_layout{bit_ratios, 0, 0, {64, 64}}, 0, 0});
    CHECK(g.cache.layout().heads == 0);
}
