/// \file prompting.hpp: a prompt's work: the stages' calls on all layers, from the first chunk to chosen rungs (arXiv 2603.20616, sections 4, 5).
#pragma once

#include <mdkv/prompt.hpp>

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/ranks.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/pipeline/measure.hpp>
#include <mdkv/pipeline/steps.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/replay/balance.hpp>
#include <mdkv/replay/leverage.hpp>
#include <mdkv/replay/replay.hpp>
#include <mdkv/stages/basis.hpp>
#include <mdkv/stages/channels.hpp>
#include <mdkv/stages/pool.hpp>
#include <mdkv/stages/score.hpp>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

namespace MDKV_NAMESPACE::detail
{

/// A hash of what must be the same on every rank of a prompt of `tokens` tokens; on a GPU waits for the encoding's frequencies.
template <element T, element U, backend B>
[[nodiscard]] std::uint64_t hash_of_prompt(B const& on, preset const& p, prompt_shape<B> const& shape, index_t tokens)
{
    replay_part const r   = p.replayed.value_or(replay_part{});
    sharing_part const of = p.shared.value_or(sharing_part{});
    refit_part const fit  = p.refitted.value_or(refit_part{});
    std::uint64_t hash    = hash_of(tokens, shape.layers, shape.ranks->heads, shape.dims.keys, shape.dims.values,
           element_code<T>, element_code<U>, p.ratios.size(), p.pooling.width, p.pooling.kind, p.charge, p.window,
           p.queries, p.question, p.early_weight, p.uniform, p.stand_ins, p.stand_in_part, p.coded_stand_ins,
           p.window_part, p.scale, p.replayed.has_value(), r.norm, r.chunk, r.sinks, r.ahead, r.own, r.join, r.last,
           p.shared.has_value(), of.depth, of.leverage_power, p.refitted.has_value(), fit.blocks, fit.apart, fit.span,
           fit.rows, fit.ridge, fit.most);
    for (rung const& one : p.ratios) { hash = hash_of(hash, one.num, one.den, one.kind); }
    if (!p.replayed) { return hash; }
    rotary_encoding<B> const& rope = shape.encoding;
    hash                           = hash_of(hash, rope.base, rope.rotating, rope.pairs, rope.frequencies.has_value());
    std::vector<double> frequencies(rope.frequencies ? static_cast<std::size_t>(rope.frequencies->extent(0)) : 0);
    if (rope.frequencies)
    {
        fetch(on, rope.frequencies->data_handle(), frequencies.data(), rope.frequencies->extent(0));
    }
    for (double const x : frequencies) { hash = hash_of(hash, x); }
    return hash;
}

/// The state of a prompt and the stages' calls. M is the largest possible number of tokens before the window, N the prompt's
/// own. take_state and the choice of rungs change members; the other functions change elements of the views.
template <backend B, element T, element U>
struct prompt_work
{
    using rows_of_layer = prompt_rows<B, T, U>;

    preset settings;
    prompt_shape<B> shape;
    rung_costs costs;
    out_view<float, 4, B> losses{};           ///< [L, H, R, M]  first replayed, then pooled or joined, at last balanced
    out_view<float, 4, B> key_bases{};        ///< [L, H, D, D]; L = 0 without projected rungs
    out_view<float, 4, B> value_bases{};      ///< [L, H, Dv, Dv]; L = 0 without projected rungs
    out_view<float, 4, B> channels{};         ///< [L, H, 3, D]; L = 0 without rotated rungs
    out_view<T, 4, B> sinks{};                ///< [L, H, replay_part::sinks, D]; keys
    out_view<U, 4, B> block_queries{};        ///< [L, H*G, kept() * each, D]; L = 0 unless the preset refits
    out_view<leverage_sum, 1, B> leverages{}; ///< [tokens]; empty unless the preset weighs leverages
    out_view<std::uint8_t, 3, B> rungs{};     ///< [L, H, M + W]  the window's are used if it is coded
    out_view<index_t, 1, B> sizes{};          ///< [L]
    bool balanced = false;                    ///< whether the losses of all layers are
    prompt_progress progress{};
    prompt_choice choice{}; ///< its budget is -1 until rungs are chosen

    static constexpr char const* stage =
        "prompt::allocate"; ///< that of plan, choose_rungs, choose_by_quotas and settle

    [[nodiscard]] index_t rung_count() const noexcept { return static_cast<index_t>(settings.ratios.size()); }

    /// The shape of a layer of a prompt of `tokens` tokens.
    [[nodiscard]] layer_shape layer(index_t tokens) const
    {
        index_t const window = (std::min)(settings.window, tokens);
        return {shape.heads, shape.group, tokens - window, window, shape.dims, index_t{sizeof(T)}};
    }

    /// The same as rungs were chosen: tokens of a coded window have rungs.
    [[nodiscard]] layer_shape stored_layer(index_t tokens) const
    {
        layer_shape one = layer(tokens);
        if (choice.coded_window) { one.tokens += std::exchange(one.window, 0); }
        return one;
    }

    /// The layout of a prompt of `tokens` tokens, as rungs were chosen.
    [[nodiscard]] cache_layout layout(index_t tokens) const
    {
        cache_layout form{settings.ratios, shape.heads, stored_layer(tokens).window, shape.dims, settings.scale};
        if (choice.coded_stand_ins && choice.stand_ins > 0) { form.stand_in_run = settings.ratios.cheapest_rotated(); }
        return form;
    }

    /// Checks preset and shape; takes memory from the workspace.
    void take_state(B const& on, workspace::frame& memory)
    {
        expects_prompt_preset(settings);
        expects(shape.layers >= 1 && shape.layers <= prompt_progress::most_layers, "prompt: layers is ", shape.layers,
            "; it must be from 1 to ", prompt_progress::most_layers);
        layer(shape.tokens).expects_valid("prompt");
        if (settings.replayed) { turned_coordinates("prompt", shape.encoding, shape.dims.keys); }
        if (ranks const* const with = shape.ranks; with != nullptr)
        {
            expects(
                with->heads >= shape.heads && with->first_head >= 0 && with->first_head <= with->heads - shape.heads,
                "prompt: this rank's ", shape.heads, " heads from ", with->first_head, " on are not among the ",
                with->heads, " of all ranks");
        }
        auto const [L, H]   = std::pair{shape.layers, shape.heads};
        auto const [D, Dv]  = shape.dims;
        index_t const M     = layer(shape.tokens).tokens;
        index_t const bases = settings.ratios.any_projected() ? L : 0;
        losses              = scratch_view<float>(on, memory, L, H, rung_count(), M);
        key_bases           = scratch_view<float>(on, memory, bases, H, D, D);
        value_bases         = scratch_view<float>(on, memory, bases, H, Dv, Dv);
        channels            = scratch_view<float>(on, memory, settings.ratios.any_rotated() ? L : 0, H, index_t{3}, D);
        sinks               = scratch_view<T>(on, memory, L, H, settings.replayed ? settings.replayed->sinks : 0, D);
        auto const fit      = settings.refitted.value_or(refit_part{});
        block_queries       = scratch_view<U>(
            on, memory, settings.refitted ? L : 0, H * shape.group, fit.kept() * fit.each(shape.group), D);
        leverages = scratch_view<leverage_sum>(on, memory, settings.leverage_power() > 0 ? shape.tokens : 0);
        rungs     = scratch_view<std::uint8_t>(on, memory, L, H, settings.window_part > 0 ? shape.tokens : M);
        sizes     = scratch_view<index_t>(on, memory, L);
        run(on, fill<leverage_sum>{leverages.data_handle(), 0, leverages.extent(0)});
    }

    /// Losses of a layer's first n tokens, [H, R, n].
    [[nodiscard]] out_view<float, 3, B> losses_of(index_t l, index_t n) const
    {
        return slice<2>(item_of(losses, l), 0, n);
    }
    /// Rungs of a layer's first n tokens, [H, n].
    [[nodiscard]] out_view<std::uint8_t, 2, B> rungs_of(index_t l, index_t n) const
    {
        return slice<1>(item_of(rungs, l), 0, n);
    }
    /// Losses and rungs of the first n tokens of all layers.
    [[nodiscard]] list_losses<B::memory_space> lists(index_t n) const
    {
        index_t const heads = losses.extent(0) * losses.extent(1);
        return {in_view<float, 3, B>{
                    losses.data_handle(), {heads, losses.extent(2), n}, {losses.stride(1), losses.stride(2), 1}},
            out_view<std::uint8_t, 2, B>{rungs.data_handle(), {heads, n}, {rungs.stride(1), 1}}};
    }
    /// A layer's part of a state, or an empty view if the preset does not need that state.
    [[nodiscard]] static in_view<float, 3, B> layer_of(out_view<float, 4, B> const& all, index_t l)
    {
        return all.extent(0) > 0 ? as_input(item_of(all, l)) : in_view<float, 3, B>{};
    }

    void score_chunk(B const& on, index_t l, index_t first, rows_of_layer const& rows) const
    {
        index_t const count = rows.keys.extent(1);
        index_t const end   = (std::min)(first + count, losses.extent(3)) - first; // the window's tokens are left out
        keep_sinks(on, rows, first, item_of(sinks, l));
        if (settings.refitted)
        {
            keep_blocks(on, *settings.refitted, shape.group, rows.queries, first, item_of(block_queries, l));
        }
        if (end <= 0) { return; }
        replay_chunks(on, settings, shape.encoding, rows, first, end, as_input(item_of(sinks, l)),
            slice<2>(item_of(losses, l), first, end));
    }

    /// Finds the losses of a layer's N tokens by its last queries, by the replayed ones (already in `losses`), or by both.
    void find_losses(B const& on, index_t l, rows_of_layer const& rows, layer_shape const& one, agreement& agreed) const
    {
        preset const& p     = settings;
        auto const [H, N]   = std::pair{one.heads, one.tokens};
        auto const [D, Dv]  = one.dims;
        index_t const Q     = (std::min)(p.queries, rows.queries.extent(1));
        index_t const R     = rung_count();
        bool const scores   = p.last_queries_score();
        auto const keys     = slice<1>(rows.keys, 0, N);
        auto const values   = slice<1>(rows.values, 0, N);
        index_t const early = rows.queries.extent(1) - Q; // queries that do not score
        auto const queries  = slice<1>(rows.queries, early, Q);
        auto const found    = losses_of(l, N);
        bool const bases    = p.ratios.any_projected();
        workspace::frame frame{on.scratch};
        auto const energy = scratch_view<float>(on, frame, bases ? H : 0, (std::max)(D, Dv));
        auto const scored = scratch_view<float>(on, frame, scores ? H : 0, R, N);
        auto const pooled = scratch_view<float>(on, frame, H, R, N);
        if (bases)
        {
            fit_basis(on, keys, item_of(key_bases, l), slice<1>(energy, 0, D));
            fit_basis(on, values, item_of(value_bases, l), slice<1>(energy, 0, Dv));
        }
        if (p.ratios.any_rotated()) { fit_channels(on, queries, keys, item_of(channels, l)); }
        // Memory may run out before: the state is added to last.
        auto const keep = [&, this](in_view<float, 3, B> const& made) {
            if (p.leverage_power() > 0) { add_leverage(on, rows.keys, slice<0>(leverages, 0, N + one.window)); }
            run(on, copy_rows<B, float>{made, found});
        };
        if (!scores)
        {
            mdkv::pool(on, as_input(found), p.pooling, pooled);
            return keep(as_input(pooled));
        }
        score_options<B> options{.scale = p.scale,
            .lse                        = of_queries(rows.lse, early, Q),
            .lse_elsewhere              = of_queries(rows.lse_elsewhere, early, Q),
            .early_weight               = p.early_weight,
            .question                   = p.question,
            .norm                       = p.replayed ? p.replayed->last : row_norm::sum,
            .uniform_queries            = p.uniform_queries(Q)};
        if (p.ratios.any_rotated()) { options.channels = as_input(item_of(channels, l)); }
        score(on, queries, keys, values, slice<1>(rows.keys, N, one.window), layer_of(key_bases, l),
            layer_of(value_bases, l), p.ratios, options, scored);
        mdkv::pool(on, as_input(scored), p.pooling, pooled);
        if (!p.replayed) { return keep(as_input(pooled)); }
        agree(on, "prompt::finish_layer", agreed, N + one.window, l);
        join(on, as_input(found), as_input(pooled), p.replayed->join, scored, shape.ranks);
        keep(as_input(scored));
    }

    /// How a budget of a prompt of `tokens` tokens is spent.
    [[nodiscard]] spending spending_on(index_t tokens) const
    {
        layer_shape one = layer(tokens);
        one.heads       = share(1).all;
        return {settings, costs, one};
    }

    /// This rank's heads of some layers.
    [[nodiscard]] head_share share(index_t layers) const { return {shape.ranks, layers, shape.heads}; }

    /// Agrees on the call with all ranks.
    /// \param number  that of the layer, or the complement of the limit
    void agree(B const& on, char const* call, agreement& agreed, index_t tokens, index_t number) const
    {
        if (!agreed.open()) { return; }
        agreed.settle(call, share(1), hash_of(number, hash_of_prompt<T, U>(on, settings, shape, tokens)));
    }

    /// Whether losses of a layer are joined, over all ranks.
    [[nodiscard]] bool joins() const { return settings.replayed && settings.last_queries_score(); }

    allocation choose_rungs(B const& on, spending const& by, prompt_choice& next, agreement& agreed)
    {
        layer_shape const& one = by.layer;
        index_t const L        = shape.layers;
        index_t const N        = one.tokens;
        index_t spend          = next.budget - by.window_bytes(next);
        agree(on, stage, agreed, N + one.window, ~next.budget);
        choice = {};
        if (next.all_full) { return keep_everything(on, L * one.heads, N, L * spend); }
        if (settings.shared && !balanced)
        {
            auto const weighed = slice<0>(leverages, 0, settings.leverage_power() > 0 ? N : 0);
            sum_over_ranks(on, shape.ranks, weighed.data_handle(), weighed.extent(0));
            mdkv::balance(on, slice<3>(losses, 0, N), settings.template balance<B>(as_input(weighed), shape.ranks));
            balanced = true;
        }
        if (next.coded_window) { fill_rungs(on, settings.ratios.costliest_rotated()); } // the window's stay
        auto const limits = static_cast<std::size_t>(settings.shared ? 1 : L);
        auto const choose = [&, this](index_t each) {
            return allocate_within(on, stage, std::vector(limits, L / static_cast<index_t>(limits) * each), costs,
                {.charge = settings.charge, .ranks = shape.ranks, .layers = L}, lists(N));
        };
        allocation total = choose(spend);
        if ((next.coded_window || next.coded_stand_ins) && !by.codes_are_cheap(total))
        {
            bool const anew   = next.coded_window && next.budget >= one.window_bytes();
            next.coded_window = next.coded_window && !anew;
            by.plan_stand_ins(next, false);
            spend = next.budget - by.window_bytes(next);
            if (anew) { total = choose(spend); }
        }
        index_t const aside = one.heads * next.stand_ins * by.stand_in_bytes(next.coded_stand_ins);
        if (aside > 0 && total.tokens[0] > 0) { total = choose(spend - aside); }
        if (next.coded_window) // its tokens have rungs like others
        {
            index_t const of_windows = L * by.window_bytes(next);
            total.tokens[settings.ratios.costliest_rotated()] += L * one.heads * one.window;
            total.token_bytes += of_windows;
            total.limit += of_windows;
        }
        return total;
    }

    void fill_rungs(B const& on, std::size_t rung) const
    {
        run(on, fill<std::uint8_t>{rungs.data_handle(), static_cast<std::uint8_t>(rung),
                    rungs.extent(0) * rungs.extent(1) * rungs.extent(2)});
    }

    /// Gives all tokens the full rung.
    /// \param heads  number of heads, of all ranks and layers, that share a limit of so many bytes
    [[nodiscard]] allocation keep_everything(B const& on, index_t heads, index_t tokens, index_t bytes) const
    {
        auto const best = settings.ratios.size() - 1;
        fill_rungs(on, best);
        allocation total;
        total.status       = allocation_status::everything_kept;
        total.limit        = bytes;
        total.tokens[best] = heads * tokens;
        total.token_bytes  = total.tokens[best] * costs.bytes[best];
        return total;
    }

    /// Chooses rungs for each head within its own limit.
    [[nodiscard]] allocation choose_by_quotas(
        B const& on, spending const& by, in_view<index_t, 2, B> const& quotas, prompt_choice& next)
    {
        choice            = {};
        auto const [L, H] = std::pair{shape.layers, shape.heads};
        std::vector<index_t> limits(static_cast<std::size_t>(L * H));
        {
            workspace::frame frame{on.scratch};
            auto const bytes = scratch_view<index_t>(on, frame, 1, L, H);
            run(on, copy_rows<B, index_t>{{quotas.data_handle(), {1, L, H}, {0, quotas.stride(0), 1}}, bytes});
            fetch(on, bytes.data_handle(), limits.data(), L * H);
        }
        index_t const N     = by.layer.tokens;
        index_t const whole = N * costs.bytes[costs.size() - 1];
        next.all_full       = settings.ratios[costs.size() - 1].full()
                        && std::all_of(limits.begin(), limits.end(), [&](index_t quota) { return quota >= whole; });
        index_t sum = 0;
        for (index_t const quota : limits) { sum += quota; }
        if (next.all_full) { return keep_everything(on, L * H, N, sum); }
        return allocate_within(on, stage, limits, costs, {.charge = settings.charge}, lists(N));
    }

    /// Ends a choice of rungs: refuses a bad one, and finds the bytes of all arenas.
    void settle(B const& on, spending const& by, prompt_choice next, allocation const& total)
    {
        layer_shape const& one = by.layer;
        bool const quotas      = next.budget < 0;
        next.multiplier        = total.multiplier;
        if (quotas) { next.budget = one.window_bytes() + total.limit / shape.layers; }
        bool const fits = total.status != allocation_status::over_limit;
        expects(fits || !quotas, stage,
            ": a quota cannot hold the tokens of its head at their cheapest rung; at least ",
            costs.least(1, one.tokens), " bytes are needed");
        expects(fits, stage, ": a budget of ", next.budget,
            " bytes a layer cannot hold every token at its cheapest rung; at least ",
            by.window_bytes(next) + costs.least(one.heads, one.tokens), " bytes are needed");
        if (total.tokens[0] == 0) { next.stand_ins = 0; }
        choice               = next; // its layout is the caches'
        index_t const tokens = one.tokens + one.window;
        run(on,
            size_arenas<T, B>{as_input(slice<2>(rungs, 0, stored_layer(tokens).tokens)), layout(tokens),
                choice.stand_ins, sizes.data_handle()},
            shape.layers);
        fetch(on, sizes.data_handle(), choice.arena_bytes.data(), shape.layers);
    }
};

} // namespace MDKV_NAMESPACE::detail
