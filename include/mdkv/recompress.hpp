/// \file recompress.hpp: contract of recompress: folds the appended tokens into the compressed part, so that a long generation stays within fixed memory.
#pragma once

#include <mdkv/allocate.hpp>
#include <mdkv/cache.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/contract.hpp>
#include <mdkv/detail/host_directory.hpp>
#include <mdkv/detail/stored_slots.hpp>
#include <mdkv/pool.hpp>
#include <mdkv/score.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace mdkv
{

template <backend B>
struct recompress_options
{
    /// What the arena may take: window, tokens and projections. The tail comes on top, as with compress. Shares are of the
    /// tokens the cache lists now, as if they were whole, and so shrink with it: bytes or a KV size say more.
    budget limit = budget::kv_size(128);

    pool_options pooling{};
    allocate_options allocation{}; ///< all but same_count_per_head: heads have different numbers of tokens

    float scale = 0.0F; ///< factor of q.k; 0 means 1/sqrt(D)

    /// [Q]  as score_options::query_weights
    std::optional<in_view<float, 1, B>> query_weights = std::nullopt;
    quantisation_loss quantisation                    = quantisation_loss::bound;

    /// [H, S]  receives for every slot of the new cache the slot of the old one that its token had, so that whatever is
    /// kept beside the tokens can follow them; -1 beyond a head's last slot. Slots count a head's tokens in the order of
    /// the cache: the runs by rung, the exact run, the tail. S at least `most_slots` of the old cache.
    std::optional<out_view<std::int32_t, 2, B>> sources = std::nullopt;
};

/// Tokens are those of all heads.
struct recompress_report
{
    index_t limit_bytes    = 0;
    index_t window_bytes   = 0;
    index_t resident_bytes = 0; ///< of the new arena, measured; never above limit_bytes
    index_t released       = 0; ///< tokens that left the window or the tail
    index_t kept           = 0; ///< of these and the stored ones: as they were
    index_t lowered        = 0; ///< stored in fewer bytes
    index_t dropped        = 0;
    allocation chosen; ///< everything_kept: all stay as they are, losses were not asked
};

namespace detail
{

/// What is left to say where every token stays as it is, from `chosen.tokens`, `limit_bytes`, `window_bytes` and
/// `resident_bytes`.
template <std::size_t R>
void report_everything_kept(recompress_report& report, ratio_set<R> const& ratios, layer_shape const& shape)
{
    report.chosen.status = allocation_status::everything_kept;
    report.chosen.limit  = report.limit_bytes - report.window_bytes;
    for (std::size_t r = 0; r < ratios.size(); ++r)
    {
        report.chosen.token_bytes += report.chosen.tokens[r] * ratios.bytes(r, shape.dims, shape.element_bytes);
    }
    report.chosen.charged_bytes = report.resident_bytes - report.window_bytes - report.chosen.token_bytes;
}

} // namespace detail

/// The most slots a head has: all its tokens, window and tail included. Only the directory is read.
template <element T>
[[nodiscard]] index_t most_slots(cache_view<T, space::host> const& cache) noexcept
{
    index_t most = 0;
    for (index_t h = 0; h < cache.layout.heads; ++h)
    {
        index_t const tokens = detail::tokens_below_full(cache.layout, cache.heads[h]) + cache.heads[h].exact.tokens;
        most                 = std::max(most, tokens + *cache.appended);
    }
    return most;
}

/// The same of a cache that may lie elsewhere.
/// \sync   on a GPU waits for the backend's stream
template <backend B, element T>
[[nodiscard]] index_t most_slots(B const& on, cache_view<T, B::memory_space> const& cache)
{
    return most_slots(detail::host_directory<T>{on, cache}.view());
}

/// Makes room in a cache that has grown. Of the window and the appended tokens after it the last W are the new window; the
/// older ones, still exact, are released. Released tokens take any rung, stored ones keep theirs or one of fewer bytes, all
/// from what is stored: no original is needed, and no projection is made, so that a head's rungs are those its stored
/// projections reach. What a stored token would lose is scored against what it is now: by the recent queries, over what
/// the head has stored. A token that keeps its rung keeps every bit of what is stored of it, however often this is done.
/// Where the limit holds all tokens as they are, they stay so. Tokens of a run do not stay in the order of the text.
///
/// \param on              backend: threads, scratch
/// \param[in]  queries    [H*G, Q, D]  of the last Q tokens, after position encoding; Q <= W + appended tokens
/// \param[in]  ratios     the rungs, those in use in the cache among them; the first must drop tokens
/// \param[in]  options    limit, pooling and the rest
/// \param[in,out] cache   the backend's cache (`cpu::cache<T>`, `gpu::cache<T, Resource>`); its tail is empty afterwards
///                        and has the same room. The new arena and tail are taken from its memory resource before the old
///                        are freed. Shapes follow from its directory, which a dry run reads, too
/// \return     what was done
/// \pre    Q >= 1
/// \cost   that of score, pool, allocate and pack for the stored tokens, heads scored one after another; no scores where
///         everything stays. Scratch O(H*M*(R + D)) for M tokens in the longest head; allocates the new cache, and (gpu)
///         a copy of the directory and the counts of every rung in host memory
/// \sync   returns when done, on a GPU too: it waits for the device several times, in a dry run for the directory. Work on
///         the cache must have been enqueued on the backend's stream, or be waited for by it
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument        shapes disagree; the limit is below the window (naming the least that works); the set
///                                 cannot drop
/// \throws mismatch                a head has tokens at a rung that the set lacks
/// \throws non_finite_input        queries or tokens that would be scored hold a NaN or an infinity (naming head and slot)
/// \throws insufficient_workspace  naming the size needed
/// \throws std::bad_alloc          and whatever the executor or the cache's memory resource throws; gpu: cuda_error.
///                                 Nothing was changed in any case
/// \see    tests/recompress.cpp, tests/gpu/recompress.cu
template <backend B, element T, std::size_t R, class Cache>
recompress_report recompress(B const& on, in_view<T, 3, B> queries, ratio_set<R> const& ratios,
    recompress_options<B> const& options, Cache& cache)
{
    cache_view<T, B::memory_space> const stored = cache.view();
    bool const dry                              = detail::dry_run(on);
    if (stored.layout.heads == 0) { return {}; }
    detail::host_directory<T> const copy{on, stored};
    cache_view<T, space::host> const& directory = copy.view();
    static_assert(
        requires { recompress_impl(on, queries, ratios, options, layer_shape{}, directory, cache); },
        MDKV_DETAIL_NO_IMPLEMENTATION(recompress, recompress));
    cache_layout const& layout = stored.layout;
    index_t const heads        = layout.heads;
    index_t const appended     = *directory.appended;

    expects(queries.extent(0) % heads == 0 && queries.extent(0) >= heads, "recompress: queries [H*G, Q, D] has ",
        queries.extent(0), " query heads, which ", heads, " KV heads do not divide");
    expects(queries.extent(1) >= 1 && queries.extent(1) <= layout.window + appended,
        "recompress: queries [H*G, Q, D] has "
        "Q = ",
        queries.extent(1), "; it must be at least 1 and at most the window and the appended tokens, ", layout.window,
        " + ", appended);
    expects(ratios.can_drop(), "recompress: the ratio set has no rung that drops a token");
    ratios.expects_fit("key", layout.dims.keys);
    ratios.expects_fit("value", layout.dims.values);
    ratios.expects_ascending(layout.dims, sizeof(T));
    expects(!options.allocation.same_count_per_head, "recompress: options.allocation.same_count_per_head: the heads of "
                                                     "a packed cache have different numbers of tokens");
    expects(options.scale >= 0.0F, "recompress: options.scale is ", options.scale, "; it must not be negative");

    detail::argument const q{"recompress", "queries", queries};
    q.shape({queries.extent(0), queries.extent(1), layout.dims.keys}, "H*G,Q,D").data(dry).apart_from_scratch(on);
    auto const arena = stored.arena_bytes_view();
    auto const tail  = stored.tail_bytes_view();
    detail::argument const a{"recompress", "cache.arena", arena};
    detail::argument const t{"recompress", "cache.tail", tail};
    a.apart_from_scratch(on);
    t.apart_from_scratch(on);
    if (options.query_weights)
    {
        detail::argument const w{"recompress", "options.query_weights", *options.query_weights};
        w.shape({queries.extent(1)}, "Q").data(dry).aligned().apart_from_scratch(on);
    }
    index_t const most = most_slots(directory);
    if (options.sources)
    {
        detail::argument const s{"recompress", "options.sources", *options.sources};
        expects(options.sources->extent(1) >= most,
            "recompress: options.sources [H, S] has S = ", options.sources->extent(1), "; a head has ", most,
            " tokens");
        s.shape({heads, options.sources->extent(1)}, "H,S").data(dry).aligned().unique().apart_from_scratch(on);
        s.apart_from(q).apart_from(a).apart_from(t);
    }
    auto const same = detail::same_rungs(layout, cache_layout{ratios, heads, layout.window, layout.dims});
    for (index_t h = 0; h < heads; ++h)
    {
        for (std::size_t r = 0; r < layout.rungs; ++r)
        {
            index_t const tokens = layout.own_run(r) ? directory.heads[h].runs[r].tokens : 0;
            expects<mismatch>(tokens == 0 || same[r] < ratios.size(), "recompress: head ", h, " has ", tokens,
                " tokens at the cache's rung ", r, " (", layout.key_coordinates[r], " coordinates of a key in ",
                layout.key_bytes(r, sizeof(T)), " bytes), which the ratio set lacks");
        }
    }
    layer_shape const shape{
        heads, queries.extent(0) / heads, most - layout.window, layout.window, layout.dims, index_t{sizeof(T)}};
    shape.expects_valid("recompress");
    index_t const limit = options.limit.in_bytes(shape);
    expects(limit >= shape.window_bytes(), "recompress: a budget of ", limit, " bytes cannot hold the window of ",
        layout.window, " tokens; at least ", shape.window_bytes(), " bytes are needed");
    return recompress_impl(on, queries, ratios, options, shape, directory, cache);
}

} // namespace mdkv
