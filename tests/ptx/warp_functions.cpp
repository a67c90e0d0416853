// What lanes of a warp do together: exchanges, votes, products of tiles, transposition.
#include "machine.hpp"

#include <array>

namespace ptx
{

namespace
{

__extension__ using f16 = _Float16;

enum class direction : std::uint8_t
{
    up,
    down,
    across,
    index
};

/// shfl: result and predicate, then value, lane, limits, members.
template <direction D>
void shuffle(warp& w, instruction const& i, lanes who)
{
    std::array<std::uint32_t, warp_size> value;
    std::memcpy(value.data(), words<std::uint32_t>(w, i.at[2]), sizeof value);
    auto const* const other  = words<std::uint32_t>(w, i.at[3]);
    auto const* const limits = words<std::uint32_t>(w, i.at[4]);
    auto* const to           = words<std::uint32_t>(w, i.at[0]);
    lanes& inside            = bits(w, i.at[1]);
    for_lanes(who, [&](int l) {
        auto const lane          = static_cast<std::uint32_t>(l);
        std::uint32_t const by   = other[l] & 31;
        std::uint32_t const end  = limits[l] & 31;
        std::uint32_t const own  = limits[l] >> 8 & 31; // bits in which lanes of a segment agree
        std::uint32_t const most = (lane & own) | (end & ~own);
        std::uint32_t const from = D == direction::up       ? lane - by
                                   : D == direction::down   ? lane + by
                                   : D == direction::across ? lane ^ by
                                                            : (lane & own) | (by & ~own);
        bool const within =
            D == direction::up ? static_cast<std::int32_t>(from) >= static_cast<std::int32_t>(most) : from <= most;
        std::uint32_t const source = within ? from : lane;
        if ((who >> source & 1) == 0) { report("shfl from a lane that is not there", w, i, l); }
        to[l]  = value[source];
        inside = (inside & ~(lanes{1} << lane)) | static_cast<lanes>(within) << lane;
    });
}

void vote_any(warp& w, instruction const& i, lanes who)
{
    lanes& to = bits(w, i.at[0]);
    to        = (to & ~who) | ((bits(w, i.at[1]) & who) != 0 ? who : 0);
}
void ballot(warp& w, instruction const& i, lanes who)
{
    lanes const yes = bits(w, i.at[1]) & who;
    for_lanes(who, [&](int l) { words<std::uint32_t>(w, i.at[0])[l] = yes; });
}

void meet(warp& w, instruction const&, lanes who)
{
    if (who == w.alive) { ++w.phase; }
}

/// A pair's half as a float.
template <bool Half>
[[nodiscard]] float half_of(std::uint32_t pair, int second)
{
    auto const bits_of = static_cast<std::uint16_t>(second != 0 ? pair >> 16 : pair);
    if constexpr (Half) { return static_cast<float>(std::bit_cast<f16>(bits_of)); }
    else { return std::bit_cast<float>(static_cast<std::uint32_t>(bits_of) << 16); }
}

/// mma.m16n8k16: products are exact, sums in double, rounded once. Operands: d[4], a[4], b[2], c[4].
template <bool Half>
void multiply(warp& w, instruction const& i, lanes)
{
    float a[16][16], b[16][8];
    double sum[16][8];
    for (int l = 0; l < warp_size; ++l)
    {
        int const row = l / 4, column = l % 4 * 2;
        for (int k = 0; k < 2; ++k)
        {
            auto const part = [&](std::size_t operand) {
                return half_of<Half>(words<std::uint32_t>(w, i.at[operand])[l], k);
            };
            a[row][column + k]         = part(4);
            a[row + 8][column + k]     = part(5);
            a[row][column + k + 8]     = part(6);
            a[row + 8][column + k + 8] = part(7);
            b[column + k][row]         = part(8);
            b[column + k + 8][row]     = part(9);
            auto const before          = [&](std::size_t operand) {
                return std::bit_cast<float>(words<std::uint32_t>(w, i.at[operand])[l]);
            };
            sum[row][column + k]     = before(static_cast<std::size_t>(10 + k));
            sum[row + 8][column + k] = before(static_cast<std::size_t>(12 + k));
        }
    }
    for (int row = 0; row < 16; ++row)
    {
        for (int k = 0; k < 16; ++k)
        {
            for (int column = 0; column < 8; ++column)
            {
                sum[row][column] += static_cast<double>(a[row][k]) * static_cast<double>(b[k][column]);
            }
        }
    }
    for (int l = 0; l < warp_size; ++l)
    {
        for (std::size_t k = 0; k < 4; ++k)
        {
            auto const value =
                static_cast<float>(sum[l / 4 + (k < 2 ? 0 : 8)][static_cast<std::size_t>(l % 4) * 2 + k % 2]);
            words<std::uint32_t>(w, i.at[k])[l] = std::bit_cast<std::uint32_t>(value);
        }
    }
}

void transpose(warp& w, instruction const& i, lanes)
{
    std::array<std::uint32_t, warp_size> from;
    std::memcpy(from.data(), words<std::uint32_t>(w, i.at[1]), sizeof from);
    for (unsigned l = 0; l < warp_size; ++l)
    {
        unsigned const column = l / 4, row = l % 4 * 2;
        auto const number = [&](unsigned r) { return from[r * 4 + column / 2] >> (16 * (column % 2)) & 0xffff; };
        words<std::uint32_t>(w, i.at[0])[l] = number(row) | number(row + 1) << 16;
    }
}

} // namespace

void add_warp_functions(operations& all)
{
    std::vector<std::uint8_t> const shuffled{4, 0, 4, 4, 4, 4};
    all["shfl.sync.up.b32"]     = {shuffle<direction::up>, shuffled, flow::members};
    all["shfl.sync.down.b32"]   = {shuffle<direction::down>, shuffled, flow::members};
    all["shfl.sync.bfly.b32"]   = {shuffle<direction::across>, shuffled, flow::members};
    all["shfl.sync.idx.b32"]    = {shuffle<direction::index>, shuffled, flow::members};
    all["vote.sync.any.pred"]   = {vote_any, {0, 0, 4}, flow::members};
    all["vote.sync.ballot.b32"] = {ballot, {4, 0, 4}, flow::members};
    all["bar.warp.sync"]        = {meet, {4}, flow::members};
    std::vector<std::uint8_t> const tile(14, 4);
    all["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"]   = {multiply<true>, tile, flow::whole_warp};
    all["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"] = {multiply<false>, tile, flow::whole_warp};
    all["movmatrix.sync.aligned.m8n8.trans.b16"]               = {transpose, {4, 4}, flow::whole_warp};
}

} // namespace ptx
