/// \file rows.cuh: rows of elements in pieces of 16 bytes: whether they lie that way.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>

#include <cstddef>
#include <cstdint>

namespace mdkv::gpu::kernels
{

/// Elements of a piece.
template <element T>
inline constexpr int piece_of = 16 / static_cast<int>(sizeof(T));

/// True when every row begins at a multiple of `bytes`.
template <class View>
[[nodiscard]] bool rows_begin_at(View const& rows, index_t bytes)
{
    constexpr std::size_t rank = View::rank();
    constexpr index_t size     = sizeof(typename View::element_type);
    bool even = reinterpret_cast<std::uintptr_t>(rows.data_handle()) % static_cast<std::uintptr_t>(bytes) == 0;
    for (std::size_t i = 0; i + 1 < rank; ++i)
    {
        even = even && (rows.extent(i) <= 1 || rows.stride(i) * size % bytes == 0);
    }
    return even;
}

} // namespace mdkv::gpu::kernels
