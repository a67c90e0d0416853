/// \file basis.hpp: contract of fit_basis: the PCA basis of each head, directions of most energy first (arXiv 2603.20616, section 4.1).
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/eigenvectors.hpp>
#include <mdkv/detail/panel.hpp>
#include <mdkv/detail/team.hpp>

namespace MDKV_NAMESPACE
{

namespace detail
{

/// The body of accumulate_gram.
template <backend B, element T>
void add_gram(B const& on, in_view<T, 3, B> samples, out_view<double, 3, B> gram)
{
    index_t const dim = samples.extent(2);
    workspace::frame frame{*on.scratch};
    auto const widened = scratch_view<float>(on, frame, samples.extent(0), panel_depth, dim);
    for_pieces(samples.extent(1), [&](index_t at, index_t count) {
        auto const part = slice<1>(samples, at, count);
        auto const rows = slice<1>(widened, 0, count);
        run(on, convert_rows<B, T>{part, 1.0F, rows});
        multiply<B, T, double>(
            on, {as_input(rows), true}, {part, true}, {.to = gram, .add = true, .mirror = true}, {}, true);
    });
}

} // namespace detail

/// Adds every head's uncentred second moment X'X to `gram`: the chunks of a prompt sum to the whole prompt.
///
/// \param on               backend: threads, scratch
/// \param[in]     samples  [H, S, D]  keys (after position encoding) or values of one layer; S may be 0
/// \param[in,out] gram     [H, D, D]  sum over the samples seen so far, both triangles; start from zeros
/// \pre    D >= 1; samples are finite (a NaN or infinity spoils every direction; see `expects_finite`)
/// \cost   O(H*S*D*D) multiply-adds, samples read once; scratch O(H*D*D)
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads; float products, double sums over blocks
/// \throws invalid_argument        a shape disagrees, an output overlaps (nothing was changed)
/// \see    tests/unit/stages/basis.cpp, docs/numerics.md
template <backend B, element T>
void accumulate_gram(B const& on, in_view<T, 3, B> samples, out_view<double, 3, B> gram)
{
    index_t const heads = samples.extent(0);
    index_t const dim   = samples.extent(2);
    expects(heads == 0 || dim >= 1, "accumulate_gram: samples [H, S, D] has D = 0");
    detail::checks{on, "accumulate_gram"}
        .rows("samples", samples, {heads, samples.extent(1), dim}, "H,S,D")
        .out("gram", gram, {heads, dim, dim}, "H,D,D");
    detail::add_gram(on, samples, gram);
}

/// Eigenvectors of every head's Gram matrix, strongest first.
///
/// \param on           backend
/// \param[in]  gram    [H, D, D]  symmetric, non-negative definite up to rounding
/// \param[out] basis   [H, D, D]  orthonormal rows: row i is the direction of the i-th largest energy; always complete
/// \param[out] energy  [H, D]     eigenvalues, non-increasing, clamped at 0
/// \pre    gram is finite
/// \cost   O(H*D^3); scratch O(H*D*D)
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads; signs of directions are arbitrary
/// \throws invalid_argument   a shape disagrees, an output overlaps, or a Gram matrix is not finite (before anything is
///                            changed), naming the head. The gpu does not refuse the last: it gives that head unit vectors and
///                            energies that are NaN.
/// \see    tests/unit/stages/basis.cpp, docs/numerics.md
template <backend B>
void eigenbasis(B const& on, in_view<double, 3, B> gram, out_view<float, 3, B> basis, out_view<float, 2, B> energy)
{
    index_t const heads = gram.extent(0);
    index_t const dim   = gram.extent(2);
    expects(heads == 0 || dim >= 1, "eigenbasis: gram [H, D, D] has D = 0");
    detail::checks{on, "eigenbasis"}
        .in("gram", gram, {heads, dim, dim}, "H,D,D")
        .out("basis", basis, {heads, dim, dim}, "H,D,D")
        .out("energy", energy, {heads, dim}, "H,D");
    detail::find_eigenbasis(on, gram, basis, energy);
}

/// The PCA basis of every head: accumulate_gram from zero, then eigenbasis.
///
/// \param on            backend: threads, scratch
/// \param[in]  samples  [H, S, D]  keys (after position encoding) or values; S < D is completed to a whole basis
/// \param[out] basis    [H, D, D]  orthonormal rows, strongest first
/// \param[out] energy   [H, D]     non-increasing sums of squares along the rows, >= 0
/// \pre    samples are finite
/// \cost   O(H*S*D*D + H*D^3), samples read once; scratch O(H*D*D)
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads; signs of directions are arbitrary
/// \throws invalid_argument        see accumulate_gram and eigenbasis
/// \see    tests/unit/stages/basis.cpp
template <backend B, element T>
void fit_basis(B const& on, in_view<T, 3, B> samples, out_view<float, 3, B> basis, out_view<float, 2, B> energy)
{
    index_t const heads = samples.extent(0);
    index_t const dim   = samples.extent(2);
    expects(heads == 0 || dim >= 1, "fit_basis: samples [H, S, D] has D = 0");
    detail::checks{on, "fit_basis"}
        .rows("samples", samples, {heads, samples.extent(1), dim}, "H,S,D")
        .out("basis", basis, {heads, dim, dim}, "H,D,D")
        .out("energy", energy, {heads, dim}, "H,D");
    workspace::frame frame{*on.scratch};
    auto const gram = detail::scratch_view<double>(on, frame, heads, dim, dim);
    run(on, detail::fill<double>{gram.data_handle(), 0, heads * dim * dim});
    detail::add_gram(on, samples, gram);
    detail::find_eigenbasis(on, as_input(gram), basis, energy);
}

} // namespace MDKV_NAMESPACE
