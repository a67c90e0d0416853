/// \file prompt.hpp: prompt: all layers of one prompt by one preset, from its chunks as they are read to the packed caches (arXiv 2603.20616, sections 4, 5).
#pragma once

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ranks.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/ranks.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/engine/finite.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/replay/replay.hpp>
#include <mdkv/stages/pack.hpp>

#include <concepts>
#include <optional>

namespace MDKV_NAMESPACE
{

enum class non_finite : std::uint8_t
{
    error,    ///< search for NaNs and infinities first and refuse them
    unchecked ///< the caller guarantees that there are none
};

/// Sizes of a prompt and of the model that reads it; all layers are alike.
template <backend B>
struct prompt_shape
{
    index_t layers = 0; ///< L, from 1 to 256
    index_t heads  = 0; ///< H, KV heads; over ranks this rank's
    index_t group  = 1; ///< G, query heads per KV head
    head_dims dims;     ///< D, Dv
    index_t tokens = 0; ///< length of the prompt, or the largest possible one if it is not known yet

    rotary_encoding<B> encoding{}; ///< the model's; presets that replay need it. Its frequencies outlive the prompt
    non_finite on_non_finite = non_finite::error;
    index_t first_layer      = 0; ///< number of the model's layer that is layer 0 here, for messages about its numbers
    mdkv::ranks const* ranks = nullptr; ///< outlives the prompt; null: all heads are here
};

/// Queries, keys and values of one layer, after position encoding.
template <backend B, element T, element U = T>
struct prompt_rows
{
    in_view<U, 3, B> queries; ///< [H*G, Q, D]  the last ones (`finish_layer` says how many); in read_chunk all
    in_view<T, 3, B> keys;    ///< [H, N, D]
    in_view<T, 3, B> values;  ///< [H, N, Dv]

    /// [H*G, Q]  natural logarithm of sum exp(scale*q.k) over the keys up to each query's own token: score_options::lse. Presets
    /// with stand-ins, `best` and `any_question` among them, need it.
    std::optional<in_view<float, 2, B>> lse = std::nullopt;
    /// [H*G, Q]  likewise, over keys that are not here: score_options::lse_elsewhere.
    std::optional<in_view<float, 2, B>> lse_elsewhere = std::nullopt;
};

enum class compress_status : std::uint8_t
{
    compressed,
    uncompressed ///< the budget holds the whole layer: stored bit for bit
};

/// How a layer was packed.
struct compress_report
{
    compress_status status = compress_status::compressed;
    layer_shape shape;
    index_t budget_bytes   = 0; ///< limit of an average layer, on all ranks; the other sizes are this rank's
    index_t window_bytes   = 0;
    index_t resident_bytes = 0; ///< bytes of the arena, stand-ins included
    index_t full_bytes     = 0; ///< bytes of the uncompressed layer
    allocation chosen;
};

namespace detail
{

/// Checks the shapes of rows of a layer, of so many tokens and queries.
template <backend B, element T, element U>
checks expects_rows(B const& on, char const* stage, prompt_shape<B> const& shape, prompt_rows<B, T, U> const& rows,
    index_t tokens, index_t queries)
{
    index_t const heads = checked_multiply(shape.heads, shape.group);
    checks rest{on, stage};
    rest.rows("keys", rows.keys, {shape.heads, tokens, shape.dims.keys}, "H,N,D")
        .rows("values", rows.values, {shape.heads, tokens, shape.dims.values}, "H,N,Dv")
        .rows("queries", rows.queries, {heads, queries, shape.dims.keys}, "H*G,Q,D")
        .in("lse", rows.lse, {{heads, queries}}, "H*G,Q")
        .of_queries("lse_elsewhere", rows.lse_elsewhere, heads, queries, "H*G,Q");
    return rest;
}

/// Refuses NaNs and infinities in rows of a layer, unless the caller guarantees that there are none.
template <backend B, element T, element U>
void expects_finite_rows(B const& on, prompt_shape<B> const& shape, index_t layer, prompt_rows<B, T, U> const& rows)
{
    if (shape.on_non_finite == non_finite::unchecked) { return; }
    expects_finite(on, "queries", rows.queries, shape.first_layer + layer);
    expects_finite(on, "keys", rows.keys, shape.first_layer + layer);
    expects_finite(on, "values", rows.values, shape.first_layer + layer);
}

/// The state of a prompt and the stages' calls, behind its checks: pipeline/prompting.hpp.
template <backend B, element T, element U>
struct prompt_work;

template <backend B, element T, element U, class Cache>
compress_report pack_layer(B const& on, prompt_work<B, T, U> const& of, index_t layer, prompt_rows<B, T, U> const& rows,
    Cache& to); // pipeline/storing.hpp

} // namespace detail

/// One prompt of L layers, compressed by a preset. The same calls serve every preset; calls that a preset does not need
/// return at once:
///
///     prompt<B, T> p{on, presets::best, {.layers = L, .heads = H, .group = G, .dims = {D, D}, .tokens = N,
///                       .encoding = {.base = 1e6}}};
///     p.read_chunk(on, layer, first, {q, k, v});              // each chunk of each layer, while prefill has its queries
///     p.finish_layer(on, layer, {last_q, keys, values, lse}); // each layer, with the keys and values of all tokens
///     p.allocate(on, budget::fraction(1, 8));                 // every token of every layer gets its rung
///     p.pack(on, layer, {last_q, keys, values, lse}, cache);  // each layer
///
/// The constructor takes the state of all layers from the workspace of its backend, until the object ends; every call takes
/// scratch from the workspace of its own backend. Nothing else is allocated but the caches of owners (`pack`).
///
/// Layers may come in any order, and the chunks of a layer in the order of the text. A call that throws invalid_argument, or what
/// the workspace's memory throws if there is none left, has changed nothing and may be made again, but `allocate` may have chosen
/// no rungs then. If an executor or a device throws, only the destructor may be called; `pack` never changes the prompt.
///
/// \tparam T  element type of keys, values and caches
/// \tparam U  element type of queries: `prompt<B, half, float>` for queries in float
/// \see    tests/unit/prompt.cpp, examples/best.cpp, docs/integrate.md
template <backend B, element T, element U = T>
class prompt
{
    static constexpr space S = B::memory_space;

public:
    using rows_of_layer = prompt_rows<B, T, U>;

    /// \param on      backend: its workspace holds the state, and outlives the prompt
    /// \param chosen  preset; copied
    /// \param shape   sizes, position encoding
    /// \cost   state: L*H*R*M floats and L*H*M bytes for M = tokens - window, and if the preset needs them L*H*(D*D + Dv*Dv)
    ///         floats (projected rungs), 3*L*H*D floats (codes), L*H*sinks keys, 8 bytes a token
    /// \sync   returns when done (cpu); enqueued on the stream (gpu)
    /// \throws invalid_argument        a size or a member of the preset is out of its range, or the preset replays rungs
    ///                                 that are projected
    prompt(B const& on, preset const& chosen, prompt_shape<B> const& shape)
        : work_{chosen, shape, {chosen.ratios, shape.dims, index_t{sizeof(T)}}}
        , memory_{on.scratch}
    {
        work_.take_state(on, memory_);
        tokens_ = shape.tokens;
    }

    prompt(prompt const&)            = delete;
    prompt& operator=(prompt const&) = delete;
    ~prompt()                        = default;

    /// Scores a part of a layer's tokens by their own queries, rotated to later positions: `replay`, in chunks of
    /// `replay_part::chunk` tokens from the part's first one on. The presets were measured with parts of whole chunks; a query
    /// sees the keys of its chunk alone, so parts that end elsewhere give other losses. Does nothing unless the preset replays.
    /// The tokens that are the window's by `prompt_shape::tokens` are left out. A part may be read again; then all parts after
    /// it must be, too.
    ///
    /// \param on     backend: threads, scratch
    /// \param layer  0 to L - 1
    /// \param first  token of the prompt that is the first of `rows`
    /// \param rows   Q = N: these tokens alone, any number of them; `lse` is not read
    /// \cost   the cost of `replay`
    /// \sync   returns when done (cpu); enqueued on the stream (gpu)
    /// \order  bitwise reproducible for equal inputs and equal parts, for any number of threads
    /// \throws invalid_argument        a shape disagrees, tokens before `first` were not read, the prompt is longer than
    ///                                 `prompt_shape::tokens`, or the layer is finished
    void read_chunk(B const& on, index_t layer, index_t first, rows_of_layer const& rows)
    {
        constexpr char const* stage = "prompt::read_chunk";
        index_t const count         = rows.keys.extent(1);
        work_.progress.expects_open(stage, layer, work_.shape.layers);
        expects_rows(on, stage, rows, count);
        expects(rows.queries.extent(1) == count, stage, ": queries [H*G, Q, D] has Q = ", rows.queries.extent(1),
            "; the chunk has ", count, " tokens");
        expects(first >= 0 && first <= work_.shape.tokens - count, stage, ": tokens ", first, " to ", first + count,
            " leave the prompt of at most ", work_.shape.tokens);
        if (!work_.settings.replayed) { return; }
        expects(first <= work_.progress.of(layer), stage, ": first is ", first, "; of layer ", layer, " only ",
            work_.progress.of(layer), " tokens were read");
        work_.progress.of(layer) = first; // after an error this part, and those after it, are to be read again
        work_.score_chunk(on, layer, first, rows);
        work_.progress.advance(layer, first + count);
    }

    /// Sets a layer's losses, instead of read_chunk: losses by rows of the caller's choice, e.g. of a second prefill.
    /// Values of such a layer are not refitted, because nothing of it was read.
    ///
    /// \param on      backend: threads
    /// \param layer   0 to L - 1
    /// \param losses  [H, R, n]  losses of the prompt's first n tokens, n its tokens before the window; not pooled
    /// \cost   copies the losses
    /// \sync   returns when done (cpu); enqueued on the stream (gpu)
    /// \order  deterministic
    /// \throws invalid_argument   a shape disagrees, the preset does not replay, or the layer is finished
    void take_losses(B const& on, index_t layer, in_view<float, 3, B> losses)
    {
        constexpr char const* stage = "prompt::take_losses";
        work_.progress.expects_open(stage, layer, work_.shape.layers);
        index_t const n = losses.extent(2);
        expects(work_.settings.replayed.has_value(), stage, ": preset \"", work_.settings.name, "\" does not replay");
        expects(n <= work_.losses.extent(3), stage, ": losses are of ", n, " tokens, above ", work_.losses.extent(3));
        detail::checks{on, stage}.in("losses", losses, {work_.shape.heads, work_.rung_count(), n}, "H,R,n");
        run(on, detail::copy_rows<B, float>{losses, work_.losses_of(layer, n)});
        work_.progress.of(layer) = n;
    }

    /// Finds a layer's losses after the prompt was read: by the last queries (`score`, `pool`), by the replayed ones, or by
    /// both (`join`). Fits the bases and channels that packing needs. If the preset joins, all ranks make the call together.
    ///
    /// \param on     backend: threads, scratch
    /// \param layer  0 to L - 1
    /// \param rows   N tokens, window included, the same number in every layer; Q last queries, 1 to N, best `preset::queries`
    ///               (64) of a longer prompt: more are not used; fewer choose worse, and below `refit_part::span` (64)
    ///               `pack` refits no values. `lse` is needed if the preset makes stand-ins, and otherwise saves work
    /// \cost   the sum of the stages: fit_basis or fit_channels, score unless the preset only replays, pool, join,
    ///         add_leverage; scratch O(H*R*N) and score's scratch
    /// \sync   returns when done (cpu); enqueued on the stream (gpu), but the search for NaNs and infinities waits
    /// \order  bitwise reproducible for equal inputs, for any number of threads
    /// \throws invalid_argument        a shape disagrees, the layer is finished, `lse` is missing, or the preset replays and
    ///                                 tokens before the window were not read
    /// \throws non_finite_input        naming layer, head and row, unless `prompt_shape::on_non_finite` is unchecked
    void finish_layer(B const& on, index_t layer, rows_of_layer const& rows)
    {
        constexpr char const* stage = "prompt::finish_layer";
        detail::agreement agreed{work_.joins() ? work_.shape.ranks : nullptr};
        index_t const tokens = rows.keys.extent(1);
        work_.progress.expects_open(stage, layer, work_.shape.layers);
        expects_rows(on, stage, rows, tokens);
        expects(tokens <= work_.shape.tokens, stage, ": keys are of ", tokens, " tokens, above the prompt's ",
            work_.shape.tokens);
        expects(work_.progress.finished == 0 || tokens == tokens_, stage, ": layer ", layer, " has ", tokens,
            " tokens; the layers before have ", tokens_);
        layer_shape const one = work_.layer(tokens);
        expects(!work_.settings.replayed || work_.progress.of(layer) >= one.tokens, stage, ": of layer ", layer,
            " only ", work_.progress.of(layer), " tokens were read, not all ", one.tokens,
            " before the window (read_chunk)");
        expects_lse(stage, rows, one.tokens > 0 && work_.settings.ratios.can_drop() ? work_.settings.stand_ins : 0);
        detail::expects_finite_rows(on, work_.shape, layer, rows);
        if (one.tokens > 0) { work_.find_losses(on, layer, rows, one, agreed); }
        work_.agree(on, stage, agreed, tokens, layer); // if all tokens are the window's
        tokens_                  = tokens;
        work_.progress.of(layer) = -1;
        ++work_.progress.finished;
    }

    /// Chooses every token's rung within a budget: for all layers at once, their losses balanced, if the preset is
    /// `shared`, otherwise layer by layer. Room for stand-ins is set aside if tokens are dropped. May be called again with
    /// another budget. Over ranks budget and choice are those of the heads of all ranks, which make the call together.
    ///
    /// \param on     backend: threads, scratch
    /// \param limit  budget of an average layer: window, tokens, projections, channels and stand-ins
    /// \return the choice, summed over all layers
    /// \cost   balance and allocate, the latter twice if stand-ins need room; a pass over the rungs for the sizes of arenas
    /// \sync   returns when done, on a GPU too: it waits for the device
    /// \order  bitwise reproducible for equal inputs, for any number of threads
    /// \throws invalid_argument        a layer is not finished, or the budget is below the window or the cheapest rungs (then
    ///                                 no rungs are chosen, not even those of a call before); over ranks if one of them
    ///                                 refuses its arguments, on every rank
    /// \throws non_finite_input        a loss is NaN or infinite
    allocation allocate(B const& on, budget limit)
    {
        detail::agreement agreed{work_.shape.ranks};
        expects_all_finished();
        auto const by          = work_.spending_on(tokens_);
        auto next              = by.plan(work_.stage, limit.in_bytes(by.layer));
        allocation const total = work_.choose_rungs(on, by, next, agreed);
        work_.settle(on, by, next, total);
        return total;
    }

    /// The same with a limit for each head (MixedDimKV-H). Losses are not balanced, and no room is set aside for stand-ins.
    ///
    /// \param on      backend: threads, scratch
    /// \param quotas  [L, H]  bytes that a head may spend on tokens, projections and channels, beside its window
    /// \return the sum of the heads' choices
    /// \cost   allocate of each layer, and a copy of the quotas in host memory; a pass over the rungs
    /// \sync   returns when done, on a GPU too: it waits for the device
    /// \order  bitwise reproducible for equal inputs, for any number of threads
    /// \throws as above
    allocation allocate(B const& on, in_view<index_t, 2, B> quotas)
    {
        expects_all_finished();
        detail::checks{on, work_.stage}.in("quotas", quotas, {work_.shape.layers, work_.shape.heads}, "L,H");
        auto const by = work_.spending_on(tokens_);
        decltype(work_.choice) next{};
        allocation const total = work_.choose_by_quotas(on, by, quotas, next);
        work_.settle(on, by, next, total);
        return total;
    }

    /// [H, R, N - W]  a layer's losses: by replayed rows; after finish_layer pooled and joined; after allocate balanced,
    /// too, if the preset is `shared`. N is the largest possible number of tokens until a layer is finished.
    [[nodiscard]] in_view<float, 3, B> losses_of(index_t layer) const
    {
        work_.progress.expects_layer("prompt::losses_of", layer, work_.shape.layers);
        return work_.losses_of(layer, work_.layer(tokens_).tokens);
    }

    /// [H, N - W]  the rungs that `allocate` chose for a layer's tokens. The window has none, W = layout().window: 0 if
    /// its tokens are stored in codes (preset::window_part).
    [[nodiscard]] in_view<std::uint8_t, 2, B> rungs_of(index_t layer) const
    {
        work_.progress.expects_layer("prompt::rungs_of", layer, work_.shape.layers);
        return work_.rungs_of(layer, work_.stored_layer(tokens_).tokens);
    }

    /// The layout of all layers' caches: known after `allocate`, which chooses how window and stand-ins are stored.
    [[nodiscard]] cache_layout layout() const { return work_.layout(tokens_); }

    /// Packs a layer at its rungs, with its stand-ins; the cache's tail is empty.
    ///
    /// \param on     backend: threads, scratch
    /// \param layer  0 to L - 1
    /// \param rows   the rows that `finish_layer` had; `lse` is needed if there are stand-ins
    /// \param[out] to  the backend's cache (`cpu::cache<T>`, or `gpu::cache<T, Resource>` made with stream and resource): replaced
    ///               at the very end by a cache of exactly the size it needs, whose tail has no room: `reserve_tail` before the
    ///               first token is appended
    /// \return the layer's report; chosen has the tokens of each rung (cpu) and the multiplier of all layers. resident_bytes
    ///         counts stand-ins; if layers share a budget, it may be above budget_bytes, an average layer's
    /// \cost   stand_in and pack; allocates the new cache
    /// \sync   returns when done (cpu); enqueued on the stream, the cache's own stream is waited for (gpu)
    /// \order  bitwise reproducible for equal inputs, for any number of threads
    /// \throws invalid_argument        a shape disagrees, no rungs were chosen, or `lse` is missing
    /// \throws std::bad_alloc          (or an exception of the cache's resource); `to` has not changed
    template <class Cache>
    compress_report pack(B const& on, index_t layer, rows_of_layer const& rows, Cache& to)
    {
        constexpr char const* stage = "prompt::pack";
        work_.progress.expects_layer(stage, layer, work_.shape.layers);
        expects(work_.choice.budget >= 0, stage, ": no rungs were chosen; call allocate first");
        expects_rows(on, stage, rows, tokens_);
        expects_lse(stage, rows, work_.choice.stand_ins);
        static_assert(std::same_as<typename decltype(to.view())::element_type, T>,
            "prompt::pack: the cache must have the element type of the prompt's keys: prompt<B, T>, cpu::cache<T>");
        return detail::pack_layer(on, work_, layer, rows, to);
    }

private:
    void expects_all_finished() const
    {
        for (index_t l = 0; l < work_.shape.layers; ++l)
        {
            expects(work_.progress.of(l) < 0, work_.stage, ": layer ", l, " is not finished");
        }
    }
    void expects_rows(B const& on, char const* stage, rows_of_layer const& rows, index_t tokens) const
    {
        index_t const count = rows.queries.extent(1);
        detail::expects_rows(on, stage, work_.shape, rows, tokens, count);
        expects(count >= (tokens > 0 ? 1 : 0) && count <= tokens, stage, ": queries [H*G, Q, D] has Q = ", count,
            "; it must be from 1 to the ", tokens, " tokens");
    }

    void expects_lse(char const* stage, rows_of_layer const& rows, index_t stand_ins) const
    {
        expects(stand_ins == 0 || rows.lse, stage, ": lse is missing; preset \"", work_.settings.name,
            "\" makes up to ", stand_ins, " stand-ins, which need it (stand_ins = 0 makes none)");
    }

    detail::prompt_work<B, T, U> work_;
    workspace::frame memory_; // memory of the state
    index_t tokens_ = 0;      // tokens of the prompt; the largest possible number until a layer is finished
};

} // namespace MDKV_NAMESPACE

#include <mdkv/pipeline/prompting.hpp>
#include <mdkv/pipeline/storing.hpp>
