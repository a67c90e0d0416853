/// \file reading.hpp: a reader's state: the losses that stay beside stored tokens, and the stages' calls on all layers (arXiv 2603.20616, sections 4, 5).
#pragma once

#include <mdkv/reader.hpp>

#include <mdkv/append.hpp>
#include <mdkv/attend.hpp>
#include <mdkv/core/allocation.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/cache_owner.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/panel.hpp>
#include <mdkv/detail/read_tokens.hpp>
#include <mdkv/detail/stored_slots.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/pipeline/measure.hpp>
#include <mdkv/pipeline/slot_losses.hpp>
#include <mdkv/pipeline/steps.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/prompt.hpp>
#include <mdkv/recompress.hpp>
#include <mdkv/replay/balance.hpp>
#include <mdkv/replay/leverage.hpp>
#include <mdkv/stages/pool.hpp>

#include <algorithm>
#include <cmath>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

namespace MDKV_NAMESPACE::detail
{

/// The state of a reader and the stages' calls on it.
template <backend B, class Cache, element U>
struct reader_work
{
    static constexpr space S = B::memory_space;

    using T             = typename decltype(std::declval<Cache&>().view())::element_type;
    using rows_of_layer = prompt_rows<B, T, U>;
    using bytes         = owned_bytes<std::remove_cvref_t<decltype(std::declval<Cache const&>().memory())>>;

    preset settings;
    prompt_shape<B> shape;
    reader_options options;
    std::span<Cache> caches;
    rung_costs costs{settings.ratios, shape.dims, index_t{sizeof(T)}};
    index_t limit_bytes = 0; ///< limit of an average layer
    prompt_choice choice{};  ///< how window and stand-ins are stored: in codes at the prompt's end alone
    index_t L      = shape.layers;
    index_t H      = shape.heads;
    index_t R      = static_cast<index_t>(settings.ratios.size());
    refit_part fit = settings.refitted.value_or(refit_part{}).of_chunks(options.chunk);

    prompt_progress progress{}; ///< tokens of the chunk, by layer
    index_t read    = 0;        ///< tokens before the chunk
    index_t pending = 0;     ///< tokens of a chunk that some layers have stored already, after an error in another one
    prompt_progress asked{}; ///< rows of `recent`, by layer; the last ones are the chunk's
    bool finished = false;
    bool lowered  = false;     ///< tokens have lost bytes
    std::vector<bytes> kept{}; ///< [L]  losses of stored tokens, see slot_losses

    out_view<T, 4, B> sinks{};          ///< [L, H, replay_part::sinks, D]
    out_view<U, 4, B> recent{};         ///< [L, H*G, Q, D]  the last queries so far
    out_view<float, 4, B> recent_lse{}; ///< [L, 2, H*G, Q]  of these: over all keys, and over those elsewhere
    out_view<float, 1, B> no_keys{};    ///< [1]  minus infinity
    out_view<float, 4, B> losses{};     ///< [L, H, R, chunk]  of the chunk's tokens, pooled
    out_view<double, 4, B> grams{};     ///< [L, H, D, D]  of all keys before the chunk; L = 0 unless leverages weigh
    out_view<double, 1, B> factors{};   ///< [chunk]  of the chunk's tokens, if leverages weigh
    out_view<double, 1, B> totals{};    ///< [L]  losses at rung 0 of all tokens before the chunk
    out_view<U, 4, B> blocks{}; ///< [L, H*G, kept() * each, D]  the chunk's queries to refit by; none unless it refits

    [[nodiscard]] layer_shape layer(index_t tokens) const
    {
        index_t const window = (std::min)(settings.window, tokens);
        return {H, shape.group, tokens - window, window, shape.dims, index_t{sizeof(T)}};
    }
    /// The next layout of layer l: stand-ins that are in codes already stay so.
    [[nodiscard]] cache_layout layout(index_t l, index_t window) const
    {
        cache_layout form{settings.ratios, H, window, shape.dims, settings.scale};
        form.stand_in_run =
            choice.coded_stand_ins ? settings.ratios.cheapest_rotated() : cache(l).layout().stand_in_run;
        return form;
    }
    [[nodiscard]] Cache& cache(index_t l) const { return caches[static_cast<std::size_t>(l)]; }
    [[nodiscard]] slot_losses<T, S> kept_of(index_t l) const
    {
        return {cache(l).view(), reinterpret_cast<bfloat16*>(kept[static_cast<std::size_t>(l)].data())};
    }
    [[nodiscard]] bool weighs() const { return settings.leverage_power() > 0; }

    void take_state(B const& on, workspace::frame& memory)
    {
        expects_prompt_preset(settings);
        expects(settings.replayed.has_value(), "reader: preset \"", settings.name,
            "\" does not replay; its losses are not known before the last queries");
        expects(settings.ratios.can_drop(), "reader: the ratio set has no rung that drops a token");
        expects(L >= 1 && L <= prompt_progress::most_layers, "reader: layers is ", L, "; it must be from 1 to ",
            prompt_progress::most_layers);
        expects(static_cast<index_t>(caches.size()) == L, "reader: there are ", static_cast<index_t>(caches.size()),
            " caches for ", L, " layers");
        expects(options.chunk >= 1, "reader: reader_options::chunk is ", options.chunk, "; it must be at least 1");
        expects_not_negative("reader", "reader_options::slack", options.slack);
        layer_shape const one = layer(shape.tokens);
        one.expects_valid("reader");
        turned_coordinates("reader", shape.encoding, shape.dims.keys);
        limit_bytes         = options.limit.in_bytes(one);
        index_t const least = one.window_bytes();
        expects(limit_bytes >= least, "reader: a limit of ", limit_bytes, " bytes a layer cannot hold the window of ",
            one.window, " tokens; at least ", least, " bytes are needed");
        auto const [D, Dv]    = shape.dims;
        index_t const queries = (std::min)(settings.queries, shape.tokens); // for channels and stand-ins, too
        sinks                 = scratch_view<T>(on, memory, L, H, settings.replayed->sinks, D);
        recent                = scratch_view<U>(on, memory, L, H * shape.group, queries, D);
        recent_lse            = scratch_view<float>(on, memory, L, 2, H * shape.group, queries);
        no_keys               = scratch_view<float>(on, memory, 1);
        losses                = scratch_view<float>(on, memory, L, H, R, options.chunk);
        grams                 = scratch_view<double>(on, memory, weighs() ? L : 0, H, D, D);
        factors               = scratch_view<double>(on, memory, weighs() ? options.chunk : 0);
        totals                = scratch_view<double>(on, memory, L);
        index_t const fitting = settings.refitted ? fit.kept() * fit.each(shape.group) : 0;
        blocks                = scratch_view<U>(on, memory, L, H * shape.group, fitting, D);
        run(on, fill<double>{grams.data_handle(), 0, grams.extent(0) * H * D * D});
        run(on, fill<double>{totals.data_handle(), 0, L});
        run(on, fill<float>{no_keys.data_handle(), empty_lse, 1});
        kept.resize(static_cast<std::size_t>(L));
        cache_layout const empty{settings.ratios, H, 0, shape.dims, settings.scale};
        for (index_t l = 0; l < L; ++l) { cache(l) = cache(l).like(empty, 0, options.chunk); }
    }

    /// A part of a chunk in one layer, whose tokens are number `before` of the chunk and the next ones.
    void attend_chunk(B const& on, index_t l, index_t before, rows_of_layer const& rows, out_view<U, 3, B> output,
        out_view<float, 2, B> lse)
    {
        index_t const n            = rows.keys.extent(1);
        index_t const most         = recent.extent(2);
        index_t const kept_queries = (std::min)(asked.of(l), most - (std::min)(n, most)); // rows that stay
        bool const pools = !settings.last_queries_score() && !settings.pooling.copies();  // like prompt::finish_layer
        workspace::frame frame{on.scratch};
        auto const raw       = scratch_view<float>(on, frame, pools ? H : 0, R, n);
        auto const moved_lse = scratch_view<float>(on, frame, H * shape.group, kept_queries, 1);
        auto const moved     = scratch_view<U>(on, frame, H * shape.group, kept_queries, shape.dims.keys);
        expects_finite_rows(on, shape, l, rows);
        if (settings.refitted) { keep_blocks(on, fit, shape.group, rows.queries, before, item_of(blocks, l)); }
        keep_sinks(on, rows, read + before, item_of(sinks, l));
        auto const found = slice<2>(item_of(losses, l), before, n);
        replay_chunks(on, settings, shape.encoding, rows, read + before, n, as_input(item_of(sinks, l)),
            raw.empty() ? found : raw);
        if (!raw.empty()) { mdkv::pool(on, as_input(raw), settings.pooling, found); }
        auto const view = cache(l).view();
        truncate_tail(on, before, view); // tokens of a call for which memory ran out below
        append(on, rows.keys, rows.values, view);
        mdkv::attend(
            on, rows.queries, view, {.scale = settings.scale, .lse_elsewhere = rows.lse_elsewhere}, output, lse);
        in_view<float, 2, B> const none{no_keys.data_handle(), {lse.extent(0), 1}, {0, 1}};
        keep_last(on, asked.of(l), n, as_input(lse), moved_lse, item_of(item_of(recent_lse, l), 0));
        keep_last(on, asked.of(l), n, rows.lse_elsewhere.value_or(none), moved_lse, item_of(item_of(recent_lse, l), 1));
        keep_last<U>(on, asked.of(l), rows.queries, moved, item_of(recent, l));
        asked.of(l) = (std::min)(asked.of(l) + n, most);
    }

    /// Adds the keys of the chunk's n tokens, which lie in the tail, to Gram matrices of a layer.
    /// \param gram  [H, D, D]
    /// \param keys  [H, n, D]  receives them
    void add_chunk(B const& on, index_t l, out_view<double, 3, B> gram, out_view<T, 3, B> keys) const
    {
        workspace::frame frame{on.scratch};
        auto const values = scratch_view<T>(on, frame, H, keys.extent(1), shape.dims.values);
        read_tail(on, cache(l).view(), keys, values);
        accumulate_gram(on, as_input(keys), gram);
    }

    /// Finds the factors of the chunk's n tokens by their leverages among all keys.
    void weigh_leverages(B const& on, index_t n) const
    {
        index_t const D = shape.dims.keys;
        workspace::frame frame{on.scratch};
        auto const keys     = scratch_view<T>(on, frame, H, n, D);
        auto const gram     = scratch_view<double>(on, frame, H, D, D);
        auto const whitener = scratch_view<float>(on, frame, H, D, D);
        row_totals<B> const mass{
            frame, {nullptr, 1, L * H}, {nullptr, {1, L * H, 1}, {0, 0, 1}}}; // filled by another job
        auto const leverages = scratch_view<leverage_sum>(on, frame, n);
        run(on, fill<leverage_sum>{leverages.data_handle(), 0, n});
        for (index_t l = 0; l < L; ++l)
        {
            run(on, copy_rows<B, double>{as_input(item_of(grams, l)), gram});
            add_chunk(on, l, gram, keys);
            run(on, whiten<B>{.gram = gram, .whitener = whitener, .mass = mass.pieces.sums + l * H}, H);
            add_leverages(on, as_input(keys), as_input(whitener), leverages);
        }
        run(on, add_totals<B>{mass.pieces, mass.totals, nullptr});
        run(on,
            weigh_surroundings<B>{as_input(leverages), mass.totals, read + n,
                double{leverage_power_for(settings.leverage_power(), read + n)},
                largest_factor(static_cast<double>(L * H) * static_cast<double>(shape.tokens), settings.shared->depth),
                factors.data_handle()});
    }

    /// One call of end_chunk or finish.
    reader_report bring_within(B const& on, char const* stage, bool last)
    {
        float_environment const standard;
        index_t const n       = pending > 0 ? pending : progress.of(0);
        index_t const all     = read + n;
        layer_shape const one = layer(all);
        spending const by{settings, costs, one};
        reader_report report{.tokens = all, .limit_bytes = checked_multiply(limit_bytes, L), .chosen = {}};
        double const extra = last ? 0.0 : double{options.slack} * static_cast<double>(report.limit_bytes);
        report.limit_bytes += // cut below 64 bits
            (std::min)(static_cast<index_t>((std::min)(extra, 0x1p62)), INT64_MAX - report.limit_bytes);
        for (index_t l = 0; l < L && all == 0 && last; ++l) { cache(l) = cache(l).like(layout(l, 0), 0, 0); }
        if (all == 0 || (n == 0 && !last)) { return measured(report); }
        bool const chooses = !fits(report.limit_bytes);
        choice             = chooses && last ? by.plan(stage, limit_bytes) : prompt_choice{.budget = limit_bytes};
        index_t const W    = choice.coded_window ? 0 : one.window; // tokens of a window in codes are like others
        bool const counts  = n > 0 && pending == 0;                // the chunk's tokens, into means
        workspace::frame frame{on.scratch};
        auto const first = scratch_view<index_t>(on, frame, L * H + 1);
        std::vector<index_t> ends{0}; // heads' tokens among those of all heads, windows left out
        std::vector<token_list<B>> lists;
        index_t most = 0;
        for (index_t l = 0; l < L; ++l)
        {
            host_directory<T> const directory{on, cache(l).view()};
            index_t const begin   = ends.back();
            index_t const longest = add_heads<T>({directory.view, layout(l, W)}, ends);
            lists.push_back({as_input(slice<0>(first, l * H, H + 1)), begin, ends.back(), longest});
            most = (std::max)(most, longest);
        }
        auto const rung     = scratch_view<std::uint8_t>(on, frame, ends.back());
        auto const list_of  = [&](index_t l) -> token_list<B> const& { return lists[static_cast<std::size_t>(l)]; };
        auto const chunk_of = [&](index_t l) {
            return chunk_losses<B>{
                as_input(slice<2>(item_of(losses, l), 0, n)), weighs() ? factors.data_handle() : nullptr};
        };
        copy(on, ends.data(), first.data_handle(), std::ssize(ends) * index_t{sizeof(index_t)});
        report.chosen.status = allocation_status::everything_kept;
        {
            workspace::frame choosing{on.scratch};
            auto const loss       = scratch_view<float>(on, choosing, R, chooses ? ends.back() : 0);
            index_t const counted = counts ? n : 0;
            row_totals<B> const sums{choosing, {nullptr, L, H},
                {losses.data_handle(), {L, H, counted}, {losses.stride(0), losses.stride(1), 1}}};
            sums.find(on, nullptr, totals.data_handle());
            if (weighs() && counts) { weigh_leverages(on, n); }
            for (index_t l = 0; l < L && chooses; ++l)
            {
                run(on,
                    spread_losses<T, B>{slots_of(l, W, list_of(l)), kept_of(l), chunk_of(l),
                        units_of(l, sums.totals + l, all, 1.0), list_of(l).of(loss), one.window - W,
                        static_cast<index_t>(settings.ratios.costliest_rotated())},
                    H);
                if (settings.last_queries_score()) { join_layer(on, l, W, all, list_of(l), loss); }
            }
            auto const choose = [&, this](bool codes) {
                by.plan_stand_ins(choice, codes);
                index_t const made  = H * choice.stand_ins * by.stand_in_bytes(choice.coded_stand_ins);
                index_t const spend = report.limit_bytes - L * ((W > 0 ? one.window_bytes() : 0) + made);
                auto const limits   = static_cast<std::size_t>(settings.shared ? 1 : L);
                report.chosen = allocate_within(on, stage, std::vector(limits, spend / static_cast<index_t>(limits)),
                    costs, {.charge = settings.charge}, {as_input(loss), rung, as_input(first), most});
                lowered       = true;
            };
            if (chooses) { choose(last); }
            if (choice.coded_stand_ins && !by.codes_are_cheap(report.chosen)) { choose(false); }
            workspace::frame more{on.scratch};
            auto const keys = scratch_view<T>(on, more, weighs() ? H : 0, counted, shape.dims.keys);
            on.scratch->hold_peak(); // weigh_leverages has made the calls of add_chunk before
            // Nothing throws from here on: the means count the chunk.
            auto const row = [&](double* x) { return view<double, 3, S>{x, {1, 1, L}, {0, 0, 1}}; };
            run(on, copy_rows<B, double>{row(sums.totals), row(totals.data_handle())});
            for (index_t l = 0; l < L && weighs() && counts; ++l) { add_chunk(on, l, item_of(grams, l), keys); }
            wait(on);
            pending = n;
        }
        for (index_t l = 0; l < L; ++l) { pack_layer(on, l, W, all, last, list_of(l), rung, !chooses, chunk_of(l)); }
        pending = 0;
        read    = all;
        if (last) { kept.clear(); }
        return measured(report);
    }

    [[nodiscard]] reader_report measured(reader_report report) const
    {
        for (Cache const& one : caches) { report.held_bytes += one.arena_bytes(); }
        for (bytes const& one : kept) { report.losses_bytes += one.size(); }
        return report;
    }

    /// Whether all tokens keep their rungs within the bytes of all layers, of which each has its part unless they share.
    [[nodiscard]] bool fits(index_t bytes_of_all) const
    {
        std::int64_t sum = 0;
        for (index_t l = 0; l < L; ++l)
        {
            index_t const own = cache(l).arena_bytes() + layer(0).bytes_of(progress.of(l));
            if (!settings.shared && own > bytes_of_all / L) { return false; }
            sum += own;
        }
        return sum <= bytes_of_all && settings.ratios.full_rung() < settings.ratios.size();
    }

    [[nodiscard]] stored_slots<T, S> slots_of(index_t l, index_t W, token_list<B> const& list) const
    {
        return {cache(l).view(), layout(l, W), list.longest, list.first};
    }

    /// The unit of layer l, whose losses at rung 0 add up to `total`.
    [[nodiscard]] layer_units units_of(index_t l, double const* total, index_t tokens, double weight) const
    {
        double const depth = settings.shared ? double{settings.shared->depth} : 0.0;
        return {total, static_cast<double>(H * tokens),
            weight * std::exp(depth * static_cast<double>(l) / static_cast<double>(L))};
    }

    /// A layer for its last queries, and for stand-ins if `makes`.
    [[nodiscard]] recompressing<B, T, U> layer_of(B const& on, index_t l, index_t W, index_t tokens,
        token_list<B> const& list, recompress_options<B> const& how, host_directory<T> const& directory,
        bool makes) const
    {
        layer_shape const one{H, shape.group, list.longest, W, shape.dims, index_t{sizeof(T)}};
        index_t const logged = (std::min)(asked.of(l), stand_in_queries);
        // A call that memory ended has stored this layer: its stand-ins stay.
        bool const stored_in_codes = directory.view.layout.stand_in_run < directory.view.layout.rungs;
        return {on, as_input(slice<1>(item_of(recent, l), 0, asked.of(l))), settings.ratios, how, one,
            stored_slots<T, space::host>{directory.view, layout(l, W), list.longest}, slots_of(l, W, list),
            makes && logged > 0 && !stored_in_codes ? choice.stand_ins : 0, directory.appended, tokens,
            as_input(slice<1>(item_of(item_of(recent_lse, l), 0), asked.of(l) - logged, logged)),
            as_input(slice<1>(item_of(blocks, l), 0, lowered ? blocks.extent(2) : 0)),
            {.rows = fit, .stand_ins = choice.stand_ins, .encoding = shape.encoding, .scale = settings.scale}};
    }

    /// Adds the losses of a layer's tokens by the last queries, in units of their mean.
    void join_layer(
        B const& on, index_t l, index_t W, index_t tokens, token_list<B> const& list, out_view<float, 2, B> loss) const
    {
        index_t const n     = list.end - list.begin;
        index_t const count = asked.of(l);
        if (n == 0 || count == 0) { return; }
        workspace::frame frame{on.scratch};
        auto const scored = scratch_view<float>(on, frame, R, n);
        row_totals<B> const total{frame, {nullptr, 1, 1}, {scored.data_handle(), {1, 1, n}, {0, 0, 1}}};
        host_directory<T> const directory{on, cache(l).view()};
        auto how          = fold_options<B>(settings, budget::bytes(0), count);
        how.lse_elsewhere = as_input(slice<1>(item_of(item_of(recent_lse, l), 1), 0, count));
        auto const stored = layer_of(on, l, W, tokens, list, how, directory, false);
        stored.read();
        stored.score_slots(scored);
        total.find(on);
        auto const rows = [&]<class V>(view<V, 2, S> const& x) {
            return view<V, 4, S>{x.data_handle(), {1, 1, R, n}, {0, 0, x.stride(0), 1}};
        };
        auto const joined = rows(list.of(loss));
        run(on, weigh_losses<B>{as_input(joined), {}, nullptr, as_input(rows(scored)),
                    units_of(l, total.totals, tokens, double{settings.replayed->join}), joined});
    }

    /// Packs a layer at its new rungs, moves its losses, and counts no token of the chunk.
    /// \param rung  of all layers' tokens: the chosen ones, or room for the present ones, which tokens keep if they `stay`
    void pack_layer(B const& on, index_t l, index_t W, index_t tokens, bool last, token_list<B> const& list,
        out_view<std::uint8_t, 1, B> rung, bool stay, chunk_losses<B> const& chunk)
    {
        host_directory<T> const directory{on, cache(l).view()};
        workspace::frame frame{on.scratch};
        auto const sources = scratch_view<std::int32_t>(on, frame, H, list.longest + W);
        recompress_options<B> const how{.sources = sources};
        Cache to = cache(l).like(layout(l, W), 0, 0);
        {
            auto stored = layer_of(on, l, W, tokens, list, how, directory, true);
            stored.read();
            stored.store(to, stored.settle(list.of(rung), stay).resident_bytes);
        }
        if (!last) { to.reserve_tail(options.chunk); }
        bytes moved = move_losses(on, kept_of(l), chunk, as_input(sources), to);
        wait(on);
        if constexpr (requires { to.fold_limit; })
        {
            to.fold_limit = (std::max)(to.arena_bytes(), settings.shared && lowered ? index_t{0} : limit_bytes);
        }
        cache(l)                          = std::move(to);
        kept[static_cast<std::size_t>(l)] = std::move(moved);
        progress.of(l)                    = 0;
    }
};

} // namespace MDKV_NAMESPACE::detail
