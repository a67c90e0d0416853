/// \file decoding.hpp: what a decode step brings to a packed cache: queries, and tokens to append
#pragma once

#include <mdkv/append.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>

#include "support/host.hpp"
#include "support/random.hpp"

namespace support
{

/// [rows, dim]; the same for the same number of rows.
template <class U>
[[nodiscard]] tensor<U, 2> random_queries(index_t rows, index_t dim, placement how = {})
{
    source random{"queries", rows};
    tensor<U, 2> queries{{rows, dim}, how};
    for (index_t i = 0; i < rows; ++i)
    {
        for (index_t d = 0; d < dim; ++d) { queries.set(mdkv::narrow<U>(static_cast<float>(random.normal())), i, d); }
    }
    return queries;
}

template <class T>
void append_random(mdkv::cpu::cache<T>& cache, source& random, index_t count)
{
    auto const& layout = cache.layout();
    for (index_t i = 0; i < count; ++i)
    {
        tensor<float, 2> key{{layout.heads, layout.dims.keys}};
        tensor<float, 2> value{{layout.heads, layout.dims.values}};
        for (auto* x : {&key, &value})
        {
            for (index_t h = 0; h < layout.heads; ++h)
            {
                for (index_t d = 0; d < x->extent(1); ++d) { x->set(static_cast<float>(random.normal()), h, d); }
            }
        }
        run([&](mdkv::cpu::backend const& on) { append(on, key.in(), value.in(), cache.view()); });
    }
}

} // namespace support
