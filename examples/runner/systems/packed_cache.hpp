/// \file packed_cache.hpp: a layer's cache in the library's packed form, made by compress or from tokens marked as kept (arXiv 2603.20616, section 5)
#pragma once

#include <mdkv/append.hpp>
#include <mdkv/attend.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/stages/allocate.hpp>
#include <mdkv/stages/channels.hpp>
#include <mdkv/stages/pack.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "layer_cache.hpp"
#include "prompt_layer.hpp"
#include "runner/scratch_memory.hpp"

namespace runner
{

/// The bases of a layer's heads; null if no projected rung is in use.
struct head_bases
{
    float const* keys   = nullptr; // [heads, key_dim, key_dim]
    float const* values = nullptr; // [heads, value_dim, value_dim]
};

/// The layer with its past tokens at the given rungs and its window whole, in exactly the memory needed.
/// \param rungs   [heads, past], indices into `ratios`
/// \throws mdkv::invalid_argument   rungs has another size, or holds an index outside the ratio set
template <mdkv::element T>
[[nodiscard]] mdkv::cpu::cache<T> pack_layer(mdkv::cpu::executor_ref executor, scratch_memory& scratch,
    prompt_layer<T> const& layer, mdkv::ratio_set const& ratios, head_bases const& bases,
    std::span<std::uint8_t const> rungs)
{
    std::int64_t const heads = layer.heads;
    mdkv::expects(std::ssize(rungs) == heads * layer.past(), "pack_layer: rungs has ", std::ssize(rungs),
        " entries; [heads, past] is [", heads, ", ", layer.past(), "]");
    mdkv::cache_layout const layout{ratios, heads, layer.window, {layer.key_dim, layer.value_dim}};
    mdkv::index_t const bytes = scratch.run(executor, [&](mdkv::cpu::backend on) {
        return mdkv::packed_bytes<T>(on, mdkv::in(on, rungs.data(), heads, layer.past()), layout);
    });
    mdkv::cpu::cache<T> made{layout, bytes};
    std::int64_t const coded = layout.any_rotated() ? heads : 0;
    std::vector<float> fitted(static_cast<std::size_t>(coded * 3 * layer.key_dim));
    scratch.run(executor, [&](mdkv::cpu::backend on) {
        using mdkv::in;
        using mdkv::slice;
        std::int64_t const key_heads   = bases.keys == nullptr ? 0 : heads;
        std::int64_t const value_heads = bases.values == nullptr ? 0 : heads;
        auto const keys                = in(on, layer.keys, heads, layer.tokens, layer.key_dim);
        auto const values              = in(on, layer.values, heads, layer.tokens, layer.value_dim);
        auto const past                = slice<1>(keys, 0, layer.past());
        auto const channels            = mdkv::out(on, fitted.data(), coded, 3, layer.key_dim);
        if (coded > 0)
        {
            auto const rows    = std::min(layer.query_tokens, fitting_queries);
            auto const queries = in(on, layer.queries, heads * layer.group, layer.query_tokens, layer.key_dim);
            mdkv::fit_channels(on, slice<1>(queries, layer.query_tokens - rows, rows), past, channels);
        }
        mdkv::pack(on, past, slice<1>(values, 0, layer.past()), slice<1>(keys, layer.past(), layer.window),
            slice<1>(values, layer.past(), layer.window), in(on, bases.keys, key_heads, layer.key_dim, layer.key_dim),
            in(on, bases.values, value_heads, layer.value_dim, layer.value_dim),
            in(on, rungs.data(), heads, layer.past()), made.view(), mdkv::as_input(channels));
        return 0;
    });
    return made;
}

/// Makes room for one more token; the tail at least doubles, so that a token costs O(1) copies of a row.
template <mdkv::element T>
void grow_tail(mdkv::cpu::cache<T>& cache)
{
    if (cache.appended() == cache.tail_capacity()) { cache.reserve_tail(2 * cache.tail_capacity() + 16); }
}

/// Tokens of all heads at each rung. Tokens that the cache no longer has count as dropped; a window that is stored whole and
/// tokens in the tail are left out.
/// \param tokens   tokens of the text so far
template <mdkv::element T>
[[nodiscard]] auto count_tokens(mdkv::cpu::cache<T> const& cache, std::int64_t tokens)
{
    mdkv::cache_layout const& layout = cache.layout();
    decltype(mdkv::allocation::tokens) counted{};
    std::int64_t lacking = layout.heads * (tokens - cache.appended() - layout.window);
    for (std::int64_t h = 0; h < layout.heads; ++h)
    {
        mdkv::head_entry const& head = cache.view().heads[h];
        for (std::size_t r = 0; r < layout.rungs; ++r)
        {
            bool const exact      = r == layout.full_rung; // this run has the window, too
            std::size_t const run = exact ? layout.rungs : r;
            std::int64_t const own =
                head.runs[r].tokens - (exact ? layout.window : 0) - (layout.stand_in_run == run ? head.stand_ins : 0);
            counted[r] += own;
            lacking -= own;
        }
    }
    counted[0] += lacking;
    return counted;
}

/// Cache of every policy that chooses a rung per token of the prompt and then leaves the cache alone.
template <mdkv::element T>
class packed_cache : public layer_cache
{
public:
    /// \param group         query heads that share each cached head
    /// \param tail_tokens   room made for appended tokens; more of them cost a copy of the tail
    packed_cache(mdkv::cpu::cache<T> finished, std::int64_t group, std::int64_t tail_tokens = 0)
        : cache_{std::move(finished)}
        , query_heads_{cache_.layout().heads * group}
        , lse_(static_cast<std::size_t>(query_heads_))
    {
        cache_.reserve_tail(tail_tokens);
    }

    /// Keeps whole tokens and the window.
    /// \param kept   [heads, past], 1 for tokens that stay, 0 for tokens that go
    /// \throws mdkv::invalid_argument   kept has another size, or holds anything else
    packed_cache(mdkv::cpu::executor_ref executor, scratch_memory& scratch, prompt_layer<T> const& layer,
        std::span<std::uint8_t const> kept, std::int64_t tail_tokens = 0)
        : packed_cache{pack_layer(executor, scratch, layer, mdkv::evict_ratios, {}, kept), layer.group, tail_tokens}
    {}

    void attend(mdkv::cpu::executor_ref executor, scratch_memory& scratch, float const* query, float const* key,
        float const* value, float* output) override
    {
        grow_tail(cache_);
        mdkv::cache_layout const& layout = cache_.layout();
        scratch.run(executor, [&](mdkv::cpu::backend on) {
            using mdkv::in;
            using mdkv::out;
            mdkv::append(on, in(on, key, layout.heads, layout.dims.keys),
                in(on, value, layout.heads, layout.dims.values), cache_);
            mdkv::attend(on, in(on, query, query_heads_, layout.dims.keys), cache_, {},
                out(on, output, query_heads_, layout.dims.values), out(on, lse_.data(), query_heads_));
            return 0;
        });
    }

    /// Window, tokens, projections and stand-ins.
    [[nodiscard]] std::int64_t resident_bytes() const noexcept override { return cache_.arena_bytes(); }

    [[nodiscard]] mdkv::cpu::cache<T> const& packed() const noexcept { return cache_; }

protected:
    mdkv::cpu::cache<T> cache_;
    std::int64_t query_heads_;

private:
    std::vector<float> lse_; // [query_heads], needed by attend alone
};

} // namespace runner
