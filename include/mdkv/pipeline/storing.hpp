/// \file storing.hpp: the end of a prompt's work: a layer's tokens packed at their rungs, with stand-ins and refitted values (arXiv 2603.20616, sections 4, 5).
#pragma once

#include <mdkv/prompt.hpp>

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/pipeline/measure.hpp>
#include <mdkv/pipeline/prompting.hpp>
#include <mdkv/replay/refit.hpp>
#include <mdkv/replay/stand_in.hpp>
#include <mdkv/stages/pack.hpp>

#include <algorithm>
#include <utility>

namespace MDKV_NAMESPACE::detail
{

/// The first and the end of refit's blocks for a layer of so many tokens, of which the last `queries` have queries.
template <backend B, element T, element U>
[[nodiscard]] array<index_t, 2> blocks_of(prompt_work<B, T, U> const& of, index_t l, index_t tokens, index_t queries)
{
    if (!of.settings.refitted || of.choice.all_full || queries < of.settings.refitted->span) { return {}; }
    refit_part const& part = *of.settings.refitted;
    index_t const read     = of.progress.most(l);
    index_t const end      = (std::min)(tokens - part.span, read) / part.apart;
    index_t const begun    = (read + part.span - 1) / part.apart;
    return {(std::max<index_t>)({end - part.blocks, begun - part.kept(), 0}), end};
}

/// Packs a layer at its rungs, with its stand-ins and refitted values, into an owner.
template <backend B, element T, element U, class Cache>
compress_report pack_layer(
    B const& on, prompt_work<B, T, U> const& of, index_t l, prompt_rows<B, T, U> const& rows, Cache& to)
{
    layer_shape const one          = of.stored_layer(rows.keys.extent(1));
    auto const [H, N]              = std::pair{one.heads, one.tokens};
    auto const chosen              = as_input(of.rungs_of(l, N));
    auto const keys                = slice<1>(rows.keys, 0, N);
    auto const values              = slice<1>(rows.values, 0, N);
    array<index_t, 2> const blocks = blocks_of(of, l, N + one.window, rows.queries.extent(1));
    index_t const each             = of.settings.refitted.value_or(refit_part{}).each(of.shape.group);
    index_t const fitting          = (blocks[1] - blocks[0]) * each; // queries
    bool const refits              = fitting > 0;
    workspace::frame frame{on.scratch};
    auto const made_keys   = scratch_view<float>(on, frame, H, of.choice.stand_ins, one.dims.keys);
    auto const made_values = scratch_view<float>(on, frame, H, of.choice.stand_ins, one.dims.values);
    auto const changed     = scratch_view<T>(on, frame, refits ? H : 0, N, one.dims.values);
    auto const later       = scratch_view<U>(on, frame, H * of.shape.group, refits ? fitting + each : 0, one.dims.keys);
    compress_report result;
    result.status            = of.choice.all_full ? compress_status::uncompressed : compress_status::compressed;
    result.shape             = one;
    result.budget_bytes      = of.choice.budget;
    result.window_bytes      = one.window_bytes();
    result.resident_bytes    = of.choice.arena_bytes[static_cast<std::size_t>(l)];
    result.full_bytes        = one.full_bytes();
    result.chosen.multiplier = of.choice.multiplier;
    Cache made               = to.like(of.layout(rows.keys.extent(1)), result.resident_bytes, 0);
    made.wait();
    cache_view<T, B::memory_space> const cache = made.view();
    if constexpr (B::memory_space == space::host)
    {
        for (index_t h = 0; h < H; ++h)
        {
            for (index_t i = 0; i < N; ++i) { ++result.chosen.tokens[chosen(h, i)]; }
        }
    }
    if (of.choice.stand_ins > 0)
    {
        index_t const count = (std::min)(stand_in_queries, rows.queries.extent(1));
        mdkv::stand_in(on, last<1>(rows.queries, count), keys, values, chosen, last<1>(*rows.lse, count),
            N + one.window, of.settings.stand_in(), made_keys, made_values);
    }
    auto const pack_with = [&](in_view<T, 3, B> const& stored) {
        mdkv::pack(on, keys, stored, slice<1>(rows.keys, N, one.window), slice<1>(rows.values, N, one.window),
            of.layer_of(of.key_bases, l), of.layer_of(of.value_bases, l), chosen, cache, of.layer_of(of.channels, l),
            as_input(made_keys), as_input(made_values));
    };
    pack_with(values);
    if (refits)
    {
        for (index_t b = blocks[0]; b < blocks[1]; ++b)
        {
            run(on, copy_rows<B, U>{
                        as_input(slice<1>(item_of(of.block_queries, l), of.settings.refitted->place(b) * each, each)),
                        slice<1>(later, (b - blocks[0]) * each, each)});
        }
        auto const recent  = last<1>(rows.queries, of.settings.refitted->span);
        index_t const step = of.settings.refitted->step(of.shape.group) * recent.stride(1);
        run(on, copy_rows<B, U>{
                    {recent.data_handle(), {H * of.shape.group, each, one.dims.keys}, {recent.stride(0), step, 1}},
                    slice<1>(later, fitting, each)});
        mdkv::refit(on, as_input(later), rows.keys, rows.values, chosen, cache,
            {.rows         = *of.settings.refitted,
                .first     = of.settings.refitted->first(blocks[0]),
                .stand_ins = of.choice.stand_ins,
                .encoding  = of.shape.encoding,
                .scale     = of.settings.scale},
            changed);
        pack_with(as_input(changed));
    }
    if constexpr (requires { made.fold_limit; }) // a caller's own kind of owner may have none
    {
        index_t const all = of.share(1).all;
        index_t const own = all > H ? of.choice.budget / all * H : of.choice.budget; // this rank's part
        bool const whole  = of.choice.all_full || (!of.settings.shared && all == H);
        made.fold_limit   = (std::max)(result.resident_bytes, whole ? own : 0);
    }
    to = std::move(made);
    return result;
}

} // namespace MDKV_NAMESPACE::detail
