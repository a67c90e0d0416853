/// \file pool.hpp: contract of pool: lets neighbouring tokens share their losses, so that statements are kept and not crumbs of them.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/contract.hpp>

#include <cstdint>

namespace mdkv
{

/// What a token gets. Adaptive: how far a statement reaches follows from how high its peak stands, not from the width, which
/// is the distance between the two places where half of a peak is left.
enum class pooling : std::uint8_t
{
    max,     ///< the largest loss among the neighbours
    mean,    ///< their sum divided by the width, also at the two ends (as SnapKV's average pooling counts)
    adaptive ///< the largest of the row's losses, the far ones fading: max over j of loss_j * 2^(-2 |i - j| / width)
};

struct pool_options
{
    index_t width = 7; ///< odd. max, mean: neighbours that share, the token itself in their middle; 1 copies.
                       ///< adaptive: 1 leaves a quarter from token to token
    pooling kind = pooling::max;

    /// Pooling so would change nothing.
    [[nodiscard]] constexpr bool copies() const noexcept { return width == 1 && kind != pooling::adaptive; }
};

/// Replaces each loss by that of its neighbourhood, each rung and head apart.
///
/// \param on           backend: threads
/// \param[in]  loss    [H, R, N]
/// \param[in]  options width and kind
/// \param[out] pooled  [H, R, N]  not the same memory as `loss`
/// \pre    width odd, >= 1; a NaN makes all that it has a part in NaN: its neighbours, or with `adaptive` its whole row,
///         over which infinity spreads too
/// \cost   adaptive: O(H*R*N); max, mean: O(H*R*N*log(width)) up to a width of 1,024, O(H*R*N*width) beyond; no scratch
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument   a shape disagrees, the width is even or below 1, the views overlap (nothing was changed)
/// \see    tests/pool.cpp; docs/decisions.md says why the default is not the paper's literal algorithm
template <backend B>
void pool(B const& on, in_view<float, 3, B> loss, pool_options options, out_view<float, 3, B> pooled)
{
    static_assert(
        requires { pool_impl(on, loss, options, pooled); }, MDKV_DETAIL_NO_IMPLEMENTATION(pool, pool));
    bool const dry = detail::dry_run(on);
    expects(options.width >= 1 && options.width % 2 == 1, "pool: width is ", options.width,
        "; it must be odd and at least 1");
    detail::argument const l{"pool", "loss", loss};
    detail::argument const p{"pool", "pooled", pooled};
    l.data(dry).aligned();
    p.shape({loss.extent(0), loss.extent(1), loss.extent(2)}, "H,R,N").data(dry).aligned().unique().apart_from(l);
    pool_impl(on, loss, options, pooled);
}

} // namespace mdkv
