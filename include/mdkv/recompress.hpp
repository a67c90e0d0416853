/// \file recompress.hpp: contract of recompress: folds the appended tokens into the compressed part, so that a long generation stays within fixed memory.
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/cache.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/read_tokens.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/stored_slots.hpp>
#include <mdkv/detail/stored_tokens.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/finite.hpp>
#include <mdkv/pack.hpp>
#include <mdkv/pool.hpp>
#include <mdkv/score.hpp>
#include <mdkv/slots.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace mdkv
{

template <backend B>
struct recompress_options
{
    /// Limit of the arena: window, tokens and projections, without the tail. A fraction is one of the cache's present
    /// tokens uncompressed, and so shrinks with them; prefer bytes or a KV size.
    budget limit = budget::kv_size(128);

    pool_options pooling{};
    allocate_options allocation{};

    float scale = 0.0F; ///< factor of q.k; 0 means 1/sqrt(D)

    /// [H*G, Q]  as score_options::lse_elsewhere: the part of each query's softmax that lies on none of the cache's tokens, as
    /// sink logits or keys kept elsewhere
    std::optional<in_view<float, 2, B>> lse_elsewhere = std::nullopt;

    /// [Q]  as score_options::query_weights
    std::optional<in_view<float, 1, B>> query_weights = std::nullopt;
    quantisation_loss quantisation                    = quantisation_loss::bound;
    float even_queries                                = 0.0F; ///< as score_options::even_queries

    /// [H, S]  receives, for every slot of the new cache, its token's slot in the old one, so that the caller can move
    /// data kept beside the tokens; -1 beyond a head's last slot. Slots count a head's tokens in the order of the
    /// cache: the runs by rung, the exact run, the tail. S at least `most_slots` of the old cache.
    std::optional<out_view<std::int32_t, 2, B>> sources = std::nullopt;
};

/// Tokens are those of all heads.
struct recompress_report
{
    index_t limit_bytes    = 0;
    index_t window_bytes   = 0;
    index_t resident_bytes = 0; ///< of the new arena, measured; never above limit_bytes
    index_t released       = 0; ///< tokens that left the window or the tail
    index_t kept           = 0; ///< of these and the stored ones: unchanged
    index_t lowered        = 0; ///< stored in fewer bytes
    index_t dropped        = 0;
    allocation chosen; ///< everything_kept: all stay as they are, losses were not read
};

/// The most slots a head has: all its tokens, window and tail included. Only the directory is read.
template <class T>
[[nodiscard]] index_t most_slots(cache_view<T, space::host> const& cache) noexcept
{
    index_t most = 0;
    for (index_t h = 0; h < cache.layout.heads; ++h)
    {
        most = std::max(most, detail::tokens_of_head(detail::without_const(cache), h));
    }
    return most;
}

/// The same for a cache in any memory.
/// \sync   on a GPU waits for the backend's stream
template <backend B, class T>
[[nodiscard]] index_t most_slots(B const& on, cache_view<T, B::memory_space> const& cache)
{
    return most_slots(detail::host_directory{on, detail::without_const(cache)}.view);
}

namespace detail
{

/// Waits for the stream of a GPU's backend.
/// \throws cuda_error   work before it failed
template <backend B>
void wait(B const& on)
{
    fetch(on, static_cast<std::byte const*>(nullptr), static_cast<std::byte*>(nullptr), 0);
}

/// Waits however a call ends: until then what was enqueued works on memory that the call gives back.
template <backend B>
struct wait_at_end
{
    B const& on;

    ~wait_at_end()
    {
        try
        {
            wait(on);
        }
        catch (...) // a device that has failed works on no memory any more
        {}
    }
};

/// One call of recompress: the cache that is there as vectors, and the rungs of its tokens. A dry run only counts.
template <backend B, element T, element U>
struct recompressing
{
    static constexpr space S = B::memory_space;

    B const& on;
    in_view<U, 3, B> queries;
    ratio_set const& ratios;
    recompress_options<B> const& options;
    layer_shape shape;
    stored_slots<T, space::host> slots; // over the host's copy of the directory
    stored_slots<T, S> there;           // the same where the cache lies

    index_t H     = shape.heads;
    index_t M     = shape.tokens;
    index_t W     = shape.window;
    index_t D     = shape.dims.keys;
    index_t Dv    = shape.dims.values;
    index_t rungs = static_cast<index_t>(ratios.size());
    index_t bases = ratios.any_projected() ? H : 0; ///< no heads where no rung is projected

    workspace::frame frame{*on.scratch, "recompress"};
    out_view<T, 3, B> keys              = room<T>(H, M, D);
    out_view<T, 3, B> values            = room<T>(H, M, Dv);
    out_view<T, 3, B> window_keys       = room<T>(H, W, D);
    out_view<T, 3, B> window_values     = room<T>(H, W, Dv);
    out_view<float, 3, B> key_basis     = room<float>(bases, D, D);
    out_view<float, 3, B> value_basis   = room<float>(bases, Dv, Dv);
    out_view<std::uint8_t, 2, B> rung   = room<std::uint8_t>(H, M);
    out_view<std::int32_t, 2, B> listed = room<std::int32_t>(H, M);      ///< slots by new rung
    index_t* counts = frame.template take<index_t>(H * (rungs + 1) + 1); ///< `first`, then the tokens that stay
    out_view<index_t, 2, B> first = out(on, counts, H, rungs + 1);       ///< where each rung's slots begin
    bool real                     = frame.ready();

    template <class V, class... Extents>
    [[nodiscard]] auto room(Extents... extents)
    {
        return out(on, frame.template take<V>((extents * ...)), extents...);
    }

    /// Returns the report; `cache` is replaced last.
    template <class Cache>
    recompress_report operator()(Cache& cache)
    {
        run(on, read_projections<T, S>{there.cache, key_basis, value_basis}, bases);
        read_tokens<T, S> const tokens{
            there, as_input(key_basis), as_input(value_basis), keys, values, window_keys, window_values};
        run(on, tokens, tokens.items());
        recompress_report report;
        report.limit_bytes  = options.limit.in_bytes(shape);
        report.window_bytes = shape.window_bytes();
        settle(report, true);
        if (!real || report.resident_bytes > report.limit_bytes)
        {
            report.chosen = choose(report.limit_bytes - report.window_bytes);
            settle(report, false);
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
        pack(on, as_input(keys), as_input(values), as_input(window_keys), as_input(window_values), as_input(key_basis),
            as_input(value_basis), as_input(rung), to);
        carry_over<T, S> const carry{
            there, to, as_input(listed), as_input(first), options.sources.value_or(out_view<std::int32_t, 2, B>{})};
        run(on, carry, carry.items());
        if (!real) { return report; }
        wait(on); // what failed so far is thrown before anything is replaced
        cache = std::move(made);
        return report;
    }

    /// Gives every token its new rung by its loss within `bytes`.
    [[nodiscard]] allocation choose(index_t bytes)
    {
        bool const pooled   = !options.pooling.copies();
        index_t const heads = pooled ? H : 0;
        workspace::frame losses{*on.scratch, "recompress"};
        auto const loss    = out(on, losses.template take<float>(H * rungs * M), H, rungs, M);
        auto const smooth  = out(on, losses.template take<float>(heads * rungs * M), heads, rungs, M);
        auto* const limit  = losses.template take<index_t>(1);
        auto const reports = out(on, losses.template take<allocation>(1), 1);
        static_cast<void>(losses.ready());
        expects_finite(on, "recompress: queries", queries);
        expects_finite(on, "recompress: keys by slot", as_input(keys));
        expects_finite(on, "recompress: values by slot", as_input(values));
        expects_finite(on, "recompress: window keys", as_input(window_keys));
        for (index_t h = 0; h < H; ++h) { score_head(h, loss, smooth); }
        run(on, mask_losses<T, S>{there, as_input(pooled ? smooth : loss), loss}, H);
        run(on, fill<index_t>{limit, bytes, 1}, 1);
        allocate(on, as_input(loss), rung_costs{ratios, shape.dims, shape.element_bytes}, in(on, limit, 1),
            options.allocation, rung, reports);
        allocation chosen;
        fetch(on, reports.data_handle(), &chosen, 1);
        expects<non_finite_input>(chosen.status != allocation_status::non_finite_loss,
            "recompress: a loss is NaN or infinite; stored vectors or queries are too large to multiply",
            options.lse_elsewhere ? ", or options.lse_elsewhere holds a NaN or a value above 1e30" : "");
        return chosen;
    }

    /// Heads have different numbers of tokens, so they are scored one by one; neighbours are those of a stretch.
    void score_head(index_t h, out_view<float, 3, B> loss, out_view<float, 3, B> smooth) const
    {
        index_t const group = shape.group;
        index_t const n     = slots.tokens(h);
        auto const own      = slice<2>(slice<0>(loss, h, 1), 0, n);
        auto const head     = [&](auto const& all) { // none of a basis that is not there
            index_t const heads = all.extent(0) > 0 ? 1 : 0;
            return as_input(slice<0>(all, h * heads, heads));
        };
        score_options<B> choice{.scale = options.scale,
            .query_weights             = options.query_weights,
            .quantisation              = options.quantisation,
            .even_queries              = options.even_queries};
        if (options.lse_elsewhere) { choice.lse_elsewhere = slice<0>(*options.lse_elsewhere, h * group, group); }
        score(on, slice<0>(queries, h * group, group), slice<1>(head(keys), 0, n), slice<1>(head(values), 0, n),
            head(window_keys), head(key_basis), head(value_basis), ratios, choice, own);
        if (smooth.extent(0) == 0) { return; }
        index_t begin = 0;
        for (std::size_t i = 0; i < most_runs(slots.cache.layout); ++i)
        {
            index_t const count = run_of_head(slots.cache, h, i).tokens - (i == slots.cache.layout.rungs ? W : 0);
            if (count > 0)
            {
                pool(on, as_input(slice<2>(own, begin, count)), options.pooling,
                    slice<2>(slice<0>(smooth, h, 1), begin, count));
            }
            begin += count;
        }
    }

    /// Lists the tokens by new rung: as they are stored, or as chosen. Counts tokens and bytes of the new arena; waits.
    void settle(recompress_report& report, bool as_stored)
    {
        index_t* const kept = real ? counts + H * (rungs + 1) : nullptr;
        run(on, fill<index_t>{kept, 0, 1}, 1);
        run(on, settle_rungs<T, S>{there, rung, as_stored, kept}, H);
        list_slots(on, as_input(rung), listed, first);
        if (!real) { return; }
        std::vector<index_t> all(static_cast<std::size_t>(H * (rungs + 1) + 1));
        fetch(on, counts, all.data(), H * (rungs + 1) + 1);
        report.released       = H * run_of_head(slots.cache, 0, slots.cache.layout.rungs + 1).tokens;
        report.dropped        = 0;
        report.resident_bytes = 0;
        report.kept           = all.back();
        report.lowered        = -report.kept; // kept tokens are not among them
        report.chosen.tokens  = {};
        index_t token_bytes   = 0;
        for (index_t h = 0; h < H; ++h)
        {
            index_t const* const begin = all.data() + h * (rungs + 1);
            array<index_t, max_rungs> tokens{};
            for (std::size_t r = 0; r < ratios.size(); ++r)
            {
                tokens[r] = begin[r + 1] - begin[r] - (r == 0 ? M - slots.tokens(h) : 0); // padding
                report.chosen.tokens[r] += tokens[r];
                (r == 0 ? report.dropped : report.lowered) += tokens[r];
                token_bytes += tokens[r] * ratios.bytes(r, shape.dims, shape.element_bytes);
            }
            head_entry entry;
            report.resident_bytes = lay_out_head<T>(slots.layout, tokens, report.resident_bytes, entry);
        }
        if (!as_stored) { return; }
        report.chosen.status        = allocation_status::everything_kept;
        report.chosen.limit         = report.limit_bytes - report.window_bytes;
        report.chosen.token_bytes   = token_bytes;
        report.chosen.charged_bytes = report.resident_bytes - report.window_bytes - token_bytes;
    }
};

} // namespace detail

/// Makes room in a grown cache. Of the window and the appended tokens after it the last W are the new window; the older
/// ones, still exact, are released. Released tokens take any rung, stored ones keep theirs or take one of fewer bytes,
/// all from the stored values: no originals are needed, and no projections are made, so that a head's rungs are limited
/// to its stored projections. The recent queries measure a stored token's loss against its stored value, over the
/// head's stored tokens. A token that keeps its rung keeps every stored bit, in any number of calls. If the limit holds
/// all tokens unchanged, they stay unchanged. The tokens of a run leave the order of the text.
///
/// \param on              backend: threads, scratch
/// \param[in]  queries    [H*G, Q, D]  of the last Q tokens, after position encoding, of any element type; Q <= W +
///                        appended tokens
/// \param[in]  ratios     the rungs, those in use in the cache among them; the first must drop tokens
/// \param[in]  options    limit, pooling and the rest
/// \param[in,out] cache   the backend's cache (`cpu::cache<T>`, `gpu::cache<T, Resource>`); its tail is empty afterwards
///                        and has the same room. The new arena and tail are taken from its memory resource before the old
///                        are freed. Shapes follow from its directory, which a dry run reads, too
/// \return     the report
/// \pre    Q >= 1
/// \cost   that of score, pool, allocate and pack for the stored tokens, heads scored one after another; no scores where
///         everything stays. Scratch O(H*M*(R + D)) for M tokens in the longest head; allocates the new cache, and a copy
///         of the directory and the counts of every rung in host memory
/// \sync   returns when done. On a GPU it waits for the device: twice for the directory, in a dry run too; for the counts of
///         every rung, for the cache's stream and at the end; unless everything stays, four times to look for NaNs, once for
///         what allocate chose and for the new counts. Work on the cache must have been enqueued on the backend's stream,
///         or be waited for by it; afterwards every stream may work on the cache, which keeps its own
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument        shapes disagree; the limit is below the window (naming the least that works); the set
///                                 cannot drop
/// \throws mismatch                a head has tokens at a rung that the set lacks
/// \throws non_finite_input        queries or tokens that would be scored hold a NaN or an infinity (naming head and slot), or
///                                 a loss is, as where `lse_elsewhere` holds a NaN or a value above 1e30; gpu: as it is where
///                                 query weights are negative or not finite, which cannot be seen before
/// \throws insufficient_workspace  naming the size needed
/// \throws std::bad_alloc          and whatever the executor or the cache's memory resource throws; gpu: cuda_error.
///                                 Nothing was changed in any case
/// \see    tests/recompress.cpp, tests/gpu/recompress.cu
template <backend B, element U, class Cache>
recompress_report recompress(
    B const& on, in_view<U, 3, B> queries, ratio_set const& ratios, recompress_options<B> const& options, Cache& cache)
{
    using T = typename decltype(cache.view())::element_type;

    cache_view<T, B::memory_space> const stored = cache.view();
    cache_layout const& layout                  = stored.layout;
    index_t const heads                         = layout.heads;
    if (heads == 0) { return {}; }
    detail::host_directory const copy{on, stored};
    cache_view<T, space::host> const& directory = copy.view;
    index_t const most                          = most_slots(directory);
    index_t const recent                        = layout.window + *directory.appended;
    index_t const rows                          = queries.extent(0);

    expects(rows % heads == 0 && rows >= heads, "recompress: queries [H*G, Q, D] has ", rows, " query heads, which ",
        heads, " KV heads do not divide");
    expects(queries.extent(1) >= 1 && queries.extent(1) <= recent,
        "recompress: queries [H*G, Q, D] has Q = ", queries.extent(1),
        "; it must be at least 1 and at most the window and the appended tokens, ", layout.window, " + ",
        *directory.appended);
    expects(ratios.can_drop(), "recompress: the ratio set has no rung that drops a token");
    ratios.expects_ascending(layout.dims, sizeof(T));
    expects(options.scale >= 0.0F, "recompress: options.scale is ", options.scale, "; it must not be negative");
    expects(options.even_queries >= 0.0F && options.even_queries <= std::numeric_limits<float>::max(),
        "recompress: options.even_queries is ", options.even_queries, "; it must be finite and not negative");

    detail::check c{on, "recompress"};
    c.rows("queries", queries, {{rows, queries.extent(1), layout.dims.keys}}, "H*G,Q,D");
    c.bytes("cache.arena", stored.arena, stored.arena_bytes, true);
    c.bytes("cache.tail", stored.tail, heads * stored.tail_head_bytes(), true);
    if (options.query_weights) { c.in("options.query_weights", *options.query_weights, {{queries.extent(1)}}, "Q"); }
    if (options.lse_elsewhere)
    {
        c.in("options.lse_elsewhere", *options.lse_elsewhere, {{rows, queries.extent(1)}}, "H*G,Q");
    }
    if (options.sources)
    {
        index_t const room = options.sources->extent(1);
        expects(room >= most, "recompress: options.sources [H, S] has S = ", room, "; a head has ", most, " tokens");
        c.out("options.sources", *options.sources, {{heads, room}}, "H,S");
    }
    cache_layout const next{ratios, heads, layout.window, layout.dims};
    auto const same = detail::same_rungs(layout, next);
    for (index_t h = 0; h < heads; ++h)
    {
        for (std::size_t r = 0; r < layout.rungs; ++r)
        {
            index_t const tokens = detail::run_of_head(directory, h, r).tokens;
            expects<mismatch>(tokens == 0 || same[r] < ratios.size(), "recompress: head ", h, " has ", tokens,
                " tokens at the cache's rung ", r, " (", layout.key_coordinates[r], " coordinates of a key in ",
                layout.key_bytes(r, sizeof(T)), " bytes), which the ratio set lacks");
        }
    }
    layer_shape const shape{heads, rows / heads, most - layout.window, layout.window, layout.dims, index_t{sizeof(T)}};
    shape.expects_valid("recompress");
    index_t const limit = options.limit.in_bytes(shape);
    expects(limit >= shape.window_bytes(), "recompress: a budget of ", limit, " bytes cannot hold the window of ",
        layout.window, " tokens; at least ", shape.window_bytes(), " bytes are needed");
    return detail::staged(on, "recompress", [&](B const& stages) {
        detail::recompressing<B, T, U> job{stages, queries, ratios, options, shape,
            detail::stored_slots<T, space::host>{directory, next, shape.tokens},
            detail::stored_slots<T, B::memory_space>{stored, next, shape.tokens}};
        return job(cache);
    });
}

} // namespace mdkv
