/// \file project.hpp: contracts of project and reconstruct: vectors to their leading coordinates in a basis, and back (arXiv 2603.20616, section 4.1).
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/contract.hpp>

namespace mdkv
{

/// The leading r coordinates of every vector in its head's basis; what pack stores, for engines with a layout of their own.
///
/// \param on                backend: threads, scratch
/// \param[in]  vectors      [H, N, D]  keys or values, any element type T
/// \param[in]  basis        [H, D, D]  orthonormal rows, as fit_basis writes them
/// \param[out] coordinates  [H, N, r]  1 <= r <= D, any element type U; rounded to nearest even
/// \cost   O(H*N*D*r) multiply-adds; vectors read once; scratch O(H*D*r + threads*D)
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument, insufficient_workspace   nothing was changed
/// \see    tests/project.cpp
template <backend B, element T, element U>
void project(B const& on, in_view<T, 3, B> vectors, in_view<float, 3, B> basis, out_view<U, 3, B> coordinates)
{
    static_assert(
        requires { project_impl(on, vectors, basis, coordinates); }, MDKV_DETAIL_NO_IMPLEMENTATION(project, project));
    bool const dry      = detail::dry_run(on);
    index_t const heads = vectors.extent(0);
    index_t const dim   = vectors.extent(2);
    index_t const kept  = coordinates.extent(2);
    expects(heads == 0 || (kept >= 1 && kept <= dim), "project: coordinates [H, N, r] has r = ", kept,
        "; it must lie in [1, D = ", dim, "]");
    detail::argument const x{"project", "vectors", vectors};
    detail::argument const u{"project", "basis", basis};
    detail::argument const c{"project", "coordinates", coordinates};
    x.data(dry).apart_from_scratch(on);
    u.shape({heads, dim, dim}, "H,D,D").data(dry).aligned().apart_from_scratch(on);
    c.shape({heads, vectors.extent(1), kept}, "H,N,r")
        .data(dry)
        .aligned()
        .unique()
        .apart_from(x)
        .apart_from(u)
        .apart_from_scratch(on);
    project_impl(on, vectors, basis, coordinates);
}

/// The vectors that coordinates stand for: the inverse of project at r = D, its best approximation in the head's
/// subspace below. attend never does this; it serves inspection and engines that must hand out plain keys and values.
///
/// \param on               backend: threads, scratch
/// \param[in]  coordinates [H, N, r]  1 <= r <= D, any element type U
/// \param[in]  basis       [H, D, D]
/// \param[out] vectors     [H, N, D]  any element type T; rounded to nearest even
/// \cost   O(H*N*D*r) multiply-adds; coordinates read once; scratch O(H*D*r + threads*D)
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument, insufficient_workspace   nothing was changed
/// \see    tests/project.cpp
template <backend B, element T, element U>
void reconstruct(B const& on, in_view<U, 3, B> coordinates, in_view<float, 3, B> basis, out_view<T, 3, B> vectors)
{
    static_assert(
        requires { reconstruct_impl(on, coordinates, basis, vectors); },
        MDKV_DETAIL_NO_IMPLEMENTATION(project, reconstruct));
    bool const dry      = detail::dry_run(on);
    index_t const heads = coordinates.extent(0);
    index_t const kept  = coordinates.extent(2);
    index_t const dim   = vectors.extent(2);
    expects(heads == 0 || (kept >= 1 && kept <= dim), "reconstruct: coordinates [H, N, r] has r = ", kept,
        "; it must lie in [1, D = ", dim, "]");
    detail::argument const c{"reconstruct", "coordinates", coordinates};
    detail::argument const u{"reconstruct", "basis", basis};
    detail::argument const x{"reconstruct", "vectors", vectors};
    c.data(dry).apart_from_scratch(on);
    u.shape({heads, dim, dim}, "H,D,D").data(dry).aligned().apart_from_scratch(on);
    x.shape({heads, coordinates.extent(1), dim}, "H,N,D")
        .data(dry)
        .aligned()
        .unique()
        .apart_from(c)
        .apart_from(u)
        .apart_from_scratch(on);
    reconstruct_impl(on, coordinates, basis, vectors);
}

} // namespace mdkv
