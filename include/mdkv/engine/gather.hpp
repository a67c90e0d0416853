/// \file gather.hpp: gather_pages: keys and values that an engine keeps in pages or slots, brought together for the stages, which read rows at one stride.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/team.hpp>

namespace MDKV_NAMESPACE
{

namespace detail
{

/// Copies tokens out of their pages. An item is a token.
template <backend B, element T>
struct gather_page_rows
{
    static constexpr char const* name = "gather_pages";

    in_view<T, 4, B> pages;            // [P, page_tokens, H, D]
    in_view<std::int32_t, 1, B> table; // [ceil(N / page_tokens)]
    out_view<T, 3, B> to;              // [H, N, D]

    MDKV_HD void operator()(team auto const& t, index_t token) const
    {
        index_t const page  = table(token / pages.extent(1));
        bool const in_range = page >= 0 && page < pages.extent(0);
        index_t const dim   = to.extent(2); // read once: elements may alias it
        auto const share    = share_rows(t, dim);
        for (index_t h = share.row; h < to.extent(0); h += share.rows)
        {
            T const* const from = in_range ? pages.row(page, token % pages.extent(1), h) : nullptr;
            T* const row        = to.row(h, token);
            for (index_t d = share.column; d < dim; d += t.size()) { row[d] = in_range ? load_at<T>(from + d) : T{}; }
        }
    }
};

} // namespace detail

/// Copies the rows of `to.extent(1)` tokens out of their pages: token t is row t % page_tokens of page
/// table[t / page_tokens]. With page_tokens = 1 the table lists the tokens' slots, or cells, in any order.
///
/// \param on          backend: threads or stream
/// \param[in]  pages  [P, page_tokens, H, D]  one layer's keys, or values. Strides give every order of the dimensions inside a
///                    page: [page, token, H, D], [page, H, token, D], keys and values side by side in one page or in one row
/// \param[in]  table  [ceil(N / page_tokens)]  the pages of one sequence; an entry that names no page gives rows of zeros
/// \param[out] to     [H, N, D]
/// \cost   reads and writes every row once; no scratch, no allocation
/// \sync   returns when done (cpu); enqueued on the stream, fit for graph capture (gpu)
/// \order  deterministic
/// \throws invalid_argument   a shape disagrees, page_tokens is 0, memory is null or not aligned, `to` overlaps itself,
///                            an input or the workspace
/// \see    tests/unit/engine/gather.cpp
template <backend B, element T>
void gather_pages(B const& on, in_view<T, 4, B> pages, in_view<std::int32_t, 1, B> table, out_view<T, 3, B> to)
{
    index_t const page_tokens = pages.extent(1);
    expects(page_tokens >= 1, "gather_pages: pages [P, page_tokens, H, D] has page_tokens = 0");
    index_t const heads  = to.extent(0);
    index_t const tokens = to.extent(1);
    index_t const dim    = to.extent(2);
    detail::checks{on, "gather_pages"}
        .rows("pages", pages, {pages.extent(0), page_tokens, heads, dim}, "P,page_tokens,H,D")
        .in("table", table, {(tokens + page_tokens - 1) / page_tokens}, "pages of N")
        .out("to", to, {heads, tokens, dim}, "H,N,D");
    run(on, detail::gather_page_rows<B, T>{pages, table, to}, heads * dim == 0 ? 0 : tokens);
}

} // namespace MDKV_NAMESPACE
