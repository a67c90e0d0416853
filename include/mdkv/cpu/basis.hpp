/// \file basis.hpp: Gram matrices and the bases made of them on the CPU (arXiv 2603.20616, section 4.1).
#pragma once

#include <mdkv/stages/basis.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/tile.hpp>

#include <algorithm>
#include <cstring>

namespace MDKV_NAMESPACE::cpu
{

namespace gram_sums
{

/// How a head's samples are cut: into few enough splits to afford one Gram matrix each, and enough to keep threads busy.
/// The number of splits does not depend on the number of threads, so sums do not either.
inline constexpr index_t splits      = 4;
inline constexpr index_t block_rows  = 256; // samples summed in float before they are added in double
inline constexpr index_t least_share = 512; // samples that make a split worth its own sum

/// Adds X'X of one block (upper triangle, by tiles) to sum [dim, step].
inline void add_block(float const* block, index_t samples, index_t dim, index_t step, double* sum) noexcept
{
    for (index_t i = 0; i < dim; i += tile::rows)
    {
        index_t const first = i / tile::width * tile::width; // tiles left of the diagonal are mirrored later
        for (index_t j = first; j < dim; j += tile::width)
        {
            tile::accumulators<tile::vectors> acc{};
            tile::multiply_add<tile::vectors>(block + i, 1, step, block + j, step, samples, acc);
            float products[tile::rows][tile::width];
            std::memcpy(products, acc, sizeof products);
            index_t const columns = (std::min<index_t>)(tile::width, dim - j);
            for (index_t a = 0; a < (std::min<index_t>)(tile::rows, dim - i); ++a)
            {
                double* const row = sum + (i + a) * dim + j;
                for (index_t b = 0; b < columns; ++b) { row[b] += static_cast<double>(products[a][b]); }
            }
        }
    }
}

} // namespace gram_sums

/// The backend's part of accumulate_gram.
template <element T>
void accumulate_gram_impl(backend const& on, in_view<T, 3, backend> samples, out_view<double, 3, backend> gram)
{
    index_t const heads  = samples.extent(0);
    index_t const count  = samples.extent(1);
    index_t const dim    = samples.extent(2);
    index_t const step   = tile::round_up(std::max<index_t>(dim, 1), tile::width);
    index_t const splits = std::clamp<index_t>(count / gram_sums::least_share, 1, gram_sums::splits);
    workspace::frame frame{*on.scratch, "accumulate_gram"};
    double* const sums  = frame.take<double>(checked_multiply(heads * splits, dim * dim)); // [H, splits, D, D]
    float* const blocks = frame.take<float>(on.workers(heads * splits) * (gram_sums::block_rows * step + tile::width));
    if (!frame.ready()) { return; }

    on.for_each(heads * splits, [&](index_t item, index_t worker) {
        index_t const head  = item / splits;
        index_t const split = item % splits;
        float* const block  = blocks + worker * (gram_sums::block_rows * step + tile::width); // [block_rows, step]
        double* const sum   = sums + item * dim * dim;
        std::fill_n(sum, dim * dim, 0.0);
        std::fill_n(block, gram_sums::block_rows * step + tile::width, 0.0F);
        index_t const end = count * (split + 1) / splits;
        for (index_t t = count * split / splits; t < end; t += gram_sums::block_rows)
        {
            index_t const rows = (std::min)(gram_sums::block_rows, end - t);
            for (index_t i = 0; i < rows; ++i)
            {
                tile::widen_row(samples.data_handle() + samples.offset(head, t + i, index_t{0}), block + i * step, dim);
            }
            gram_sums::add_block(block, rows, dim, step, sum);
        }
    });
    run(on, mdkv::detail::gram_of_splits<space::host>{sums, splits, gram}, heads * dim);
}

} // namespace MDKV_NAMESPACE::cpu
