/// \file sort_slots.hpp: the job of pack and recompress that sorts the positions of each head by rung.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/detail/team.hpp>

namespace MDKV_NAMESPACE::detail
{

/// An item is a head. Counting sort: each worker counts a contiguous range of tokens; prefix sums of the counts give
/// the indices of its tokens. A token whose rung is R or more is neither counted nor listed.
template <backend B>
struct sort_slots
{
    static constexpr char const* name = "sort_slots";
    static constexpr int threads      = 256;
    static constexpr index_t counters = 8192; ///< counters of all workers

    in_view<std::uint8_t, 2, B> rung;       // [H, N]    or, of lists, one after another, N tokens of the longest
    out_view<std::int32_t, 2, B> positions; // [H, N]
    out_view<index_t, 2, B> first;          // [H, R+1]  where each rung's positions begin
    in_view<index_t, 1, B> begin{};         // [H + 1]   where lists begin and the last one ends; empty: there are none

    [[nodiscard]] MDKV_HD index_t rungs() const noexcept { return first.extent(1) - 1; }
    [[nodiscard]] MDKV_HD index_t workers(index_t members) const noexcept
    {
        return members * rungs() < counters ? members : counters / rungs();
    }
    [[nodiscard]] index_t scratch_bytes() const noexcept
    {
        index_t const members = B::memory_space == space::host ? 1 : threads; // a team of the CPU is one thread
        return workers(members) * rungs() * index_t{sizeof(std::int32_t)};
    }

    MDKV_HD void operator()(team auto const& t, index_t h) const
    {
        index_t const before_head = begin.empty() ? 0 : begin(h) - begin(0);
        index_t const n           = begin.empty() ? rung.extent(1) : begin(h + 1) - begin(h);
        auto const R              = static_cast<int>(rungs());
        auto const working        = static_cast<int>(workers(t.size()));
        auto const rank           = static_cast<int>(t.rank());
        auto const size           = static_cast<int>(t.size());
        auto* const next          = t.scratch().template take<std::int32_t>(index_t{working} * R); // [R, workers]
        std::uint8_t const* const row =
            n == 0 ? nullptr : rung.row(h) + before_head; // no tokens may come without memory
        std::int32_t* const out = n == 0 ? nullptr : positions.row(h);
        index_t const each      = (n + working - 1) / working;
        index_t const own       = rank < working && rank * each < n ? rank * each : n; // first of this worker's
        index_t const end       = n - own < each ? n : own + each;
        for (int i = rank; i < working * R; i += size) { next[i] = 0; }
        t.sync();
        for (index_t i = own; i < end; ++i)
        {
            if (row[i] < R) { ++next[row[i] * working + rank]; }
        }
        t.sync();
        index_t before = 0;
        for (int i = 0; i < working * R; i += size) // all members, because they add together
        {
            bool const in_range  = i + rank < working * R;
            auto const sum       = t.prefix(in_range ? index_t{next[i + rank]} : index_t{0});
            index_t const at     = before + sum.before;
            bool const of_a_rung = in_range && (i + rank) % working == 0;
            if (in_range) { next[i + rank] = static_cast<std::int32_t>(at); }
            if (of_a_rung) { first(h, (i + rank) / working) = at; }
            before += sum.total;
        }
        if (rank == 0) { first(h, R) = before; }
        t.sync();
        for (index_t i = own; i < end; ++i)
        {
            if (row[i] < R) { out[next[row[i] * working + rank]++] = static_cast<std::int32_t>(i); }
        }
    }
};

} // namespace MDKV_NAMESPACE::detail
