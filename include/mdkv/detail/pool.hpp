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

/// Adaptive pooling goes over a row twice, rightwards and leftwards (which is rightwards over the reversed row). Within a
/// block of 16 tokens losses fade in float, by doubled distances; from block to block they are carried in double, so that
/// rounding does not grow with the distance. All factors are computed here, on the host. An item is a row; a member works
/// on its share block by block.
template <backend B>
struct pool_fading
{
    static constexpr char const* name = "pool_fading";
    static constexpr int threads      = 256;
    static constexpr int block        = 16;
    static constexpr int span         = 16; ///< borders over which a thread of a GPU carries
    static constexpr float none       = -__builtin_huge_valf();

    in_view<float, 3, B> loss;
    out_view<float, 3, B> pooled;
    float steps[4];    // factors of 1, 2, 4, 8 tokens
    float past[block]; // factors of 1 to 16 tokens
    double across;     // factor of a whole block, in double

    pool_fading(in_view<float, 3, B> loss_, index_t width, out_view<float, 3, B> pooled_) noexcept
        : loss{loss_}
        , pooled{pooled_}
    {
        float_environment const standard;
        auto const after = [&](int tokens) { return std::exp2(-2.0 * tokens / static_cast<double>(width)); };
        for (int s = 0; s < 4; ++s) { steps[s] = static_cast<float>(after(1 << s)); }
        for (int l = 0; l < block; ++l) { past[l] = static_cast<float>(after(l + 1)); }
        across = after(block);
    }

    [[nodiscard]] static index_t scratch_bytes() noexcept
    {
        index_t const ends = B::memory_space == space::host ? 0 : threads / span * index_t{sizeof(double)};
        return threads * index_t{sizeof(float)} + ends;
    }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t row) const
    {
        index_t const h = row / loss.extent(1);
        index_t const r = row % loss.extent(1);
        one_way(t, loss.row(h, r), pooled.row(h, r), false);
        one_way(t, loss.row(h, r), pooled.row(h, r), true);
    }

    template <team Team>
    MDKV_OUTLINE MDKV_HD void one_way(Team const& t, float const* x, float* to, bool leftwards) const
    {
        constexpr int blocks = Team::lanes == 1 ? 1 : 8; // blocks of a member at once
        constexpr int some   = blocks * block;
        // The loss faded to each block's last token, then the one that fades into the block.
        carver cut           = t.scratch();
        float* const border  = cut.take<float>(t.size() * blocks);
        double* const ends   = cut.take<double>((t.size() * blocks + span - 1) / span);
        float* const borders = border + t.rank() * blocks;
        index_t const n      = loss.extent(2);
        double carried       = double{none}; // only the first member's value counts
        for (index_t first = 0; first < n; first += t.size() * some)
        {
            index_t const begin     = first + t.rank() * some;
            int const count         = n - begin < some ? (n < begin ? 0 : static_cast<int>(n - begin)) : some;
            index_t const offset    = leftwards ? n - 1 - begin : begin;
            float const* const from = x + offset;
            float* const out        = to + offset;
            float within[std::size_t{block + some}]; // begins with a block that is read, but not used
            float beyond[std::size_t{block + some}];
            int const end = Team::lanes == 1 ? some : count; // registers of a GPU are indexed by constants
            for (int l = 0; l < block; ++l) { within[l] = beyond[l] = 0.0F; }
            for (int l = 0; l < some; ++l) { within[block + l] = none; }
            for (int l = 0; l < end; ++l)
            {
                if (Team::lanes > 1 || l < count) { within[block + l] = from[leftwards ? -l : l]; }
            }
            fade<some>(within, beyond, 1, steps[0]);
            fade<some>(beyond, within, 2, steps[1]);
            fade<some>(within, beyond, 4, steps[2]);
            fade<some>(beyond, within, 8, steps[3]);
            t.sync(); // the last borders may still be read
            for (int b = 0; b < blocks; ++b) { borders[b] = within[block * (b + 2) - 1]; }
            t.sync();
            index_t const left = (n - first + block - 1) / block;
            carry(t, border, left < t.size() * blocks ? static_cast<int>(left) : static_cast<int>(t.size() * blocks),
                ends, carried);
            t.sync();
            for (int b = 0; b < blocks; ++b)
            {
                for (int l = 0; l < block; ++l) { beyond[b * block + l] = past[l] * borders[b]; }
            }
            for (int l = 0; l < some; ++l) { beyond[l] = larger_or_nan(within[block + l], beyond[l]); }
            for (int l = 0; l < end; ++l)
            {
                if (Team::lanes == 1 && l >= count) { continue; }
                if (leftwards) { out[-l] = larger_or_nan(out[-l], beyond[l]); }
                else { out[l] = beyond[l]; }
            }
        }
    }

    /// Makes of the loss that fades to each block's last token the one that fades into the block. On a GPU every thread first
    /// carries over a span from no loss, and one thread then from span to span: the larger of two losses stays the larger,
    /// or equal, if both fade and are rounded, so that results are those of one thread.
    /// \param ends     [spans]  scratch of a GPU
    /// \param carried  enters the first block, and leaves the last one; only the first member's counts
    template <team Team>
    MDKV_HD void carry(Team const& t, float* border, int count, double* ends, double& carried) const
    {
        if constexpr (Team::lanes > 1)
        {
            carried = carry_over<true>(border, count, carried);
            return;
        }
        int const begin = member(t) * span;
        int const size  = count - begin < span ? count - begin : span;
        if (size > 0) { ends[t.rank()] = carry_over<false>(border + begin, size, double{none}); }
        t.sync();
        for (int i = 0; i * span < count && t.rank() == 0; ++i)
        {
            double const leaves = ends[i];
            double faded        = carried;
            // (a negative loss gets larger as it fades)
            for (int b = 0; b < span && !(leaves >= 0 && faded <= leaves); ++b) { faded *= across; }
            ends[i] = carried;
            carried = leaves > faded || leaves != leaves ? leaves : faded;
        }
        t.sync();
        if (size > 0) { carry_over<true>(border + begin, size, ends[t.rank()]); }
    }

    /// Returns the loss that leaves the last of `count` blocks.
    template <bool Write>
    MDKV_HD double carry_over(float* border, int count, double carried) const noexcept
    {
        for (int b = 0; b < count; ++b)
        {
            double const faded = carried * across;
            float const leaves = border[b];
            if (Write) { border[b] = static_cast<float>(carried); }
            carried = double{leaves} > faded || leaves != leaves ? double{leaves} : faded;
        }
        return carried;
    }

    /// One doubling: a token joins the losses that the token `step` before it has joined, if both are in the same block.
    template <int Some>
    MDKV_OUTLINE MDKV_HD static void fade(float const* within, float* next, int step, float factor) noexcept
    {
        for (int l = block; l < block + Some; ++l)
        {
            float const joined = larger_or_nan(within[l], within[l - step] * factor);
            next[l]            = (l & (block - step)) != 0 ? joined : within[l]; // l % block >= step
        }
    }
};

} // namespace MDKV_NAMESPACE::detail
