/// \file run_side.cuh: the keys or the values of one run, token by token: where each of them lies, what a coordinate is (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/detail/stored_run.cuh>

#include <cstddef>
#include <cstdint>

namespace mdkv::gpu::kernels
{

/// The keys of a run, or its values. They begin at any address.
struct run_side
{
    std::byte const* begin;
    index_t tokens;  ///< that its tiles are laid out for
    int coordinates; ///< of a token
    int token_bytes;
    storage kind;
    bool by_token; ///< as values are: token by token; keys coordinate by coordinate

    run_side() = default;
    __device__ run_side(stored_run const& run, bool of_values)
        : begin{of_values ? run.values : run.keys}
        , tokens{run.stored}
        , coordinates{of_values ? run.value_coordinates : run.key_coordinates}
        , token_bytes{of_values ? run.value_bytes : run.key_bytes}
        , kind{run.kind}
        , by_token{of_values}
    {}

    /// Tokens in the tile of token t.
    [[nodiscard]] __device__ index_t width(index_t t) const
    {
        index_t const left = tokens - t / tile_tokens * tile_tokens;
        return left < tile_tokens ? left : index_t{tile_tokens};
    }

    /// Coordinate c of token t of a plain side, counted in elements from its beginning.
    [[nodiscard]] __device__ index_t element(index_t t, int c) const
    {
        index_t const tile = t / tile_tokens * tile_tokens;
        return by_token ? t * coordinates + c : tile * coordinates + c * width(t) + t - tile;
    }

    /// Byte j of token t of a coded side, counted from its beginning. Of each group of coordinates a token has two bytes of
    /// scale, two of minimum, then codes.
    [[nodiscard]] __device__ index_t coded_byte(index_t t, int j) const
    {
        constexpr int head   = 2 * int{sizeof(half)};
        constexpr int group  = int{quantised_group};
        auto const per       = static_cast<int>(stored_bytes(kind, quantised_group, 0));
        int const at         = j % per;
        int const left       = coordinates - j / per * group;
        int const n          = left < group ? left : group;
        int const bytes      = kind == storage::int8 ? n : (n + 1) / 2;
        index_t const w      = width(t);
        index_t const i      = t % tile_tokens;
        index_t const before = t / tile_tokens * tile_tokens * token_bytes + w * (j - at);
        if (at < head) { return before + (at / 2 * w + i) * 2 + at % 2; }
        return before + w * head + (by_token ? i * bytes + at - head : (at - head) * w + i);
    }

    /// Coordinate c of token t of a coded side: what its code stands for.
    [[nodiscard]] __device__ float coded_value(index_t t, int c) const
    {
        constexpr int head  = 2 * int{sizeof(half)};
        constexpr int group = int{quantised_group};
        int const first     = c / group * static_cast<int>(stored_bytes(kind, quantised_group, 0)); // byte of the group
        int const left      = coordinates - c / group * group;
        int const n         = left < group ? left : group;
        int const half_way  = (n + 1) / 2;
        bool const upper    = kind == storage::int4 && c % group >= half_way; // the high half of a byte
        int const b         = upper ? c % group - half_way : c % group;
        auto const both     = static_cast<std::uint8_t>(begin[coded_byte(t, first + head + b)]);
        int const code      = kind == storage::int8 ? both : upper ? both >> 4 : both & 15;
        float const scale   = widen(element_at<half>(begin + coded_byte(t, first), 0));
        float const minimum = widen(element_at<half>(begin + coded_byte(t, first + int{sizeof(half)}), 0));
        return minimum + scale * static_cast<float>(code);
    }
};

/// A token where it is stored.
struct stored_token
{
    stored_run run;
    index_t place;    ///< in the run
    std::size_t rung; ///< of the cache; their number, or one more, where the token is exact
};

/// Token `slot` of head h, counted over the runs by rung, the exact run and the tail, where it must be one.
template <element T>
[[nodiscard]] __device__ inline stored_token token_at(
    cache_view<T, space::device> const& cache, index_t h, index_t slot)
{
    std::size_t const last = most_runs(cache.layout) - 1;
    for (std::size_t i = 0; i < last; ++i)
    {
        stored_run const run = run_of(cache, h, i);
        if (slot < run.tokens) { return {run, slot, i}; }
        slot -= run.tokens;
    }
    return {run_of(cache, h, last), slot, last};
}

} // namespace mdkv::gpu::kernels
