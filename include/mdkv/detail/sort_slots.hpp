/// \file sort_slots.hpp: the job of pack and recompress that sorts the positions of each head by rung.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/team.hpp>

#include <cstddef>
#include <cstdint>

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

    in_view<std::uint8_t, 2, B> rung;
    out_view<std::int32_t, 2, B> positions;
    out_view<index_t, 2, B> first;

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

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t h) const
    {
        index_t const n               = rung.extent(1);
        auto const R                  = static_cast<int>(rungs());
        auto const working            = static_cast<int>(workers(t.size()));
        auto const rank               = static_cast<int>(t.rank());
        auto const size               = static_cast<int>(t.size());
        auto* const next              = t.scratch().template take<std::int32_t>(index_t{working} * R); // [R, workers]
        std::uint8_t const* const row = n == 0 ? nullptr : rung.row(h); // no tokens may come without memory
        std::int32_t* const out       = n == 0 ? nullptr : positions.row(h);
        index_t const each            = (n + working - 1) / working;
        index_t const begin           = rank < working && rank * each < n ? rank * each : n;
        index_t const end             = n - begin < each ? n : begin + each;
        for (int i = rank; i < working * R; i += size) { next[i] = 0; }
        t.sync();
        for (index_t i = begin; i < end; ++i)
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
        for (index_t i = begin; i < end; ++i)
        {
            if (row[i] < R) { out[next[row[i] * working + rank]++] = static_cast<std::int32_t>(i); }
        }
    }
};

} // namespace MDKV_NAMESPACE::detail
