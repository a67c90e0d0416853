/// \file recompressing.hpp: one call of recompress: the cache read back as vectors, new rungs chosen, the tokens packed anew.
#pragma once

#include <mdkv/recompress.hpp>

#include <mdkv/allocate.hpp>
#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/packing.hpp>
#include <mdkv/detail/read_tokens.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/stored_slots.hpp>
#include <mdkv/detail/stored_tokens.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/finite.hpp>
#include <mdkv/pool.hpp>
#include <mdkv/score.hpp>
#include <mdkv/slots.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace mdkv::inline MDKV_MACHINE::detail
{

/// Waits for the stream of a GPU's backend.
/// \throws cuda_error   work before it failed
template <backend B>
void wait(B const& on)
{
    fetch(on, static_cast<std::byte const*>(nullptr), static_cast<std::byte*>(nullptr), 0);
}

/// Waits however a call ends: enqueued work still uses memory that the call gives back.
template <backend B>
struct wait_at_end
{
    B const& on;

    ~wait_at_end()
    {
#if defined(__cpp_exceptions)
        try
        {
            wait(on);
        }
        catch (...) // a device that has failed works on no memory any more
        {}
#else
        wait(on);
#endif
    }
};

/// One call of recompress. A dry run only counts memory.
template <backend B, element T, element U>
struct recompressing
{
    static constexpr space S = B::memory_space;

    B const& on;
    in_view<U, 3, B> queries;
    ratio_set const& ratios;
    recompress_options<B> const& options;
    layer_shape shape;
    stored_slots<T, space::host> slots; // slots by the host's copy of the directory
    stored_slots<T, S> there;           // slots by the cache's own directory

    index_t H     = shape.heads;
    index_t M     = shape.tokens;
    index_t W     = shape.window;
    index_t D     = shape.dims.keys;
    index_t Dv    = shape.dims.values;
    index_t rungs = static_cast<index_t>(ratios.size());
    index_t bases = ratios.any_projected() ? H : 0; ///< heads with bases: none if no rung is projected
    index_t coded = ratios.any_rotated() ? H : 0;   ///< heads with channels: none if no rung is rotated

    workspace::frame frame{*on.scratch, "recompress"};
    out_view<T, 3, B> keys              = room<T>(on, frame, H, M, D);
    out_view<T, 3, B> values            = room<T>(on, frame, H, M, Dv);
    out_view<T, 3, B> window_keys       = room<T>(on, frame, H, W, D);
    out_view<T, 3, B> window_values     = room<T>(on, frame, H, W, Dv);
    out_view<float, 3, B> key_basis     = room<float>(on, frame, bases, D, D);
    out_view<float, 3, B> value_basis   = room<float>(on, frame, bases, Dv, Dv);
    out_view<float, 3, B> channels      = room<float>(on, frame, coded, 3, D);
    out_view<std::uint8_t, 2, B> rung   = room<std::uint8_t>(on, frame, H, M);
    out_view<std::int32_t, 2, B> listed = room<std::int32_t>(on, frame, H, M); ///< slots by new rung
    out_view<std::uint8_t, 2, B> carried =
        room<std::uint8_t>(on, frame, H, M);                             ///< 1 for tokens whose stored bytes are copied
    index_t* counts = frame.template take<index_t>(H * (rungs + 1) + 1); ///< `first`, then the tokens that stay
    out_view<index_t, 2, B> first = out(on, counts, H, rungs + 1);       ///< where each rung's slots begin
    bool real                     = frame.ready();

    /// Returns the report; `cache` is replaced last.
    template <class Cache>
    recompress_report operator()(Cache& cache)
    {
        run(on, read_projections<T, S>{there.cache, key_basis, value_basis}, bases);
        run(on, read_tokens<T, S>{
                    there, as_input(key_basis), as_input(value_basis), keys, values, window_keys, window_values});
        run(on, stored_channels<T, U, B>{there, {queries, as_input(keys), channels}}, coded);
        recompress_report report = settle(nullptr);
        if (!real || report.resident_bytes > report.limit_bytes)
        {
            allocation const chosen = choose(report.limit_bytes - report.window_bytes - report.stand_in_bytes);
            report                  = settle(&chosen);
        }

        Cache made;
        wait_at_end<B> const over{on};
        cache_view<T, S> to;
        to.layout = slots.layout;
        if (real)
        {
            made = cache.like(slots.layout, report.resident_bytes, cache.tail_capacity());
            made.wait();
            to = made.view();
        }
        pack_tokens(on, as_input(keys), as_input(values), as_input(window_keys), as_input(window_values),
            as_input(key_basis), as_input(value_basis), as_input(channels), as_input(rung), to, {}, {}, {},
            as_input(carried), there.cache.heads);
        run(on, carry_over<T, S>{there, to, as_input(listed), as_input(first), as_input(carried),
                    options.sources.value_or(out_view<std::int32_t, 2, B>{})});
        if (!real) { return report; }
        wait(on); // an error so far is thrown before anything is replaced
        cache = std::move(made);
        return report;
    }

    /// Gives every token its new rung by its loss within `bytes`.
    [[nodiscard]] allocation choose(index_t bytes)
    {
        workspace::frame losses{*on.scratch, "recompress"};
        auto const loss    = room<float>(on, losses, H, rungs, M);
        auto const raw     = room<float>(on, losses, options.pooling.copies() ? 0 : 1, rungs, M); // losses of one head
        auto const limit   = room<index_t>(on, losses, 1);
        auto const reports = room<allocation>(on, losses, 1);
        static_cast<void>(losses.ready());
        expects_finite(on, "recompress: queries", queries);
        expects_finite(on, "recompress: keys by slot", as_input(keys));
        expects_finite(on, "recompress: values by slot", as_input(values));
        expects_finite(on, "recompress: window keys", as_input(window_keys));
        for (index_t h = 0; h < H; ++h) { score_head(h, raw, slice<0>(loss, h, 1)); }
        run(on, mask_losses<T, S>{there, loss}, H);
        run(on, fill<index_t>{limit.data_handle(), bytes, 1});
        allocate(on, as_input(loss), rung_costs{ratios, shape.dims, shape.element_bytes}, as_input(limit),
            options.allocation, rung, reports);
        allocation chosen;
        fetch(on, reports.data_handle(), &chosen, 1);
        expects<non_finite_input>(chosen.status != allocation_status::non_finite_loss,
            "recompress: a loss is NaN or infinite; stored vectors or queries are too large to multiply",
            options.lse_elsewhere ? ", or options.lse_elsewhere holds a NaN or a value above 1e30" : "");
        return chosen;
    }

    /// Scores one head: heads have different numbers of tokens. Losses are pooled within a run.
    /// \param raw  [1, R, M]  scratch for losses before pooling; no heads if losses are not pooled
    void score_head(index_t h, out_view<float, 3, B> raw, out_view<float, 3, B> loss) const
    {
        index_t const group = shape.group;
        index_t const n     = slots.tokens(h);
        bool const pooled   = raw.extent(0) > 0;
        auto const scored   = slice<2>(pooled ? raw : loss, 0, n);
        auto const head     = [&](auto const& all) { // no heads of a basis or of channels that are missing
            index_t const heads = all.extent(0) > 0 ? 1 : 0;
            return as_input(slice<0>(all, h * heads, heads));
        };
        score_options<B> choice{.scale = options.scale > 0 ? options.scale : slots.layout.scale,
            .query_weights             = options.query_weights,
            .quantisation              = options.quantisation,
            .even_queries              = options.even_queries};
        if (coded > 0) { choice.channels = head(channels); }
        if (options.lse_elsewhere) { choice.lse_elsewhere = slice<0>(*options.lse_elsewhere, h * group, group); }
        score(on, slice<0>(queries, h * group, group), slice<1>(head(keys), 0, n), slice<1>(head(values), 0, n),
            head(window_keys), head(key_basis), head(value_basis), ratios, choice, scored);
        index_t begin = 0;
        for (std::size_t i = 0; pooled && i < most_runs(slots.cache.layout); ++i)
        {
            index_t const count = slots_of_head(slots.cache, h, i).tokens - (i == slots.cache.layout.rungs ? W : 0);
            if (count > 0)
            {
                pool(on, as_input(slice<2>(scored, begin, count)), options.pooling, slice<2>(loss, begin, count));
            }
            begin += count;
        }
    }

    /// Lists the tokens by new rung: the chosen one, or without `chosen` the present one. Returns tokens and bytes of the
    /// new arena; waits.
    [[nodiscard]] recompress_report settle(allocation const* chosen)
    {
        recompress_report report;
        report.limit_bytes    = options.limit.in_bytes(shape);
        report.window_bytes   = shape.window_bytes();
        report.stand_in_bytes = stand_in_bytes(slots.cache);
        index_t* const kept   = real ? counts + H * (rungs + 1) : nullptr;
        run(on, fill<index_t>{kept, 0, 1});
        run(on, settle_rungs<T, S>{there, rung, carried, chosen == nullptr, kept}, H);
        list_slots(on, as_input(rung), listed, first);
        if (!real) { return report; }
        std::vector<index_t> all(static_cast<std::size_t>(H * (rungs + 1) + 1));
        fetch(on, counts, all.data(), H * (rungs + 1) + 1);
        report.released     = H * run_of_head(slots.cache, 0, slots.cache.layout.rungs + 1).tokens;
        report.kept         = all.back();
        report.lowered      = -report.kept; // kept tokens are not lowered
        report.chosen       = chosen != nullptr ? *chosen : allocation{};
        auto& tokens_at     = report.chosen.tokens;
        tokens_at           = {};
        index_t token_bytes = 0;
        for (index_t h = 0; h < H; ++h)
        {
            index_t const* const begin = all.data() + h * (rungs + 1);
            array<index_t, max_rungs> tokens{};
            for (std::size_t r = 0; r < ratios.size(); ++r)
            {
                tokens[r] = begin[r + 1] - begin[r] - (r == 0 ? M - slots.tokens(h) : 0); // padding
                tokens_at[r] += tokens[r];
                (r == 0 ? report.dropped : report.lowered) += tokens[r];
                token_bytes += tokens[r] * ratios.bytes(r, shape.dims, shape.element_bytes);
            }
            head_entry entry;
            report.resident_bytes =
                lay_out_head<T>(slots.layout, tokens, report.resident_bytes, entry, slots.cache.heads[h].stand_ins);
        }
        if (chosen != nullptr) { return report; }
        report.chosen.status        = allocation_status::everything_kept;
        index_t const fixed         = report.window_bytes + report.stand_in_bytes;
        report.chosen.limit         = report.limit_bytes - fixed;
        report.chosen.token_bytes   = token_bytes;
        report.chosen.charged_bytes = report.resident_bytes - fixed - token_bytes;
        return report;
    }
};

} // namespace mdkv::inline MDKV_MACHINE::detail
