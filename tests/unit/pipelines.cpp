// The promises of compress, prompt, reader and fold, each over one table of cases that takes the same text on all four ways. What
// only one of them does, and its oracle, is in the file of its name.
#include <mdkv/mdkv.hpp>

#include "support/cases.hpp"
#include "support/compare.hpp"
#include "support/failing_resource.hpp"
#include "support/host.hpp"
#include "support/message.hpp"
#include "support/packed.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <limits>
#include <memory_resource>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace
{

using namespace mdkv;
using support::contents_of;
using support::each;
using support::error_text;
using support::refused;
using support::tensor;
using support::with_refit;
using host       = cpu::backend;
using text       = support::text<half>;
using outcome    = support::outcome<half>;
using conditions = support::conditions<half>;

/// A way, and the preset by which it is taken.
struct one_case
{
    std::string_view way;
    outcome (*take)(text const&, preset const&, budget, conditions const&);
    preset chosen;
};

preset cut(preset p)
{
    p.replayed->chunk = 64;
    return p;
}

constexpr auto compresses = support::by_compress<half>;
constexpr auto prompts    = support::by_prompt<half>;
constexpr auto reads      = support::by_reader<half>;
constexpr auto folds      = support::by_fold<half>;

std::vector<one_case> const table{{"compress", compresses, presets::paper}, {"compress", compresses, presets::evict},
    {"compress", compresses, cut(with_refit(presets::best))}, {"prompt", prompts, presets::paper},
    {"prompt", prompts, presets::by_window}, {"prompt", prompts, cut(with_refit(presets::best))},
    {"prompt", prompts, cut(presets::any_question)}, {"reader", reads, cut(presets::best)},
    {"reader", reads, cut(presets::any_question)}, {"fold", folds, presets::paper}, {"fold", folds, presets::by_window},
    {"fold", folds, cut(presets::best)}};

/// Of the cases' text, whose queries are all at hand.
support::text_sizes const sizes{.layers = 2, .tokens = 300, .last = 300};

/// Calls test(case, text, limit of a layer, what becomes of it) for each case.
template <class Test>
void for_each_case(Test const& test)
{
    text const x{sizes};
    budget const limit = budget::bytes(x.layer_bytes() / 4);
    for (one_case const& one : table)
    {
        CAPTURE(std::string{one.way});
        CAPTURE(std::string{one.chosen.name});
        test(one, x, limit, one.take(x, one.chosen, limit, {}));
    }
}

/// Caches that hold something, out of a memory resource.
std::vector<cpu::cache<half>> filled(std::pmr::memory_resource* memory = std::pmr::get_default_resource())
{
    text const x{{.tokens = 50}};
    std::vector<cpu::cache<half>> caches;
    for (index_t l = 0; l < sizes.layers; ++l)
    {
        caches.emplace_back(cache_layout{}, 0, 0, memory);
        support::run([&](host const& on) {
            compress(on, x.whole(0), presets::by_window, budget::fraction(1, 2), caches.back());
        });
    }
    return caches;
}

/// Whether all heads of a cache hold these tokens of a layer, in this order, bit for bit.
template <class T>
bool holds(cpu::cache<T> const& cache, support::layer<T> const& x, std::vector<index_t> const& tokens)
{
    bool all = true;
    for (index_t h = 0; h < x.sizes.heads; ++h)
    {
        auto const stored = support::stored_tokens(cache.view(), h);
        all               = all && stored.size() == tokens.size();
        for (std::size_t i = 0; all && i < tokens.size(); ++i)
        {
            std::vector<T> key, value;
            for (index_t d = 0; d < x.sizes.dim; ++d) { key.push_back(x.keys.get(h, tokens[i], d)); }
            for (index_t d = 0; d < x.sizes.value_dim; ++d) { value.push_back(x.values.get(h, tokens[i], d)); }
            all = support::same_bits(stored[i].key, key) && support::same_bits(stored[i].value, value);
        }
    }
    return all;
}

/// N of "at least N bytes are needed".
index_t least_of(std::string const& message)
{
    std::size_t const at = message.find("at least ");
    CAPTURE(message);
    REQUIRE(at != std::string::npos);
    CHECK(message.ends_with(" bytes are needed"));
    return std::stoll(message.substr(at + 9));
}

} // namespace

TEST_CASE("bits depend neither on threads, nor on where rows lie in memory, nor on a prompt's greatest length, nor on "
          "parts of whole chunks")
{
    cpu::thread_pool three{3};
    text const strided{sizes, {.swapped = true, .slack = 3, .misalign = 1}};
    for_each_case([&](one_case const& one, text const& x, budget limit, outcome const& want) {
        CHECK(one.take(x, one.chosen, limit, {.make = each(three)}) == want);
        CHECK(one.take(strided, one.chosen, limit, {}) == want);
        if (one.chosen.leverage_power() == 0 || one.way == "prompt") // a reader weighs by the greatest length
        {
            CHECK(one.take(x, one.chosen, limit, {.beyond = 77}) == want);
        }
        if (one.way == "reader") { return; } // parts are its chunks
        CHECK(one.take(x, one.chosen, limit, {.part = 64}) == want);
        CHECK(one.take(x, one.chosen, limit, {.part = 1024}) == want);
    });
}

TEST_CASE(
    "a call for which memory ran out, or whose executor threw, has changed nothing and may be made again, whichever "
    "allocation or loop it was")
{
    using support::failure;
    for_each_case([&](one_case const& one, text const& x, budget limit, outcome const& want) {
        for (auto const& [how, throws] :
            {std::pair{failure::once, false}, {failure::from_on, false}, {failure::never, true}})
        {
            if (throws && one.way == "reader") { continue; } // after that it may only be destroyed, like a prompt
            support::failing_resource memory;
            {
                auto caches     = filled(&memory);
                int failed      = 0;
                auto const make = [&](std::string_view name, auto const& call) {
                    bool const owns = name == "compress" || name == "pack" || name == "fold";
                    if (name == "end_chunk" || name == "finish" || (throws && !owns)) // see reader.cpp
                    {
                        return static_cast<void>(support::run(call));
                    }
                    auto const before = contents_of(caches);
                    for (int k = 0;; k += throws ? 1 + k / 8 : 1)
                    {
                        memory.arm(how, k);
                        support::counting_executor executor{.thrown = throws ? k : -1};
                        workspace scratch{cpu::host_memory{&memory}};
                        auto const said = support::message_of([&] { call(host{&scratch, executor}); });
                        memory.arm(failure::never);
                        if (said == "(nothing was thrown)") { return; }
                        CHECK(said == (throws ? "no more threads" : "std::bad_alloc"));
                        CHECK((name == "attend" || contents_of(caches) == before)); // a reader's tail is its own
                        ++failed;
                    }
                };
                CHECK(one.take(x, one.chosen, limit, {.make = make, .to = &caches}) == want);
                CHECK(failed > 3);
            }
            CHECK(memory.outstanding() == 0);
        }
    });
}

TEST_CASE("a NaN or an infinity is named by rows, layer, head and row, and nothing is changed")
{
    struct place
    {
        std::string rows;
        tensor<half, 3> support::layer<half>::*of;
        index_t head, row;
        float bad;
    };
    for (place const& at : {place{"queries", &support::layer<half>::queries, 3, 35, NAN},
             {"keys", &support::layer<half>::keys, 1, 299, HUGE_VALF},
             {"values", &support::layer<half>::values, 0, 0, NAN}})
    {
        for_each_case([&](one_case const& one, text const& x, budget limit, outcome const&) {
            bool const fold = one.way == "fold";
            if (fold && at.rows != "queries") { return; }           // its keys and values are stored
            auto& rows        = const_cast<text&>(x).all[1].*at.of; // of layer 1, spoilt meanwhile
            half const good   = rows.get(at.head, at.row, 31);
            std::string where = "layer " + std::to_string(one.way == "compress" ? 0 : 1) + ", ";
            if (fold) { where.clear(); }
            auto const want = one.take(x, one.chosen, limit, {.part = 300});
            auto caches     = filled();
            bool named      = false;
            auto const make = [&](std::string_view name, auto const& call) {
                bool const looks = name == "compress" || name == "finish_layer" || name == "attend" || name == "fold";
                if (looks && !named)
                {
                    auto const before = contents_of(caches);
                    rows.set(narrow<half>(at.bad), at.head, at.row, 31);
                    std::string const said = error_text<non_finite_input>([&] { support::run(call); });
                    rows.set(good, at.head, at.row, 31);
                    if (said == "threw nothing") { return; } // of layer 0
                    CHECK(said
                          == (fold ? "recompress: " : "") + at.rows + ": NaN or infinity in " + where + "head "
                                 + std::to_string(at.head) + ", row " + std::to_string(fold ? 25 : at.row));
                    CHECK(contents_of(caches) == before);
                    named = true;
                }
                support::run(call);
            };
            CHECK(one.take(x, one.chosen, limit, {.make = make, .part = 300, .to = &caches}) == want);
            CHECK(named);
        });
    }
}

TEST_CASE("losses that are not finite are refused if nobody looked for NaNs before, and the caches stay as they were")
{
    text x{{.tokens = 100}};
    x.all[0].values.set(narrow<half>(std::numeric_limits<float>::quiet_NaN()), 0, 7, 3);
    auto shape          = x.shape();
    shape.on_non_finite = non_finite::unchecked;
    std::vector<cpu::cache<half>> caches(1);
    workspace scratch{support::nan_memory{}};
    host const on{&scratch};
    prompt<host, half> one{on, presets::best, shape};
    refused("prompt::allocate: a loss is NaN or infinite",
        [&] { support::feed(one, x, presets::best, budget::fraction(1, 4), caches); });
    CHECK(caches[0].layout().rungs == 0);
    reader<host, cpu::cache<half>> other{
        on, presets::best, shape, {.limit = budget::fraction(1, 4)}, std::span{caches}};
    tensor<half, 3> output{{4, 100, 48}};
    tensor<float, 2> lse{{4, 100}};
    other.attend(on, 0, x.part(0, 0, 100), output.out(), lse.out());
    refused("reader::end_chunk: a loss is NaN or infinite", [&] { other.end_chunk(on); });
    CHECK(caches[0].appended() == 100);
}

TEST_CASE_TEMPLATE(
    "what fits stays bit for bit, is attended to and has no projections, on every way; one byte less does not hold it",
    T, float, half, bfloat16)
{
    for (auto const& [heads, tokens] : {std::array<index_t, 2>{2, 0}, {0, 10}, {2, 1}, {2, 8}, {3, 9}, {2, 150}})
    {
        support::text<T> const x{
            {.layers = 2, .tokens = tokens, .heads = heads, .group = 3, .dims = {40, 24}, .last = tokens}};
        std::vector<index_t> order(static_cast<std::size_t>(tokens));
        std::iota(order.begin(), order.end(), 0);
        for (preset const& p : {presets::paper, presets::by_window, presets::best, presets::any_question})
        {
            CAPTURE(tokens);
            CAPTURE(std::string{p.name});
            auto const check = [&](auto const& take, std::vector<index_t> const& held) {
                index_t const bytes = std::ssize(held) * x.token_bytes();
                for (budget const limit : {budget::bytes(bytes), budget::kv_size(10000)})
                {
                    std::vector<cpu::cache<T>> caches(2);
                    take(limit, caches);
                    for (std::size_t l = 0; l < 2; ++l)
                    {
                        CHECK(caches[l].arena_bytes() == bytes);
                        CHECK(holds(caches[l], x.all[l], held));
                        if (heads > 0) { CHECK(caches[l].view().heads[0].key_columns == 0); }
                    }
                }
                if (tokens < 150) { return; }
                std::vector<cpu::cache<T>> caches(2);
                take(budget::bytes(bytes - 1), caches);
                CHECK(caches[0].arena_bytes() + caches[1].arena_bytes() < 2 * bytes);
            };
            check([&](budget limit, auto& to) { by_compress(x, p, limit, {.to = &to}); }, order);
            check([&](budget limit, auto& to) { by_prompt(x, p, limit, {.to = &to}); }, order);
            if constexpr (std::same_as<T, half>)
            {
                for (index_t const chunk : {1, 7, 64, 150})
                {
                    bool const tries = p.replayed && heads > 0 && (chunk > 1 || tokens < 10);
                    if (!tries) { continue; }
                    auto const reads_all = [&](budget limit, auto& to) {
                        auto const outputs = by_reader(x, p, limit, {.part = chunk, .to = &to}).outputs;
                        index_t const n    = tokens > 0 ? (tokens - 1) % chunk + 1 : 0; // tokens of the last chunk
                        for (index_t q = 0; n > 0 && q < heads * 3; ++q)
                        {
                            double const lse =
                                double{outputs.end()[(q - heads * 3 + 1) * n - 1]}; // of the last query of all
                            CHECK(lse == doctest::Approx(x.log_sum(1, q, tokens - 1)).epsilon(1e-4));
                        }
                    };
                    check(reads_all, order);
                }
                if (tokens < 64) { continue; }
                std::vector<index_t> grown = order; // by_fold appends the first tokens again
                for (index_t const n : {40, 64}) { grown.insert(grown.end(), order.begin(), order.begin() + n); }
                check([&](budget limit, auto& to) { by_fold(x, p, limit, {.to = &to}); }, grown);
            }
        }
    }
}

TEST_CASE("arenas never take more than the limit, nor folds of them, whatever preset, set, layers, window and limits "
          "before; one "
          "that is too small is refused with the least that works")
{
    support::source random{"arenas within budgets"};
    std::vector<ratio_set> const plain{
        bit_ratios, {drop, full_int4}, {drop, full_int8, full}, evict_ratios, {full_int4, full_int8, full}};
    std::vector<ratio_set> const projected{paper_ratios, {drop, fraction(1, 4)}, {fraction(1, 4), full},
        {drop, fraction(1, 16), fraction(1, 8), fraction(1, 4), fraction(1, 2), full},
        {drop, fraction(1, 4).as(storage::int8), fraction(3, 4).as(storage::int8), full_int8, full}};
    index_t refused = 0, chosen = 0;
    for (preset base : {presets::best, presets::any_question, presets::by_window, presets::paper, presets::evict})
    {
        auto const& sets = base.ratios.any_projected() ? projected : plain;
        for (std::size_t set = 0; set < sets.size(); ++set)
        {
            base.ratios = sets[set];
            for (auto const& [layers, tokens, window] :
                {std::array<index_t, 3>{1, 150, base.window}, {3, 80, 0}, {2, 40, 20}})
            {
                text const x{{.layers = layers, .tokens = tokens}};
                preset p = base;
                p.window = window;
                if (!p.ratios.can_drop()) { p.window_part = 0; } // else room for stand-ins may be set aside in vain
                workspace scratch{cpu::host_memory{}};
                host const on{&scratch};
                prompt<host, half> one{on, p, x.shape()};
                for (index_t l = 0; l < layers; ++l)
                {
                    one.read_chunk(on, l, 0, x.part(l, 0, tokens));
                    one.finish_layer(on, l, x.whole(l));
                }
                std::vector<index_t> budgets;
                for (index_t i = 0; i < 40; ++i)
                {
                    index_t const most = x.layer_bytes();
                    budgets.push_back(i < 25 ? most / 8 * i / 25 + random.below(60) : random.below(most + 100));
                }
                std::sort(budgets.begin(), budgets.end());
                double before = std::numeric_limits<double>::infinity(); // loss
                for (std::size_t i = 0; i < budgets.size(); ++i)
                {
                    index_t const bytes = budgets[i];
                    bool const packs    = i % 4 == 0;
                    CAPTURE(std::string{p.name});
                    CAPTURE(set);
                    CAPTURE(layers);
                    CAPTURE(bytes);
                    allocation total;
                    std::string said;
                    auto const allocates = [&](index_t within) {
                        said = error_text<invalid_argument>([&] { total = one.allocate(on, budget::bytes(within)); });
                        return said == "threw nothing";
                    };
                    index_t least = bytes; // of the window, then of tokens, too
                    while (!allocates(least))
                    {
                        REQUIRE(least_of(said) > least);
                        least = least_of(said);
                    }
                    if (least > bytes)
                    {
                        ++refused;
                        CHECK(!allocates(least - 1));
                        continue;
                    }
                    ++chosen;
                    index_t all = 0, stand_ins = 0;
                    for (index_t l = 0; l < layers; ++l)
                    {
                        if (!packs) { continue; }
                        cpu::cache<half> cache;
                        auto const report = one.pack(on, l, x.whole(l), cache);
                        CHECK(report.resident_bytes == cache.arena_bytes());
                        all += report.resident_bytes;
                        CHECK(report.budget_bytes == bytes);
                        CHECK(report.full_bytes == x.layer_bytes());
                        CHECK(report.window_bytes == one.layout().window * x.token_bytes());
                        CHECK((report.status == compress_status::uncompressed)
                              == (p.ratios.full_rung() < p.ratios.size() && bytes >= x.layer_bytes()));
                        CHECK(report.chosen.multiplier == total.multiplier);
                        CHECK(cache.tail_capacity() == 0);
                        for (std::size_t r = 0; r < p.ratios.size(); ++r)
                        {
                            total.tokens[r] -= report.chosen.tokens[r];
                        }
                        for (index_t h = 0; h < x.heads; ++h) { stand_ins += cache.view().heads[h].stand_ins; }
                        if (i == 20) // as if this limit were the first
                        {
                            auto const first = support::by_prompt(x, p, budget::bytes(bytes), {.part = tokens}).caches;
                            CHECK(support::cache_contents<half>{cache} == first[static_cast<std::size_t>(l)]);
                        }
                        if (!p.ratios.can_drop()) { continue; }
                        index_t const limit = cache.fold_limit;
                        cache.reserve_tail(24);
                        auto const more = x.part(l, 0, 24);
                        append(on, more.keys, more.values, cache.view());
                        index_t const within    = i % 8 == 0 ? limit : random.below(limit + 1);
                        auto const options      = fold_options<host>(p, budget::bytes(within), 24);
                        std::string const error = error_text<invalid_argument>(
                            [&] { recompress(on, more.queries, p.ratios, options, cache); });
                        CHECK((error == "threw nothing" ? cache.arena_bytes() <= within : least_of(error) > within));
                    }
                    CHECK(all <= layers * bytes);
                    index_t const of_window = one.layout().window * x.token_bytes();
                    if (packs)
                    {
                        CHECK(total.tokens == allocation{}.tokens);
                        if (stand_ins == 0 && one.layout().window == std::min(window, tokens))
                        {
                            CHECK(all == layers * of_window + total.token_bytes + total.charged_bytes);
                        }
                    }
                    if (p.stand_ins > 0) { continue; } // they take bytes from tokens
                    CHECK(total.loss <= before);
                    before = total.loss;
                }
            }
        }
    }
    CHECK(chosen > refused); // both, and mostly budgets that work
    CHECK(refused > 100);
}

TEST_CASE_TEMPLATE(
    "queries of another element than the cache's give the bits of the same numbers in its element", T, half, bfloat16)
{
    support::text<T> const x{{.tokens = 200, .last = 200}};
    auto const queries      = support::converted<float>(x.all[0].queries);
    auto const all          = x.whole(0);
    preset replays          = presets::best;
    replays.replayed->ahead = 0; // turned queries are then no numbers that half would round
    for (preset const& p : {presets::paper, presets::by_window, replays})
    {
        CAPTURE(std::string{p.name});
        std::vector<cpu::cache<T>> want(1), got(1);
        support::by_compress(x, p, budget::fraction(1, 4), {.to = &want});
        support::run([&](host const& on) {
            prompt_rows<host, T, float> const rows{queries.in(), all.keys, all.values, all.lse};
            compress(on, rows, p, budget::fraction(1, 4), got[0]);
        });
        CHECK(contents_of(got) == contents_of(want));
        auto const fold = [&, more = x.part(0, 0, 50)](cpu::cache<T>& cache, auto const& last) {
            cache.reserve_tail(50);
            support::run([&](host const& on) { append(on, more.keys, more.values, cache.view()); });
            recompress_report report;
            support::run([&](host const& on) { report = recompress(on, slice<1>(last.in(), 0, 50), p, cache); });
            return report;
        };
        auto const wanted = fold(want[0], x.all[0].queries), report = fold(got[0], queries);
        CHECK(wanted.lowered + wanted.dropped > 0);
        CHECK(report.chosen.loss == wanted.chosen.loss);
        CHECK(contents_of(got) == contents_of(want));
    }
}
