// What a fold alone does: which tokens it lowers and to what, its window, stand-ins, another cache, its errors. What it promises
// like compress, prompt and reader is in pipelines.cpp.
#include <mdkv/recompress.hpp>

#include <mdkv/mdkv.hpp>

#include "support/compare.hpp"
#include "support/folding.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory_resource>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::every_kind;
using support::listed;
using support::packed_layer;
using support::packed_sizes;
using support::tensor;
using host    = cpu::backend;
using options = recompress_options<host>;

/// A cache that the CPU folds.
struct growing : support::growing_cache<half>
{
    using growing_cache::growing_cache;

    /// Folds in one call.
    recompress_report fold(tensor<half, 3> const& queries, options choice, tensor<std::int32_t, 2>* sources)
    {
        if (sources != nullptr) { choice.sources = sources->out(); }
        recompress_report report;
        support::run([&](host const& on) { report = recompress(on, queries.in(), layer.ratios, choice, cache); });
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

} // namespace

TEST_CASE(
    "fifty folds keep within the limit, spoil no token that keeps its rung, and lower none but from what is stored; a "
    "limit that holds everything leaves all as it is")
{
    for (auto const& [rungs, dims, least] :
        {std::tuple{listed(bit_ratios), head_dims{40, 24}, 10000}, {listed(paper_ratios), head_dims{40, 24}, 10000},
            {every_kind, head_dims{40, 24}, 10000}, {support::turned_kinds, support::turned_dims, 20000}})
    {
        growing g{rungs, 24, std::pmr::get_default_resource(), dims};
        CAPTURE(rungs.size());
        CAPTURE(dims.keys);
        index_t lowered = 0, dropped = 0, from_turned = 0; // codes of turned coordinates that are something else now
        for (int i = 0; i < 50; ++i)
        {
            CAPTURE(i);
            bool const fits = i % 10 == 0;
            g.append(fits ? 9 : 1 + g.random.below(24));
            fold_check check{g};
            tensor<std::int32_t, 2> sources{{3, most_slots(g.view()) + 2}};
            index_t const need             = g.cache.arena_bytes() + g.cache.appended() * g.token_bytes();
            index_t const limit            = fits ? need : least + g.random.below(1000);
            auto other                     = g.cache.copy();
            recompress_report const report = g.fold(limit, &sources);
            REQUIRE(g.cache.arena_bytes() <= limit);
            REQUIRE(report.resident_bytes == g.cache.arena_bytes());
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
            lowered += check.lowered;
            dropped += check.dropped;
            from_turned += check.from_turned;
            if (!fits) { continue; }
            CHECK(report.chosen.status == allocation_status::everything_kept);
            CHECK(report.resident_bytes == need);
            CHECK(report.window_bytes + report.chosen.token_bytes + report.chosen.charged_bytes == need);
            CHECK(check.lowered + check.dropped == 0);
            contents const once{g.cache}; // what would be moved to the same place is the same to the bit
            CHECK(g.fold(need).kept == report.kept);
            CHECK(contents{g.cache} == once);
            std::swap(g.cache, other);
            recompress_report const less = g.fold(need - 1);
            CHECK(less.resident_bytes < need);
            CHECK(less.lowered + less.dropped > 0);
            std::swap(g.cache, other);
        }
        CHECK(lowered > 100);
        CHECK(dropped > 500);
        CHECK(g.view().heads[0].key_columns == 0);
        CHECK((from_turned > 10 || dims.keys == 40));
    }
}

TEST_CASE("a fold may make another window than the cache has: tokens of the tail, within half of the limit")
{
    packed_layer<half> const layer{
        {.heads = 2, .tokens = 60, .window = 3, .dims = {32, 32}, .rungs = listed(bit_ratios)}};
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
        std::vector const before{support::stored_tokens(cache.view(), 0), support::stored_tokens(cache.view(), 1)};
        support::run([&](host const& on) {
            auto const report = recompress(on, slice<1>(layer.keys.in(), 0, 4), layer.ratios,
                {.limit = budget::bytes(limit * token), .window = wanted}, cache);
            CHECK(report.window_bytes == want * token);
        });
        CHECK(cache.layout().window == want);
        for (index_t i = 0; i < 2 * want; ++i)
        {
            auto const now = support::stored_tokens(cache.view(), i % 2).end()[-1 - i / 2];
            auto const old = before[static_cast<std::size_t>(i % 2)].end()[-1 - i / 2];
            CHECK((support::same_bits(now.key, old.key) && support::same_bits(now.value, old.value)));
        }
    }
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
        auto const fold = [&](auto& folded, index_t within, auto& to) {
            recompress_report report;
            support::run([&](host const& on) {
                report = recompress(on, slice<1>(layer.keys.in(), 40, 4), layer.ratios,
                    {.limit = budget::bytes(within), .sources = to.out()}, folded);
            });
            return report;
        };
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
        index_t const least = 3 * 4 * 128 + bytes + channels;
        tensor<std::int32_t, 2> sources{{3, most_slots(cache.view())}};
        CHECK(error_text<invalid_argument>([&] { fold(cache, least - 1, sources); })
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
    std::vector const before{support::stored_tokens(cache.view(), 0), support::stored_tokens(cache.view(), 1)};
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
        auto const now  = support::stored_tokens(cache.view(), h);
        CHECK(cache.view().heads[h].exact.tokens == 4);
        REQUIRE(now.size() <= old.size());
        for (std::size_t i = 0; i < now.size(); ++i)
        {
            auto const from = static_cast<std::size_t>(sources.get(h, static_cast<index_t>(i)));
            REQUIRE(from < old.size());
            CHECK(now[i].rung == old[from].rung);
            CHECK((support::same_bits(now[i].key, old[from].key) && support::same_bits(now[i].value, old[from].value)));
        }
    }
}

TEST_CASE(
    "the tokens of each head are scored by themselves, against what is stored of them, and pooled within their run")
{
    constexpr index_t group = growing::group;
    growing g{listed(bit_ratios)};
    g.append(10);
    auto const queries = g.draw(3 * group, 12, 40);
    index_t const most = most_slots(g.view()) - 4;
    tensor<float, 2> elsewhere{{3 * group, 12}}; // natural log-sum-exps
    for (index_t i = 0; i < 3 * group * 12; ++i) { elsewhere.set(0.5F * static_cast<float>(i % 17), i / 12, i % 12); }
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
    SUBCASE("beside sink logits")
    {
        choice.lse_elsewhere = slice<1>(elsewhere.in(), 0, 1);
    }
    tensor<float, 3> loss{{3, 4, most}};
    loss.assign(std::vector<float>(static_cast<std::size_t>(loss.count()))); // padding
    for (index_t h = 0; h < 3; ++h)
    {
        auto const stored = support::stored_tokens(g.view(), h);
        auto const whole  = support::reconstructed_tokens(g.view(), h);
        auto const n      = static_cast<index_t>(stored.size()) - 4;
        tensor<half, 3> keys{{1, n + 4, 40}}, values{{1, n + 4, 24}};
        std::vector<half> numbers, value_numbers;
        for (auto const& token : whole)
        {
            for (double const x : token.key) { numbers.push_back(narrow<half>(static_cast<float>(x))); }
            for (double const x : token.value) { value_numbers.push_back(narrow<half>(static_cast<float>(x))); }
        }
        keys.assign(numbers);
        values.assign(value_numbers);
        tensor<float, 3> own{{1, 4, n}}, pooled{{1, 4, n}};
        in_view<float, 3, host> const none{};
        score_options<host> scoring{.uniform_queries = choice.uniform_queries};
        if (choice.lse_elsewhere) { scoring.lse_elsewhere = slice<0>(*choice.lse_elsewhere, h * group, group); }
        support::run([&](host const& on) {
            score(on, slice<0>(queries.in(), h * group, group), slice<1>(keys.in(), 0, n), slice<1>(values.in(), 0, n),
                slice<1>(keys.in(), n, 4), none, none, bit_ratios, scoring, own.out());
        });
        auto const run_of = [&](index_t t) { // neighbours are those of the same run
            int const rung = stored[static_cast<std::size_t>(t)].rung;
            return rung >= 0 ? rung : t >= n - 10 ? -2 : -1;
        };
        for (index_t first = 0, count = 1; first < n; first += count, count = 1)
        {
            while (first + count < n && run_of(first + count) == run_of(first)) { ++count; }
            support::run([&](host const& on) {
                pool(on, slice<2>(own.in(), first, count), {5, pooling::max}, slice<2>(pooled.out(), first, count));
            });
        }
        for (index_t i = 0; i < 4 * n; ++i)
        {
            bool const free = i / n >= static_cast<index_t>(rung_of(g, stored[static_cast<std::size_t>(i % n)]));
            loss.set(free ? 0.0F : pooled.get(0, i / n, i % n), h, i / n, i % n);
        }
    }
    tensor<std::uint8_t, 2> rung{{3, most}};
    index_t const limit = 8000 - g.window_bytes();
    allocation chosen;
    support::run([&](host const& on) {
        allocate(on, {loss.in(), rung.out()}, rung_costs{bit_ratios, {40, 24}, 2}, in(on, &limit, 1), {},
            out(on, &chosen, 1));
    });
    recompress_report const report = g.fold(queries, choice, nullptr);
    CHECK(report.chosen.loss == doctest::Approx(chosen.loss).epsilon(1e-3));
    CHECK(report.chosen.loss > 0);
    index_t apart = 0;
    for (std::size_t r = 1; r < 4; ++r) { apart += std::abs(report.chosen.tokens[r] - chosen.tokens[r]); }
    CHECK(apart <= 2); // losses may differ in their last bits
}

TEST_CASE("a layer that was stored uncompressed is folded under any set")
{
    growing g{listed(evict_ratios)};
    g.append(24);
    g.layer.ratios    = packed_layer<half>{packed_sizes{.rungs = listed(bit_ratios)}}.ratios;
    auto const report = g.fold(7000);
    CHECK(report.resident_bytes <= 7000);
    CHECK(report.chosen.tokens[1] + report.chosen.tokens[2] > 0);
    CHECK(g.cache.layout() == cache_layout{g.layer.ratios, 3, 4, {40, 24}});
}

TEST_CASE("bad arguments of a fold are named with their value and limit, and nothing is changed")
{
    growing g{listed(bit_ratios)};
    g.append(5);
    contents const before{g.cache};
    auto const refused = [&](std::string const& want, tensor<half, 3> const& queries, options const& choice,
                             tensor<std::int32_t, 2>* sources = nullptr) {
        CAPTURE(want);
        std::string const said = error_text<error>([&] { g.fold(queries, choice, sources); });
        CAPTURE(said);
        CHECK(said.find(want) != std::string::npos);
        CHECK(contents{g.cache} == before);
    };
    auto const good = g.draw(6, 9, 40);
    options const small{.limit = budget::bytes(6000)};
    refused("a budget of 1535 bytes cannot hold the window of 4 tokens; at least 1536 bytes are needed", good,
        {.limit = budget::bytes(1535)});
    refused("Q = 10; it must be from 1 to 9, the tokens of the window (4; none if it is in codes) and the tail (5)",
        g.draw(6, 10, 40), small);
    refused("has 7 query heads, which 3 KV heads do not divide", g.draw(7, 9, 40), small);
    tensor<std::int32_t, 2> narrow_list{{3, most_slots(g.view()) - 1}};
    refused("options.sources [H, S] has S = ", good, small, &narrow_list);
    refused("recompress: window is -1; it must not be negative", good, {.window = -1});
    for (index_t const bytes : {6000, 100000}) // the second holds everything, and nothing would be scored
    {
        refused("recompress: uniform_queries is -2; it must be finite and not negative", good,
            {.limit = budget::bytes(bytes), .uniform_queries = -2});
    }
    for (float const bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 3e38F})
    {
        tensor<float, 2> elsewhere{{6, 9}};
        for (index_t i = 0; i < 54; ++i) { elsewhere.set(i == 40 ? bad : 0.0F, i / 9, i % 9); }
        options beside       = small;
        beside.lse_elsewhere = elsewhere.in();
        refused("lse_elsewhere", good, beside);
    }
    auto const under = [&](std::vector<rung> const& rungs) {
        packed_layer<half> const other{packed_sizes{.rungs = rungs}};
        return error_text<error>(
            [&] { support::run([&](host const& on) { recompress(on, good.in(), other.ratios, small, g.cache); }); });
    };
    CHECK(under({full_int4, full_int8, full}) == "recompress: the ratio set has no rung that drops a token");
    CHECK(under(listed(evict_ratios)).ends_with("which the ratio set lacks"));
    CHECK(contents{g.cache} == before);

    // A token that is no number is refused where it would have to be scored, and moved where not.
    auto nan = g.draw(1, 3, 40);
    nan.set(narrow<half>(std::numeric_limits<float>::quiet_NaN()), 0, 1, 7);
    g.add(nan, g.draw(1, 3, 24));
    g.append(4);
    CHECK(error_text<non_finite_input>([&] {
        g.fold(good, small, nullptr);
    }).starts_with("recompress: keys by slot: NaN or infinity in head 1"));
    CHECK(g.fold(good, {.limit = budget::bytes(100000)}, nullptr).dropped == 0);
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
            options choice{.limit = budget::bytes(bytes)};
            auto in_place = g.cache.copy();
            cpu::cache<half> view{{}, 0, 0};
            recompress_report want, got;
            auto const into = [&](auto& to) {
                support::run(
                    [&](host const& on) { got = recompress(on, queries.in(), g.layer.ratios, choice, source, to); });
            };
            support::run(
                [&](host const& on) { want = recompress(on, queries.in(), g.layer.ratios, choice, in_place); });
            into(view);
            CHECK(contents{g.cache} == before);
            CHECK(contents{view} == contents{in_place});
            CHECK(view.tail_capacity() == 0);
            CHECK(got.resident_bytes == want.resident_bytes);
            CHECK(got.dropped == want.dropped);
            view.reserve_tail(3); // the room stays
            into(view);
            CHECK(view.tail_capacity() == 3);
            choice.limit = budget::bytes(1);
            CHECK(
                error_text<invalid_argument>([&] { into(view); }).find("cannot hold the window") != std::string::npos);
            CHECK(contents{view} == contents{in_place});
        }
    }
    growing g{listed(bit_ratios)};
    contents const before{g.cache};
    auto const into_it = [&](cpu::cache<half> const& from) {
        auto const queries = g.draw(6, 4, 40);
        support::run([&](host const& on) { recompress(on, queries.in(), g.layer.ratios, {}, from.view(), g.cache); });
    };
    CHECK(error_text<invalid_argument>([&] { into_it({}); })
          == "recompress: the cache has no layout: nothing was packed into it, or it was moved from");
    CHECK(contents{g.cache} == before);
    into_it(cpu::cache<half>{cache_layout{bit_ratios, 0, 0, {64, 64}}, 0, 0});
    CHECK(g.cache.layout().heads == 0);
}
