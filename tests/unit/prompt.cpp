// What a prompt alone does: its stages by hand, ranks, quotas, windows in codes, limits that caches remember, its errors. What
// it promises like compress, reader and fold is in pipelines.cpp.
#include <mdkv/prompt.hpp>

#include <mdkv/mdkv.hpp>

#include "support/cases.hpp"
#include "support/host.hpp"
#include "support/message.hpp"
#include "support/ranks.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace
{

using namespace mdkv;
using support::by_compress;
using support::by_prompt;
using support::contents_of;
using support::error_text;
using support::refused;
using support::tensor;
using support::with_refit;
using host     = cpu::backend;
using rows     = prompt_rows<host, half>;
using text     = support::text<half>;
using caches   = std::vector<cpu::cache<half>>;
using contents = support::cache_contents<half>;

/// The stages one after another, as docs/method.md describes them.
template <class T>
struct stages_by_hand
{
    support::text<T> const& x;
    preset const& p;
    index_t L = x.layers, H = x.heads, D = x.dims.keys, Dv = x.dims.values;
    index_t R = static_cast<index_t>(p.ratios.size());
    index_t W = std::min(p.window, x.tokens);
    index_t N = x.tokens - W;
    index_t Q = std::min(p.queries, x.last);
    workspace scratch{support::nan_memory{}};
    host on{&scratch};
    std::vector<tensor<float, 3>> key_bases{}, value_bases{}, channels{};
    tensor<float, 4> losses{{L, H, R, N}};
    tensor<leverage_sum, 1> leverages{{x.tokens}};
    tensor<std::uint8_t, 2> rungs{{L * H, x.tokens}}; // the window's are used if it is in codes

    /// Bases, channels, leverages and losses of a layer of which parts of so many tokens were read.
    void read(index_t l, index_t part)
    {
        auto const all     = x.whole(l);
        auto const queries = slice<1>(all.queries, x.last - Q, Q);
        auto const keys    = slice<1>(all.keys, 0, N);
        auto const values  = slice<1>(all.values, 0, N);
        auto const found   = detail::item_of(losses.out(), l);
        bool const bases   = p.ratios.any_projected();
        key_bases.emplace_back(std::array<index_t, 3>{bases ? H : 0, D, D});
        value_bases.emplace_back(std::array<index_t, 3>{bases ? H : 0, Dv, Dv});
        channels.emplace_back(std::array<index_t, 3>{p.ratios.any_rotated() ? H : 0, 3, D});
        if (N == 0) { return; }
        tensor<float, 2> energy{{H, D}}, value_energy{{H, Dv}};
        if (bases)
        {
            fit_basis(on, keys, key_bases.back().out(), energy.out());
            fit_basis(on, values, value_bases.back().out(), value_energy.out());
        }
        if (p.ratios.any_rotated()) { fit_channels(on, queries, keys, channels.back().out()); }
        if (p.leverage_power() > 0) { add_leverage(on, all.keys, leverages.out()); }
        tensor<float, 3> replayed{{H, R, N}}, scored{{H, R, N}}, pooled{{H, R, N}};
        for (index_t begin = 0; p.replayed && begin < N; begin += part)
        {
            for (index_t first = begin; first < std::min(begin + part, N); first += p.replayed->chunk)
            {
                index_t const n  = std::min({p.replayed->chunk, begin + part - first, N - first});
                auto const chunk = x.part(l, first, n);
                replay(on, chunk.queries, chunk.keys, chunk.values,
                    slice<1>(all.keys, 0, std::min(first, p.replayed->sinks)), p.ratios, p.replay<host>({}),
                    slice<2>(replayed.out(), first, n));
            }
        }
        if (!p.last_queries_score()) { return pool(on, replayed.in(), p.pooling, found); }
        score(on, queries, keys, values, slice<1>(all.keys, N, W), key_bases.back().in(), value_bases.back().in(),
            p.ratios,
            {.scale              = p.scale,
                .lse             = slice<1>(*all.lse, x.last - Q, Q),
                .early_weight    = p.early_weight,
                .question        = p.question,
                .norm            = p.replayed ? p.replayed->last : row_norm::sum,
                .uniform_queries = p.uniform_queries(Q)},
            scored.out());
        pool(on, scored.in(), p.pooling, p.replayed ? pooled.out() : found);
        if (p.replayed) { join(on, replayed.in(), pooled.in(), p.replayed->join, found); }
    }

    /// Rungs of some layers, the same bytes for each.
    allocation choose(index_t first, index_t layers, index_t bytes)
    {
        tensor<index_t, 1> most{{1}};
        tensor<allocation, 1> report{{1}};
        most.set(layers * bytes, 0);
        allocate(on,
            {in(on, std::as_const(losses).data() + first * H * R * N, layers * H, R, N),
                slice<1>(slice<0>(rungs.out(), first * H, layers * H), 0, N)},
            rung_costs{p.ratios, x.dims, sizeof(T)}, most.in(), {.charge = p.charge}, report.out());
        return report.get(0);
    }

    /// Values of a layer's tokens before the window, refitted to its blocks' rows; as they are if it has too few of these.
    tensor<T, 3> refitted(index_t l, in_view<std::uint8_t, 2, host> chosen, index_t extra, cpu::cache<T>& cache)
    {
        auto const all         = x.whole(l);
        refit_part const& part = *p.refitted;
        index_t const each     = part.each(x.group);
        index_t const end      = (x.tokens - part.span) / part.apart;
        index_t const begin    = std::max<index_t>(end - part.blocks, 0);
        tensor<T, 3> values{{H, chosen.extent(1), Dv}};
        for (index_t i = 0; i < values.count(); ++i)
        {
            index_t const h = i / Dv / chosen.extent(1), t = i / Dv % chosen.extent(1);
            values.set(all.values(h, t, i % Dv), h, t, i % Dv);
        }
        if (x.last < part.span || begin >= end) { return values; }
        tensor<T, 3> queries{{H * x.group, (end - begin + 1) * each, D}};
        auto const& own = x.all[static_cast<std::size_t>(l)].queries;
        for (index_t i = 0; i < queries.count(); ++i)
        {
            index_t const q = i / D / queries.extent(1), row = i / D % queries.extent(1), b = begin + row / each;
            index_t const first = b < end ? part.first(b) : x.tokens - part.span;
            queries.set(own.get(q, first + row % each * part.step(x.group), i % D), q, row, i % D);
        }
        refit(on, queries.in(), all.keys, all.values, chosen, cache.view(),
            {.rows = part, .first = part.first(begin), .stand_ins = extra, .scale = p.scale}, values.out());
        return values;
    }

    std::vector<support::cache_contents<T>> made(budget limit, index_t part)
    {
        leverages.assign(std::vector<leverage_sum>(static_cast<std::size_t>(x.tokens)));
        for (index_t l = 0; l < L; ++l) { read(l, part); }
        layer_shape const shape{H, x.group, N, W, x.dims, sizeof(T)};
        index_t const bytes  = limit.in_bytes(shape);
        bool const whole     = bytes >= shape.full_bytes() && p.ratios.full_rung() < p.ratios.size();
        bool const codes     = p.ratios.any_rotated(); // bit_ratios: 4 bits are rung 1, 8 bits rung 2
        index_t const around = codes ? H * channel_bytes(x.dims, sizeof(T)) : 0;
        index_t const coded  = codes ? H * W * p.ratios.bytes(2, x.dims, sizeof(T)) : 0;
        bool in_codes =
            codes && !whole && shape.window_bytes() * p.window_part > bytes && coded + around < shape.window_bytes();
        bool small    = codes && p.coded_stand_ins; // stand-ins in 4 bits
        bool any      = false;                      // some token is dropped
        index_t spend = 0, one = 0, extra = 0;      // bytes for tokens, bytes of a stand-in, and how many of them
        auto const plan = [&] {
            spend               = bytes - (in_codes ? coded : shape.window_bytes());
            one                 = small ? p.ratios.bytes(1, x.dims, sizeof(T)) : shape.token_bytes();
            bool const fewer    = p.coded_stand_ins && !small;
            index_t const most  = fewer ? p.stand_ins / 4 : p.stand_ins;
            index_t const share = p.stand_in_part * (fewer ? 2 : 1);
            extra               = p.ratios.can_drop() ? stand_ins_within(most, bytes, share, H, one) : 0;
            extra               = H * one * extra <= spend ? extra : 0;
        };
        plan();
        rungs.assign(
            std::vector(static_cast<std::size_t>(rungs.count()), static_cast<std::uint8_t>(whole ? R - 1 : 2)));
        if (!whole)
        {
            if (p.shared) { balance(on, losses.out(), p.balance<host>(slice<0>(leverages.in(), 0, N))); }
            index_t const layers = p.shared ? L : 1;
            allocation total;
            auto const choose_all = [&](index_t each) {
                total = {};
                for (index_t l = 0; l < L; l += layers)
                {
                    auto const found = choose(l, layers, each);
                    for (std::size_t r = 0; r < max_rungs; ++r) { total.tokens[r] += found.tokens[r]; }
                }
            };
            choose_all(spend);
            if ((in_codes || small) && total.tokens[1] < total.tokens[2] + total.tokens[3])
            {
                in_codes = in_codes && bytes < shape.window_bytes();
                small    = false;
                plan();
                choose_all(spend);
            }
            any = total.tokens[0] > 0;
            if (any && extra > 0) { choose_all(spend - H * one * extra); }
        }
        extra              = any ? extra : 0;
        index_t const rest = in_codes ? 0 : W; // tokens without a rung
        index_t const n    = x.tokens - rest;
        std::vector<cpu::cache<T>> packed;
        for (index_t l = 0; l < L; ++l)
        {
            auto const all    = x.whole(l);
            auto const i      = static_cast<std::size_t>(l);
            auto const chosen = slice<1>(slice<0>(rungs.in(), l * H, H), 0, n);
            auto const keys   = slice<1>(all.keys, 0, n);
            auto const values = slice<1>(all.values, 0, n);
            cache_layout layout{p.ratios, H, rest, x.dims, p.scale};
            if (small && extra > 0) { layout.stand_in_run = 1; }
            packed.emplace_back(layout, packed_bytes<T>(on, chosen, layout, extra));
            tensor<float, 3> made_keys{{H, extra, D}}, made_values{{H, extra, Dv}};
            index_t const by = std::min(stand_in_queries, x.last);
            stand_in(on, slice<1>(all.queries, x.last - by, by), keys, values, chosen,
                slice<1>(*all.lse, x.last - by, by), x.tokens, p.stand_in(), made_keys.out(), made_values.out());
            auto const pack_with = [&](in_view<T, 3, host> const& stored) {
                pack(on, keys, stored, slice<1>(all.keys, n, rest), slice<1>(all.values, n, rest), key_bases[i].in(),
                    value_bases[i].in(), chosen, packed.back().view(),
                    N == 0 ? in_view<float, 3, host>{} : channels[i].in(), made_keys.in(), made_values.in());
            };
            pack_with(values);
            if (p.refitted && !whole) { pack_with(refitted(l, chosen, extra, packed.back()).in()); }
        }
        return contents_of(packed);
    }
};

template <class T>
support::outcome<T> by_hand(support::text<T> const& x, preset const& p, budget limit, index_t part = 128)
{
    return {stages_by_hand<T>{x, p}.made(limit, part)};
}

/// The presets as they are, with chunks so short that these prompts have several, and of one's own: one budget with projections,
/// stand-ins with a budget for each layer, a scale and no window, replayed rows with a budget for each layer, codes beside
/// projections, and sets without a rung for no or all coordinates.
std::vector<preset> all_presets()
{
    std::vector<preset> all{presets::by_window, presets::paper, presets::paper_literal, presets::evict};
    for (preset p : {presets::best, presets::any_question})
    {
        all.push_back(p);
        p.replayed->chunk = 50;
        all.push_back(with_refit(p));
    }
    auto const add = [&](preset p, void (*change)(preset&)) {
        change(p);
        all.push_back(p);
    };
    add(presets::paper, [](preset& p) { p.shared = sharing_part{}; });
    add(presets::paper, [](preset& p) { p.ratios = ratio_set{drop, fraction(1, 4)}; });
    add(presets::paper, [](preset& p) { p.ratios = ratio_set{fraction(1, 4), full}; });
    add(presets::by_window, [](preset& p) { p.stand_ins = 3; });
    add(presets::by_window, [](preset& p) {
        p.ratios = ratio_set{drop, fraction(1, 4).as(storage::int8), full_int4, full_int8, full};
    });
    add(presets::any_question, [](preset& p) { p.shared = std::nullopt; });
    add(presets::best, [](preset& p) {
        p.scale           = 0.1F;
        p.window          = 0;
        p.replayed->sinks = 0;
    });
    return all;
}

/// The heads of ranks: from number `first` on, n of them.
std::vector<text> parts_of(text const& x, std::vector<std::array<index_t, 2>> const& heads)
{
    std::vector<text> parts;
    for (auto const& [first, n] : heads)
    {
        support::text_sizes own = x;
        own.heads               = n;
        text& part              = parts.emplace_back(own);
        auto const take         = [&x, begin = first](auto const& from, auto& to) {
            auto const all = from.elements();
            to.assign(std::span{all}.subspan(
                static_cast<std::size_t>(from.count() / x.heads * begin), static_cast<std::size_t>(to.count())));
        };
        for (std::size_t l = 0; l < x.all.size(); ++l)
        {
            take(x.all[l].queries, part.all[l].queries);
            take(x.all[l].keys, part.all[l].keys);
            take(x.all[l].values, part.all[l].values);
            take(x.lse[l], part.lse[l]);
        }
    }
    return parts;
}

/// The caches of each rank of a prompt of 5 heads, or as many as are said.
std::vector<caches> over_ranks(std::vector<text> const& parts, std::vector<std::array<index_t, 2>> const& split,
    preset const& p, budget limit, index_t heads = 5, void (*change)(ranks&, int rank) = nullptr)
{
    support::rank_team team{static_cast<int>(parts.size())};
    std::vector<caches> made(parts.size());
    auto const errors = support::on_ranks(team, [&](support::thread_rank const& rank) {
        auto const r = static_cast<std::size_t>(rank.number);
        ranks all    = rank.with(split[r][0], heads);
        if (change != nullptr) { change(all, rank.number); }
        made[r].resize(parts[r].all.size());
        by_prompt(parts[r], p, limit, {.ranks = &all, .to = &made[r]});
    });
    for (std::string const& error : errors) { CHECK(error == ""); }
    return made;
}

} // namespace

TEST_CASE_TEMPLATE(
    "a prompt, and compress of a layer, are their stages one after another, bit for bit", T, float, half, bfloat16)
{
    bool const most = std::same_as<T, half>; // element types differ in stages alone
    for (auto const& [layers, tokens] : {std::array<index_t, 2>{1, 120}, {1, 3}, {3, 20}, {1, 300}, {3, 300}})
    {
        if (tokens != 120 && !most) { continue; }
        support::text<T> const x{{.layers = layers, .tokens = tokens, .last = layers == 1 ? tokens : 70}};
        index_t const part = layers == 1 ? tokens : 128;
        for (preset const& p : all_presets())
        {
            for (budget const limit :
                {p.ratios.can_drop() ? budget::fraction(1, 3) : budget::fraction(2, 3), budget::fraction(1, 1)})
            {
                CAPTURE(std::string{p.name});
                CAPTURE(p.ratios.size());
                CAPTURE(tokens);
                CAPTURE(layers);
                layer_shape const shape{2, 2, tokens, 0, {32, 48}, sizeof(T)};
                if (limit.in_bytes(shape) < std::min(p.window, tokens) * x.token_bytes()) { continue; }
                auto const want = by_hand(x, p, limit, part);
                CHECK(by_prompt(x, p, limit, {.part = part}) == want);
                if (layers > 1 && (p.shared || p.replayed)) { continue; }
                CHECK(by_compress(x, p, limit) == want);
            }
        }
    }
}

TEST_CASE("one budget over 1, 2, 3 and 5 ranks, of which some have no heads, makes the caches of one rank, bit for "
          "bit; each folds within the bytes that its heads got, or its part of the budget if everything fits")
{
    text const x{{.layers = 3, .tokens = 250, .heads = 5}};
    preset projected = presets::paper;
    projected.shared = presets::best.shared;
    std::vector<preset> const all{
        presets::best, with_refit(presets::best), presets::any_question, projected, presets::by_window, presets::paper};
    std::vector<std::vector<std::array<index_t, 2>>> const splits{{{0, 5}}, {{0, 2}, {2, 3}}, {{0, 1}, {1, 0}, {1, 4}},
        {{0, 1}, {1, 1}, {2, 1}, {3, 1}, {4, 1}}, {{0, 0}, {0, 4}, {4, 1}, {5, 0}, {5, 0}}};
    std::vector<std::vector<text>> parts;
    for (auto const& heads : splits) { parts.push_back(parts_of(x, heads)); }
    for (preset const& p : all)
    {
        for (auto const& [limit, fits] : {std::pair{budget::fraction(1, 4), false}, {budget::fraction(2, 1), true}})
        {
            auto const one = by_prompt(x, p, limit).caches;
            for (std::size_t s = 0; s < splits.size(); ++s)
            {
                CAPTURE(std::string{p.name});
                CAPTURE(s);
                auto const made = over_ranks(parts[s], splits[s], p, limit);
                for (std::size_t l = 0; l < 3; ++l)
                {
                    std::vector<std::byte> joined;
                    for (std::size_t r = 0; r < made.size(); ++r)
                    {
                        auto const& cache = made[r][l];
                        auto const arena  = contents{cache}.arena;
                        joined.insert(joined.end(), arena.begin(), arena.end());
                        index_t const own = 2 * x.layer_bytes() / 5 * splits[s][r][1];
                        CHECK((made.size() == 1 || cache.fold_limit == (fits ? own : cache.arena_bytes())));
                    }
                    CHECK(joined == one[l].arena);
                }
            }
        }
    }
}

TEST_CASE("a rank whose heads another one has, too, and that gives zeros to the sums, chooses the same rungs")
{
    text const x{{.layers = 2}};
    auto const parts = parts_of(x, {{0, 2}, {0, 2}});
    for (preset const& p : {presets::best, presets::any_question})
    {
        auto const made = over_ranks(parts, {{0, 2}, {0, 2}}, p, budget::fraction(1, 4), 2, [](ranks& all, int rank) {
            if (rank == 0) { return; }
            all.sum = [](void* state, std::int64_t* numbers, index_t n) {
                std::fill_n(numbers, n, 0);
                auto const& replica = *static_cast<support::thread_rank const*>(state);
                replica.all.sum(replica.number, numbers, n);
            };
        });
        auto const one  = by_prompt(x, p, budget::fraction(1, 4)).caches;
        for (caches const& of_rank : made) { CHECK(contents_of(of_rank) == one); }
    }
}

TEST_CASE("a prompt over ranks of which one differs, or refuses its arguments, is refused on every rank")
{
    struct call
    {
        preset p;
        prompt_shape<host> shape;
        ranks place;
        budget limit  = budget::fraction(1, 2);
        bool finishes = true;
        bool spoilt   = false; // by a key that is no number
    };
    struct difference
    {
        char const* name;
        void (*change)(call&);
        std::optional<bool> replayed{}; // only of presets that replay, or do not
    };
    static std::array<double, 16> const frequencies{1, 0.5, 0.25};
    std::vector<difference> const all{{"heads of all ranks", [](call& x) { x.place.heads = 3; }},
        {"tokens", [](call& x) { x.shape.tokens = 70; }}, {"D", [](call& x) { x.shape.dims.keys = 16; }},
        {"Dv", [](call& x) { x.shape.dims.values = 32; }},
        {"replayed", [](call& x) { x.p.replayed = x.p.replayed ? std::nullopt : presets::best.replayed; }},
        {"shared", [](call& x) { x.p.shared = x.p.shared ? std::nullopt : presets::best.shared; }},
        {"window", [](call& x) { x.p.window += 8; }},
        {"number of rungs",
            [](call& x) {
                x.p.ratios = ratio_set{drop, full_int4, full};
            }},
        {"rungs",
            [](call& x) {
                x.p.ratios = ratio_set{drop, full_int4, rung{1, 2}, full};
            },
            false},
        {"pooling.width", [](call& x) { x.p.pooling.width += 2; }},
        {"pooling.kind", [](call& x) { x.p.pooling.kind = pooling::mean; }},
        {"charge", [](call& x) { x.p.charge = projection_charge::always; }},
        {"queries", [](call& x) { x.p.queries = 63; }}, {"question", [](call& x) { x.p.question = 31; }},
        {"early_weight", [](call& x) { x.p.early_weight = 0.3F; }}, {"uniform", [](call& x) { x.p.uniform += 1; }},
        {"stand_ins", [](call& x) { x.p.stand_ins += 1; }}, {"stand_in_part", [](call& x) { x.p.stand_in_part += 1; }},
        {"coded_stand_ins", [](call& x) { x.p.coded_stand_ins = !x.p.coded_stand_ins; }},
        {"window_part", [](call& x) { x.p.window_part += 1; }}, {"scale", [](call& x) { x.p.scale = 0.5F; }},
        {"norm", [](call& x) { x.p.replayed->norm = row_norm::sum; }, true},
        {"chunk", [](call& x) { x.p.replayed->chunk = 128; }, true},
        {"sinks", [](call& x) { x.p.replayed->sinks = 3; }, true},
        {"ahead", [](call& x) { x.p.replayed->ahead += 1; }, true},
        {"own", [](call& x) { x.p.replayed->own = !x.p.replayed->own; }, true},
        {"join", [](call& x) { x.p.replayed->join += 1; }, true},
        {"last", [](call& x) { x.p.replayed->last = row_norm{1}; }, true},
        {"refitted", [](call& x) { x.p.refitted = refit_part{.rows = refit_part{}.rows + 1}; }, true},
        {"depth", [](call& x) { x.p.shared->depth = 2; }, true},
        {"leverage_power", [](call& x) { x.p.shared->leverage_power += 0.5F; }, true},
        {"base", [](call& x) { x.shape.encoding.base = 1e6; }, true},
        {"rotating", [](call& x) { x.shape.encoding.rotating = 8; }, true},
        {"pairs", [](call& x) { x.shape.encoding.pairs = rotary_pairs::neighbours; }, true},
        {"frequencies",
            [](call& x) { x.shape.encoding.frequencies = in(host{}, frequencies.data(), x.shape.dims.keys / 2); },
            true},
        {"limit", [](call& x) { x.limit = budget::fraction(1, 3); }},
        {"preset", [](call& x) { x.p = x.p.replayed ? presets::by_window : presets::best; }}};

    std::vector<text> texts;
    for (auto const& [tokens, dim, value_dim] :
        {std::array<index_t, 3>{60, 32, 48}, {70, 32, 48}, {60, 16, 48}, {60, 32, 32}, {60, 32, 48}})
    {
        texts.emplace_back(support::text_sizes{.tokens = tokens, .heads = 1, .dims = {dim, value_dim}});
    }
    texts.back().all[0].keys.set(half{0x7e00}, 0, 0, 0);
    auto const errors_with = [&](preset const& p, auto const& change) {
        support::rank_team team{2};
        return support::on_ranks(team, [&](support::thread_rank const& rank) {
            call mine{p, texts[0].shape(), rank.with(rank.number, 2)};
            if (rank.number == 1) { change(mine); }
            mine.shape.ranks = &mine.place;
            text const& x =
                mine.spoilt ? texts.back() : *std::find_if(texts.begin(), texts.end(), [&](text const& one) {
                    return one.tokens == mine.shape.tokens && one.dims == mine.shape.dims;
                });
            workspace scratch{support::nan_memory{}};
            host const on{&scratch};
            prompt<host, half> one{on, mine.p, mine.shape};
            one.read_chunk(on, 0, 0, x.part(0, 0, x.tokens));
            if (mine.finishes) { one.finish_layer(on, 0, x.whole(0)); }
            one.allocate(on, mine.limit);
        });
    };
    for (preset const& p : {presets::best, presets::any_question, presets::by_window})
    {
        CAPTURE(std::string{p.name});
        for (std::string const& error : errors_with(p, [](call&) {})) { CHECK(error == ""); }
        for (difference const& one : all)
        {
            if (one.replayed.value_or(p.replayed.has_value()) != p.replayed.has_value()) { continue; }
            CAPTURE(std::string{one.name});
            for (std::string const& error : errors_with(p, one.change))
            {
                support::says(
                    error, ": ranks differ in the call, the preset, sizes, element types, the encoding or the limit");
            }
        }
        for (std::string const& error : errors_with(p, [](call& x) { x.place.first_head = 0; }))
        {
            support::says(error, ": not every one of 2 heads is on one rank");
        }
    }
    auto errors = errors_with(presets::by_window, [](call& x) { x.finishes = false; });
    CHECK(errors[0] == "prompt::allocate: another rank refuses its arguments");
    CHECK(errors[1] == "prompt::allocate: layer 0 is not finished");
    errors = errors_with(presets::best, [](call& x) { x.spoilt = true; });
    CHECK(errors[0] == "prompt::finish_layer: another rank refuses its arguments");
    support::says(errors[1], "keys");
    errors = errors_with(presets::best, [](call& x) { x.limit = budget::bytes(1); });
    CHECK(errors[0] == "prompt::allocate: another rank refuses its arguments");
    support::says(errors[1], "cannot hold the window");
}

TEST_CASE(
    "a workspace serves the next prompts without growth, however their lives cross, and none touches another's state")
{
    text const x{{.layers = 2, .tokens = 150}}, other{{.layers = 2, .tokens = 128, .rank = 5}};
    auto const limit = budget::fraction(1, 4);
    workspace scratch{support::nan_memory{}};
    support::conditions<half> const one_workspace{.make = [&](char const*, auto const& call) { call(host{&scratch}); }};
    index_t grown = 0;
    for (int turn = 0; turn < 3; ++turn)
    {
        for (preset const& p : {presets::best, presets::by_window})
        {
            caches first_made(2), second_made(2), third_made(2);
            auto const made = [&] { return std::make_unique<prompt<host, half>>(host{&scratch}, p, x.shape()); };
            auto first      = made();
            auto second     = made();
            support::feed(*first, x, p, limit, first_made, one_workspace);
            for (index_t l = 0; l < x.layers; ++l) { second->read_chunk(host{&scratch}, l, 0, other.part(l, 0, 128)); }
            first.reset();
            auto third = made();
            support::feed(*third, x, p, limit, third_made, one_workspace);
            support::feed(*second, x, p, limit, second_made, one_workspace); // all anew
            second.reset();
            for (caches const* each : {&first_made, &second_made, &third_made})
            {
                CHECK(contents_of(*each) == by_prompt(x, p, limit).caches);
            }
        }
        if (turn == 1) { grown = scratch.held(); }
    }
    CHECK(scratch.held() == grown);
    CHECK(grown >= scratch.peak());
}

TEST_CASE("a cache remembers its limit: the layer's budget, or the bytes that a layer of several got; folds keep to it")
{
    text const x{{.layers = 3, .tokens = 300}};
    auto const folded = [&](preset const& p, budget limit) {
        caches made(3), grown(3);
        by_prompt(x, p, limit, {.to = &made});
        support::by_fold(x, p, limit, {.to = &grown});
        std::vector<index_t> limits;
        for (std::size_t l = 0; l < 3; ++l)
        {
            limits.push_back(made[l].fold_limit);
            CHECK(grown[l].arena_bytes() <= limits.back());
            CHECK(grown[l].fold_limit == limits.back());
        }
        return limits;
    };
    CHECK(folded(presets::by_window, budget::kv_size(90)) == std::vector<index_t>(3, 90 * x.token_bytes()));
    CHECK(folded(presets::by_window, budget::kv_size(400)) == std::vector<index_t>(3, 400 * x.token_bytes()));
    CHECK(folded(presets::best, budget::kv_size(400)) == std::vector<index_t>(3, 400 * x.token_bytes()));
    auto const shared = folded(presets::best, budget::kv_size(90));
    CHECK(shared[0] != shared[2]);
    CHECK(shared[0] + shared[1] + shared[2] <= 3 * 90 * x.token_bytes());

    cpu::cache<half> cache{{bit_ratios, 1, 0, {32, 32}}, 0, 0};
    auto const queries = x.part(0, 0, 1).queries;
    CHECK(error_text<invalid_argument>([&] {
        support::run([&](host const& on) { recompress(on, slice<0>(queries, 0, 1), presets::best, cache); });
    }) == "recompress: the cache's fold_limit is 0; set it, or give recompress_options a limit");
    CHECK(error_text<invalid_argument>([&] {
        prompt<host, half> const p{host{}, presets::best, {.layers = 1, .heads = 1, .dims = {32, 32}, .tokens = 90}};
    }) == "backend: it has no workspace, from which this call takes scratch");
}

TEST_CASE("quotas give every head of every layer its own bytes (MixedDimKV-H)")
{
    text const x{{.layers = 2, .tokens = 120}};
    index_t const token = x.token_bytes() / 2; // of one head
    std::array<index_t, 4> const kept{5, 40, 15, 0};
    tensor<index_t, 2> quotas{{2, 2}};
    auto const set = [&](index_t more) {
        for (std::size_t i = 0; i < 4; ++i) { quotas.set(kept[i] * token + more, i / 2, i % 2); }
    };
    workspace scratch{support::nan_memory{}};
    host const on{&scratch};
    auto const finished = [&](preset const& p) {
        auto one = std::make_unique<prompt<host, half>>(on, p, x.shape());
        for (index_t l = 0; l < 2; ++l) { one->finish_layer(on, l, x.whole(l)); }
        return one;
    };
    auto const refuses = [&](std::string const& want, preset const& by, tensor<index_t, 2> const& given) {
        auto const one = finished(by);
        refused(want, [&] { one->allocate(on, given.in()); });
    };
    set(3); // less than a token
    auto const p = finished(presets::evict);
    CHECK(p->allocate(on, quotas.in()).tokens[1] == 60);
    for (index_t l = 0; l < 2; ++l)
    {
        cpu::cache<half> cache;
        auto const report = p->pack(on, l, x.whole(l), cache);
        CHECK(report.budget_bytes == report.window_bytes + 30 * token + 6);
        for (index_t h = 0; h < 2; ++h)
        {
            CHECK(cache.view().heads[h].exact.tokens - presets::evict.window
                  == kept[static_cast<std::size_t>(2 * l + h)]);
        }
    }
    set(112 * token); // 112 tokens before the window at least
    auto const all = finished(presets::by_window);
    CHECK(all->allocate(on, quotas.in()).status == allocation_status::everything_kept);
    refuses("prompt::allocate: quotas must be [L,H] = [2, 2], its extent 1 is 1", presets::evict,
        tensor<index_t, 2>{{2, 1}});
    preset keeps = presets::by_window;
    keeps.ratios = ratio_set{full_int4, full};
    set(0);
    refuses("prompt::allocate: a quota cannot hold the tokens of its head at their cheapest rung; at least ", keeps,
        quotas);
    quotas.set(-1, 0, 0);
    refuses("allocate: limits[0] is -1; it must not be negative", presets::evict, quotas);
}

TEST_CASE(
    "a small budget stores window and stand-ins in codes, a large one the window exactly, one for everything no codes")
{
    text const x{{.layers = 2}};
    for (preset p : {presets::by_window, presets::best, presets::any_question})
    {
        CAPTURE(std::string{p.name});
        p.stand_ins       = 32;
        p.stand_in_part   = 8;
        p.coded_stand_ins = true;
        p.window_part     = 10; // 8 tokens of 80, 4 of 40
        for (index_t const kv : {10, 30, 39, 40, 79, 80, 249, 250})
        {
            CAPTURE(kv);
            bool const codes = kv < 10 * p.window;
            auto const got   = by_prompt(x, p, budget::kv_size(kv));
            CHECK(got == by_hand(x, p, budget::kv_size(kv)));
            for (contents const& one : got.caches)
            {
                CHECK(one.layout.window == (codes ? 0 : p.window));
                for (head_entry const& head : one.heads)
                {
                    CHECK(head.runs[2].tokens >= (codes ? p.window : 0));
                    CHECK((one.layout.stand_in_run == 1) == (head.stand_ins > 0));
                    if (kv == 250) { CHECK(head.exact.tokens == 250); }
                    if (kv == 30) { CHECK(head.stand_ins > 8); }
                }
            }
        }
    }
    preset p      = presets::best;
    p.window_part = 1'000'000;
    CHECK(by_prompt(x, p, budget::kv_size(60)).caches[0].layout.window == 0);
    CHECK(by_prompt(x, p, budget::kv_size(199)).caches[0].layout.window == 8); // most tokens take 8 bits
    CHECK(error_text<invalid_argument>([&] { by_prompt(x, p, budget::bytes(1800)); })
          == "prompt::allocate: a budget of 1800 bytes a layer cannot hold the window of 8 tokens; at least "
                 + std::to_string(2 * (8 * (80 + 8) + 2 * (2 * 32 + 48))) + " bytes are needed");
    p.window = 1; // its codes and their channels take more than the exact token
    CHECK(by_prompt(x, p, budget::kv_size(20)).caches[0].layout.window == 1);
    p.window = 8;
    p.ratios = evict_ratios; // no codes
    CHECK(by_prompt(x, p, budget::kv_size(20)).caches[0].layout.window == 8);
}

TEST_CASE("losses of rows that the caller chose take the place of replayed ones")
{
    text const x{{.tokens = 200}};
    preset p = presets::best;
    p.refitted.reset(); // by queries that were not read
    tensor<float, 3> replayed{{2, 4, 200 - p.window}};
    auto const part = x.part(0, 0, 200 - p.window);
    workspace scratch{support::nan_memory{}};
    host const on{&scratch};
    replay(on, part.queries, part.keys, part.values, slice<1>(part.keys, 0, 0), p.ratios, p.replay<host>({}),
        replayed.out());
    caches made(1);
    prompt<host, half> one{on, p, x.shape()};
    one.take_losses(on, 0, replayed.in());
    one.finish_layer(on, 0, x.whole(0));
    one.allocate(on, budget::fraction(1, 4));
    one.pack(on, 0, x.whole(0), made[0]);
    CHECK(contents_of(made) == by_prompt(x, p, budget::fraction(1, 4), {.part = 200}).caches);
}

TEST_CASE("bad arguments of a prompt are named with their value and limit, and calls in a wrong order, before anything "
          "changes")
{
    text const x{{.layers = 2, .tokens = 100}}, shorter{{.layers = 2, .tokens = 90}};
    preset const& p = presets::best;
    caches made(2);
    workspace scratch{support::nan_memory{}};
    host const on{&scratch};
    auto const of_preset = [&](std::string const& want, void (*change)(preset&)) {
        preset own = p;
        change(own);
        refused("prompt: preset." + want, [&] { prompt<host, half>{on, own, x.shape()}; });
    };
    of_preset("window is -1; it must not be negative", [](preset& o) { o.window = -1; });
    of_preset("queries is 0; it must be at least 1", [](preset& o) { o.queries = 0; });
    of_preset("replayed.chunk is 0; it must be at least 1", [](preset& o) { o.replayed->chunk = 0; });
    of_preset("replayed.sinks is -2; it must not be negative", [](preset& o) { o.replayed->sinks = -2; });
    of_preset("replayed.join is -1; it must be finite and not negative", [](preset& o) { o.replayed->join = -1; });
    of_preset("stand_ins is -1; it must not be negative", [](preset& o) { o.stand_ins = -1; });
    of_preset(
        "refitted.blocks is 0; it must be from 1 to 1000000", [](preset& o) { o.refitted = refit_part{.blocks = 0}; });
    of_preset("scale is nan; it", [](preset& o) { o.scale = NAN; });
    of_preset("pooling.width is 4; it must be odd and at least 1", [](preset& o) { o.pooling.width = 4; });
    of_preset("shared.depth is nan; ", [](preset& o) { o.shared->depth = NAN; });
    of_preset("shared.depth is 10000; ", [](preset& o) { o.shared->depth = 1e4F; });
    of_preset("ratios has a projected rung, whose basis is not known", [](preset& o) { o.ratios = paper_ratios; });
    auto const of_shape = [&](std::string const& want, void (*change)(prompt_shape<host>&)) {
        auto own = x.shape();
        change(own);
        refused(want, [&] { prompt<host, half>{on, p, own}; });
    };
    of_shape("prompt: layers is 0; it must be from 1 to 256", [](auto& s) { s.layers = 0; });
    of_shape("prompt: layers is 257; it must be from 1 to 256", [](auto& s) { s.layers = 257; });
    of_shape("prompt: heads is -1; it must not be negative", [](auto& s) { s.heads = -1; });
    of_shape("prompt: group is 0; it must be at least 1", [](auto& s) { s.group = 0; });
    of_shape("prompt: window is -1; it must not be negative", [](auto& s) { s.tokens = -1; });
    of_shape("rung_costs: head dimensions are 0 and 0; they must be at least 1", [](auto& s) { s.dims = {}; });
    of_shape(
        "prompt: encoding.rotating is 31, which makes 31 of 32 coordinates; that must be an even number, at most all "
        "of them",
        [](auto& s) { s.encoding.rotating = 31; });
    of_shape("prompt: encoding.base is 0; it must be positive and finite", [](auto& s) { s.encoding.base = 0; });

    prompt<host, half> one{on, p, x.shape()};
    refused(
        "prompt::read_chunk: layer is 2; it must be from 0 to 1", [&] { one.read_chunk(on, 2, 0, x.part(0, 0, 50)); });
    refused("prompt::read_chunk: first is 10; of layer 0 only 0 tokens were read",
        [&] { one.read_chunk(on, 0, 10, x.part(0, 10, 50)); });
    refused("prompt::read_chunk: tokens 51 to 101 leave the prompt of at most 100",
        [&] { one.read_chunk(on, 0, 51, x.part(0, 0, 50)); });
    refused("prompt::read_chunk: queries [H*G, Q, D] has Q = 70; the chunk has 100 tokens",
        [&] { one.read_chunk(on, 0, 0, x.whole(0)); });
    auto other_order = x.part(0, 0, 50); // [N, H, D] as if it were [H, N, D]
    other_order.keys = in(on, x.all[0].keys.in().data_handle(), {50, 2, 32}, {32, 3200, 1});
    refused("prompt::read_chunk: keys must be [H,N,D] = [2, 2, 32], its extent 0 is 50",
        [&] { one.read_chunk(on, 0, 0, other_order); });
    refused("prompt::finish_layer: of layer 1 only 0 tokens were read, not all 92 before the window (read_chunk)",
        [&] { one.finish_layer(on, 1, x.whole(1)); });
    refused("prompt::take_losses: losses are of 93 tokens, above 92", [&] {
        one.take_losses(on, 0, tensor<float, 3>{{2, 4, 93}}.in());
    });
    refused("prompt::allocate: layer 0 is not finished", [&] { one.allocate(on, budget::fraction(1, 4)); });
    refused("prompt::pack: no rungs were chosen; call allocate first", [&] { one.pack(on, 0, x.whole(0), made[0]); });
    for (index_t l = 0; l < 2; ++l) { one.read_chunk(on, l, 0, x.part(l, 0, 100)); }
    auto without            = x.whole(0);
    without.lse             = std::nullopt;
    std::string const lacks = ": lse is missing; preset \"best\" makes up to ";
    refused("prompt::finish_layer" + lacks + "32 stand-ins, which need it", [&] { one.finish_layer(on, 0, without); });
    auto without_queries    = without;
    without_queries.queries = slice<1>(without.queries, 0, 0);
    refused("prompt::finish_layer: queries [H*G, Q, D] has Q = 0; it must be from 1 to the 100 tokens",
        [&] { one.finish_layer(on, 0, without_queries); });
    one.finish_layer(on, 0, x.whole(0));
    refused("prompt::finish_layer: layer 0 is finished", [&] { one.finish_layer(on, 0, x.whole(0)); });
    refused("prompt::read_chunk: layer 0 is finished", [&] { one.read_chunk(on, 0, 0, x.part(0, 0, 50)); });
    refused("prompt::finish_layer: layer 1 has 90 tokens; the layers before have 100",
        [&] { one.finish_layer(on, 1, shorter.whole(0)); });
    refused("prompt::allocate: layer 1 is not finished", [&] { one.allocate(on, budget::fraction(1, 4)); });
    one.finish_layer(on, 1, x.whole(1));
    refused(
        "prompt::allocate: a budget of 960 bytes a layer cannot hold the window of 8 tokens; at least 1856 bytes are "
        "needed",
        [&] { one.allocate(on, budget::kv_size(3)); });
    one.allocate(on, budget::fraction(1, 3));
    refused("prompt::pack" + lacks + "13 stand-ins, which need it", [&] { one.pack(on, 0, without, made[0]); });
    refused("prompt::pack: keys must be", [&] { one.pack(on, 0, shorter.whole(0), made[0]); });
    CHECK(made[0].arena_bytes() == 0);
    for (index_t l = 0; l < 2; ++l) { one.pack(on, l, x.whole(l), made[static_cast<std::size_t>(l)]); }
    CHECK(contents_of(made) == by_prompt(x, p, budget::fraction(1, 3)).caches);
}
