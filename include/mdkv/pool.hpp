/// \file pool.hpp: contract of pool: lets neighbouring tokens share their losses, so that statements are kept and not crumbs of them.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/contract.hpp>

#include <cstdint>

namespace mdkv
{

enum class pooling : std::uint8_t
{
    max, ///< the largest loss among the neighbours
    mean ///< their sum divided by the width, also at the two ends (as SnapKV's average pooling counts)
};

struct pool_options
{
    index_t width = 7; ///< neighbours that share, the token itself in their middle; odd; 1 copies
    pooling kind  = pooling::max;
};

/// Replaces each loss by that of its neighbourhood, each rung and head apart.
///
/// \param on           backend: threads
/// \param[in]  loss    [H, R, N]
/// \param[in]  options width and kind
/// \param[out] pooled  [H, R, N]  not the same memory as `loss`
/// \pre    width odd, >= 1
/// \cost   O(H*R*N*width), both views read or written once from memory; no scratch
/// \sync   returns when done (cpu)
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
