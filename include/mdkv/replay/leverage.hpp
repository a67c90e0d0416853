/// \file leverage.hpp: add_leverage: how far each token's key stands out among its head's (arXiv 2507.08143).
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/leverage.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/stages/basis.hpp>

namespace mdkv::inline MDKV_MACHINE
{

/// Adds to each token's sum the statistical leverage of its key among its head's, k'(K'K + lambda I)^-1 k, over the heads:
/// near 1 if a key has a direction for itself, small if it shares its directions with many. lambda is a thousandth
/// of the mean energy of a direction. Summed over all layers, it is large for tokens unlike the rest of a prompt:
/// `balance_options::leverages`.
///
/// \param on             backend: threads, scratch
/// \param[in]     keys   [H, N, D]  keys of one layer, as cached (after position encoding)
/// \param[in,out] sums   [N]        start from zeros
/// \pre    keys are finite and their squares in float's range; other keys make all sums NaN
/// \cost   O(H*N*D*D + H*D^3), keys read twice; scratch O(H*D*D)
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads; products in float, sums in double
/// \throws invalid_argument        a shape disagrees, an output overlaps
/// \throws insufficient_workspace  naming the size needed; nothing was changed in either case
/// \see    tests/unit/replay/leverage.cpp, docs/numerics.md
template <backend B, element T>
void add_leverage(B const& on, in_view<T, 3, B> keys, out_view<float, 1, B> sums)
{
    index_t const heads = keys.extent(0);
    index_t const dim   = keys.extent(2);
    expects(heads == 0 || dim >= 1, "add_leverage: keys [H, N, D] has D = 0");
    detail::check{on, "add_leverage"}
        .rows("keys", keys, {heads, keys.extent(1), dim}, "H,N,D")
        .out("sums", sums, {keys.extent(1)}, "N");
    auto const body = [&](B const& with) __attribute__((noinline)) // called twice
    {
        workspace::frame frame{*with.scratch, "add_leverage"};
        auto const gram     = detail::scratch_view<double>(with, frame, heads, dim, dim);
        auto const whitener = detail::scratch_view<float>(with, frame, heads, dim, dim);
        static_cast<void>(frame.ready());
        run(with, detail::fill<double>{gram.data_handle(), 0, heads * dim * dim});
        accumulate_gram(with, keys, gram);
        run(with, detail::whiten<B>{gram, whitener}, heads);
        run(with, detail::add_squares<B, T>{keys, as_input(whitener), sums});
    };
    detail::staged(on, "add_leverage", body);
}

} // namespace mdkv::inline MDKV_MACHINE
