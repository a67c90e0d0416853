/// \file pages.cuh: keys and values that an engine keeps in pages, brought together for the stages, which read rows at one stride.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/gpu/launch.cuh>

#include <cstdint>

namespace mdkv::gpu
{

/// One sequence's keys, or values, of one layer in pages: token t is row t % page_tokens of page table[t / page_tokens].
/// Every order of the dimensions inside a page is a choice of strides, in elements: [page, token, H, D], [page, H, token, D],
/// keys and values side by side in one page or in one row.
template <element T>
struct paged_rows
{
    T const* data             = nullptr;
    std::int32_t const* table = nullptr; // [ceil(N / page_tokens)]  device memory
    index_t pages             = 0;       ///< pages there are: what the table may name
    index_t page_tokens       = 0;
    index_t page_stride       = 0;
    index_t token_stride      = 0;
    index_t head_stride       = 0;
};

namespace kernels
{

template <element T>
struct gather_page_rows
{
    static constexpr char const* name  = "gather_page_rows";
    static constexpr int threads       = 256;
    static constexpr index_t rows_each = threads / device::warp_size; ///< of a block

    paged_rows<T> from;
    out_view<T, 3, backend> to; // [H, N, D]

    __device__ void operator()() const
    {
        index_t const row = device::block() * rows_each + device::warp();
        if (row >= to.extent(0) * to.extent(1)) { return; }
        index_t const h    = row / to.extent(1);
        index_t const t    = row % to.extent(1);
        index_t const page = from.table[t / from.page_tokens];
        bool const there   = page >= 0 && page < from.pages;
        T const* const x   = there ? from.data + page * from.page_stride + t % from.page_tokens * from.token_stride
                                       + h * from.head_stride
                                   : nullptr;
        for (index_t d = device::lane(); d < to.extent(2); d += device::warp_size)
        {
            to(h, t, d) = there ? x[d] : narrow<T>(0.0F);
        }
    }
};

} // namespace kernels

/// Copies the rows of `to.extent(1)` tokens out of their pages.
///
/// \param on          backend: stream
/// \param[in]  from   pages and their table; an entry that names no page gives rows of zeros
/// \param[out] to     [H, N, D]
/// \cost   reads and writes every row once; no scratch
/// \sync   asynchronous on `on.stream`; fit for graph capture
/// \order  deterministic
/// \throws invalid_argument   a size or stride is negative, page_tokens is 0, data or table is null or
///                            not aligned, `to` overlaps itself, the table or the workspace
/// \throws cuda_error         the launch failed
/// \see    tests/gpu/pages.cu
template <element T>
void gather_pages(backend const& on, paged_rows<T> const& from, out_view<T, 3, backend> to)
{
    mdkv::detail::check arguments{on, "gather_pages"};
    expects(from.page_tokens >= 1, "gather_pages: page_tokens is ", from.page_tokens, "; it must be at least 1");
    expects(from.pages >= 0, "gather_pages: pages is ", from.pages, "; it must not be negative");
    expects(from.page_stride >= 0 && from.token_stride >= 0 && from.head_stride >= 0,
        "gather_pages: strides of pages, tokens and heads are ", from.page_stride, ", ", from.token_stride, " and ",
        from.head_stride, "; they must not be negative");
    index_t const entries = (to.extent(1) + from.page_tokens - 1) / from.page_tokens;
    arguments.bytes("table", from.table, entries * index_t{sizeof(std::int32_t)}, false)
        .out("to", to, {to.extent(0), to.extent(1), to.extent(2)}, "H,N,D");
    if (mdkv::detail::dry_run(on) || to.extent(0) * to.extent(1) * to.extent(2) == 0) { return; }
    expects(from.data != nullptr, "gather_pages: data is null");
    auto const aligned = [](void const* data, std::uintptr_t bytes) {
        return reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
    };
    expects(aligned(from.data, sizeof(T)), "gather_pages: data is not aligned to its element of ", index_t{sizeof(T)},
        " bytes");
    expects(aligned(from.table, sizeof(std::int32_t)), "gather_pages: table is not aligned to its entries of 4 bytes");
    using kernel = kernels::gather_page_rows<T>;
    launch(on, kernel{from, to}, (to.extent(0) * to.extent(1) + kernel::rows_each - 1) / kernel::rows_each);
}

} // namespace mdkv::gpu
