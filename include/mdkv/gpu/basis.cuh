/// \file basis.cuh: Gram matrices and the bases made of them on the GPU (arXiv 2603.20616, section 4.1).
#pragma once

#include <mdkv/stages/basis.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/eigenvectors.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/gram.cuh>
#include <mdkv/gpu/launch.cuh>

// Nothing here reads the device's data on the host, so a non-finite Gram matrix is not refused: its head gets a basis of
// unit vectors and energies that are NaN.

namespace mdkv::inline MDKV_MACHINE::gpu
{

/// The backend's part of accumulate_gram.
template <element T>
void accumulate_gram_impl(backend const& on, in_view<T, 3, backend> samples, out_view<double, 3, backend> gram)
{
    index_t const heads = samples.extent(0);
    index_t const dim   = samples.extent(2);
    kernels::gram_cut const cut{samples.extent(1), dim};
    workspace::frame frame{*on.scratch, "accumulate_gram"};
    double* const sums = frame.take<double>(checked_multiply(heads * cut.parts, dim * dim));
    if (!frame.ready() || samples.empty()) { return; }
    launch(on, kernels::gram_products<T>{kernels::token_rows<T>{samples}, sums, cut}, heads * cut.parts * cut.tiles);
    run(on, mdkv::detail::gram_of_parts<space::device>{sums, cut.parts, gram}, heads * dim);
}

/// The backend's part of eigenbasis.
inline void eigenbasis_impl(backend const& on, in_view<double, 3, backend> gram, out_view<float, 3, backend> basis,
    out_view<float, 2, backend> energy)
{
    if (gram.extent(2) == 0) { return; }
    run(on, mdkv::detail::eigenvectors<space::device>{gram, basis, energy}, gram.extent(0));
}

} // namespace mdkv::inline MDKV_MACHINE::gpu
