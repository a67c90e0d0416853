/// \file ratios.hpp: rungs and ratio sets: the ways to store a token, and their bytes (arXiv 2603.20616, section 4).
#pragma once

#include <mdkv/core/ground.hpp>

#include <concepts>
#include <span>

namespace MDKV_NAMESPACE
{

/// Format of a stored coordinate.
enum class storage : std::uint8_t
{
    plain, ///< elements of the cache's type
    int8,  ///< 8-bit codes between a minimum and a maximum of their group
    int4   ///< 4-bit codes, two to a byte, between a minimum and a maximum of their group
};

/// Number of consecutive coordinates of one token whose codes share a minimum and a scale, both half. The last group of
/// a vector may be shorter.
inline constexpr index_t quantised_group = 64;

/// Bytes of n coordinates of one token: elements, or codes and 4 bytes for each group.
[[nodiscard]] MDKV_HD constexpr index_t coordinate_bytes(storage kind, index_t n, index_t element_bytes) noexcept
{
    if (kind == storage::plain) { return n * element_bytes; }
    index_t const groups = (n + quantised_group - 1) / quantised_group;
    index_t const codes  = kind == storage::int8 ? n : (n + 1) / 2;
    return codes + groups * 4;
}

/// One way to store a token: the first num/den of its D coordinates, written as `kind`. 0 drops the token; 1 keeps all
/// coordinates of the original vector; a fraction between them keeps leading coordinates in the head's basis.
struct rung
{
    std::int32_t num = 0;
    std::int32_t den = 1;
    storage kind     = storage::plain;

    [[nodiscard]] constexpr bool dropped() const noexcept { return num == 0; }
    /// Whether the rung keeps the original vector, bit for bit.
    [[nodiscard]] constexpr bool full() const noexcept { return num == den && kind == storage::plain; }
    /// Whether the token is stored in the head's basis: the head stores a projection, too.
    [[nodiscard]] constexpr bool projected() const noexcept { return !dropped() && num < den; }
    [[nodiscard]] constexpr bool quantised() const noexcept { return !dropped() && kind != storage::plain; }
    /// Whether it is stored as codes of its own coordinates, rotated: the head stores its channels, too.
    [[nodiscard]] constexpr bool rotated() const noexcept { return quantised() && !projected(); }

    /// The same coordinates in another storage.
    [[nodiscard]] constexpr rung as(storage other) const noexcept { return {num, den, other}; }

    [[nodiscard]] friend constexpr bool operator==(rung const&, rung const&) noexcept = default;
};

inline constexpr rung drop{0, 1};
inline constexpr rung full{1, 1};
inline constexpr rung full_int8 = full.as(storage::int8);
inline constexpr rung full_int4 = full.as(storage::int4);

/// `fraction(1, 8)`: the first eighth of the coordinates.
[[nodiscard]] constexpr rung fraction(std::int32_t num, std::int32_t den) noexcept
{
    return {num, den};
}

/// Rule for num/den of D that is no whole number of coordinates.
enum class rounding : std::uint8_t
{
    exact, ///< refuse
    down   ///< round down, but keep at least one coordinate
};

/// Head dimensions of keys and values.
struct head_dims
{
    index_t keys   = 0; ///< D
    index_t values = 0; ///< Dv

    [[nodiscard]] MDKV_HD constexpr index_t larger() const noexcept { return keys > values ? keys : values; }

    [[nodiscard]] friend constexpr bool operator==(head_dims const&, head_dims const&) noexcept = default;
};

/// Bytes of the channels that a head stores if it has codes of vectors' own coordinates: means and scales of its keys, means of
/// its values.
[[nodiscard]] MDKV_HD constexpr index_t channel_bytes(head_dims dims, index_t element_bytes) noexcept
{
    return (2 * dims.keys + dims.values) * element_bytes;
}

/// Limit on the rungs of a ratio set; the size of the small tables that kernels take by value.
inline constexpr std::size_t max_rungs = 16;

/// A set of rungs, cheapest first: `ratio_set{drop, fraction(1, 8), fraction(1, 4), full}`, checked by the compiler if it is
/// constexpr, or `ratio_set{rungs}` from a span. The cheaper of two rungs of different storages depends on dimension and
/// element type; `expects_ascending` checks the order for a layer.
class ratio_set
{
public:
    /// \throws invalid_argument   rungs are out of order or equal, or a rung is outside [0, 1]
    template <std::same_as<rung>... Rungs>
        requires(sizeof...(Rungs) > 0)
    constexpr ratio_set(Rungs... rungs) // implicit: a braced list of rungs is a ratio set
        : rungs_{rungs...}
        , size_{sizeof...(Rungs)}
    {
        static_assert(sizeof...(Rungs) <= max_rungs, "ratio_set: more rungs than the limit of 16");
        validate();
    }

    /// \throws invalid_argument   there is no rung or too many, rungs are out of order or equal, or a rung is outside [0, 1]
    constexpr explicit ratio_set(std::span<rung const> rungs, rounding round = rounding::exact)
        : size_{rungs.size()}
        , round_{round}
    {
        expects(size_ >= 1, "ratio_set: it must have at least one rung");
        expects(size_ <= max_rungs, "ratio_set: ", size_, " rungs are more than the limit of ", max_rungs);
        for (std::size_t r = 0; r < size_; ++r) { rungs_[r] = rungs[r]; }
        validate();
    }

    /// The same set with another rule for fractions of D.
    [[nodiscard]] constexpr ratio_set rounded(rounding round) const noexcept
    {
        ratio_set copy = *this;
        copy.round_    = round;
        return copy;
    }

    [[nodiscard]] constexpr std::size_t size() const noexcept { return size_; }
    [[nodiscard]] constexpr rung const& operator[](std::size_t r) const noexcept { return rungs_[r]; }
    [[nodiscard]] constexpr rung const* begin() const noexcept { return rungs_.data(); }
    [[nodiscard]] constexpr rung const* end() const noexcept { return rungs_.data() + size(); }

    /// Coordinates that rung r keeps of a vector of dimension `dim`.
    [[nodiscard]] constexpr index_t coordinates(std::size_t r, index_t dim) const noexcept
    {
        rung const& u = rungs_[r];
        if (u.dropped()) { return 0; }
        index_t const kept = dim * u.num / u.den;
        return kept < 1 ? 1 : kept;
    }

    /// Bytes of one token at rung r, keys and values together.
    [[nodiscard]] MDKV_OUTLINE constexpr index_t bytes(
        std::size_t r, head_dims dims, index_t element_bytes) const noexcept
    {
        return coordinate_bytes(rungs_[r].kind, coordinates(r, dims.keys), element_bytes)
               + coordinate_bytes(rungs_[r].kind, coordinates(r, dims.values), element_bytes);
    }

    /// Whether a rung needs projections, or channels.
    [[nodiscard]] constexpr bool any_projected() const noexcept { return cheapest(&rung::projected) < size_; }
    [[nodiscard]] constexpr bool any_rotated() const noexcept { return cheapest(&rung::rotated) < size_; }

    /// Indices of the cheapest and the costliest rung with channels; size() when there is none.
    [[nodiscard]] constexpr std::size_t cheapest_rotated() const noexcept { return cheapest(&rung::rotated); }
    [[nodiscard]] constexpr std::size_t costliest_rotated() const noexcept
    {
        std::size_t r = size();
        while (r > 0 && !rungs_[r - 1].rotated()) { --r; }
        return r > 0 ? r - 1 : size();
    }

    /// Index of the rung that keeps the original vector; size() when there is none.
    [[nodiscard]] constexpr std::size_t full_rung() const noexcept { return cheapest(&rung::full); }

    [[nodiscard]] constexpr bool can_drop() const noexcept { return rungs_[0].dropped(); }

    /// Checks that every rung is a whole number of coordinates of `dim`, and that no two of one storage are the same number.
    /// \throws invalid_argument   naming the rung and the dimension
    MDKV_OUTLINE constexpr void expects_fit(char const* name, index_t dim) const
    {
        for (std::size_t r = 0; r < size(); ++r)
        {
            rung const& u = rungs_[r];
            expects(round_ == rounding::down || dim * u.num % u.den == 0, "ratio_set: rung ", r, " (", u.num, "/",
                u.den, ") of ", name, " dimension ", dim, " is not a whole number of coordinates");
            for (std::size_t other = 0; other < r; ++other)
            {
                expects(rungs_[other].kind != u.kind || coordinates(other, dim) != coordinates(r, dim),
                    "ratio_set: rungs ", other, " and ", r, " both keep ", coordinates(r, dim), " coordinates of ",
                    name, " dimension ", dim);
            }
        }
    }

    /// Checks that every rung costs more bytes than the one before it.
    /// \throws invalid_argument   naming the rungs and their bytes
    MDKV_OUTLINE constexpr void expects_ascending(head_dims dims, index_t element_bytes) const
    {
        for (std::size_t r = 1; r < size(); ++r)
        {
            index_t const before = bytes(r - 1, dims, element_bytes);
            index_t const here   = bytes(r, dims, element_bytes);
            expects(here > before, "ratio_set: rungs must ascend in bytes; rung ", r, " takes ", here,
                " bytes a token, rung ", r - 1, " ", before, " (dimensions ", dims.keys, " and ", dims.values,
                ", elements of ", element_bytes, " bytes)");
        }
    }

private:
    /// Index of the first rung that is so; size() when there is none.
    [[nodiscard]] constexpr std::size_t cheapest(bool (rung::*is)() const noexcept) const noexcept
    {
        std::size_t r = 0;
        while (r < size() && !(rungs_[r].*is)()) { ++r; }
        return r;
    }

    MDKV_OUTLINE constexpr void validate() const
    {
        for (std::size_t r = 0; r < size(); ++r)
        {
            rung const& u = rungs_[r];
            expects(u.den >= 1, "ratio_set: rung ", r, " has the denominator ", u.den, "; it must be positive");
            expects(u.num >= 0 && u.num <= u.den, "ratio_set: rung ", r, " is ", u.num, "/", u.den,
                "; it must lie in [0, 1]");
            expects(!u.dropped() || (r == 0 && u.kind == storage::plain), "ratio_set: rung ", r,
                " drops the token; only rung 0 may, and it has no storage");
            expects(!u.projected() || u.kind != storage::int4, "ratio_set: rung ", r, " (", u.num, "/", u.den,
                ") has int4; coordinates in a basis are plain or int8, because 4 bits lose those beside the largest");
            for (std::size_t before = 0; before < r; ++before)
            {
                rung const& v = rungs_[before];
                expects(u.kind != v.kind || std::int64_t{v.num} * u.den < std::int64_t{u.num} * v.den,
                    "ratio_set: rungs must ascend; rung ", r, " (", u.num, "/", u.den, ") does not exceed rung ",
                    before, " (", v.num, "/", v.den, ")");
            }
        }
    }

    array<rung, max_rungs> rungs_{};
    std::size_t size_{};
    rounding round_{rounding::exact};
};

/// The paper's ratio set: drop, an eighth, a quarter, everything.
inline constexpr ratio_set paper_ratios{drop, fraction(1, 8), fraction(1, 4), full};

/// Token eviction: drop or keep.
inline constexpr ratio_set evict_ratios{drop, full};

/// Drop, or keep all coordinates in 4, 8 or all bits; needs no projections.
inline constexpr ratio_set bit_ratios{drop, full_int4, full_int8, full};

} // namespace MDKV_NAMESPACE
