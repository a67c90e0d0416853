/// \file reader.hpp: reader: a prompt that is compressed while it is read, in memory that does not grow with its length (arXiv 2603.20616, sections 4, 5).
#pragma once

#include <mdkv/append.hpp>
#include <mdkv/attend.hpp>
#include <mdkv/core/allocation.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/ranks.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/prompt.hpp>

#include <algorithm>
#include <span>
#include <type_traits>
#include <utility>

namespace MDKV_NAMESPACE
{

struct reader_options
{
    /// Limit of an average layer's arena, for the window and all tokens. A fraction is one of `prompt_shape::tokens`.
    budget limit = budget::kv_size(1024);

    /// The most tokens of a chunk, which are held uncompressed beside the limit. The presets were measured with chunks of
    /// `replay_part::chunk` tokens; shorter ones see fewer of their neighbours.
    index_t chunk = 256;

    /// Share of the limit that stored tokens may take beside it before the prompt's end: chunks attend to more, and `finish` has
    /// more to choose from (docs/long-prompts.md).
    float slack = 0.25F;
};

/// The state after `end_chunk` or `finish`.
struct reader_report
{
    index_t tokens       = 0; ///< tokens read so far
    index_t limit_bytes  = 0; ///< bytes that the arenas of all layers may take now
    index_t held_bytes   = 0; ///< bytes that this rank's take
    index_t losses_bytes = 0; ///< bytes of this rank's losses beside them, which `finish` gives back
    allocation chosen;        ///< everything_kept: no token was lowered
};

namespace detail
{

template <backend B, class Cache, element U>
struct reader_work; // state and stages of a reader: pipeline/reading.hpp

} // namespace detail

/// A prompt of L layers that hands in its tokens chunk by chunk, gets their attention back, and is stored within one limit
/// from its first chunk on:
///
///     reader<B, cpu::cache<T>> r{on, presets::any_question, shape, {.limit = budget::bytes(n)}, caches};
///     for (each chunk of at most 256 tokens)
///     {
///         for (each layer) r.attend(on, layer, {q, k, v}, output, lse);  // over the chunk, and what is kept of the past
///         r.end_chunk(on);                                               // all layers are brought within the limit
///     }
///     r.finish(on);                                                      // caches as `prompt::pack` leaves them
///
/// A token's losses are found while its chunk is read, by the chunk's own queries (`replay`), and stay beside it. Tokens keep
/// their rung or take one of fewer bytes, by their stored values, then refitted ones. A prompt that fits stays uncompressed.
///
/// Caches and losses lie in memory of the caches' resource, the rest of the state in the constructor's workspace; every call
/// takes scratch from its own.
///
/// \tparam Cache  the backend's owner: `cpu::cache<T>` or `gpu::cache<T, Resource>`
/// \see    tests/unit/reader.cpp, docs/integrate.md
template <backend B, class Cache, element U = typename decltype(std::declval<Cache&>().view())::element_type>
class reader
{
public:
    using element_type  = typename decltype(std::declval<Cache&>().view())::element_type;
    using rows_of_layer = prompt_rows<B, element_type, U>;

    /// \param on       backend: its workspace holds the state, and outlives the reader
    /// \param chosen   preset that replays; copied
    /// \param shape    sizes and position encoding; `tokens` is the largest possible number
    /// \param options  limit, chunk, slack
    /// \param caches   [L]  owners, which outlive the reader and are its own until `finish`. They become empty caches, out of
    ///                 the same memory resource, with room for a chunk
    /// \cost   state: L*H*R*chunk floats, sinks, last queries and those to refit by, and L*H*D*D doubles if leverages weigh
    /// \sync   returns when done (cpu); enqueued on the stream (gpu)
    /// \throws invalid_argument        a size or a member of the preset is out of its range, the preset does not replay or
    ///                                 cannot drop, there are not L caches, or the limit is below windows and channels
    /// \throws std::bad_alloc          (or an exception of the caches' or the workspace's memory)
    reader(B const& on, preset const& chosen, prompt_shape<B> const& shape, reader_options const& options,
        std::span<Cache> caches)
        : work_{chosen, shape, options, caches}
        , memory_{on.scratch}
    {
        work_.take_state(on, memory_);
    }

    reader(reader const&)            = delete;
    reader& operator=(reader const&) = delete;
    ~reader()                        = default;

    /// Attention of a chunk's tokens in one layer: causal over the chunk, and over what is kept of the tokens before it. The tokens
    /// become the cache's, uncompressed until the chunk's end, and get their losses. A chunk may come in several calls a layer.
    ///
    /// \param on      backend: threads, scratch
    /// \param layer   0 to L - 1
    /// \param rows    Q = N: the chunk's tokens, after position encoding; `lse` is not read, `lse_elsewhere` is attend's, too
    /// \param[out] output  [H*G, N, Dv]
    /// \param[out] lse     [H*G, N]  see mdkv::attend
    /// \cost   append, attend, replay and pool
    /// \sync   returns when done (cpu); enqueued on the stream (gpu), but the search for NaNs and infinities waits
    /// \order  bitwise reproducible for equal inputs and equal chunks, for any number of threads
    /// \throws invalid_argument        a shape disagrees, or the chunk or the prompt gets too long
    /// \throws non_finite_input        naming layer, head and row of the call, unless `on_non_finite` is unchecked
    /// \throws std::bad_alloc          (or an exception of the workspace's memory); nothing was changed in any of these cases
    void attend(
        B const& on, index_t layer, rows_of_layer const& rows, out_view<U, 3, B> output, out_view<float, 2, B> lse)
    {
        constexpr char const* stage = "reader::attend";
        auto const& shape           = work_.shape;
        detail::prompt_progress::expects_layer(stage, layer, shape.layers);
        index_t const count = rows.keys.extent(1);
        index_t const heads = checked_multiply(shape.heads, shape.group);
        detail::expects_rows(on, stage, shape, rows, count, count)
            .out("output", output, {heads, count, shape.dims.values}, "H*G,N,Dv")
            .out("lse", lse, {heads, count}, "H*G,N");
        index_t const before = work_.progress.of(layer); // tokens of the chunk
        expects_open(stage);
        expects(work_.pending == 0, stage, ": the chunk before has not ended, because memory ran out");
        expects(count >= 1 && before + count <= work_.options.chunk, stage, ": layer ", layer, " has ", before,
            " tokens of the chunk, and ", count, " more; from 1 to reader_options::chunk = ", work_.options.chunk,
            " make a chunk");
        expects(work_.read + before + count <= shape.tokens, stage, ": the prompt gets longer than the ", shape.tokens,
            " tokens of prompt_shape::tokens");
        work_.attend_chunk(on, layer, before, rows, output, lse);
        work_.progress.of(layer) = before + count;
    }

    /// Takes the tokens of the present chunk back from all layers, e.g. after an error in one of them.
    ///
    /// \param on   backend
    /// \cost   constant for each layer
    /// \sync   returns when done (cpu); enqueued on the stream (gpu)
    /// \throws invalid_argument   the prompt is finished, or end_chunk has stored some layers' tokens already
    void forget_chunk(B const& on)
    {
        constexpr char const* stage = "reader::forget_chunk";
        expects_open(stage);
        expects(work_.pending == 0, stage, ": layers have stored the chunk's tokens; end_chunk can be called again");
        for (index_t l = 0; l < work_.shape.layers; ++l)
        {
            truncate_tail(on, 0, work_.caches[static_cast<std::size_t>(l)].view());
            work_.asked.of(l)    = (std::max<index_t>)(work_.asked.of(l) - work_.progress.of(l), 0);
            work_.progress.of(l) = 0;
        }
    }

    /// Ends the chunk: finds new rungs for all tokens of all layers within the limit and the slack, none above a token's
    /// present one, and packs them. Does nothing without tokens.
    ///
    /// \param on   backend: threads, scratch
    /// \cost   allocate over all stored tokens; reads each layer, packs it, twice if it refits; its new arena beside the old one
    /// \sync   returns when done, on a GPU too: it waits for the device four times, and some times for each layer
    /// \order  bitwise reproducible for equal inputs, for any number of threads
    /// \throws invalid_argument        layers have different numbers of tokens
    /// \throws non_finite_input        a loss is NaN or infinite; nothing was changed
    /// \throws std::bad_alloc          (or an exception of the caches' or the workspace's memory). Each layer is as it was or as
    ///                                 it is to be, and the call may be made again
    reader_report end_chunk(B const& on) { return bring_within(on, "reader::end_chunk", false); }

    /// Ends the prompt: as `end_chunk`, but within the limit, by the last chunk's queries, too, if the preset joins, and with
    /// window and stand-ins stored as `prompt::pack` stores them: `layout().window` is 0 if the last tokens are in codes
    /// (preset::window_part). The tails are empty and have no room.
    ///
    /// \param on   backend: threads, scratch
    /// \cost   as end_chunk; if the preset joins, also score of all stored tokens; allocate twice if stand-ins were to be in codes,
    ///         and most kept tokens are not
    /// \sync   as end_chunk; two waits more for the second allocate
    /// \order  as end_chunk
    /// \throws as end_chunk
    reader_report finish(B const& on) { return bring_within(on, "reader::finish", true); }

    /// Tokens read and stored; those of the present chunk do not count.
    [[nodiscard]] index_t tokens() const noexcept { return work_.read; }

private:
    void expects_open(char const* stage) const { expects(!work_.finished, stage, ": the prompt is finished"); }

    reader_report bring_within(B const& on, char const* stage, bool last)
    {
        expects_open(stage);
        if (work_.pending == 0) { work_.progress.expects_alike(stage, work_.shape.layers); }
        reader_report const report = work_.bring_within(on, stage, last);
        work_.finished             = last;
        return report;
    }

    detail::reader_work<B, Cache, U> work_;
    workspace::frame memory_; // memory of the state
};

} // namespace MDKV_NAMESPACE

#include <mdkv/pipeline/reading.hpp>
