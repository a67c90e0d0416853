/// \file basis.hpp: contract of fit_basis: the head-wise PCA basis that makes leading coordinates matter most (arXiv 2603.20616, section 4.1).
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/contract.hpp>

namespace mdkv
{

/// Adds every head's uncentred second moment X'X to `gram`, so that chunks of a prompt add up to the whole of it.
///
/// \param on               backend: threads, scratch
/// \param[in]     samples  [H, S, D]  keys (after position encoding) or values of one layer; S may be 0
/// \param[in,out] gram     [H, D, D]  sum over the samples seen so far, both triangles; start from zeros
/// \pre    D >= 1; samples are finite (a NaN or infinity spoils every direction; see `expects_finite`)
/// \cost   O(H*S*D*D) multiply-adds, samples read once; scratch O(H*D*D)
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads; float products, double sums over blocks
/// \throws invalid_argument        a shape disagrees, an output overlaps (nothing was changed)
/// \throws insufficient_workspace  naming the size needed
/// \see    tests/basis.cpp, docs/numerics.md
template <backend B, element T>
void accumulate_gram(B const& on, in_view<T, 3, B> samples, out_view<double, 3, B> gram)
{
    static_assert(
        requires { accumulate_gram_impl(on, samples, gram); }, MDKV_DETAIL_NO_IMPLEMENTATION(basis, accumulate_gram));
    index_t const heads = samples.extent(0);
    index_t const dim   = samples.extent(2);
    bool const dry      = detail::dry_run(on);
    expects(heads == 0 || dim >= 1, "accumulate_gram: samples [H, S, D] has D = 0");
    detail::argument const x{"accumulate_gram", "samples", samples};
    detail::argument const g{"accumulate_gram", "gram", gram};
    x.data(dry).apart_from_scratch(on);
    g.shape({heads, dim, dim}, "HDD").data(dry).aligned().unique().apart_from(x).apart_from_scratch(on);
    accumulate_gram_impl(on, samples, gram);
}

/// Eigenvectors of every head's Gram matrix, strongest first.
///
/// \param on           backend
/// \param[in]  gram    [H, D, D]  symmetric, non-negative definite up to rounding
/// \param[out] basis   [H, D, D]  orthonormal rows: row i is the direction of the i-th largest energy; always complete
/// \param[out] energy  [H, D]     eigenvalues, non-increasing, clamped at 0
/// \pre    gram is finite
/// \cost   O(H*D^3); allocates O(D*D) per head through the linear algebra library, the only stage that allocates
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads; signs of directions are arbitrary
/// \throws invalid_argument   a shape disagrees, an output overlaps, or a Gram matrix is not finite (naming the head;
///                            gpu: that head's energies are NaN)
/// \throws std::bad_alloc     the linear algebra library could not allocate
/// \see    tests/basis.cpp
template <backend B>
void eigenbasis(B const& on, in_view<double, 3, B> gram, out_view<float, 3, B> basis, out_view<float, 2, B> energy)
{
    static_assert(
        requires { eigenbasis_impl(on, gram, basis, energy); }, MDKV_DETAIL_NO_IMPLEMENTATION(basis, eigenbasis));
    index_t const heads = gram.extent(0);
    index_t const dim   = gram.extent(2);
    bool const dry      = detail::dry_run(on);
    detail::argument const g{"eigenbasis", "gram", gram};
    detail::argument const u{"eigenbasis", "basis", basis};
    detail::argument const e{"eigenbasis", "energy", energy};
    g.shape({heads, dim, dim}, "HDD").data(dry).aligned();
    u.shape({heads, dim, dim}, "HDD").data(dry).aligned().unique().apart_from(g);
    e.shape({heads, dim}, "HD").data(dry).aligned().unique().apart_from(g).apart_from(u);
    eigenbasis_impl(on, gram, basis, energy);
}

/// The coordinates that keys are stored in and queries are brought to: (row i of `of_keys` . k) and (row i of `of_queries`
/// . q), such that over all D rows the products of the two sum up to q . k. An orthonormal basis is its own partner.
template <backend B>
struct key_bases
{
    in_view<float, 3, B> of_keys;    // [H, D, D]
    in_view<float, 3, B> of_queries; // [H, D, D]

    key_bases(in_view<float, 3, B> orthonormal) // implicit: fit_basis's result serves both
        : of_keys{orthonormal}
        , of_queries{orthonormal}
    {}
    key_bases(in_view<float, 3, B> keys, in_view<float, 3, B> queries)
        : of_keys{keys}
        , of_queries{queries}
    {}
};

/// The PCA basis of every head: accumulate_gram from zero, then eigenbasis.
///
/// \param on            backend: threads, scratch
/// \param[in]  samples  [H, S, D]  keys (after position encoding) or values; S < D is completed to a whole basis
/// \param[out] basis    [H, D, D]  orthonormal rows, strongest first
/// \param[out] energy   [H, D]     non-increasing sums of squares along the rows, >= 0
/// \pre    samples are finite
/// \cost   O(H*S*D*D + H*D^3), samples read once; scratch O(H*D*D); allocates as eigenbasis does
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads; signs of directions are arbitrary
/// \throws invalid_argument, insufficient_workspace, std::bad_alloc   as its two parts
/// \see    tests/basis.cpp
template <backend B, element T>
void fit_basis(B const& on, in_view<T, 3, B> samples, out_view<float, 3, B> basis, out_view<float, 2, B> energy)
{
    static_assert(
        requires { fit_basis_impl(on, samples, basis, energy); }, MDKV_DETAIL_NO_IMPLEMENTATION(basis, fit_basis));
    index_t const heads = samples.extent(0);
    index_t const dim   = samples.extent(2);
    bool const dry      = detail::dry_run(on);
    expects(heads == 0 || dim >= 1, "fit_basis: samples [H, S, D] has D = 0");
    detail::argument const x{"fit_basis", "samples", samples};
    detail::argument const u{"fit_basis", "basis", basis};
    detail::argument const e{"fit_basis", "energy", energy};
    x.data(dry).apart_from_scratch(on);
    u.shape({heads, dim, dim}, "HDD").data(dry).aligned().unique().apart_from(x).apart_from_scratch(on);
    e.shape({heads, dim}, "HD").data(dry).aligned().unique().apart_from(x).apart_from(u).apart_from_scratch(on);
    fit_basis_impl(on, samples, basis, energy);
}

/// A basis for keys that minds the queries: leading coordinates are those in which q . k has most of its energy. With
/// C_k = K'K / N, C_q = Q'Q / (G*Q) + 0.05 tr(Q'Q / (G*Q))/D I, S = (C_q / c)^(1/2) and U the eigenvectors of S C_k S,
/// strongest first, keys are stored as U' S k and queries brought to U' S^(-1) q. c, the mean of C_q's diagonal, cancels in
/// q . k and keeps stored coordinates as large as keys. Of all r numbers per key, the leading r leave the least of the sum of
/// (q . k)^2, where the queries count as C_q has them. Nested like PCA, and as large in memory (prior art: KQ-SVD, arXiv
/// 2512.05916). Where all queries of a head are zero, or there are none, it is the PCA basis.
///
/// \param on               backend: threads, scratch
/// \param[in]  queries     [H*G, Q, D]  after position encoding; rows of one KV head are neighbours
/// \param[in]  keys        [H, N, D]    same encoding
/// \param[out] of_keys     [H, D, D]    rows in order of their energy; not orthonormal
/// \param[out] of_queries  [H, D, D]    the inverse of of_keys, transposed
/// \param[out] energy      [H, D]       non-increasing, >= 0: mean over queries (as C_q has them) and keys of the square of
///                                      what the coordinate adds to q . k; 0 where all queries are zero
/// \pre    keys and queries are finite
/// \cost   O(H*N*D*D + H*G*Q*D*D + H*D^3), keys and queries read once; scratch O(H*D*D); allocates as eigenbasis does
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads; signs of directions are arbitrary
/// \throws invalid_argument   a shape disagrees, an output overlaps, or a Gram matrix is not finite (naming the head;
///                            gpu: that head's energies are NaN)
/// \throws insufficient_workspace, std::bad_alloc   as fit_basis
/// \see    tests/basis.cpp; `key_bases` takes both results to score and pack
template <backend B, element T>
void fit_query_aware_basis(B const& on, in_view<T, 3, B> queries, in_view<T, 3, B> keys, out_view<float, 3, B> of_keys,
    out_view<float, 3, B> of_queries, out_view<float, 2, B> energy)
{
    static_assert(
        requires { fit_query_aware_basis_impl(on, queries, keys, of_keys, of_queries, energy); },
        MDKV_DETAIL_NO_IMPLEMENTATION(basis, fit_query_aware_basis));
    index_t const heads = keys.extent(0);
    index_t const dim   = keys.extent(2);
    bool const dry      = detail::dry_run(on);
    expects(heads == 0 || dim >= 1, "fit_query_aware_basis: keys [H, N, D] has D = 0");
    expects(heads == 0 || (queries.extent(0) % heads == 0 && queries.extent(0) >= heads),
        "fit_query_aware_basis: queries [H*G, Q, D] has ", queries.extent(0), " query heads, which ", heads,
        " KV heads do not divide");
    detail::argument const q{"fit_query_aware_basis", "queries", queries};
    detail::argument const k{"fit_query_aware_basis", "keys", keys};
    detail::argument const a{"fit_query_aware_basis", "of_keys", of_keys};
    detail::argument const b{"fit_query_aware_basis", "of_queries", of_queries};
    detail::argument const e{"fit_query_aware_basis", "energy", energy};
    q.shape({queries.extent(0), queries.extent(1), dim}, "H*G,Q,D").data(dry).apart_from_scratch(on);
    k.data(dry).apart_from_scratch(on);
    a.shape({heads, dim, dim}, "H,D,D").data(dry).aligned().unique().apart_from(q).apart_from(k).apart_from_scratch(on);
    b.shape({heads, dim, dim}, "H,D,D").data(dry).aligned().unique().apart_from(q).apart_from(k).apart_from(a);
    b.apart_from_scratch(on);
    e.shape({heads, dim}, "H,D").data(dry).aligned().unique().apart_from(q).apart_from(k).apart_from(a).apart_from(b);
    e.apart_from_scratch(on);
    fit_query_aware_basis_impl(on, queries, keys, of_keys, of_queries, energy);
}

} // namespace mdkv
