/// \file pool.hpp: pool: neighbouring tokens share their losses, so that whole statements are kept.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/pool.hpp>

#include <cstdint>

namespace MDKV_NAMESPACE
{

/// Rule for a token's pooled loss. Adaptive: a higher peak reaches further; the width is the distance between the two
/// distances where half of a peak is left.
enum class pooling : std::uint8_t
{
    max,  ///< the largest loss among the neighbours
    mean, ///< their sum divided by the width, also at the two ends (as SnapKV's average pooling counts)
    adaptive ///< the largest of losses that fade with distance: max over j of loss_j * 2^(-2 |i - j| / width), if |i - j| <= 8 width
};

struct pool_options
{
    index_t width = 7; ///< odd. max, mean: neighbours that share, the token itself in their middle; 1 copies.
                       ///< adaptive: 1 leaves a quarter from token to token
    pooling kind = pooling::max;

    /// Whether pooling with these options would change nothing.
    [[nodiscard]] constexpr bool copies() const noexcept { return width == 1 && kind != pooling::adaptive; }
};

/// Replaces each loss by its neighbourhood's loss, each rung and head apart.
///
/// \param on           backend: threads
/// \param[in]  loss    [H, R, N]
/// \param[in]  options width and kind
/// \param[out] pooled  [H, R, N]  not the same memory as `loss`
/// \pre    width odd, >= 1; a NaN makes its neighbours NaN, with `adaptive` its own token alone
/// \cost   max, mean: O(H*R*N*width); adaptive: O(H*R*N * (1 + width / 32)); no scratch
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs: the same on every backend, for any number of threads and any vector width
/// \throws invalid_argument   a shape disagrees, the width is even or below 1, the views overlap (nothing was changed)
/// \see    tests/unit/stages/pool.cpp; docs/decisions.md says why the default is not the paper's literal algorithm
template <backend B>
void pool(B const& on, in_view<float, 3, B> loss, pool_options options, out_view<float, 3, B> pooled)
{
    detail::checks arguments{on, "pool"};
    detail::expects_width("pool: width", options.width);
    arguments.in("loss", loss, loss.extents(), "H,R,N").out("pooled", pooled, loss.extents(), "H,R,N");
    if (options.kind == pooling::adaptive) { run(on, detail::pool_fading<B>{loss, options.width, pooled}); }
    else { run(on, detail::pool_windows<B>{loss, pooled, options.width, options.kind == pooling::mean}); }
}

} // namespace MDKV_NAMESPACE
