/// \file pool.hpp: the jobs of pool: windows of neighbours, and losses that fade over the row.
#pragma once

#include <mdkv/core/float_environment.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>

#include <cmath>

namespace MDKV_NAMESPACE::detail
{

/// The largest of two losses. A NaN wins from either side: it must reach allocate, which reports it.
template <class Floats>
[[nodiscard]] MDKV_HD Floats larger_or_nan(Floats a, Floats b) noexcept
{
    return b > a ? b : (b != b ? b : a);
}

/// Largest or mean of the neighbours. An item is a piece of a row.
template <backend B>
struct pool_windows
{
    static constexpr char const* name = "pool_windows";
    static constexpr index_t piece    = 2048;

    in_view<float, 3, B> loss;
    out_view<float, 3, B> pooled;
    index_t width;
    bool mean;

    [[nodiscard]] MDKV_HD index_t pieces() const noexcept { return (loss.extent(2) + piece - 1) / piece; }
    [[nodiscard]] index_t items() const noexcept { return loss.extent(0) * loss.extent(1) * pieces(); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        constexpr int lanes  = Team::register_lanes;
        using floats         = lane_floats<lanes>;
        index_t const h      = item / pieces() / loss.extent(1);
        index_t const r      = item / pieces() % loss.extent(1);
        index_t const first  = item % pieces() * piece;
        index_t const n      = loss.extent(2);
        index_t const last   = n - first < piece ? n : first + piece;
        index_t const reach  = width / 2 < n ? width / 2 : n;
        float const* const x = loss.row(h, r);
        float* const to      = pooled.row(h, r);
        for (index_t i = first + t.rank() * lanes; i < last; i += t.size() * lanes)
        {
            if (i >= reach && i + lanes + reach <= n && i + lanes <= last)
            {
                store_lanes(to + i, neighbours<floats>(x, i - reach, i + reach + 1));
                continue;
            }
            for (index_t j = i; j < i + lanes && j < last; ++j) // at an end of the row, or of the piece
            {
                to[j] = neighbours<float>(x, j < reach ? 0 : j - reach, n - j <= reach ? n : j + reach + 1);
            }
        }
    }

private:
    template <class Floats>
    [[nodiscard]] MDKV_HD Floats neighbours(float const* x, index_t begin, index_t end) const
    {
        Floats joined = Floats{} + (mean ? 0.0F : -__builtin_huge_valf());
        for (index_t k = begin; k < end; ++k)
        {
            auto const next = load_lanes<Floats>(x + k);
            joined          = mean ? joined + next : larger_or_nan(joined, next);
        }
        return mean ? joined / static_cast<float>(width) : joined;
    }
};

/// The largest of losses that fade with distance, in a pass rightwards and one leftwards over each share of a row. A pass begins
/// at losses of which 2^-16 is left there. An item is a piece of a row; a member works on its shares token by token.
template <backend B>
struct pool_fading
{
    static constexpr char const* name = "pool_fading";
    static constexpr int threads      = 32;
    static constexpr index_t share    = 256;
    static constexpr index_t piece    = threads * share;

    in_view<float, 3, B> loss;
    out_view<float, 3, B> pooled;
    index_t reach; ///< tokens until 2^-16 is left
    double fading; ///< from token to token

    pool_fading(in_view<float, 3, B> loss_, index_t width, out_view<float, 3, B> pooled_) noexcept
        : loss{loss_}
        , pooled{pooled_}
        , reach{width < loss.extent(2) ? 8 * width : loss.extent(2)}
    {
        float_environment const standard;
        fading = std::exp2(-2.0 / static_cast<double>(width));
    }

    [[nodiscard]] MDKV_HD index_t pieces() const noexcept { return (loss.extent(2) + piece - 1) / piece; }
    [[nodiscard]] index_t items() const noexcept { return loss.extent(0) * loss.extent(1) * pieces(); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const h      = item / pieces() / loss.extent(1);
        index_t const r      = item / pieces() % loss.extent(1);
        index_t const first  = item % pieces() * piece;
        index_t const n      = loss.extent(2);
        index_t const last   = n - first < piece ? n : first + piece;
        float const* const x = loss.row(h, r);
        float* const to      = pooled.row(h, r);
        auto const larger    = [](auto own, decltype(own) other) { return other > own ? other : own; }; // own NaN stays
        for (index_t begin = first + member(t) * share; begin < last; begin += members(t) * share)
        {
            index_t const end = last - begin < share ? last : begin + share;
            index_t const far = n - end < reach ? n : end + reach;
            double faded      = -__builtin_huge_val();
            for (index_t i = begin < reach ? 0 : begin - reach; i < end; ++i)
            {
                faded = larger(double{x[i]}, faded * fading);
                if (i >= begin) { to[i] = static_cast<float>(faded); }
            }
            faded = -__builtin_huge_val();
            for (index_t i = far - 1; i >= begin; --i)
            {
                faded = larger(double{x[i]}, faded * fading);
                if (i < end) { to[i] = larger(to[i], static_cast<float>(faded)); }
            }
        }
    }
};

} // namespace MDKV_NAMESPACE::detail
