/// \file counting_job.hpp: a job for tests that uses all a team can do.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/team.hpp>

#include <array>
#include <cstdint>

namespace support
{

using mdkv::index_t;

/// Counts bytes by their low four bits, piece by piece: the counts of all pieces, and of each piece the number of odd
/// bytes, the largest byte, and for each byte how many odd ones of its piece precede it.
struct count_bytes
{
    static constexpr char const* name = "count_bytes";
    static constexpr int threads      = 64;
    static constexpr index_t piece    = 100;
    static constexpr index_t all      = 333;

    std::uint8_t const* bytes; // [all]
    std::int64_t* counts;      // [16]
    index_t* odd;              // [pieces]
    std::int32_t* largest;     // [pieces]
    std::int32_t* before;      // [all]
    index_t* first_large;      // [1] least index of a byte above 250

    [[nodiscard]] MDKV_HD static index_t scratch_bytes()
    {
        mdkv::detail::carver cut;
        static_cast<void>(cut.take<std::int64_t>(16));
        return cut.bytes();
    }

    template <mdkv::detail::team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        auto cut         = t.scratch();
        auto* const mine = cut.template take<std::int64_t>(16);
        for (index_t b = t.rank(); b < 16; b += t.size()) { mine[b] = 0; }
        t.sync();
        index_t const end = (item + 1) * piece < all ? (item + 1) * piece : all;
        index_t odd_here  = 0;
        std::int32_t most = 0;
        index_t carried   = 0;
        for (index_t from = item * piece; from < end; from += t.size())
        {
            index_t const i      = from + t.rank();
            bool const there     = i < end;
            std::uint8_t const x = there ? bytes[i] : std::uint8_t{0};
            auto const sums      = t.prefix(index_t{there && x % 2 == 1 ? 1 : 0});
            odd_here += there && x % 2 == 1 ? 1 : 0;
            most = there && x > most ? x : most;
            if (there)
            {
                before[i] = static_cast<std::int32_t>(carried + sums.before);
                t.add(mine + x % 16, std::int64_t{1});
                if (x > 250) { t.min_across(first_large, i); }
            }
            carried += sums.total;
        }
        odd_here = t.sum(odd_here);
        most     = t.largest(most);
        t.sync();
        for (index_t b = t.rank(); b < 16; b += t.size()) { t.add_across(counts + b, mine[b]); }
        if (t.rank() == 0)
        {
            odd[item]     = odd_here;
            largest[item] = most;
        }
    }
};

/// What one call computes.
struct byte_counts
{
    std::int64_t counts[16]               = {};
    index_t odd[4]                        = {};
    std::int32_t largest[4]               = {};
    std::int32_t before[count_bytes::all] = {};
    index_t first_large                   = count_bytes::all;

    [[nodiscard]] friend bool operator==(byte_counts const&, byte_counts const&) = default;
};

[[nodiscard]] inline std::array<std::uint8_t, count_bytes::all> some_bytes()
{
    std::array<std::uint8_t, count_bytes::all> bytes{};
    std::uint32_t state = 7;
    for (auto& b : bytes) { b = static_cast<std::uint8_t>((state = state * 1664525U + 1013904223U) >> 24); }
    return bytes;
}

/// By plain loops.
[[nodiscard]] inline byte_counts count_plainly(std::uint8_t const* bytes)
{
    byte_counts all;
    for (index_t i = 0; i < count_bytes::all; ++i)
    {
        auto const p = i / count_bytes::piece;
        ++all.counts[bytes[i] % 16];
        all.before[i] = static_cast<std::int32_t>(all.odd[p]);
        all.odd[p] += bytes[i] % 2;
        all.largest[p] = bytes[i] > all.largest[p] ? bytes[i] : all.largest[p];
        if (bytes[i] > 250 && i < all.first_large) { all.first_large = i; }
    }
    return all;
}

} // namespace support
