/// \file pool.hpp: pool: neighbouring tokens share their losses, so that whole statements are kept.
#pragma once

#include <mdkv/core/float_environment.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>

namespace MDKV_NAMESPACE
{

/// Rule for a token's pooled loss. Adaptive: a higher peak reaches further; the width is the distance between the two
/// distances where half of a peak is left.
enum class pooling : std::uint8_t
{
    max,     ///< the largest loss among the neighbours
    mean,    ///< their sum divided by the width, also at the two ends (as SnapKV's average pooling counts)
    adaptive ///< the largest of losses that fade: max over j of loss_j * 2^(-2 |i - j| / width), if |i - j| <= 8 width
};

struct pool_options
{
    index_t width = 7; ///< odd. max, mean: neighbours that share, the token itself in their middle; 1 copies.
                       ///< adaptive: 1 leaves a quarter from token to token
    pooling kind = pooling::max;

    /// Whether pooling with these options would change nothing.
    [[nodiscard]] constexpr bool copies() const noexcept { return width == 1 && kind != pooling::adaptive; }
};

namespace detail
{

/// An item is a piece of a row.
template <backend B>
struct pool_losses
{
    static constexpr char const* name = "pool";
    static constexpr int threads      = 32;
    static constexpr index_t share    = 256;
    static constexpr index_t piece    = threads * share;

    in_view<float, 3, B> loss;
    out_view<float, 3, B> pooled;
    pool_options options;
    double fading; ///< part of a loss that is left at the next token

    [[nodiscard]] MDKV_HD index_t pieces() const noexcept { return (loss.extent(2) + piece - 1) / piece; }
    [[nodiscard]] index_t items() const noexcept { return loss.extent(0) * loss.extent(1) * pieces(); }

    MDKV_HD void operator()(team auto const& t, index_t item) const
    {
        index_t const h      = item / pieces() / loss.extent(1);
        index_t const r      = item / pieces() % loss.extent(1);
        index_t const n      = loss.extent(2);
        index_t const first  = item % pieces() * piece;
        index_t const last   = n - first < piece ? n : first + piece;
        float const* const x = loss.row(h, r);
        float* const to      = pooled.row(h, r);
        if (options.kind != pooling::adaptive) { return join_windows(t, x, n, first, last, to); }
        for (index_t begin = first + member(t) * share; begin < last; begin += members(t) * share)
        {
            fade(x, n, begin, last - begin < share ? last : begin + share, to);
        }
    }

private:
    template <team Team>
    MDKV_HD void join_windows(Team const& t, float const* x, index_t n, index_t first, index_t last, float* to) const
    {
        constexpr int lanes = Team::register_lanes;
        index_t const reach = options.width / 2 < n ? options.width / 2 : n;
        for (index_t i = first + t.rank() * lanes; i < last; i += t.size() * lanes)
        {
            if (i >= reach && i + lanes + reach <= n && i + lanes <= last)
            {
                store_lanes(to + i, neighbours<lane_floats<lanes>>(x, i - reach, i + reach + 1));
                continue;
            }
            for (index_t j = i; j < i + lanes && j < last; ++j) // at an end of the row, or of the piece
            {
                to[j] = neighbours<float>(x, j < reach ? 0 : j - reach, n - j <= reach ? n : j + reach + 1);
            }
        }
    }

    /// Largest or mean. A NaN wins from either side: it must reach allocate, which reports it.
    template <class Floats>
    [[nodiscard]] MDKV_HD Floats neighbours(float const* x, index_t begin, index_t end) const
    {
        bool const mean = options.kind == pooling::mean;
        Floats joined   = Floats{} + (mean ? 0.0F : -__builtin_huge_valf());
        for (index_t k = begin; k < end; ++k)
        {
            auto const next = load_lanes<Floats>(x + k);
            joined          = mean ? joined + next : next > joined ? next : (next != next ? next : joined);
        }
        return mean ? joined / static_cast<float>(options.width) : joined;
    }

    /// The largest of losses that fade with distance, for tokens [begin, end), in a pass rightwards and one leftwards. Both begin
    /// at losses of which 2^-16 is left there.
    MDKV_HD void fade(float const* x, index_t n, index_t begin, index_t end, float* to) const
    {
        auto const larger   = [](auto own, decltype(own) other) { return other > own ? other : own; }; // own NaN stays
        index_t const reach = options.width < n ? 8 * options.width : n;
        double faded        = -__builtin_huge_val();
        for (index_t i = begin < reach ? 0 : begin - reach; i < end; ++i)
        {
            faded = larger(double{x[i]}, faded * fading);
            if (i >= begin) { to[i] = static_cast<float>(faded); }
        }
        faded = -__builtin_huge_val();
        for (index_t i = (n - end < reach ? n : end + reach) - 1; i >= begin; --i)
        {
            faded = larger(double{x[i]}, faded * fading);
            if (i < end) { to[i] = larger(to[i], static_cast<float>(faded)); }
        }
    }
};

} // namespace detail

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
    float_environment const standard;
    run(on, detail::pool_losses<B>{loss, pooled, options, std::exp2(-2.0 / static_cast<double>(options.width))});
}

} // namespace MDKV_NAMESPACE
