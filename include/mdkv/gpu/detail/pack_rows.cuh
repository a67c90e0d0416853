/// \file pack_rows.cuh: where the rows of tokens to pack lie, how they are read, and how what was made of them is written.
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/detail/rows.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <vector_types.h>

namespace mdkv::gpu::kernels
{

/// One call of pack.
template <element T>
struct packing
{
    in_view<T, 3, backend> keys;            // [H, N, D]
    in_view<T, 3, backend> values;          // [H, N, Dv]
    in_view<T, 3, backend> window_keys;     // [H, W, D]
    in_view<T, 3, backend> window_values;   // [H, W, Dv]
    in_view<float, 3, backend> key_basis;   // [H, D, D]
    in_view<float, 3, backend> query_basis; // [H, D, D]
    in_view<float, 3, backend> value_basis; // [H, Dv, Dv]
    std::int32_t const* positions;          // [H, N]    by rung, ascending
    index_t const* first;                   // [H, R+1]  where each rung's positions begin
    bool vector_keys;                       ///< every row of keys and window_keys is whole pieces of 16 bytes
    bool vector_values;
    cache_view<T, space::device> cache;

    /// Position of token i of head h at rung r.
    [[nodiscard]] __device__ index_t position(index_t h, std::size_t r, index_t i) const
    {
        index_t const begin = first[h * (static_cast<index_t>(cache.layout.rungs) + 1) + static_cast<index_t>(r)];
        return positions[h * keys.extent(1) + begin + i];
    }
};

template <class View>
[[nodiscard]] __device__ inline auto const* row_of(View const& view, index_t h, index_t t)
{
    return view.data_handle() + view.mapping()(h, t, 0);
}

/// Whether every row is whole pieces of 16 bytes.
template <element T>
[[nodiscard]] bool whole_pieces(in_view<T, 3, backend> rows)
{
    return rows_begin_at(rows, 16) && rows.extent(2) % piece_of<T> == 0;
}

/// Writes a value at any address: what precedes it in the arena may end anywhere.
template <class T>
__device__ inline void store_at(std::byte* to, T value)
{
    if (reinterpret_cast<std::uintptr_t>(to) % alignof(T) == 0)
    {
        *reinterpret_cast<T*>(to) = value;
        return;
    }
    std::byte bytes[sizeof(T)];
    memcpy(bytes, &value, sizeof(T));
    for (std::size_t i = 0; i < sizeof(T); ++i) { to[i] = bytes[i]; }
}

/// Pieces of one size that a block has made in shared memory, one after another, and where they belong: piece k holds
/// `tokens_each` tokens, the last one those that are left, of `bytes` each, behind `before` bytes for each of them.
struct stored_pieces
{
    std::byte const* from; // shared
    std::byte* run;        // global, from the first of these tokens on
    index_t token_bytes;   ///< of the run
    index_t before;        ///< of a token, in the same tile
    int bytes;             ///< of a token, here
    int tokens;
    int tokens_each;

    /// A warp takes a piece.
    template <class Word>
    __device__ void write_words() const
    {
        int const warps = device::threads() / device::warp_size;
        for (int first = device::warp() * tokens_each; first < tokens; first += warps * tokens_each)
        {
            int const left        = tokens - first;
            int const width       = left < tokens_each ? left : tokens_each;
            std::byte* const to   = run + first * token_bytes + width * before;
            auto* const words     = reinterpret_cast<Word*>(to);
            auto const* const own = reinterpret_cast<Word const*>(from + first * bytes);
            for (int i = device::lane(); i < width * bytes / int{sizeof(Word)}; i += device::warp_size)
            {
                words[i] = own[i];
            }
        }
    }

    /// In the largest words that all addresses and sizes are multiples of.
    __device__ void write() const
    {
        int const last     = tokens % tokens_each; // a narrow one's tokens
        index_t const size = tokens_each * token_bytes | tokens_each * before | last * before;
        auto const common  = reinterpret_cast<std::uintptr_t>(run) | static_cast<std::uintptr_t>(size)
                            | static_cast<std::uintptr_t>(tokens_each * bytes | last * bytes);
        if (common % 16 == 0) { write_words<uint4>(); }
        else if (common % 4 == 0) { write_words<std::uint32_t>(); }
        else if (common % 2 == 0) { write_words<std::uint16_t>(); }
        else { write_words<std::byte>(); }
    }
};

} // namespace mdkv::gpu::kernels
