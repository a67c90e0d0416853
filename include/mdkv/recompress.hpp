/// \file recompress.hpp: contract of recompress: folds the appended tokens into the compressed part, so that a long generation stays within fixed memory.
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/stored_slots.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/stages/pool.hpp>

#include <algorithm>
#include <concepts>
#include <optional>
#include <type_traits>
#include <vector>

namespace MDKV_NAMESPACE
{

template <backend B>
struct recompress_options
{
    /// Limit of the arena: window, stand-ins, tokens and projections, without the tail. A fraction is one of the bytes
    /// that the cache's present tokens take uncompressed, and shrinks with them; prefer bytes or a KV size.
    budget limit = budget::kv_size(128);

    pool_options pooling{};
    allocate_options allocation{};

    /// [H*G, Q]  see score_options::lse_elsewhere: the part of each query's softmax that lies on none of the cache's tokens,
    /// e.g. sink logits or keys kept elsewhere
    std::optional<in_view<float, 2, B>> lse_elsewhere = std::nullopt;

    float uniform_queries = 0.0F; ///< see score_options::uniform_queries
    float early_weight    = 1.0F; ///< weight of the queries before the last `question` ones, whose weight is 1
    index_t question      = 32;

    /// Tokens of the new window, in at most half of the limit; unset: as many as in the present one. A window in codes
    /// (preset::window_part) is none in the cache, so that a fold by a preset says how long the next one is.
    std::optional<index_t> window = std::nullopt;

    /// [H, S]  receives, for every slot of the new cache, its token's slot in the old one, so that the caller can move
    /// data kept beside the tokens; -1 beyond a head's last slot. Slots count a head's tokens in the order of the
    /// cache: the runs by rung, the exact run without its stand-ins, the tail. S at least `most_slots` of the old cache.
    std::optional<out_view<std::int32_t, 2, B>> sources = std::nullopt;
};

/// The options of a fold by a preset, whose queries have the weights that they have at a prompt's end.
/// \param chosen   preset of the cache
/// \param limit    limit of the arena
/// \param queries  number Q of last queries
template <backend B>
[[nodiscard]] constexpr recompress_options<B> fold_options(preset const& chosen, budget limit, index_t queries) noexcept
{
    recompress_options<B> options{.limit = limit, .pooling = chosen.pooling, .allocation = {.charge = chosen.charge}};
    options.uniform_queries = chosen.uniform_queries(queries);
    options.early_weight    = chosen.early_weight;
    options.question        = chosen.question;
    if (chosen.window_part > 0) { options.window = chosen.window; }
    return options;
}

/// The report of recompress. Tokens are counted over all heads.
struct recompress_report
{
    index_t limit_bytes    = 0;
    index_t window_bytes   = 0;
    index_t stand_in_bytes = 0; ///< stand-ins, all of which stay
    index_t resident_bytes = 0; ///< bytes of the new arena, measured; never above limit_bytes
    index_t kept           = 0; ///< tokens before the window that keep their bytes
    index_t lowered        = 0; ///< tokens now stored in fewer bytes
    index_t dropped        = 0;
    allocation chosen; ///< everything_kept: tokens stay, losses were not read
};

/// The most slots a head has: all its tokens, window and tail included, without stand-ins. Only the directory is read.
template <class T>
[[nodiscard]] index_t most_slots(cache_view<T, space::host> const& cache) noexcept
{
    auto const of = detail::without_const(cache);
    index_t most  = 0;
    for (index_t h = 0; h < of.layout.heads; ++h) { most = (std::max)(most, detail::tokens_of_head(of, h)); }
    return most;
}

/// The most slots a head has, for a cache in any memory.
/// \cost   reads the directory; on a GPU copies it to host memory that this call allocates
/// \sync   returns when done, on a GPU too: it waits for the stream
template <backend B, class T>
[[nodiscard]] index_t most_slots(B const& on, cache_view<T, B::memory_space> const& cache)
{
    return most_slots(detail::host_directory{on, detail::without_const(cache)}.view);
}

namespace detail
{

template <backend B, element T, element U>
struct recompressing; // one call behind its checks: pipeline/recompressing.hpp

} // namespace detail

/// Makes room in a grown cache. The last W tokens of window and tail are the new window; the older ones are released, and may
/// take any rung. Stored tokens keep theirs, and then every bit, or take one of fewer bytes. Losses are measured by the recent
/// queries against stored values, without the attention of stand-ins, which stay. No projections are made. If the limit holds
/// all tokens, they stay unchanged. Inside a run tokens are then not in text order.
///
/// \param on              backend: threads, scratch
/// \param[in]  queries    [H*G, Q, D]  queries of the last Q tokens in the cache, after position encoding, of any element type; Q
///                        from 1 to layout().window (0 if it is in codes, as with `best`) + appended tokens. Two choose
///                        about as well as eight (docs/accuracy.md); the time of scores grows with Q
/// \param[in]  ratios     the rungs, those in use in the cache among them; the first must drop tokens
/// \param[in]  options    limit, pooling and the rest
/// \param[in,out] cache   the backend's cache (`cpu::cache<T>`, `gpu::cache<T, Resource>`); its tail is empty afterwards
///                        and has the same room. Its new memory is taken before the old is freed
/// \cost   score, pool, allocate and pack for the stored tokens; no scores if everything stays. Scratch O(H*M*(R + D)) for M
///         tokens in the longest head; allocates the new cache and, in host memory, a copy of the directory, the counts of rungs
///         and where heads begin
/// \sync   returns when done; on a GPU it waits for the device up to thirteen times. Work on the cache must have
///         been enqueued on the backend's stream, or be waited for by it; afterwards every stream may work on the cache
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument        the cache has no layout; shapes disagree; the limit is below window and stand-ins (naming the
///                                 least that works); the set cannot drop; an option is negative or not finite
/// \throws mismatch                a head has tokens at a rung that the set lacks
/// \throws non_finite_input        queries or tokens to be scored hold a NaN or an infinity (naming head and slot, or row of the
///                                 window), or a loss does, e.g. of a `lse_elsewhere` above 1e30
/// \throws std::bad_alloc          and the exceptions of the executor and of the cache's and the workspace's memory; gpu:
///                                 cuda_error. Nothing was changed in any case
/// \see    tests/unit/recompress.cpp, tests/gpu/recompress.cu
template <backend B, element U, class Cache>
recompress_report recompress(
    B const& on, in_view<U, 3, B> queries, ratio_set const& ratios, recompress_options<B> const& options, Cache& cache)
{
    return recompress(on, queries, ratios, options, cache.view(), cache);
}

/// The same by a preset, with its ratio set and `fold_options`, within the cache's own limit (`fold_limit`), that of its layer
/// when `prompt`, `reader` or `compress` filled it.
///
/// \param on, queries, cache   as above
/// \param[in]  chosen          preset of the cache
/// \param[in]  lse_elsewhere   see recompress_options
/// \par    Cost, synchronisation, order: as above
/// \throws invalid_argument   as above, and the other errors; the cache has no limit of its own
/// \see    tests/unit/recompress.cpp, docs/start.md
template <backend B, element U, class Cache>
recompress_report recompress(B const& on, in_view<U, 3, B> queries, preset const& chosen, Cache& cache,
    std::optional<in_view<float, 2, B>> lse_elsewhere = std::nullopt)
{
    static_assert(
        requires { cache.fold_limit; }, "recompress: a view has no fold_limit: give an owner, or fold_options");
    expects(cache.fold_limit > 0, "recompress: the cache's fold_limit is ", cache.fold_limit,
        "; set it, or give recompress_options a limit");
    auto options          = fold_options<B>(chosen, budget::bytes(cache.fold_limit), queries.extent(1));
    options.lse_elsewhere = lse_elsewhere;
    return recompress(on, queries, chosen.ratios, options, cache);
}

/// The same into another cache: `from` stays as it is, e.g. the prefix of many questions, in a file even. A question that was
/// appended to it measures the losses, and the new cache holds no more than the limit for this question.
///
/// \param on, ratios, options   as above
/// \param[in]  queries  [H*G, Q, D]  queries of the last Q tokens of `from`
/// \param[in]  from     read only, e.g. the view of `with_tail`
/// \param[out] to       becomes a cache of its own memory resource; its tail is empty and has the room that it had
/// \par    Cost, synchronisation, order: as above
/// \throws invalid_argument   as above, and the other errors
/// \see    tests/unit/recompress.cpp
template <backend B, element U, class E, class Cache>
recompress_report recompress(B const& on, in_view<U, 3, B> queries, ratio_set const& ratios,
    recompress_options<B> const& options, cache_view<E, B::memory_space> const& from, Cache& to)
{
    using T = std::remove_const_t<E>;
    static_assert(std::same_as<T, typename decltype(to.view())::element_type>,
        "recompress: both caches must have one element type");

    cache_view<T, B::memory_space> const stored = detail::without_const(from);
    cache_layout const& layout                  = stored.layout;
    index_t const heads                         = layout.heads;
    expects(layout.rungs > 0, "recompress: the cache has no layout: nothing was packed into it, or it was moved from");
    bool const in_place = to.view().heads == stored.heads;
    if (heads == 0)
    {
        if (!in_place) { to = to.like(layout, 0, 0); }
        return {};
    }
    detail::host_directory const fetched{on, stored};
    cache_view<T, space::host> const& directory = fetched.view;
    index_t const longest                       = most_slots(directory);
    index_t const recent                        = layout.window + *directory.appended;
    index_t const rows                          = queries.extent(0);
    index_t const query_group                   = rows / heads;

    expects(rows == heads * query_group && query_group >= 1, "recompress: queries [H*G, Q, D] has ", rows,
        " query heads, which ", heads, " KV heads do not divide");
    expects(queries.extent(1) >= 1 && queries.extent(1) <= recent,
        "recompress: queries [H*G, Q, D] has Q = ", queries.extent(1), "; it must be from 1 to ", recent,
        ", the tokens of the window (", layout.window, "; none if it is in codes) and the tail (", *directory.appended,
        ")");
    expects(ratios.can_drop(), "recompress: the ratio set has no rung that drops a token");
    ratios.expects_ascending(layout.dims, sizeof(T));
    detail::expects_not_negative("recompress", "uniform_queries", options.uniform_queries);
    detail::expects_not_negative("recompress", "early_weight", options.early_weight);
    expects(options.question >= 0, "recompress: question is ", options.question, "; it must not be negative");

    detail::checks c{on, "recompress"};
    c.rows("queries", queries, {{rows, queries.extent(1), layout.dims.keys}}, "H*G,Q,D");
    c.bytes("cache.arena", stored.arena, stored.arena_bytes, in_place);
    c.bytes("cache.tail", stored.tail, heads * stored.tail_head_bytes(), in_place);
    c.of_queries("options.lse_elsewhere", options.lse_elsewhere, rows, queries.extent(1), "H*G,Q");
    if (options.sources)
    {
        index_t const capacity = options.sources->extent(1);
        expects(capacity >= longest, "recompress: options.sources [H, S] has S = ", capacity, "; a head has ", longest,
            " tokens");
        c.out("options.sources", *options.sources, {{heads, capacity}}, "H,S");
    }
    expects(options.window.value_or(0) >= 0, "recompress: window is ", options.window.value_or(0),
        "; it must not be negative");
    layer_shape const whole{heads, query_group, longest, 0, layout.dims, index_t{sizeof(T)}};
    whole.expects_valid("recompress");
    index_t const limit       = options.limit.in_bytes(whole);
    index_t const stand_ins   = detail::stand_in_bytes(directory, true);
    index_t const for_window  = (std::min)(limit / 2, (std::max<index_t>)(limit - stand_ins, 0));
    index_t const room        = for_window / (std::max<index_t>)(whole.bytes_of(1), 1); // tokens
    index_t const most_window = (std::min)(recent, room);
    index_t const window      = options.window ? (std::min)(*options.window, most_window) : layout.window;
    cache_layout next{ratios, heads, window, layout.dims, layout.scale};
    auto const same = detail::same_rungs(layout, next);
    if (layout.stand_in_run < layout.rungs) { next.stand_in_run = same[layout.stand_in_run]; }
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
    layer_shape const shape{heads, query_group, longest - window, window, layout.dims, index_t{sizeof(T)}};
    index_t const least = shape.window_bytes() + stand_ins;
    expects(limit >= least, "recompress: a budget of ", limit, " bytes cannot hold the window of ", window,
        stand_ins > 0 ? " tokens and the stand-ins" : " tokens", "; at least ", least, " bytes are needed");
    detail::stored_slots<T, space::host> const by_slot{directory, next, shape.tokens};
    std::vector<index_t> ends{0};
    detail::add_heads(by_slot, ends);
    workspace::frame frame{on.scratch};
    auto const begin = detail::scratch_view<index_t>(on, frame, heads + 1);
    auto const rung  = detail::scratch_view<std::uint8_t>(on, frame, ends.back());
    copy(on, ends.data(), begin.data_handle(), (heads + 1) * index_t{sizeof(index_t)});
    detail::recompressing<B, T, U> layer{on, queries, ratios, options, shape, by_slot,
        detail::stored_slots<T, B::memory_space>{stored, next, shape.tokens, as_input(begin)}};
    layer.read();
    recompress_report report = layer.settle(rung, true);
    index_t const spend      = limit - report.window_bytes - report.stand_in_bytes;
    if (report.resident_bytes > limit)
    {
        allocation chosen = layer.choose(spend, rung);
        report            = layer.settle(rung, false);
        chosen.tokens     = report.chosen.tokens;
        report.chosen     = chosen;
    }
    layer.store(to, report.resident_bytes);
    report.limit_bytes  = limit;
    report.chosen.limit = spend;
    return report;
}

} // namespace MDKV_NAMESPACE

#include <mdkv/pipeline/recompressing.hpp>
