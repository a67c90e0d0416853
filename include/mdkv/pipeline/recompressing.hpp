/// \file recompressing.hpp: one call of recompress: the cache read back as vectors, new rungs chosen, the tokens packed anew.
#pragma once

#include <mdkv/recompress.hpp>

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/packing.hpp>
#include <mdkv/detail/read_tokens.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/sort_slots.hpp>
#include <mdkv/detail/stored_slots.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/engine/finite.hpp>
#include <mdkv/engine/unpack.hpp>
#include <mdkv/pipeline/steps.hpp>
#include <mdkv/replay/refit.hpp>
#include <mdkv/replay/stand_in.hpp>
#include <mdkv/stages/pool.hpp>
#include <mdkv/stages/score.hpp>

#include <algorithm>
#include <utility>
#include <vector>

namespace MDKV_NAMESPACE::detail
{

/// Waits however a call ends: enqueued work still uses memory that the call gives back.
template <backend B>
struct wait_at_end
{
    B const& on;

    ~wait_at_end()
    {
        call_without_errors([&] { wait(on); }); // a device that has failed works on no memory any more
    }
};

/// Gathers the rows that new stand-ins are to take the place of: a head's tokens that are dropped now, then its present stand-ins.
/// An item is a row of a head.
template <element T, space S>
struct gather_dropped
{
    static constexpr char const* name = "recompress_gather_dropped";
    static constexpr int threads      = 64;

    stored_slots<T, S> by_slot;
    view<T const, 3, S> from_keys, from_values; // [H, M, D], [H, M, Dv]
    view<std::int32_t const, 2, S> listed;      // [H, M]  slots by new rung
    view<index_t const, 2, S> first;            // [H, R+1]
    view<T, 3, S> keys, values;                 // [H, most dropped tokens + most stand-ins, D], [.., Dv]
    view<std::uint8_t, 2, S> marks;             // [H, rows]  0 for rows of a head, 1 behind them
    index_t most;                               // stand-ins
    index_t* dropped;                           // [H]  tokens
    index_t* old_seeds;                         // [H]  clusters of the new stand-ins that form around present ones
    index_t read;                               // tokens for which the slots and the present stand-ins stand
    head_entry* entries;                        // [H]  receive the number of new stand-ins

    [[nodiscard]] index_t items() const { return marks.extent(0) * marks.extent(1); }

    MDKV_HD void operator()(team auto const& t, index_t item) const
    {
        index_t const h      = item / marks.extent(1);
        index_t const i      = item % marks.extent(1);
        index_t const j      = i - (marks.extent(1) - most); // number of a stand-in
        stored_run const run = run_of_head(by_slot.cache, h, by_slot.cache.layout.rungs);
        index_t const old    = by_slot.cache.heads[h].stand_ins;
        index_t const gone   = first(h, 1);
        bool const token     = j < 0 && i < gone;
        bool const stands_in = j >= 0 && j < old;
        auto const copy = [&](view<T const, 3, S> const& tokens, run_rows const& stand_ins, view<T, 3, S> const& to) {
            for (index_t d = t.rank(); d < to.extent(2); d += t.size()) // empty rows are multiplied, too
            {
                to(h, i, d) = token       ? tokens(h, listed(h, i), d)
                              : stands_in ? load_at<T>(
                                    stand_ins.begin + stand_ins.coordinate(run.tokens - old + j, static_cast<int>(d)))
                                          : narrow<T>(0.0F);
            }
        };
        copy(from_keys, run.keys, keys);
        copy(from_values, run.values, values);
        if (t.rank() > 0) { return; }
        marks(h, i) = token || stands_in ? 0 : 1;
        if (i > 0) { return; }
        index_t const clusters = old + gone < most ? old + gone : most;
        index_t const before   = read - tokens_of_head(by_slot.cache, h); // tokens that were dropped before
        index_t const share  = before + gone > 0 ? (2 * clusters * before + before + gone) / (2 * (before + gone)) : 0;
        index_t const least  = clusters - gone > 0 ? clusters - gone : 0;
        dropped[h]           = gone;
        old_seeds[h]         = share < least ? least : share < old ? share : old;
        entries[h].stand_ins = clusters;
    }
};

/// A layer of a cache that is stored anew: its tokens are read back as vectors, judged by the last queries, packed at new rungs.
template <backend B, element T, element U>
struct recompressing
{
    static constexpr space S = B::memory_space;

    B const& on;
    in_view<U, 3, B> queries;
    ratio_set const& ratios;
    recompress_options<B> const& options;
    layer_shape shape;
    stored_slots<T, space::host> by_slot; // slots by the host's copy of the directory
    stored_slots<T, S> cache_slots;       // slots by the cache's own directory
    index_t most_made = 0;      // most new stand-ins, of present ones and dropped tokens; 0: the present ones stay
    index_t latest = INT64_MAX; // number of the queries that belong to the cache's last tokens; earlier queries see all
    index_t tokens_read = 0;    // tokens for which slots and stand-ins stand
    in_view<float, 2, B> lse{}; // [H*G, Q]  of the queries, over all that they saw; for stand-ins
    in_view<U, 3, B> refitting{}; // [H*G, most blocks * each, D]  queries of the tail to refit by; or none
    refit_options<B> refitted{};  // blocks lie side by side, from the tail's first token on

    index_t H     = shape.heads;
    index_t M     = shape.tokens;
    index_t W     = shape.window;
    index_t D     = shape.dims.keys;
    index_t Dv    = shape.dims.values;
    index_t rungs = static_cast<index_t>(ratios.size());
    index_t bases = ratios.any_projected() ? H : 0; ///< heads with bases: none if no rung is projected
    index_t coded = ratios.any_rotated() ? H : 0;   ///< heads with channels: none if no rung is rotated

    workspace::frame frame{on.scratch};
    index_t makers                      = most_made > 0 ? H : 0; ///< heads that make stand-ins
    index_t most_dropped                = 0;                     ///< tokens of a head, once rungs are settled
    out_view<T, 3, B> keys              = scratch_view<T>(on, frame, H, M, D);
    out_view<T, 3, B> values            = scratch_view<T>(on, frame, H, M, Dv);
    out_view<float, 3, B> made_keys     = scratch_view<float>(on, frame, makers, most_made, D);
    out_view<float, 3, B> made_values   = scratch_view<float>(on, frame, makers, most_made, Dv);
    out_view<index_t, 1, B> dropped     = scratch_view<index_t>(on, frame, makers);
    out_view<index_t, 1, B> old_seeds   = scratch_view<index_t>(on, frame, makers);
    out_view<head_entry, 1, B> entries  = scratch_view<head_entry>(on, frame, makers);
    out_view<T, 3, B> window_keys       = scratch_view<T>(on, frame, H, W, D);
    out_view<T, 3, B> window_values     = scratch_view<T>(on, frame, H, W, Dv);
    out_view<float, 3, B> key_basis     = scratch_view<float>(on, frame, bases, D, D);
    out_view<float, 3, B> value_basis   = scratch_view<float>(on, frame, bases, Dv, Dv);
    out_view<float, 3, B> channels      = scratch_view<float>(on, frame, coded, 3, D);
    out_view<float, 2, B> value_means   = scratch_view<float>(on, frame, coded, Dv);
    out_view<std::int32_t, 2, B> listed = scratch_view<std::int32_t>(on, frame, H, M); ///< slots by new rung
    out_view<std::uint8_t, 2, B> carried =
        scratch_view<std::uint8_t>(on, frame, H, M); ///< 1 for tokens whose stored bytes are copied
    out_view<index_t, 2, B> counts =
        scratch_view<index_t>(on, frame, H, rungs + 2);             ///< `first`, then the tokens that stay
    out_view<index_t, 2, B> first = slice<1>(counts, 0, rungs + 1); ///< where each rung's slots begin

    /// Reads the tokens back as vectors, and their channels, which heads without codes get anew.
    void read() const
    {
        run(on, read_projections<T, S>{cache_slots.cache, key_basis, value_basis}, bases);
        run(on, read_tokens<T, S>{{cache_slots.cache, as_input(key_basis), as_input(value_basis),
                                      most_runs(cache_slots.cache.layout), M + W},
                    cache_slots, keys, values, window_keys, window_values});
        run(on,
            stored_channels<T, U, B>{cache_slots, {queries, as_input(keys), channels}, {as_input(values), value_means}},
            coded);
    }

    /// Finds the losses of all slots by the queries, once the tokens were read.
    /// \param loss  [R, M of all heads]
    void score_slots(out_view<float, 2, B> loss) const
    {
        workspace::frame losses{on.scratch};
        auto const raw =
            scratch_view<float>(on, losses, options.pooling.copies() ? 0 : 1, rungs, M); // losses of one head
        index_t at = 0;
        for (index_t h = 0; h < H; ++h)
        {
            index_t const n = by_slot.tokens(h);
            score_head(h, raw, {after(loss.data_handle(), at), {1, rungs, n}, {0, loss.stride(0), 1}});
            at += n;
        }
        run(on, mask_losses<T, S>{cache_slots, loss}, H);
    }

    /// Settles the rungs, and reports on them; waits.
    /// \param rung  the list of all tokens' rungs: the chosen ones, or room for the present ones, which tokens keep if they `stay`
    [[nodiscard]] recompress_report settle(out_view<std::uint8_t, 1, B> rung, bool stay)
    {
        run(on, settle_rungs<T, S>{cache_slots, rung.data_handle(), carried, stay, counts}, H);
        run(on, sort_slots<B>{{rung.data_handle(), {H, M}, {0, 1}}, listed, first, cache_slots.first}, H);
        recompress_report result{
            .window_bytes = shape.window_bytes(), .stand_in_bytes = stand_in_bytes(by_slot.cache), .chosen = {}};
        result.chosen.status = allocation_status::everything_kept;
        if (H == 0) { return result; }
        std::vector<index_t> all(static_cast<std::size_t>(H * (rungs + 2)));
        fetch(on, counts.data_handle(), all.data(), H * (rungs + 2));
        for (index_t h = 0; h < H; ++h)
        {
            index_t const* const here = all.data() + h * (rungs + 2);
            array<index_t, max_rungs> tokens{};
            for (std::size_t r = 0; r < ratios.size(); ++r)
            {
                tokens[r] = here[r + 1] - here[r];
                result.chosen.tokens[r] += tokens[r];
                result.chosen.token_bytes += tokens[r] * ratios.bytes(r, shape.dims, shape.element_bytes);
                result.lowered += tokens[r];
            }
            index_t const old  = by_slot.cache.heads[h].stand_ins;
            index_t const most = most_made > 0 ? (std::min)(most_made, old + tokens[0]) : old;
            head_entry entry;
            result.resident_bytes = lay_out_head<T>(by_slot.layout, tokens, result.resident_bytes, entry, most);
            result.kept += here[rungs + 1];
            most_dropped = (std::max)(most_dropped, tokens[0]);
        }
        result.dropped = result.chosen.tokens[0];
        result.lowered -= result.kept + result.dropped;
        result.chosen.charged_bytes =
            result.resident_bytes - result.window_bytes - result.stand_in_bytes - result.chosen.token_bytes;
        return result;
    }

    /// Packs the tokens at their settled rungs, which take so many bytes; `cache`, the present one or another, is replaced last.
    template <class Cache>
    void store(Cache& cache, index_t bytes) const
    {
        replace_stand_ins();
        Cache made;
        wait_at_end<B> const over{on};
        made = cache.like(by_slot.layout, bytes, cache.tail_capacity());
        if constexpr (requires { cache.fold_limit; }) { made.fold_limit = cache.fold_limit; }
        made.wait();
        cache_view<T, S> const to = made.view();
        auto const pack           = [&] {
            pack_tokens<B, T>(on,
                {as_input(keys), as_input(values), as_input(window_keys), as_input(window_values), as_input(key_basis),
                    as_input(value_basis), as_input(channels), as_input(value_means), as_input(listed), as_input(first),
                    as_input(made_keys), as_input(made_values), as_input(carried),
                    makers > 0 ? entries.data_handle() : cache_slots.cache.heads},
                to);
            run(on, carry_over<T, S>{cache_slots, to, as_input(listed), as_input(first), as_input(carried),
                        options.sources.value_or(out_view<std::int32_t, 2, B>{}),
                        makers > 0 ? dropped.data_handle() : nullptr});
        };
        pack();
        if (refit_tokens(to)) { pack(); }
        wait(on); // an error so far is thrown before anything is replaced
        cache = std::move(made);
    }

    /// Gives every token its new rung by its loss within `bytes`.
    /// \param rung  the list of all tokens
    [[nodiscard]] allocation choose(index_t bytes, out_view<std::uint8_t, 1, B> rung) const
    {
        workspace::frame losses{on.scratch};
        auto const loss = scratch_view<float>(on, losses, rungs, rung.extent(0));
        expects_finite(on, "recompress: queries", queries);
        expects_finite(on, "recompress: keys by slot", as_input(keys));
        expects_finite(on, "recompress: values by slot", as_input(values));
        expects_finite(on, "recompress: window keys", as_input(window_keys));
        score_slots(loss);
        rung_costs costs{ratios, shape.dims, shape.element_bytes};
        index_t projections = 0; // stored bytes
        for (index_t h = 0; h < H; ++h)
        {
            head_entry const& stored = by_slot.cache.heads[h];
            projections += (D * stored.key_columns + Dv * stored.value_columns) * shape.element_bytes;
        }
        for (std::size_t r = 0; r < costs.size(); ++r)
        {
            // No projections are made: heads pay for an average of those they have.
            if (costs.projection[r] > 0) { costs.projection[r] = (projections + H - 1) / H; }
        }
        return allocate_within(on, "recompress", {bytes}, costs, {.charge = options.allocation.charge},
            {as_input(loss), rung, cache_slots.first, M});
    }

private:
    /// Changes the tokens' values so that the tail's queries would have, behind the tail, the outputs of the present cache.
    /// \return   whether there are rows to do so
    bool refit_tokens(cache_view<T, S> const& made) const
    {
        index_t const whole = *by_slot.cache.appended / refitted.rows.span; // blocks
        index_t const rows  = whole * refitted.rows.each(shape.group);
        index_t const n     = whole * refitted.rows.span;
        index_t const most  = most_rows(by_slot.cache);
        if (whole < 2 || refitting.extent(1) == 0) { return false; }
        workspace::frame fitting{on.scratch};
        auto const held        = scratch_view<index_t>(on, fitting, H); // rows of each head
        auto const old_keys    = scratch_view<T>(on, fitting, H, most, D);
        auto const old_values  = scratch_view<T>(on, fitting, H, most, Dv);
        auto const tail_keys   = scratch_view<T>(on, fitting, H, *by_slot.cache.appended, D);
        auto const tail_values = scratch_view<T>(on, fitting, H, *by_slot.cache.appended, Dv);
        unpack_rows(on, cache_slots.cache, old_keys, old_values, held);
        read_tail(on, cache_slots.cache, tail_keys, tail_values);
        refit_values(on,
            refit_rows<B, T, U>{slice<1>(refitting, 0, rows), as_input(old_keys), as_input(old_values), as_input(held),
                slice<1>(tail_keys, 0, n), slice<1>(tail_values, 0, n), as_input(values), 0, as_input(listed),
                as_input(first)},
            made, refitted, values);
        run(on, fill<std::uint8_t>{carried.data_handle(), 0, H * M}); // no stored bytes are copied
        return true;
    }

    /// Makes one set of stand-ins of each head's present ones and the tokens that it drops now.
    void replace_stand_ins() const
    {
        if (makers == 0) { return; }
        index_t const all = most_dropped + most_made;
        workspace::frame making{on.scratch};
        auto const all_keys   = scratch_view<T>(on, making, H, all, D);
        auto const all_values = scratch_view<T>(on, making, H, all, Dv);
        auto const marks      = scratch_view<std::uint8_t>(on, making, H, all);
        run(on, gather_dropped<T, S>{cache_slots, as_input(keys), as_input(values), as_input(listed), as_input(first),
                    all_keys, all_values, marks, most_made, dropped.data_handle(), old_seeds.data_handle(), tokens_read,
                    entries.data_handle()});
        mdkv::stand_in(on, slice<1>(queries, queries.extent(1) - lse.extent(1), lse.extent(1)), as_input(all_keys),
            as_input(all_values), as_input(marks), lse, all,
            {by_slot.layout.scale, all, most_dropped, old_seeds.data_handle()}, made_keys, made_values);
    }

    /// Scores one head: heads have different numbers of tokens. Losses are pooled within a run.
    /// \param raw  [1, R, M]  scratch for losses before pooling; no heads if losses are not pooled
    void score_head(index_t h, out_view<float, 3, B> raw, out_view<float, 3, B> loss) const
    {
        index_t const query_group = shape.group;
        index_t const n           = loss.extent(2);
        bool const pooled         = raw.extent(0) > 0;
        auto const scored         = pooled ? slice<2>(raw, 0, n) : loss;
        auto const head           = [&](auto const& all) { // no heads of a basis or of channels that are missing
            index_t const heads = all.extent(0) > 0 ? 1 : 0;
            return as_input(slice<0>(all, h * heads, heads));
        };
        score_options<B> choice{.scale = by_slot.layout.scale,
            .early_weight              = options.early_weight,
            .question                  = options.question,
            .uniform_queries           = options.uniform_queries};
        choice.first_query = n + W - (std::min)(latest, queries.extent(1));
        if (coded > 0) { choice.channels = head(channels); }
        if (options.lse_elsewhere)
        {
            choice.lse_elsewhere = slice<0>(*options.lse_elsewhere, h * query_group, query_group);
        }
        score(on, slice<0>(queries, h * query_group, query_group), slice<1>(head(keys), 0, n),
            slice<1>(head(values), 0, n), head(window_keys), head(key_basis), head(value_basis), ratios, choice,
            scored);
        index_t from = 0;
        for (std::size_t i = 0; pooled && i < most_runs(by_slot.cache.layout); ++i)
        {
            index_t const count = by_slot.tokens(h, i);
            if (count > 0)
            {
                pool(on, as_input(slice<2>(scored, from, count)), options.pooling, slice<2>(loss, from, count));
            }
            from += count;
        }
    }
};

} // namespace MDKV_NAMESPACE::detail
