/// \file slots.hpp: contract of list_slots: which positions each head keeps at each rung, as index lists an engine can gather by.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/contract.hpp>

#include <cstdint>

namespace mdkv
{

/// Sorts every head's positions by rung, ascending inside a rung: the order in which pack stores them.
///
/// \param on              backend: threads
/// \param[in]  rung       [H, N]    as allocate writes it
/// \param[out] positions  [H, N]    of head h at rung r: positions[h, first[h, r] ... first[h, r + 1])
/// \param[out] first      [H, R+1]  where each rung's list begins; first[h, R] = N
/// \pre    every rung < R; N < 2^31
/// \cost   reads rung twice, writes positions once; no scratch (gpu: see a dry run)
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  deterministic
/// \throws invalid_argument   a shape disagrees, an output overlaps, or a rung is R or more (naming head and token;
///                            gpu: such a token is in no list)
/// \see    tests/slots.cpp
template <backend B>
void list_slots(B const& on, in_view<std::uint8_t, 2, B> rung, out_view<std::int32_t, 2, B> positions,
    out_view<index_t, 2, B> first)
{
    static_assert(
        requires { list_slots_impl(on, rung, positions, first); }, MDKV_DETAIL_NO_IMPLEMENTATION(slots, list_slots));
    bool const dry = detail::dry_run(on);
    expects<size_overflow>(
        rung.extent(1) <= INT32_MAX, "list_slots: N = ", rung.extent(1), " is beyond the limit of ", INT32_MAX);
    expects(first.extent(1) >= 2, "list_slots: first [H, R+1] has R+1 = ", first.extent(1), "; it must be at least 2");
    detail::argument const r{"list_slots", "rung", rung};
    detail::argument const p{"list_slots", "positions", positions};
    detail::argument const f{"list_slots", "first", first};
    r.data(dry);
    p.shape({rung.extent(0), rung.extent(1)}, "H,N").data(dry).aligned().unique().apart_from(r);
    f.shape({rung.extent(0), first.extent(1)}, "H,R+1").data(dry).aligned().unique().apart_from(r).apart_from(p);
    list_slots_impl(on, rung, positions, first);
}

} // namespace mdkv
