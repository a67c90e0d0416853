/// \file recompress_layer.cuh: a packed cache on the GPU seen as a layer that is to be compressed again: what that takes, and its steps.
#pragma once

#include <mdkv/recompress.hpp>

#include <mdkv/basis.hpp>
#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/stored_slots.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/fill.cuh>
#include <mdkv/gpu/detail/recompress_bases.cuh>
#include <mdkv/gpu/detail/recompress_copy.cuh>
#include <mdkv/gpu/detail/recompress_read.cuh>
#include <mdkv/gpu/detail/recompress_slots.cuh>
#include <mdkv/gpu/launch.cuh>
#include <mdkv/gpu/pool.cuh>
#include <mdkv/gpu/score.cuh>
#include <mdkv/gpu/slots.cuh>
#include <mdkv/pool.hpp>
#include <mdkv/score.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

#include <cuda/std/array>

namespace mdkv::gpu::detail
{

using rung_counts = ::cuda::std::array<index_t, max_rungs>;

/// Bytes of an arena with count(h) tokens of head h at each rung.
template <element T, class Count>
[[nodiscard]] index_t laid_out_bytes(cache_layout const& layout, Count const& count)
{
    index_t bytes = 0;
    for (index_t h = 0; h < layout.heads; ++h)
    {
        head_entry entry;
        bytes = lay_out_head<T>(layout, count(h), bytes, entry);
    }
    return bytes;
}

/// The old cache seen as what is to be compressed: of every head the tokens before its new window, listed by their slots.
template <element T>
struct stored_layer
{
    mdkv::detail::stored_slots slots; // over a directory of the host's
    cache_view<T, space::device> cache;
    bool bases = false; // the new cache may have projections

    // scratch
    out_view<T, 3, backend> keys;              // [H, M, D]
    out_view<T, 3, backend> values;            // [H, M, Dv]
    out_view<T, 3, backend> window_keys;       // [H, W, D]
    out_view<T, 3, backend> window_values;     // [H, W, Dv]
    out_view<float, 3, backend> of_keys;       // [H, D, D]    no heads without bases
    out_view<float, 3, backend> of_queries;    // [H, D, D]
    out_view<float, 3, backend> of_values;     // [H, Dv, Dv]
    out_view<std::uint8_t, 2, backend> rung;   // [H, M]
    out_view<std::int32_t, 2, backend> listed; // [H, M]    slots by new rung
    out_view<index_t, 2, backend> first;       // [H, R+1]  where each rung's begin
    index_t* kept   = nullptr;                 // [1]       right behind `first`
    double* solving = nullptr;                 // [H, 2 * D * D]

    stored_layer(mdkv::detail::stored_slots const& slots_, cache_view<T, space::device> const& cache_, bool bases_)
        : slots{slots_}
        , cache{cache_}
        , bases{bases_}
    {}

    void take(workspace::frame& frame, backend const& on)
    {
        auto const [dim, value_dim] = slots.layout.dims;
        index_t const H             = slots.layout.heads;
        index_t const M             = slots.most;
        index_t const W             = slots.layout.window;
        index_t const base_heads    = bases ? H : 0;
        index_t const begins        = static_cast<index_t>(slots.layout.rungs) + 1;
        keys                        = out(on, frame.take<T>(H * M * dim), H, M, dim);
        values                      = out(on, frame.take<T>(H * M * value_dim), H, M, value_dim);
        window_keys                 = out(on, frame.take<T>(H * W * dim), H, W, dim);
        window_values               = out(on, frame.take<T>(H * W * value_dim), H, W, value_dim);
        of_keys                     = out(on, frame.take<float>(base_heads * dim * dim), base_heads, dim, dim);
        of_queries                  = out(on, frame.take<float>(base_heads * dim * dim), base_heads, dim, dim);
        of_values = out(on, frame.take<float>(base_heads * value_dim * value_dim), base_heads, value_dim, value_dim);
        rung      = out(on, frame.take<std::uint8_t>(H * M), H, M);
        listed    = out(on, frame.take<std::int32_t>(H * M), H, M);
        auto* const counts = frame.take<index_t>(H * begins + 1);
        first              = out(on, counts, H, begins);
        kept               = counts == nullptr ? nullptr : counts + H * begins;
        solving            = frame.take<double>(base_heads * 2 * dim * dim);
    }

    /// For kernels.
    [[nodiscard]] mdkv::detail::stored_slots on_device() const
    {
        mdkv::detail::stored_slots same = slots;
        same.heads                      = cache.heads;
        return same;
    }

    /// Reads everything back, and every token's rung.
    void read(backend const& on) const
    {
        if (bases)
        {
            launch(on,
                kernels::stored_projections<T>{
                    cache, of_keys.data_handle(), of_queries.data_handle(), of_values.data_handle(), solving},
                slots.layout.heads);
        }
        kernels::read_tokens<T> const tokens{on_device(), cache, bases ? of_queries.data_handle() : nullptr,
            bases ? of_values.data_handle() : nullptr, keys.data_handle(), values.data_handle(),
            window_keys.data_handle(), window_values.data_handle()};
        launch(on, tokens, tokens.blocks());
        kernels::stored_rungs const rungs{{on_device()}, rung};
        launch(on, rungs, rungs.blocks());
    }

    /// Bytes of the new arena if every token stays as it is.
    [[nodiscard]] index_t bytes_as_stored() const
    {
        return laid_out_bytes<T>(slots.layout, [&](index_t h) {
            rung_counts tokens{};
            for (std::size_t r = 0; r < slots.before.rungs; ++r)
            {
                if (slots.before.own_run(r)) { tokens[slots.same[r]] += slots.heads[h].runs[r].tokens; }
            }
            tokens[slots.exact_rung(h)] += slots.tokens(h) - slots.first_exact(h);
            return tokens;
        });
    }

    /// Bases of one head, or none.
    [[nodiscard]] in_view<float, 3, backend> basis_of(out_view<float, 3, backend> all, index_t h) const
    {
        return as_input(bases ? slice<0>(all, h, 1) : all);
    }
};

/// Losses of what is stored; see mask_losses. Heads have different numbers of tokens, so they are scored one by one.
template <element T, std::size_t R>
void score_stored(backend const& on, stored_layer<T> const& layer, in_view<T, 3, backend> queries,
    ratio_set<R> const& ratios, recompress_options<backend> const& options, out_view<float, 3, backend> loss,
    out_view<float, 3, backend> smooth)
{
    index_t const group = queries.extent(0) / layer.slots.layout.heads;
    bool const pooled   = !options.pooling.copies();
    score_options<backend> const scoring{
        .scale = options.scale, .query_weights = options.query_weights, .quantisation = options.quantisation};
    for (index_t h = 0; h < layer.slots.layout.heads; ++h)
    {
        index_t const n = layer.slots.tokens(h);
        auto const own  = slice<2>(slice<0>(loss, h, 1), 0, n);
        score(on, slice<0>(queries, h * group, group), slice<1>(slice<0>(as_input(layer.keys), h, 1), 0, n),
            slice<1>(slice<0>(as_input(layer.values), h, 1), 0, n), slice<0>(as_input(layer.window_keys), h, 1),
            key_bases<backend>{layer.basis_of(layer.of_keys, h), layer.basis_of(layer.of_queries, h)},
            layer.basis_of(layer.of_values, h), ratios, scoring, own);
        if (!pooled) { continue; }
        auto const to = slice<0>(smooth, h, 1);
        layer.slots.for_stretches(h, [&](index_t first, index_t count) {
            pool(on, as_input(slice<2>(own, first, count)), options.pooling, slice<2>(to, first, count));
        });
    }
    if (on.scratch->counting()) { return; }
    kernels::mask_losses const mask{{layer.on_device()}, as_input(pooled ? smooth : loss), loss};
    launch(on, mask, mask.blocks());
}

/// What the device counted of the new rungs.
struct counted_rungs
{
    std::vector<index_t> first; // [H, R+1]
    index_t begins = 0;         // R+1
    index_t kept   = 0;         ///< tokens that are what they were

    /// Lists the tokens by their new rungs, counts, and waits.
    template <element T>
    counted_rungs(backend const& on, stored_layer<T> const& layer)
        : first(static_cast<std::size_t>(layer.first.extent(0) * layer.first.extent(1) + 1))
        , begins{layer.first.extent(1)}
    {
        launch(on, kernels::fill<index_t>{out(on, layer.kept, 1, 1), 0}, 1);
        kernels::count_kept const count{{layer.on_device()}, as_input(layer.rung), layer.kept};
        launch(on, count, count.blocks());
        read_back(on, layer.first.data_handle(), first.data(), static_cast<index_t>(first.size() * sizeof(index_t)));
        kept = first.back();
    }

    [[nodiscard]] rung_counts tokens(index_t h) const
    {
        rung_counts counts{};
        for (index_t r = 0; r + 1 < begins; ++r)
        {
            counts[static_cast<std::size_t>(r)] = begin(h, r + 1) - begin(h, r);
        }
        return counts;
    }

private:
    [[nodiscard]] index_t begin(index_t h, index_t r) const { return first[static_cast<std::size_t>(h * begins + r)]; }
};

} // namespace mdkv::gpu::detail
