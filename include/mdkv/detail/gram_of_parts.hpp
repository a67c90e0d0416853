/// \file gram_of_parts.hpp: the job that both backends end Gram matrices with.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/team.hpp>

namespace mdkv::inline MDKV_MACHINE::detail
{

/// Adds the parts of a head, one after another, to both triangles of its Gram matrix. An item is a row of a head.
template <space S>
struct gram_of_parts
{
    static constexpr char const* name = "gram_of_parts";
    static constexpr int threads      = 128;

    double const* sums; // [H, parts, D, D]  on and above the diagonal
    index_t parts;
    view<double, 3, S> gram;

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const dim  = gram.extent(1);
        index_t const head = item / dim;
        index_t const i    = item % dim;
        for (index_t j = i + t.rank(); j < dim; j += t.size())
        {
            double total = 0;
            for (index_t part = 0; part < parts; ++part) { total += sums[((head * parts + part) * dim + i) * dim + j]; }
            gram(head, i, j) += total;
            if (i != j) { gram(head, j, i) += total; }
        }
    }
};

} // namespace mdkv::inline MDKV_MACHINE::detail
