#include <mdkv/prompt.hpp>

#include <mdkv/append.hpp>
#include <mdkv/compress.hpp>
#include <mdkv/core/allocation.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/leverage.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/cpu/thread_pool.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/recompress.hpp>
#include <mdkv/replay/advance.hpp>
#include <mdkv/replay/balance.hpp>
#include <mdkv/replay/leverage.hpp>
#include <mdkv/replay/refit.hpp>
#include <mdkv/replay/replay.hpp>
#include <mdkv/replay/stand_in.hpp>
#include <mdkv/stages/allocate.hpp>
#include <mdkv/stages/basis.hpp>
#include <mdkv/stages/channels.hpp>
#include <mdkv/stages/pack.hpp>
#include <mdkv/stages/pool.hpp>

#include "support/failing_resource.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"
#include "support/message.hpp"
#include "support/random.hpp"
#include "support/ranks.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::tensor;
using host  = cpu::backend;
using rows  = prompt_rows<host, half>;
using store = std::vector<std::byte>;

/// Queries, keys and values of all tokens of all layers, and the log-sum-exps of the last queries.
struct text
{
    static constexpr index_t group = 2, dim = 32, value_dim = 48, last = 70;

    index_t layers, tokens, heads;
    std::vector<support::layer<half>> all;
    std::vector<tensor<float, 2>> lse; // [H*G, Q]

    text(index_t layers_, index_t tokens_, index_t heads_ = 2)
        : layers{layers_}
        , tokens{tokens_}
        , heads{heads_}
    {
        for (index_t l = 0; l < layers; ++l)
        {
            all.emplace_back(support::layer_sizes{.heads = heads,
                .group                                   = group,
                .queries                                 = tokens,
                .tokens                                  = tokens,
                .window                                  = 0,
                .dim                                     = dim,
                .value_dim                               = value_dim,
                .first_query                             = 0,
                .salt                                    = l + 1});
            lse.emplace_back(std::array<index_t, 2>{heads * group, count()});
            for (index_t q = 0; q < heads * group; ++q)
            {
                for (index_t i = 0; i < count(); ++i) { lse.back().set(log_sum(all.back(), q, i), q, i); }
            }
        }
    }

    /// Last queries at hand.
    [[nodiscard]] index_t count() const { return std::min(last, tokens); }

    [[nodiscard]] rows part(index_t l, index_t first, index_t n) const
    {
        auto const& x = all[static_cast<std::size_t>(l)];
        return {slice<1>(x.queries.in(), first, n), slice<1>(x.keys.in(), first, n), slice<1>(x.values.in(), first, n)};
    }
    [[nodiscard]] rows whole(index_t l) const
    {
        auto const& x = all[static_cast<std::size_t>(l)];
        return {slice<1>(x.queries.in(), tokens - count(), count()), x.keys.in(), x.values.in(),
            lse[static_cast<std::size_t>(l)].in()};
    }
    [[nodiscard]] prompt_shape<host> shape() const
    {
        return {.layers = layers, .heads = heads, .group = group, .dims = {dim, value_dim}, .tokens = tokens};
    }

private:
    [[nodiscard]] float log_sum(support::layer<half> const& x, index_t q, index_t i) const
    {
        double sum = 0;
        for (index_t t = 0; t <= tokens - count() + i; ++t)
        {
            double logit = 0;
            for (index_t d = 0; d < dim; ++d)
            {
                logit += double{widen(x.queries.get(q, tokens - count() + i, d))}
                         * double{widen(x.keys.get(q / group, t, d))};
            }
            sum += std::exp(logit * x.scale());
        }
        return static_cast<float>(std::log(sum));
    }
};

/// Everything that can be read from a cache.
struct contents
{
    store arena, tail;
    std::vector<head_entry> heads;
    cache_layout layout;
    index_t appended = 0;

    explicit contents(cpu::cache<half> const& cache)
        : layout{cache.layout()}
        , appended{cache.appended()}
    {
        auto const v = cache.view();
        arena.assign(v.arena, v.arena + v.arena_bytes);
        tail.assign(v.tail, v.tail + cache.tail_bytes());
        heads.assign(v.heads, v.heads + v.layout.heads);
    }
    friend bool operator==(contents const&, contents const&) = default;
};

template <class Caches>
std::vector<contents> contents_of(Caches const& caches)
{
    std::vector<contents> all;
    for (auto const& one : caches) { all.emplace_back(one); }
    return all;
}

/// How a test feeds a prompt.
struct feeding
{
    index_t part   = 128; ///< tokens of read_chunk
    index_t beyond = 0;   ///< tokens that the prompt could have had more
};

template <class Prompt>
std::vector<compress_report> feed(Prompt& p, host const& on, text const& x, preset const& chosen, budget limit,
    std::vector<cpu::cache<half>>& caches, feeding const& how = {})
{
    // The window's tokens are left out by the caller where the prompt cannot know them.
    index_t const end = how.beyond > 0 ? std::max<index_t>(x.tokens - chosen.window, 0) : x.tokens;
    for (index_t first = 0; first < end; first += how.part)
    {
        for (index_t l = 0; l < x.layers; ++l)
        {
            p.read_chunk(on, l, first, x.part(l, first, std::min(how.part, end - first)));
        }
    }
    for (index_t l = x.layers; l-- > 0;) { p.finish_layer(on, l, x.whole(l)); }
    p.allocate(on, limit);
    std::vector<compress_report> reports;
    for (index_t l = 0; l < x.layers; ++l)
    {
        reports.push_back(p.pack(on, l, x.whole(l), caches[static_cast<std::size_t>(l)]));
    }
    return reports;
}

std::vector<cpu::cache<half>> room_for(text const& x)
{
    return std::vector<cpu::cache<half>>(static_cast<std::size_t>(x.layers));
}

/// By one workspace for everything.
std::vector<contents> by_prompt(
    text const& x, preset const& chosen, budget limit, cpu::executor_ref threads = {}, feeding const& how = {})
{
    auto caches = room_for(x);
    auto shape  = x.shape();
    shape.tokens += how.beyond;
    support::run(
        [&](host const& on) {
            prompt<host, half> p{on, chosen, shape};
            feed(p, on, x, chosen, limit, caches, how);
        },
        threads);
    return contents_of(caches);
}

/// Rows of a rank's heads.
rows cut(rows r, index_t first, index_t heads)
{
    r.queries = slice<0>(r.queries, first * text::group, heads * text::group);
    r.keys    = slice<0>(r.keys, first, heads);
    r.values  = slice<0>(r.values, first, heads);
    if (r.lse) { r.lse = slice<0>(*r.lse, first * text::group, heads * text::group); }
    return r;
}

/// The arena of each layer over ranks, of which each has the heads from one cut to the next, in the order of one rank.
std::vector<store> over_ranks(text const& x, preset const& chosen, budget limit, std::vector<index_t> const& cuts)
{
    support::rank_team team{static_cast<int>(cuts.size()) - 1};
    std::vector<std::vector<contents>> made(cuts.size() - 1);
    auto const errors = support::on_ranks(team, [&](support::thread_rank const& rank) {
        auto const r        = static_cast<std::size_t>(rank.number);
        index_t const first = cuts[r];
        ranks const all     = rank.with(first, x.shape().heads);
        auto shape          = x.shape();
        shape.heads         = cuts[r + 1] - first;
        shape.ranks         = &all;
        auto caches         = room_for(x);
        support::run([&](host const& on) {
            prompt<host, half> p{on, chosen, shape};
            for (index_t l = 0; l < x.layers; ++l)
            {
                for (index_t at = 0; at < x.tokens; at += feeding{}.part) // as by_prompt does
                {
                    index_t const n = std::min(feeding{}.part, x.tokens - at);
                    p.read_chunk(on, l, at, cut(x.part(l, at, n), first, shape.heads));
                }
                p.finish_layer(on, l, cut(x.whole(l), first, shape.heads));
            }
            p.allocate(on, limit);
            for (index_t l = 0; l < x.layers; ++l)
            {
                p.pack(on, l, cut(x.whole(l), first, shape.heads), caches[static_cast<std::size_t>(l)]);
            }
        });
        made[r] = contents_of(caches);
    });
    for (std::string const& error : errors) { CHECK(error == ""); }
    std::vector<store> all(static_cast<std::size_t>(x.layers));
    for (auto const& of_rank : made)
    {
        for (std::size_t l = 0; l < of_rank.size(); ++l)
        {
            all[l].insert(all[l].end(), of_rank[l].arena.begin(), of_rank[l].arena.end());
        }
    }
    return all;
}

/// Values of a layer's tokens before the window, refitted to its blocks' rows; as they are if it has too few of these.
tensor<half, 3> refitted(text const& x, index_t l, preset const& p, in_view<std::uint8_t, 2, host> rungs, index_t extra,
    cpu::cache<half>& cache)
{
    rows const all         = x.whole(l);
    refit_part const& part = *p.refitted;
    index_t const each     = part.each(text::group);
    index_t const end      = (x.tokens - part.span) / part.apart;
    index_t const begin    = std::max<index_t>(end - part.blocks, 0);
    tensor<half, 3> values{{x.heads, rungs.extent(1), text::value_dim}};
    for (index_t h = 0; h < x.heads; ++h)
    {
        for (index_t i = 0; i < rungs.extent(1); ++i)
        {
            for (index_t d = 0; d < text::value_dim; ++d) { values.set(all.values(h, i, d), h, i, d); }
        }
    }
    if (x.count() < part.span || begin >= end) { return values; }
    tensor<half, 3> queries{{x.heads * text::group, (end - begin + 1) * each, text::dim}};
    auto const& own = x.all[static_cast<std::size_t>(l)].queries;
    for (index_t b = begin; b <= end; ++b)
    {
        index_t const first = b < end ? part.first(b) : x.tokens - part.span;
        for (index_t i = 0; i < each * queries.extent(0) * text::dim; ++i)
        {
            index_t const q = i / text::dim / each, j = i / text::dim % each, d = i % text::dim;
            queries.set(own.get(q, first + j * part.step(text::group), d), q, (b - begin) * each + j, d);
        }
    }
    support::run([&](host const& on) {
        refit(on, queries.in(), all.keys, all.values, rungs, cache.view(),
            {.rows = part, .first = part.first(begin), .stand_ins = extra, .scale = p.scale}, values.out());
    });
    return values;
}

/// The stages one after another, as docs/method.md describes them.
std::vector<contents> by_hand(text const& x, preset const& p, budget limit, index_t part = 128)
{
    index_t const L = x.layers, H = x.heads, D = text::dim, Dv = text::value_dim;
    auto const R         = static_cast<index_t>(p.ratios.size());
    index_t const window = std::min(p.window, x.tokens);
    index_t const N      = x.tokens - window;
    index_t const Q      = std::min(p.queries, x.count());
    layer_shape const shape{H, text::group, N, window, {D, Dv}, 2};
    tensor<float, 4> losses{{L, H, R, N}};
    tensor<leverage_sum, 1> leverages{{x.tokens}};
    leverages.assign(std::vector<leverage_sum>(static_cast<std::size_t>(x.tokens)));
    std::vector<tensor<float, 3>> key_bases, value_bases, channels;
    auto const of = [&](index_t l) { return detail::item_of(losses.out(), l); };
    for (index_t l = 0; l < L; ++l)
    {
        rows const all     = x.whole(l);
        auto const queries = slice<1>(all.queries, x.count() - Q, Q);
        auto const keys = slice<1>(all.keys, 0, N), values = slice<1>(all.values, 0, N);
        key_bases.emplace_back(std::array<index_t, 3>{p.ratios.any_projected() ? H : 0, D, D});
        value_bases.emplace_back(std::array<index_t, 3>{p.ratios.any_projected() ? H : 0, Dv, Dv});
        channels.emplace_back(std::array<index_t, 3>{p.ratios.any_rotated() ? H : 0, 3, D});
        if (N == 0) { continue; }
        if (p.ratios.any_projected())
        {
            tensor<float, 2> energy{{H, D}}, value_energy{{H, Dv}};
            support::run([&](host const& on) { fit_basis(on, keys, key_bases.back().out(), energy.out()); });
            support::run([&](host const& on) { fit_basis(on, values, value_bases.back().out(), value_energy.out()); });
        }
        if (p.ratios.any_rotated())
        {
            support::run([&](host const& on) { fit_channels(on, queries, keys, channels.back().out()); });
        }
        if (p.leverage_power() > 0)
        {
            support::run([&](host const& on) { add_leverage(on, all.keys, leverages.out()); });
        }
        tensor<float, 3> replayed{{H, R, N}}, scored{{H, R, N}}, pooled{{H, R, N}};
        for (index_t begin = 0; p.replayed && begin < N; begin += part)
        {
            for (index_t first = begin; first < std::min(begin + part, N); first += p.replayed->chunk)
            {
                index_t const n  = std::min({p.replayed->chunk, begin + part - first, N - first});
                rows const chunk = x.part(l, first, n);
                support::run([&](host const& on) {
                    replay(on, chunk.queries, chunk.keys, chunk.values,
                        slice<1>(all.keys, 0, std::min(first, p.replayed->sinks)), p.ratios, p.replay<host>({}),
                        slice<2>(replayed.out(), first, n));
                });
            }
        }
        if (!p.last_queries_score())
        {
            support::run([&](host const& on) { pool(on, replayed.in(), p.pooling, of(l)); });
            continue;
        }
        tensor<float, 1> weights{{Q}};
        for (index_t q = 0; q < Q; ++q) { weights.set(p.query_weight(q, Q), q); }
        support::run([&](host const& on) {
            score(on, queries, keys, values, slice<1>(all.keys, N, window), key_bases.back().in(),
                value_bases.back().in(), p.ratios,
                {.scale              = p.scale,
                    .lse             = slice<1>(*all.lse, x.count() - Q, Q),
                    .query_weights   = weights.in(),
                    .norm            = p.replayed ? p.replayed->last : row_norm::sum,
                    .uniform_queries = p.uniform_queries(Q)},
                scored.out());
        });
        support::run([&](host const& on) { pool(on, scored.in(), p.pooling, p.replayed ? pooled.out() : of(l)); });
        if (p.replayed)
        {
            support::run([&](host const& on) { join(on, replayed.in(), pooled.in(), p.replayed->join, of(l)); });
        }
    }
    tensor<std::uint8_t, 2> rungs{{L * H, N}};
    index_t const bytes = limit.in_bytes(shape);
    bool const whole    = bytes >= shape.full_bytes();
    bool const codes    = p.ratios.any_rotated(); // bit_ratios: 4 bits are rung 1, 8 bits rung 2
    index_t const coded = codes ? H * (window * p.ratios.bytes(2, {D, Dv}, 2) + channel_bytes({D, Dv}, 2)) : 0;
    bool in_codes = codes && !whole && shape.window_bytes() * p.window_part > bytes && coded < shape.window_bytes();
    bool small    = codes && p.coded_stand_ins; // stand-ins in 4 bits
    bool any      = false;                      // some token is dropped
    index_t spend = 0, one = 0, extra = 0;      // bytes for tokens, bytes of a stand-in, and how many of them
    auto const plan = [&] {
        spend               = bytes - (in_codes ? coded - H * channel_bytes({D, Dv}, 2) : shape.window_bytes());
        one                 = small ? p.ratios.bytes(1, {D, Dv}, 2) : shape.token_bytes();
        bool const fewer    = p.coded_stand_ins && !small;
        index_t const most  = fewer ? p.stand_ins / 4 : p.stand_ins;
        index_t const share = p.stand_in_part * (fewer ? 2 : 1);
        extra               = p.ratios.can_drop() ? stand_ins_within(most, bytes, share, H, one) : 0;
        extra               = H * one * extra <= spend ? extra : 0;
    };
    plan();
    if (whole)
    {
        rungs.assign(std::vector<std::uint8_t>(static_cast<std::size_t>(L * H * N), static_cast<std::uint8_t>(R - 1)));
    }
    else
    {
        if (p.shared)
        {
            support::run(
                [&](host const& on) { balance(on, losses.out(), p.balance<host>(slice<0>(leverages.in(), 0, N))); });
        }
        index_t const parts = p.shared ? 1 : L;
        index_t const heads = L / parts * H;
        std::vector<allocation> found(static_cast<std::size_t>(parts));
        auto const choose = [&](index_t i, index_t each) {
            tensor<index_t, 1> most{{1}};
            tensor<allocation, 1> report{{1}};
            most.set(L / parts * each, 0);
            support::run([&](host const& on) {
                allocate(on,
                    {in(on, std::as_const(losses).data() + i * heads * R * N, heads, R, N),
                        slice<0>(rungs.out(), i * heads, heads)},
                    rung_costs{p.ratios, {D, Dv}, 2}, most.in(), {.charge = p.charge}, report.out());
            });
            found[static_cast<std::size_t>(i)] = report.get(0);
        };
        for (index_t i = 0; i < parts; ++i) { choose(i, spend); }
        index_t cheap = 0, costly = 0; // tokens in 4 bits, and in more
        for (allocation const& each : found)
        {
            cheap += each.tokens[1];
            costly += each.tokens[2] + each.tokens[3];
        }
        if ((in_codes || small) && cheap < costly)
        {
            in_codes = in_codes && bytes < shape.window_bytes();
            small    = false;
            plan();
            for (index_t i = 0; i < parts; ++i) { choose(i, spend); }
        }
        for (index_t i = 0; i < parts; ++i)
        {
            auto const& dropped = found[static_cast<std::size_t>(i)].tokens[0];
            if (dropped > 0 && extra > 0) { choose(i, spend - H * one * extra); }
            any = any || dropped > 0;
        }
    }
    extra              = any ? extra : 0;
    index_t const rest = in_codes ? 0 : window; // tokens without a rung
    tensor<std::uint8_t, 2> all_rungs{{L * H, x.tokens - rest}};
    for (index_t h = 0; h < L * H; ++h)
    {
        for (index_t i = 0; i < x.tokens - rest; ++i)
        {
            all_rungs.set(i < N ? rungs.get(h, i) : std::uint8_t{2}, h, i);
        }
    }
    std::vector<cpu::cache<half>> caches;
    for (index_t l = 0; l < L; ++l)
    {
        rows const all    = x.whole(l);
        auto const i      = static_cast<std::size_t>(l);
        auto const chosen = slice<0>(all_rungs.in(), l * H, H);
        index_t const n   = x.tokens - rest;
        auto const keys = slice<1>(all.keys, 0, n), values = slice<1>(all.values, 0, n);
        cache_layout layout{p.ratios, H, rest, {D, Dv}, p.scale};
        if (small && extra > 0) { layout.stand_in_run = 1; }
        index_t size = 0;
        support::run([&](host const& on) { size = packed_bytes<half>(on, chosen, layout, extra); });
        caches.emplace_back(layout, size);
        tensor<float, 3> made_keys{{H, extra, D}}, made_values{{H, extra, Dv}};
        index_t const by = std::min(stand_in_queries, x.count());
        support::run([&](host const& on) {
            stand_in(on, slice<1>(all.queries, x.count() - by, by), keys, values, chosen,
                slice<1>(*all.lse, x.count() - by, by), x.tokens, p.stand_in(), made_keys.out(), made_values.out());
        });
        auto const pack_with = [&](in_view<half, 3, host> const& stored) {
            support::run([&](host const& on) {
                pack(on, keys, stored, slice<1>(all.keys, n, rest), slice<1>(all.values, n, rest), key_bases[i].in(),
                    value_bases[i].in(), chosen, caches.back().view(),
                    N == 0 ? in_view<float, 3, host>{} : channels[i].in(), made_keys.in(), made_values.in());
            });
        };
        pack_with(values);
        if (p.refitted && !whole) { pack_with(refitted(x, l, p, chosen, extra, caches.back()).in()); }
    }
    return contents_of(caches);
}

/// Each layer by one call.
std::vector<contents> by_compress(text const& x, preset const& p, budget limit)
{
    std::vector<cpu::cache<half>> caches(static_cast<std::size_t>(x.layers));
    for (index_t l = 0; l < x.layers; ++l)
    {
        support::run([&](host const& on) { compress(on, x.whole(l), p, limit, caches[static_cast<std::size_t>(l)]); });
    }
    return contents_of(caches);
}

/// A preset with blocks so short that these prompts have several.
preset with_refit(preset p)
{
    p.refitted = {.blocks = 2, .apart = 45, .span = 16, .rows = 9};
    return p;
}

/// The presets as they are, and with chunks so short that these prompts have several.
std::vector<preset> all_presets()
{
    std::vector<preset> all;
    for (preset p : {presets::by_window, presets::best, presets::any_question, presets::paper})
    {
        all.push_back(p);
        if (!p.replayed) { continue; }
        p.replayed->chunk = 50;
        all.push_back(p);
        all.push_back(with_refit(p));
    }
    return all;
}

} // namespace

TEST_CASE("a prompt is its stages one after another, bit for bit, whatever its length, layers and budget")
{
    for (index_t const tokens : {3, 20, 300})
    {
        for (index_t const layers : {1, 3})
        {
            text const x{layers, tokens};
            for (preset const& p : all_presets())
            {
                for (budget const limit : {budget::fraction(1, 3), budget::fraction(1, 1)})
                {
                    layer_shape const shape{2, 2, 0, std::min(p.window, tokens), {32, 48}, 2};
                    layer_shape const whole{2, 2, tokens, 0, {32, 48}, 2};
                    if (limit.in_bytes(whole) < shape.window_bytes()) { continue; }
                    CAPTURE(p.name);
                    CAPTURE(p.replayed.value_or(replay_part{}).chunk);
                    CAPTURE(tokens);
                    CAPTURE(layers);
                    CHECK(by_prompt(x, p, limit) == by_hand(x, p, limit));
                }
            }
        }
    }
}

TEST_CASE("one budget over 1, 2, 3 and 5 ranks, of which some have no heads, makes the caches of one rank, bit for bit")
{
    text const x{3, 250, 5};
    std::vector<std::vector<index_t>> const splits{
        {0, 5}, {0, 2, 5}, {0, 1, 1, 5}, {0, 1, 2, 3, 4, 5}, {0, 0, 4, 5, 5, 5}};
    preset projected = presets::paper;
    projected.shared = presets::best.shared;
    for (preset const& p : {presets::best, with_refit(presets::best), presets::any_question, projected,
             presets::by_window, presets::paper})
    {
        for (budget const limit : {budget::fraction(1, 4), budget::fraction(1, 1)})
        {
            std::vector<store> one;
            for (contents const& of_layer : by_prompt(x, p, limit)) { one.push_back(of_layer.arena); }
            for (auto const& cuts : splits)
            {
                CAPTURE(p.name);
                CAPTURE(cuts.size());
                CHECK(over_ranks(x, p, limit, cuts) == one);
            }
        }
    }
}

TEST_CASE("a rank whose heads another one has, too, and that gives zeros to the sums, chooses the same rungs")
{
    text const x{2, 250};
    for (preset const& p : {presets::best, presets::any_question})
    {
        support::rank_team team{2};
        std::vector<std::vector<contents>> made(2);
        auto const errors = support::on_ranks(team, [&](support::thread_rank const& rank) {
            ranks all = rank.with(0, x.heads);
            if (rank.number == 1)
            {
                all.sum = [](void* state, std::int64_t* numbers, index_t n) {
                    std::fill_n(numbers, n, 0);
                    auto const& replica = *static_cast<support::thread_rank const*>(state);
                    replica.all.sum(replica.number, numbers, n);
                };
            }
            auto shape  = x.shape();
            shape.ranks = &all;
            auto caches = room_for(x);
            support::run([&](host const& on) {
                prompt<host, half> one{on, p, shape};
                feed(one, on, x, p, budget::fraction(1, 4), caches);
            });
            made[static_cast<std::size_t>(rank.number)] = contents_of(caches);
        });
        for (std::string const& error : errors) { CHECK(error == ""); }
        auto const one = by_prompt(x, p, budget::fraction(1, 4));
        for (auto const& caches : made) { CHECK(caches == one); }
    }
}

TEST_CASE("ranks fold within the bytes that their heads got, and within their part of the budget if everything fits")
{
    text const x{1, 250, 5};
    for (preset const& p : {presets::best, presets::by_window})
    {
        for (budget const limit : {budget::fraction(1, 4), budget::fraction(2, 1)})
        {
            support::rank_team team{2};
            std::vector<cpu::cache<half>> made(2);
            auto const errors = support::on_ranks(team, [&](support::thread_rank const& rank) {
                index_t const first = 2 * rank.number;
                ranks const all     = rank.with(first, 5);
                auto shape          = x.shape();
                shape.heads         = rank.number == 0 ? 2 : 3;
                shape.ranks         = &all;
                workspace scratch{cpu::host_memory{}};
                host const on{&scratch};
                prompt<host, half> one{on, p, shape};
                one.read_chunk(on, 0, 0, cut(x.part(0, 0, x.tokens), first, shape.heads));
                one.finish_layer(on, 0, cut(x.whole(0), first, shape.heads));
                one.allocate(on, limit);
                one.pack(on, 0, cut(x.whole(0), first, shape.heads), made[static_cast<std::size_t>(rank.number)]);
            });
            for (std::string const& error : errors) { CHECK(error == ""); }
            index_t const all = limit.in_bytes({5, text::group, x.tokens, 0, {text::dim, text::value_dim}, 2});
            bool const fits   = all > 250 * 5 * (text::dim + text::value_dim) * 2;
            CHECK(made[0].fold_limit == (fits ? all / 5 * 2 : made[0].arena_bytes()));
            CHECK(made[1].fold_limit == (fits ? all / 5 * 3 : made[1].arena_bytes()));
        }
    }
}

TEST_CASE("a prompt over ranks of which one differs, or refuses its arguments, is refused on every rank")
{
    struct call
    {
        preset p;
        prompt_shape<host> shape;
        ranks place;
        budget limit  = budget::fraction(1, 4);
        bool finishes = true;
        half first_key{};
    };
    struct difference
    {
        char const* name;
        void (*change)(call&);
        std::optional<bool> replayed{}; // only of presets that replay, or do not
    };
    static std::array<double, 16> const frequencies{1, 0.5, 0.25};
    std::vector<difference> const all{{"heads of all ranks", [](call& x) { x.place.heads = 3; }},
        {"tokens", [](call& x) { x.shape.tokens = 110; }}, {"D", [](call& x) { x.shape.dims.keys = 16; }},
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

    std::map<index_t, text> const texts = [] {
        std::map<index_t, text> made;
        for (index_t const tokens : {100, 110}) { made.emplace(tokens, text{1, tokens}); }
        return made;
    }();
    auto const errors_with = [&](preset const& p, auto const& change) {
        support::rank_team team{2};
        return support::on_ranks(team, [&](support::thread_rank const& rank) {
            call mine{p, texts.at(100).shape(), rank.with(rank.number, 2)};
            mine.shape.heads = 1;
            if (rank.number == 1) { change(mine); }
            mine.shape.ranks = &mine.place;
            text const& x    = texts.at(mine.shape.tokens);
            workspace scratch{support::nan_memory{}};
            host const on{&scratch};
            tensor<half, 3> keys{{1, x.tokens, mine.shape.dims.keys}};
            support::run([&](host const& with) {
                run(with, detail::copy_rows<host, half>{
                              slice<2>(cut(x.whole(0), rank.number, 1).keys, 0, mine.shape.dims.keys), keys.out()});
            });
            if (widen(mine.first_key) != 0) { keys.set(mine.first_key, 0, 0, 0); }
            auto const part = [&](rows const& r) {
                rows const heads   = cut(r, rank.number, 1);
                auto const [D, Dv] = mine.shape.dims;
                return rows{slice<2>(heads.queries, 0, D), keys.in(), slice<2>(heads.values, 0, Dv)};
            };
            prompt<host, half> one{on, mine.p, mine.shape};
            one.read_chunk(on, 0, 0, part(x.part(0, 0, x.tokens)));
            if (mine.finishes) { one.finish_layer(on, 0, part(x.whole(0))); }
            one.allocate(on, mine.limit);
        });
    };
    for (preset const& p : {presets::best, presets::any_question, presets::by_window})
    {
        CAPTURE(p.name);
        for (std::string const& error : errors_with(p, [](call&) {})) { CHECK(error == ""); }
        for (difference const& one : all)
        {
            if (one.replayed.value_or(p.replayed.has_value()) != p.replayed.has_value()) { continue; }
            CAPTURE(one.name);
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
    errors = errors_with(presets::best, [](call& x) { x.first_key = half{0x7e00}; });
    CHECK(errors[0] == "prompt::finish_layer: another rank refuses its arguments");
    support::says(errors[1], "keys");
    errors = errors_with(presets::best, [](call& x) { x.limit = budget::bytes(1); });
    CHECK(errors[0] == "prompt::allocate: another rank refuses its arguments");
    support::says(errors[1], "cannot hold the window");
}

TEST_CASE("with a budget for each layer a prompt is compress of each layer, bit for bit")
{
    text const x{2, 250};
    for (preset const& p : {presets::by_window, presets::paper, presets::paper_literal, presets::evict})
    {
        for (budget const limit : {budget::fraction(1, 4), budget::kv_size(100), budget::fraction(1, 1)})
        {
            CAPTURE(p.name);
            CHECK(by_prompt(x, p, limit) == by_compress(x, p, limit));
        }
    }
}

TEST_CASE("compress of a preset that replays is a prompt of one layer with the queries of all tokens, bit for bit")
{
    text const x{1, 250};
    for (preset const& chosen : {presets::best, presets::any_question})
    {
        preset p    = chosen;
        p.stand_ins = 0; // they need the log-sum-exps of all queries
        auto caches = room_for(x);
        cpu::cache<half> one;
        rows const all = x.part(0, 0, x.tokens);
        support::run([&](host const& on) {
            prompt<host, half> q{on, p, x.shape()};
            q.read_chunk(on, 0, 0, all);
            q.finish_layer(on, 0, all);
            q.allocate(on, budget::fraction(1, 4));
            q.pack(on, 0, all, caches[0]);
        });
        support::run([&](host const& on) { compress(on, all, p, budget::fraction(1, 4), one); });
        CHECK(contents{one} == contents{caches[0]});
    }
}

TEST_CASE("a workspace serves the next prompts without growth")
{
    text const x{2, 300};
    workspace scratch{cpu::host_memory{}};
    host const on{&scratch};
    index_t grown = 0;
    for (int turn = 0; turn < 3; ++turn)
    {
        for (preset const& p : {presets::best, presets::by_window})
        {
            auto caches = room_for(x);
            prompt<host, half> one{on, p, x.shape()};
            feed(one, on, x, p, budget::fraction(1, 4), caches);
            CHECK(contents_of(caches) == by_prompt(x, p, budget::fraction(1, 4)));
        }
        if (turn == 1) { grown = scratch.held(); }
    }
    CHECK(scratch.held() == grown);
    CHECK(grown >= scratch.peak());
}

TEST_CASE("a cache remembers its limit: the layer's budget, or the bytes that a layer of several got; folds keep to it")
{
    text const x{3, 300};
    auto const folded = [&](preset const& p, budget limit) {
        auto caches = room_for(x);
        support::run([&](host const& on) {
            prompt<host, half> one{on, p, x.shape()};
            feed(one, on, x, p, limit, caches);
        });
        std::vector<index_t> limits;
        for (index_t l = 0; l < x.layers; ++l)
        {
            auto& cache = caches[static_cast<std::size_t>(l)];
            limits.push_back(cache.fold_limit);
            cache.reserve_tail(64);
            for (int fold = 0; fold < 2; ++fold)
            {
                rows const more = x.part(l, 0, 64);
                support::run([&](host const& on) { append(on, more.keys, more.values, cache.view()); });
                auto by_hand                         = cache.copy();
                in_view<half, 3, host> const queries = slice<1>(more.queries, 16, 48);
                tensor<float, 1> weights{{48}};
                for (index_t q = 0; q < 48; ++q) { weights.set(q < 48 - p.question ? p.early_weight : 1.0F, q); }
                support::run([&](host const& on) { recompress(on, queries, p, cache); });
                recompress_options<host> options{.limit = budget::bytes(limits.back()), .pooling = p.pooling};
                options.allocation.charge = p.charge;
                options.query_weights     = weights.in();
                options.uniform_queries   = p.uniform_queries(48);
                if (p.window_part > 0) { options.window = p.window; }
                support::run([&](host const& on) { recompress(on, queries, p.ratios, options, by_hand); });
                CHECK(contents{cache}.arena == contents{by_hand}.arena);
                CHECK(contents{cache}.heads == contents{by_hand}.heads);
                CHECK(cache.arena_bytes() <= limits.back());
                CHECK(cache.fold_limit == limits.back());
                CHECK(by_hand.fold_limit == limits.back());
            }
        }
        return limits;
    };
    index_t const token = x.heads * (text::dim + text::value_dim) * index_t{sizeof(half)};
    CHECK(folded(presets::by_window, budget::kv_size(90)) == std::vector<index_t>(3, 90 * token));
    CHECK(folded(presets::by_window, budget::kv_size(400)) == std::vector<index_t>(3, 400 * token));
    CHECK(folded(presets::best, budget::kv_size(400)) == std::vector<index_t>(3, 400 * token));
    auto const shared = folded(presets::best, budget::kv_size(90));
    index_t all       = 0;
    for (index_t const bytes : shared) { all += bytes; }
    CHECK(shared[0] != shared[2]);
    CHECK(all <= 3 * 90 * token);

    cpu::cache<half> cache{{bit_ratios, 1, 0, {32, 32}}, 0, 0};
    auto const queries = x.part(0, 0, 1).queries;
    CHECK(error_text<invalid_argument>([&] {
        support::run([&](host const& on) { recompress(on, slice<0>(queries, 0, 1), presets::best, cache); });
    }) == "recompress: the cache's fold_limit is 0; set it, or give recompress_options a limit");
}

TEST_CASE("arenas never take more than the budget, nor folds of them, whatever preset, set, layers, window and budget")
{
    support::source random{"arenas within budgets"};
    std::vector<ratio_set> const sets{bit_ratios, {drop, full_int4}, {drop, full_int8, full}, evict_ratios};
    index_t refused = 0, chosen = 0;
    for (preset base : {presets::best, presets::any_question, presets::by_window, presets::paper, presets::evict})
    {
        for (std::size_t set = 0; set < (base.ratios.any_projected() ? 1 : sets.size()); ++set)
        {
            if (!base.ratios.any_projected()) { base.ratios = sets[set]; }
            for (auto const& [layers, tokens, window] :
                {std::array<index_t, 3>{1, 150, base.window}, {3, 80, 0}, {2, 40, 20}})
            {
                text const x{layers, tokens};
                preset p = base;
                p.window = window;
                layer_shape const whole{x.heads, text::group, tokens, 0, {text::dim, text::value_dim}, 2};
                index_t const most = whole.full_bytes();
                workspace scratch{cpu::host_memory{}};
                host const on{&scratch};
                prompt<host, half> one{on, p, x.shape()};
                for (index_t l = 0; l < layers; ++l)
                {
                    for (index_t first = 0; first < tokens; first += 128)
                    {
                        one.read_chunk(on, l, first, x.part(l, first, std::min<index_t>(128, tokens - first)));
                    }
                    one.finish_layer(on, l, x.whole(l));
                }
                for (int i = 0; i < 60; ++i)
                {
                    index_t const bytes = i < 40 ? most / 8 * i / 40 + random.below(60) : random.below(most + 100);
                    bool const packs    = i % 4 == 0;
                    CAPTURE(p.name);
                    CAPTURE(set);
                    CAPTURE(layers);
                    CAPTURE(bytes);
                    try
                    {
                        one.allocate(on, budget::bytes(bytes));
                    }
                    catch (invalid_argument const&)
                    {
                        ++refused;
                        continue;
                    }
                    ++chosen;
                    index_t all = 0;
                    for (index_t l = 0; l < layers; ++l)
                    {
                        all += one.arena_bytes(on, l);
                        if (!packs) { continue; }
                        cpu::cache<half> cache;
                        one.pack(on, l, x.whole(l), cache);
                        CHECK(cache.arena_bytes() == one.arena_bytes(on, l));
                        index_t const limit = cache.fold_limit;
                        cache.reserve_tail(24);
                        rows const more = x.part(l, 0, 24);
                        append(on, more.keys, more.values, cache.view());
                        index_t const within    = i % 8 == 0 ? limit : random.below(limit + 1);
                        auto const options      = fold_options<host>(p, budget::bytes(within), 24);
                        std::string const error = error_text<invalid_argument>(
                            [&] { recompress(on, more.queries, p.ratios, options, cache); });
                        bool const folds = error.find("bytes are needed") == std::string::npos;
                        CHECK((!folds || cache.arena_bytes() <= within));
                    }
                    CHECK(all <= layers * bytes);
                }
            }
        }
    }
    CHECK(chosen > refused); // both, and mostly budgets that work
    CHECK(refused > 100);
}

TEST_CASE("quotas give every head of every layer its own bytes (MixedDimKV-H)")
{
    text const x{2, 120};
    index_t const token = (text::dim + text::value_dim) * index_t{sizeof(half)};
    tensor<index_t, 2> quotas{{2, 2}};
    std::array<std::array<index_t, 2>, 2> const kept{{{5, 40}, {15, 0}}};
    auto const set = [&](index_t more) {
        for (index_t l = 0; l < 2; ++l)
        {
            for (index_t h = 0; h < 2; ++h)
            {
                quotas.set(kept[static_cast<std::size_t>(l)][static_cast<std::size_t>(h)] * token + more, l, h);
            }
        }
    };
    set(3); // less than a token
    auto caches = room_for(x);
    allocation total;
    support::run([&](host const& on) {
        prompt<host, half> p{on, presets::evict, x.shape()};
        for (index_t l = 0; l < 2; ++l) { p.finish_layer(on, l, x.whole(l)); }
        total = p.allocate(on, quotas.in());
        for (index_t l = 0; l < 2; ++l)
        {
            auto const report = p.pack(on, l, x.whole(l), caches[static_cast<std::size_t>(l)]);
            CHECK(report.budget_bytes == report.window_bytes + 30 * token + 6);
        }
    });
    CHECK(total.tokens[1] == 60);
    for (std::size_t l = 0; l < 2; ++l)
    {
        for (std::size_t h = 0; h < 2; ++h)
        {
            CHECK(caches[l].view().heads[h].exact.tokens == kept[l][h] + presets::evict.window);
        }
    }
    set(115 * token); // 120 tokens at least
    support::run([&](host const& on) {
        prompt<host, half> p{on, presets::by_window, x.shape()};
        for (index_t l = 0; l < 2; ++l) { p.finish_layer(on, l, x.whole(l)); }
        CHECK(p.allocate(on, quotas.in()).status == allocation_status::everything_kept);
        auto const report = p.pack(on, 1, x.whole(1), caches[1]);
        CHECK(report.status == compress_status::uncompressed);
        CHECK(report.resident_bytes == report.full_bytes);
    });
    tensor<index_t, 2> const few{{2, 1}};
    auto const refusal = [&](tensor<index_t, 2> const& given) {
        return error_text<invalid_argument>([&] {
            support::run([&](host const& on) {
                prompt<host, half> p{on, presets::evict, x.shape()};
                for (index_t l = 0; l < 2; ++l) { p.finish_layer(on, l, x.whole(l)); }
                p.allocate(on, given.in());
            });
        });
    };
    CHECK(refusal(few) == "prompt::allocate: quotas must be [L,H] = [2, 2], its extent 1 is 1");
    preset keeps = presets::by_window;
    keeps.name   = "no token dropped";
    keeps.ratios = ratio_set{full_int4, full};
    set(0);
    CHECK(error_text<invalid_argument>([&] {
        support::run([&](host const& on) {
            prompt<host, half> p{on, keeps, x.shape()};
            for (index_t l = 0; l < 2; ++l) { p.finish_layer(on, l, x.whole(l)); }
            p.allocate(on, quotas.in());
        });
    }).starts_with("prompt::allocate: a quota cannot hold the tokens of its head at their cheapest rung; at least "));
    quotas.set(-1, 0, 0);
    CHECK(refusal(quotas) == "allocate: limits[0] is -1; it must not be negative");
}

TEST_CASE(
    "presets of one's own: one budget with projections, stand-ins with a budget for each layer, a scale, no window")
{
    text const x{2, 250};
    preset shared          = presets::paper;
    shared.shared          = sharing_part{};
    preset own             = presets::by_window;
    own.stand_ins          = 3;
    preset scaled          = presets::best;
    scaled.scale           = 0.1F;
    scaled.window          = 0;
    scaled.replayed->sinks = 0;
    preset replayed        = presets::any_question;
    replayed.shared        = std::nullopt;
    for (preset const& p : {shared, own, scaled, replayed})
    {
        CAPTURE(p.name);
        auto const got = by_prompt(x, p, budget::fraction(1, 4));
        CHECK(got == by_hand(x, p, budget::fraction(1, 4)));
        for (contents const& one : got)
        {
            CHECK(one.tail.empty());
            for (head_entry const& head : one.heads) { CHECK((head.stand_ins > 0) == (p.stand_ins > 0)); }
        }
    }
}

TEST_CASE(
    "a small budget stores window and stand-ins in codes, a large one the window exactly, one for everything no codes")
{
    text const x{2, 250};
    for (preset p : {presets::by_window, presets::best, presets::any_question})
    {
        CAPTURE(p.name);
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
            for (contents const& one : got)
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
    CHECK(by_prompt(x, p, budget::kv_size(60))[0].layout.window == 0);
    CHECK(by_prompt(x, p, budget::kv_size(199))[0].layout.window == 8); // most tokens take 8 bits
    CHECK(error_text<invalid_argument>([&] { static_cast<void>(by_prompt(x, p, budget::bytes(1800))); })
          == "prompt::allocate: a budget of 1800 bytes a layer cannot hold the window of 8 tokens; at least "
                 + std::to_string(2 * (8 * (80 + 8) + 2 * (2 * 32 + 48))) + " bytes are needed");
    p.window = 1; // its codes and their channels take more than the exact token
    CHECK(by_prompt(x, p, budget::kv_size(20))[0].layout.window == 1);
    p.window = 8;
    p.ratios = evict_ratios; // no codes
    CHECK(by_prompt(x, p, budget::kv_size(20))[0].layout.window == 8);
}

TEST_CASE("threads, a length that is not known before, and parts of the same chunks change no bit")
{
    text const x{2, 300};
    cpu::thread_pool three{3};
    for (preset p :
        {presets::by_window, presets::best, with_refit(presets::best), presets::any_question, presets::paper})
    {
        CAPTURE(p.name);
        if (p.replayed) { p.replayed->chunk = 64; }
        auto const want = by_prompt(x, p, budget::fraction(1, 4));
        CHECK(by_prompt(x, p, budget::fraction(1, 4), three) == want);
        CHECK(by_prompt(x, p, budget::fraction(1, 4), {}, {.beyond = 77}) == want);
        CHECK(by_prompt(x, p, budget::fraction(1, 4), {}, {.part = 64}) == want);
        CHECK(by_prompt(x, p, budget::fraction(1, 4), {}, {.part = 1024}) == want);
    }
}

TEST_CASE("a call for which memory ran out changes nothing and may be made again, and another budget may follow")
{
    text const x{2, 300};
    for (preset const& p : {presets::best, presets::any_question, presets::paper})
    {
        CAPTURE(p.name);
        workspace state{support::nan_memory{}};
        auto caches = room_for(x);
        prompt<host, half> one{host{&state}, p, x.shape()};
        for (index_t l = 0; l < 2; ++l)
        {
            support::insist([&](host const& on) { one.read_chunk(on, l, 0, x.part(l, 0, 300)); });
        }
        for (index_t l = 0; l < 2; ++l)
        {
            support::insist([&](host const& on) { one.finish_layer(on, l, x.whole(l)); });
        }
        for (budget const limit : {budget::fraction(1, 8), budget::fraction(1, 1), budget::fraction(1, 4)})
        {
            allocation total;
            support::insist([&](host const& on) { total = one.allocate(on, limit); });
            std::vector<compress_report> reports(2);
            for (index_t l = 0; l < 2; ++l)
            {
                support::insist([&](host const& on) {
                    reports[static_cast<std::size_t>(l)] =
                        one.pack(on, l, x.whole(l), caches[static_cast<std::size_t>(l)]);
                });
            }
            CHECK(contents_of(caches) == by_prompt(x, p, limit, {}, {.part = 300}));
            index_t resident = 0;
            for (std::size_t l = 0; l < 2; ++l)
            {
                index_t const stored = caches[l].arena_bytes();
                CHECK(reports[l].resident_bytes == stored);
                CHECK(reports[l].chosen.multiplier == total.multiplier);
                resident += stored;
                for (std::size_t r = 0; r < p.ratios.size(); ++r) { total.tokens[r] -= reports[l].chosen.tokens[r]; }
            }
            CHECK(total.tokens == allocation{}.tokens);
            CHECK(resident <= 2 * reports[0].budget_bytes);
        }
    }
}

TEST_CASE("a place that the caller has made is filled with the bytes of an owner's cache")
{
    text const x{2, 300};
    preset const& p = presets::best;
    auto caches     = room_for(x);
    std::vector<cpu::cache<half>> places;
    support::run([&](host const& on) {
        prompt<host, half> one{on, p, x.shape()};
        feed(one, on, x, p, budget::fraction(1, 4), caches);
        places.clear();
        for (index_t l = 0; l < 2; ++l)
        {
            auto& place = places.emplace_back(one.layout(), one.arena_bytes(on, l));
            auto to     = place.view();
            CHECK(one.pack(on, l, x.whole(l), to).resident_bytes == place.arena_bytes());
        }
    });
    CHECK(contents_of(places) == contents_of(caches));
}

TEST_CASE(
    "arena_bytes are those of the rungs that were chosen last; there are none before a choice or after a failed one")
{
    text const x{3, 250};
    preset keeps = presets::by_window;
    keeps.name   = "no token dropped";
    keeps.ratios = ratio_set{full_int4, full_int8, full};
    for (preset const& p : {presets::best, presets::any_question, presets::by_window, presets::paper, keeps})
    {
        CAPTURE(p.name);
        support::run([&](host const& on) {
            prompt<host, half> one{on, p, x.shape()};
            for (index_t l = 0; l < x.layers; ++l)
            {
                one.read_chunk(on, l, 0, x.part(l, 0, x.tokens));
                one.finish_layer(on, l, x.whole(l));
            }
            auto const none = [&] {
                CHECK(error_text<invalid_argument>([&] { static_cast<void>(one.arena_bytes(on, 0)); })
                      == "prompt::arena_bytes: no rungs were chosen; call allocate first");
            };
            none();
            for (budget const limit : {budget::fraction(2, 5), budget::fraction(1, 2), budget::fraction(1, 1)})
            {
                one.allocate(on, limit);
                index_t all = 0;
                for (index_t l = 0; l < x.layers; ++l)
                {
                    cpu::cache<half> packed;
                    one.pack(on, l, x.whole(l), packed);
                    CHECK(one.arena_bytes(on, l) == packed.arena_bytes());
                    all += one.arena_bytes(on, l);
                }
                CHECK(all > 0);
                CHECK(all <= x.layers * limit.in_bytes({2, 2, x.tokens, 0, {x.dim, x.value_dim}, 2}));
            }
            CHECK(error_text<invalid_argument>([&] { static_cast<void>(one.arena_bytes(on, 3)); })
                  == "prompt::arena_bytes: layer is 3; it must be from 0 to 2");
            if (p.ratios.can_drop()) { return; }
            support::says(error_text<invalid_argument>([&] { one.allocate(on, budget::fraction(1, 8)); }),
                "cannot hold every token at its cheapest rung");
            none();
        });
    }
}

TEST_CASE("losses of rows that the caller chose take the place of replayed ones, and queries may be of another element")
{
    text const x{1, 200};
    preset p          = presets::best;
    p.replayed->ahead = 0; // turned queries are then no numbers that half would round
    p.refitted.reset();    // by queries that were not read
    index_t const n = 200 - p.window;
    tensor<float, 3> replayed{{2, 4, n}};
    rows const part = x.part(0, 0, n);
    support::run([&](host const& on) {
        replay(on, part.queries, part.keys, part.values, slice<1>(part.keys, 0, 0), p.ratios, p.replay<host>({}),
            replayed.out());
    });
    auto const queries = support::converted<float>(x.all[0].queries);
    rows const same    = x.whole(0);
    prompt_rows<host, half, float> const all{
        slice<1>(queries.in(), 200 - x.count(), x.count()), same.keys, same.values, same.lse};
    auto const call = [&](auto const& read) {
        auto caches = room_for(x);
        support::run([&](host const& on) {
            prompt<host, half, float> one{on, p, x.shape()};
            read(one, on);
            one.finish_layer(on, 0, all);
            one.allocate(on, budget::fraction(1, 4));
            one.pack(on, 0, all, caches[0]);
        });
        return contents_of(caches);
    };
    auto const want = by_prompt(x, p, budget::fraction(1, 4), {}, {.part = 200});
    CHECK(call([&](auto& one, host const& on) { one.take_losses(on, 0, replayed.in()); }) == want);
    CHECK(call([&](auto& one, host const& on) {
        one.read_chunk(on, 0, 0, {queries.in(), same.keys, same.values});
    }) == want);
}

TEST_CASE("a chunk may be read anew from an earlier token on")
{
    text const x{1, 300};
    preset p          = presets::any_question;
    p.replayed->chunk = 64;
    text const other{1, 128};
    auto caches = room_for(x);
    support::run([&](host const& on) {
        prompt<host, half> one{on, p, x.shape()};
        one.read_chunk(on, 0, 0, other.part(0, 0, 128)); // another text, which is taken back
        feed(one, on, x, p, budget::fraction(1, 4), caches);
    });
    CHECK(contents_of(caches) == by_prompt(x, p, budget::fraction(1, 4)));
}

TEST_CASE("prompts on one workspace may end in any order, and none touches the state of another")
{
    text const x{2, 150};
    preset const& p     = presets::best;
    auto const limit    = budget::fraction(1, 4);
    auto const expected = by_prompt(x, p, limit);
    workspace scratch{support::nan_memory{}};
    host const on{&scratch};
    auto caches = room_for(x);
    auto first  = std::make_unique<prompt<host, half>>(on, p, x.shape());
    auto second = std::make_unique<prompt<host, half>>(on, p, x.shape());
    feed(*first, on, x, p, limit, caches);
    for (index_t l = 0; l < x.layers; ++l)
    {
        second->read_chunk(on, l, 0, x.part(l, 0, feeding{}.part));
        second->read_chunk(on, l, feeding{}.part, x.part(l, feeding{}.part, x.tokens - feeding{}.part));
    }
    first.reset();
    prompt<host, half> third{on, p, x.shape()};
    auto others = room_for(x);
    feed(third, on, x, p, limit, others);
    for (index_t l = 0; l < x.layers; ++l) { second->finish_layer(on, l, x.whole(l)); }
    second->allocate(on, limit);
    for (index_t l = 0; l < x.layers; ++l) { second->pack(on, l, x.whole(l), caches[static_cast<std::size_t>(l)]); }
    CHECK(contents_of(caches) == expected);
    CHECK(contents_of(others) == expected);
    second.reset();
}

TEST_CASE("bad arguments of a prompt are named with their value and limit, and calls in a wrong order, before anything "
          "changes")
{
    text const x{2, 100};
    preset const& p = presets::best;
    auto caches     = room_for(x);
    workspace scratch{support::nan_memory{}};
    host const on{&scratch};
    auto const of_preset = [&](auto const& change) {
        preset own = p;
        change(own);
        return error_text<invalid_argument>([&] { prompt<host, half>{on, own, x.shape()}; });
    };
    CHECK(of_preset([](preset& o) { o.window = -1; }) == "prompt: preset.window is -1; it must not be negative");
    CHECK(of_preset([](preset& o) { o.queries = 0; }) == "prompt: preset.queries is 0; it must be at least 1");
    CHECK(of_preset([](preset& o) { o.replayed->chunk = 0; })
          == "prompt: preset.replayed.chunk is 0; it must be at least 1");
    CHECK(of_preset([](preset& o) { o.replayed->sinks = -2; })
          == "prompt: preset.replayed.sinks is -2; it must not be negative");
    CHECK(of_preset([](preset& o) { o.stand_ins = -1; }) == "prompt: preset.stand_ins is -1; it must not be negative");
    CHECK(of_preset([](preset& o) { o.refitted = refit_part{.blocks = 0}; })
          == "prompt: preset.refitted.blocks is 0; it must be at least 1");
    CHECK(of_preset([](preset& o) { o.replayed->join = -1; }).find("prompt: preset.replayed.join is -1") == 0);
    CHECK(of_preset([](preset& o) { o.scale = std::numeric_limits<float>::quiet_NaN(); }).find("prompt: preset.scale")
          == 0);
    CHECK(
        of_preset([](preset& o) { o.ratios = paper_ratios; }).find("prompt: preset.ratios has a projected rung") == 0);
    auto const of_shape = [&](auto const& change) {
        auto own = x.shape();
        change(own);
        return error_text<invalid_argument>([&] { prompt<host, half>{on, p, own}; });
    };
    CHECK(of_shape([](auto& s) { s.layers = 0; }) == "prompt: layers is 0; it must be from 1 to 256");
    CHECK(of_shape([](auto& s) { s.layers = 257; }) == "prompt: layers is 257; it must be from 1 to 256");
    CHECK(of_shape([](auto& s) { s.heads = -1; }) == "prompt: heads is -1; it must not be negative");
    CHECK(of_shape([](auto& s) { s.group = 0; }) == "prompt: group is 0; it must be at least 1");
    CHECK(of_shape([](auto& s) { s.tokens = -1; }).find("-1; it must not be negative") != std::string::npos);
    CHECK(of_shape([](auto& s) { s.dims = {}; }) == "rung_costs: head dimensions are 0 and 0; they must be at least 1");
    CHECK(of_shape([](auto& s) { s.encoding.rotating = 31; })
          == "prompt: encoding.rotating is 31, which makes 31 of 32 coordinates; that must be an even number, at most "
             "all of them");
    CHECK(
        of_shape([](auto& s) { s.encoding.base = 0; }) == "prompt: encoding.base is 0; it must be positive and finite");

    prompt<host, half> one{on, p, x.shape()};
    auto const text_of = [](auto const& call) { return error_text<invalid_argument>(call); };
    CHECK(text_of([&] { one.read_chunk(on, 2, 0, x.part(0, 0, 50)); })
          == "prompt::read_chunk: layer is 2; it must be from 0 to 1");
    CHECK(text_of([&] { one.read_chunk(on, 0, 10, x.part(0, 10, 50)); })
          == "prompt::read_chunk: first is 10; of layer 0 only 0 tokens were read");
    CHECK(text_of([&] { one.read_chunk(on, 0, 51, x.part(0, 0, 50)); })
          == "prompt::read_chunk: tokens 51 to 101 leave the prompt of at most 100");
    CHECK(text_of([&] { one.read_chunk(on, 0, 0, x.whole(0)); })
          == "prompt::read_chunk: queries [H*G, Q, D] has Q = 70; the chunk has 100 tokens");
    auto other_order = x.part(0, 0, 50); // [N, H, D] as if it were [H, N, D]
    other_order.keys = in(on, x.all[0].keys.in().data_handle(), {50, 2, 32}, {32, 3200, 1});
    CHECK(text_of([&] { one.read_chunk(on, 0, 0, other_order); })
          == "prompt::read_chunk: keys must be [H,N,D] = [2, 2, 32], its extent 0 is 50");
    auto narrow_keys = x.part(0, 0, 50);
    narrow_keys.keys = slice<0>(narrow_keys.keys, 0, 1);
    CHECK(
        text_of([&] { one.read_chunk(on, 0, 0, narrow_keys); }).find("prompt::read_chunk: keys must be [H,N,D]") == 0);
    CHECK(text_of([&] { one.finish_layer(on, 1, x.whole(1)); })
          == "prompt::finish_layer: of layer 1 only 0 tokens were read, not all 92 before the window (read_chunk)");
    tensor<float, 3> too_many{{2, 4, 93}};
    CHECK(text_of([&] { one.take_losses(on, 0, too_many.in()); })
          == "prompt::take_losses: losses are of 93 tokens, above 92");
    CHECK(text_of([&] { one.allocate(on, budget::fraction(1, 4)); }) == "prompt::allocate: layer 0 is not finished");
    CHECK(text_of([&] { one.pack(on, 0, x.whole(0), caches[0]); })
          == "prompt::pack: no rungs were chosen; call allocate first");
    for (index_t l = 0; l < 2; ++l) { one.read_chunk(on, l, 0, x.part(l, 0, 100)); }
    auto spoilt = text{1, 100};
    spoilt.all[0].keys.set(narrow<half>(std::numeric_limits<float>::infinity()), 1, 7, 3);
    CHECK(error_text<non_finite_input>([&] { one.finish_layer(on, 0, spoilt.whole(0)); })
          == "keys: NaN or infinity in layer 0, head 1, row 7");
    one.finish_layer(on, 0, x.whole(0));
    CHECK(text_of([&] { one.finish_layer(on, 0, x.whole(0)); }) == "prompt::finish_layer: layer 0 is finished");
    CHECK(text_of([&] { one.read_chunk(on, 0, 0, x.part(0, 0, 50)); }) == "prompt::read_chunk: layer 0 is finished");
    text const shorter{1, 90};
    CHECK(text_of([&] { one.finish_layer(on, 1, shorter.whole(0)); })
          == "prompt::finish_layer: layer 1 has 90 tokens; the layers before have 100");
    one.finish_layer(on, 1, x.whole(1));
    CHECK(text_of([&] { one.allocate(on, budget::kv_size(3)); })
          == "prompt::allocate: a budget of 960 bytes a layer cannot hold the window of 8 tokens; at least 1856 bytes "
             "are needed");
    one.allocate(on, budget::fraction(1, 3));
    auto without = x.whole(0);
    without.lse  = std::nullopt;
    CHECK(
        text_of([&] { one.pack(on, 0, without, caches[0]); })
        == "prompt::pack: lse is missing; preset \"best\" makes up to 13 stand-ins, which need it (stand_ins = 0 makes "
           "none)");
    CHECK(text_of([&] { one.pack(on, 0, shorter.whole(0), caches[0]); }).find("prompt::pack: keys must be") == 0);
    cache_view<half, space::host> nowhere;
    CHECK(text_of([&] { one.pack(on, 0, x.whole(0), nowhere); })
          == "prompt::pack: to.layout is not that of the preset and the layers");
    CHECK(caches[0].arena_bytes() == 0);
    for (index_t l = 0; l < 2; ++l) { one.pack(on, l, x.whole(l), caches[static_cast<std::size_t>(l)]); }
    CHECK(contents_of(caches) == by_prompt(x, p, budget::fraction(1, 3)));
}

TEST_CASE("losses that are not finite are refused if nobody looked for NaNs before")
{
    text x{1, 100};
    x.all[0].values.set(narrow<half>(std::numeric_limits<float>::quiet_NaN()), 0, 7, 3);
    auto shape          = x.shape();
    shape.on_non_finite = non_finite::unchecked;
    auto caches         = room_for(x);
    CHECK(error_text<non_finite_input>([&] {
        support::run([&](host const& on) {
            prompt<host, half> one{on, presets::best, shape};
            feed(one, on, x, presets::best, budget::fraction(1, 4), caches);
        });
    }).find("prompt::allocate: a loss is NaN or infinite")
          == 0);
}
