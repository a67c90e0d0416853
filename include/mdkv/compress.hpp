/// \file compress.hpp: compress: one layer of a finished prompt in one call, as a `prompt` of that layer (arXiv 2603.20616, sections 4, 5).
#pragma once

#include <mdkv/core/budget.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/prompt.hpp>
#include <mdkv/replay/replay.hpp>

namespace MDKV_NAMESPACE
{

/// Compresses one layer of one prompt by a preset, as a `prompt` whose only layer this is. A preset that replays needs the queries
/// of all tokens; a shared budget is then the layer's own.
///
/// \param on        backend: threads or stream, scratch
/// \param[in]  rows     queries, keys, values of the prompt's N tokens, the window's at their end; Q = N if the preset replays,
///                  otherwise the last Q queries. Stand-ins need `lse`
/// \param[in]  chosen   preset
/// \param[in]  limit    limit of the layer
/// \param[out] to       see `prompt::pack`
/// \param[in]  encoding  the model's, for presets that replay
/// \return     the report; `chosen` is that of `prompt::allocate`
/// \cost   the sum of the calls; scratch O(H*R*N + H*D*D)
/// \sync   returns when done, on a GPU too: it waits for the device
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument        a shape disagrees, the budget is below the window or the cheapest rungs (naming the least
///                                 that works), or the preset replays and Q < N
/// \throws non_finite_input        naming head and row
/// \throws std::bad_alloc          and the executor's exceptions; `to` has not changed in any of these cases
/// \see    tests/unit/compress.cpp, examples/engine_hook.cpp
template <backend B, element T, element U, class Cache>
compress_report compress(B const& on, prompt_rows<B, T, U> const& rows, preset const& chosen, budget limit, Cache& to,
    rotary_encoding<B> const& encoding = {})
{
    index_t const heads       = rows.keys.extent(0);
    index_t const query_heads = rows.queries.extent(0);
    index_t const tokens      = rows.keys.extent(1);
    expects(heads == 0 || (query_heads % heads == 0 && query_heads >= heads), "compress: queries [H*G, Q, D] has ",
        query_heads, " query heads, which ", heads, " KV heads do not divide");
    expects(!chosen.replayed || rows.queries.extent(1) == tokens,
        "compress: queries [H*G, Q, D] has Q = ", rows.queries.extent(1), "; preset \"", chosen.name,
        "\" replays the queries of all ", tokens, " tokens");
    prompt_shape<B> const shape{.layers = 1,
        .heads                          = heads,
        .group                          = heads == 0 ? 1 : query_heads / heads,
        .dims                           = {rows.keys.extent(2), rows.values.extent(2)},
        .tokens                         = tokens,
        .encoding                       = encoding};
    layer_shape{heads, shape.group, tokens, 0, shape.dims, index_t{sizeof(T)}}.expects_valid("compress");
    detail::expects_rows(on, "compress", shape, rows, tokens, rows.queries.extent(1));
    prompt<B, T, U> p{on, chosen, shape};
    if (chosen.replayed) { p.read_chunk(on, 0, 0, rows); }
    p.finish_layer(on, 0, rows);
    auto const total       = p.allocate(on, limit);
    compress_report report = p.pack(on, 0, rows, to);
    report.chosen          = total;
    return report;
}

} // namespace MDKV_NAMESPACE
