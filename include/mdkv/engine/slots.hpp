/// \file slots.hpp: list_slots: the positions of each head at each rung, as index lists for an engine's gathers.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/sort_slots.hpp>
#include <mdkv/detail/team.hpp>

#include <cstdint>

namespace MDKV_NAMESPACE
{

/// Sorts every head's positions by rung, ascending inside a rung: the order in which pack stores them.
///
/// \param on              backend: threads
/// \param[in]  rung       [H, N]    from allocate
/// \param[out] positions  [H, N]    tokens of head h at rung r: positions[h, first[h, r] ... first[h, r + 1])
/// \param[out] first      [H, R+1]  where each rung's list begins; first[h, R] = N
/// \pre    every rung < R; N < 2^31
/// \cost   reads rung twice (cpu: once more, to refuse), writes positions once; scratch (cpu): 4*R bytes a thread
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  deterministic
/// \throws invalid_argument   a shape disagrees, an output overlaps, or a rung is R or more (naming head and token;
///                            gpu: such a token is in no list)
/// \see    tests/unit/engine/slots.cpp
template <backend B>
void list_slots(B const& on, in_view<std::uint8_t, 2, B> rung, out_view<std::int32_t, 2, B> positions,
    out_view<index_t, 2, B> first)
{
    detail::checks arguments{on, "list_slots"};
    index_t const heads  = rung.extent(0);
    index_t const tokens = rung.extent(1);
    expects<size_overflow>(tokens <= INT32_MAX, "list_slots: N = ", tokens, " is beyond the limit of ", INT32_MAX);
    expects(first.extent(1) >= 2, "list_slots: first [H, R+1] has R+1 = ", first.extent(1), "; it must be at least 2");
    arguments.in("rung", rung, {heads, tokens}, "H,N")
        .out("positions", positions, {heads, tokens}, "H,N")
        .out("first", first, {heads, first.extent(1)}, "H,R+1");
    index_t const rungs = first.extent(1) - 1;
    expects(rungs <= 256, "list_slots: first [H, R+1] has R = ", rungs, "; a rung is a byte, so R is at most 256");
    if constexpr (B::memory_space == space::host)
    {
        for (index_t h = 0; h < heads; ++h)
        {
            for (index_t i = 0; i < tokens; ++i)
            {
                expects(rung(h, i) < rungs, "list_slots: rung of head ", h, ", token ", i, " is ", int{rung(h, i)},
                    "; it must be below ", rungs);
            }
        }
    }
    run(on, detail::sort_slots<B>{rung, positions, first}, heads);
}

} // namespace MDKV_NAMESPACE
