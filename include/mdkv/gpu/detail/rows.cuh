/// \file rows.cuh: rows of elements, and whether pieces of 16 bytes can be read from them.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>

#include <cstdint>

namespace mdkv::inline MDKV_MACHINE::gpu::kernels
{

/// Elements of a piece of 16 bytes.
template <element T>
inline constexpr int piece_of = 16 / static_cast<int>(sizeof(T));

/// A layer's tokens.
template <element T>
struct token_rows
{
    in_view<T, 3, backend> view; // [H, N, D]
    bool wide;                   ///< every row begins at a multiple of 16 bytes

    explicit token_rows(in_view<T, 3, backend> const& tokens)
        : view{tokens}
        , wide{reinterpret_cast<std::uintptr_t>(tokens.data_handle()) % 16 == 0 && even(0) && even(1)}
    {}

private:
    [[nodiscard]] bool even(std::size_t i) const { return view.extent(i) <= 1 || view.stride(i) % piece_of<T> == 0; }
};

} // namespace mdkv::inline MDKV_MACHINE::gpu::kernels
