/// \file choose.hpp: which projections each head pays for if they are charged by use, chosen by the heads' curves of bytes and losses (arXiv 2603.20616, section 4.3).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/allocate/piece.hpp>
#include <mdkv/detail/allocate/work.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>

#include <cstddef>
#include <cstdint>

// At a multiplier m, with thresholds theta_j and steps s_j of each token,
//
//     loss(m) = least loss + sum_j s_j theta_j [theta_j <= m]
//
// Histograms of thresholds, weighted with s_j and with s_j theta_j, therefore give bytes and loss of every head with every
// set at all edges between bins. Losses are summed from the small thresholds up: large ones do not drown them.

namespace MDKV_NAMESPACE::detail::dual
{

/// Histograms of every head with every set that it can pay for, and the least losses.
struct weigh_sets
{
    static constexpr char const* name = "allocate_weigh_sets";

    work w;

    [[nodiscard]] index_t items() const { return w.limits * w.own_pieces() * w.sets; }
    [[nodiscard]] static index_t scratch_bytes() { return index_t{sizeof(open_piece)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const k     = item % w.sets;
        index_t const limit = item / w.sets / w.own_pieces();
        piece const range   = w.own_piece(limit * w.candidates * w.own_pieces() + item / w.sets % w.own_pieces());
        if (!w.affords(limit, k)) { return; }
        open_piece& opened = open_piece::of(t, w, range, k);
        opened.clear(t, opened.sums, 2 * coarse_bins);
        opened.clear(t, opened.losses, columns);
        constexpr int lanes = Team::register_lanes;
        neighbours<lanes> some;
        for (index_t i = t.rank() * lanes; i < range.count; i += t.size() * lanes)
        {
            some.read(opened, i);
            add_thresholds(t, opened, some);
            auto least = some.loss[0];
            for (std::size_t r = 1; r < opened.rungs.count; ++r) { least = smaller(some.loss[r], least); }
            double* const sums = opened.losses + (i & (columns - 1));
            for (int l = 0; l < lanes; ++l) { sums[l] += double{lane(least, l)}; }
        }
        double const least = tree_sum(t, opened.losses);
        if (t.rank() == 0) { w.least_losses[(limit * w.pieces() + range.number) * w.sets + k] = least; }
        std::int64_t* const to = w.curve(limit * w.heads + range.head, k);
        for (index_t b = t.rank(); b < 2 * coarse_bins; b += t.size())
        {
            if (opened.sums[b] != 0) { t.add_across(to + b, opened.sums[b]); }
        }
    }

private:
    template <int Lanes, team Team>
    MDKV_HD void add_thresholds(Team const& t, open_piece& opened, neighbours<Lanes> const& some) const
    {
        for (std::size_t j = 1; j < opened.rungs.count; ++j)
        {
            for (int l = 0; l < Lanes; ++l)
            {
                float const theta = lane(some.theta[j], l);
                if (!(theta > 0.0F)) { continue; }
                std::uint32_t const bits = bits_of_float(theta);
                std::uint32_t const low  = bits & ((1U << coarse_bits) - 1);
                std::int64_t* const bin  = opened.sums + (bits >> coarse_bits);
                t.add(bin, opened.steps[j]);
                t.add(bin + coarse_bins, opened.steps[j] * index_t{low >> w.dropped_bits});
            }
        }
    }
};

/// Turns histograms into curves. Entry e of a row belongs to the edge below bin e: bytes of the thresholds from that edge
/// on, and the loss that remains once these bytes are spent, as the bits of a double.
struct curves
{
    static constexpr char const* name = "allocate_curves";

    work w;

    [[nodiscard]] index_t items() const { return w.limits * w.heads * w.sets; }
    [[nodiscard]] static index_t scratch_bytes() { return index_t{sizeof(sums)}; }

    /// Loss per widest step at an edge (infinity counts as 2^128).
    [[nodiscard]] MDKV_HD static double edge(index_t bin) noexcept
    {
        int const e = static_cast<int>(bin / 4);
        int const m = static_cast<int>(bin % 4);
        return e == 0 ? m * 0.25 * power_of_two(-126) : (1 + m * 0.25) * power_of_two(e - 127);
    }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const head  = item / w.sets;
        index_t const limit = head / w.heads;
        index_t const k     = item % w.sets;
        if (!w.affords(limit, k)) { return; }
        std::int64_t* const bytes = w.curve(head, k);
        std::int64_t* const rest  = bytes + coarse_bins;
        sums& memory              = *t.scratch().template take<sums>(1);
        double const* const x     = w.least_losses + head * w.pieces_per_head * w.sets + k;
        double loss   = ordered_sum(t, memory.partial, w.pieces_per_head, [&](index_t p) { return x[p * w.sets]; });
        index_t above = 0;
        for (index_t from = 0; from < coarse_bins; from += t.size())
        {
            index_t const b = coarse_bins - 1 - from - t.rank();
            if (b >= 0) { memory.loss[b] = loss_in(b, bytes[b], rest[b]); }
            auto const prefix = t.prefix(b >= 0 ? index_t{bytes[b]} : index_t{0});
            if (b >= 0) { bytes[b] += above + prefix.before; }
            above += prefix.total;
        }
        t.sync();
        for (index_t b = 0; t.rank() == 0 && b < coarse_bins; ++b)
        {
            rest[b] = __builtin_bit_cast(std::int64_t, loss);
            loss += memory.loss[b];
        }
    }

private:
    struct alignas(16) sums
    {
        double partial[columns];
        double loss[coarse_bins];
    };

    /// 2^e, -1022 <= e <= 1023.
    [[nodiscard]] MDKV_HD static double power_of_two(int e) noexcept
    {
        return __builtin_bit_cast(double, static_cast<std::uint64_t>(e + 1023) << 52U);
    }
    /// \param rest  sum over steps of bytes * the bits of their thresholds below the first digit
    [[nodiscard]] MDKV_HD double loss_in(index_t bin, std::int64_t bytes, std::int64_t rest) const
    {
        int const e       = static_cast<int>(bin / 4);
        double const unit = power_of_two((e == 0 ? 1 : e) - 150 + w.dropped_bits);
        return (rounded_product(edge(bin), static_cast<double>(bytes))
                   + rounded_product(unit, static_cast<double>(rest)))
               / static_cast<double>(w.widest_step);
    }
};

/// Reads bytes and losses of one limit's heads from their curves.
struct curve_reader
{
    /// A choice of sets at the limit.
    struct outcome
    {
        index_t edge = -1;                   ///< the lowest edge that fits; negative if none does
        index_t left = 0;                    ///< bytes left by the thresholds above bin `edge` - 1 (bin 0 at edge 0)
        double least = 0;                    ///< lower bound of the loss
        double lost  = __builtin_huge_val(); ///< estimate of the loss
        double most  = __builtin_huge_val(); ///< upper bound of the loss
    };

    work const& w;
    index_t item;                 ///< number of the limit
    index_t limit;                ///< bytes of the limit
    std::uint32_t affordable = 0; ///< bit k: a head can have set k

    MDKV_HD curve_reader(work const& all, index_t number)
        : w{all}
        , item{number}
        , limit{all.limit_of(number)}
    {
        for (index_t k = 0; k < w.sets; ++k) { affordable |= w.affords(item, k) ? 1U << k : 0U; }
    }
    [[nodiscard]] MDKV_HD bool affords(index_t k) const { return (affordable >> k & 1U) != 0; }

    [[nodiscard]] MDKV_HD index_t taken(index_t h, index_t k, index_t e) const
    {
        return w.set_at(k).least + w.curve(item * w.heads + h, k)[e];
    }
    [[nodiscard]] MDKV_HD double lost(index_t h, index_t k, index_t e) const
    {
        return __builtin_bit_cast(double, w.curve(item * w.heads + h, k)[coarse_bins + e]);
    }
    /// Price of bytes at an edge, as a loss.
    [[nodiscard]] MDKV_HD double price(index_t bytes, index_t e) const
    {
        return rounded_product(curves::edge(e), static_cast<double>(bytes) / static_cast<double>(w.widest_step));
    }
    /// The set that minimises loss + multiplier * bytes.
    [[nodiscard]] MDKV_OUTLINE MDKV_HD index_t best_set(index_t h, index_t e) const
    {
        index_t best  = -1;
        double lowest = 0;
        for (index_t k = 0; k < w.sets; ++k)
        {
            if (!affords(k)) { continue; }
            double const value = lost(h, k, e) + price(taken(h, k, e), e);
            if (best >= 0 && !(value < lowest)) { continue; }
            best   = k;
            lowest = value;
        }
        return best;
    }

    /// The set of every head: without `sets` its best one at the given edge, else sets[h], but `set` for `head`.
    struct choice
    {
        std::uint8_t const* sets = nullptr; // [heads]
        index_t head             = -1;
        index_t set              = 0;
    };
    struct total
    {
        index_t bytes;
        double loss;
    };
    [[nodiscard]] MDKV_OUTLINE MDKV_HD total total_at(choice const& made, index_t e) const
    {
        total sum{};
        for (index_t h = 0; h < w.heads; ++h)
        {
            index_t const k = made.sets == nullptr ? best_set(h, e) : h == made.head ? made.set : index_t{made.sets[h]};
            sum.bytes += taken(h, k, e);
            sum.loss += lost(h, k, e);
        }
        return sum;
    }

    [[nodiscard]] MDKV_OUTLINE MDKV_HD outcome at_limit(choice const& made) const
    {
        outcome result;
        index_t low  = 0;
        index_t high = coarse_bins;
        while (low < high)
        {
            index_t const middle = (low + high) / 2;
            if (total_at(made, middle).bytes <= limit) { high = middle; }
            else { low = middle + 1; }
        }
        index_t const before = low > 0 ? low - 1 : 0;
        auto const higher    = total_at(made, before);
        index_t const excess = higher.bytes - limit;
        result.least         = higher.loss + price(excess, before);
        if (low == coarse_bins) { return result; }
        // Between two edges the loss is convex: below its chord, above its tangents.
        auto const lower   = total_at(made, low);
        result.edge        = low;
        result.left        = limit - (low > 0 ? lower.bytes : total_at(made, 1).bytes);
        result.most        = lower.loss;
        double const right = result.most - price(limit - lower.bytes, low);
        result.least       = result.least > right ? result.least : right;
        result.least       = result.least < result.most ? result.least : result.most; // despite rounding
        double const way =
            excess > 0 ? static_cast<double>(result.left) / static_cast<double>(excess + result.left) : 0.0;
        double const chord = result.most - rounded_product(result.most - higher.loss, way);
        result.lost        = (result.least + chord) * 0.5;
        return result;
    }
};

/// Chooses every head's set, and the first bits of the multiplier that goes with it. Candidates are the same set for every
/// head, and the heads' own choices at the edge where the limit binds, changed head by head. A candidate is not solved if
/// the curves show that it loses more than another one.
struct choose
{
    static constexpr char const* name      = "allocate_choose";
    static constexpr index_t most_changing = 64; ///< heads; with more, their own choices stay as they are

    work w;

    [[nodiscard]] index_t scratch_bytes() const { return w.candidates * index_t{sizeof(curve_reader::outcome)}; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t limit) const
    {
        problem* const found            = w.problems + limit * w.candidates;
        std::uint8_t* const sets        = w.set_of + limit * w.candidates * w.heads;
        std::uint8_t* const combination = sets + w.sets * w.heads;
        if (found->over()) { return; }
        auto* const outcomes = t.scratch().template take<curve_reader::outcome>(w.candidates);
        curve_reader const read{w, limit};
        auto const free    = read.at_limit({});
        index_t const edge = free.edge < 0 ? coarse_bins - 1 : free.edge;
        for (index_t h = t.rank(); h < w.heads; h += t.size())
        {
            combination[h] = static_cast<std::uint8_t>(read.best_set(h, edge));
        }
        t.sync();
        for (index_t step = 0; step < 2 * w.heads && w.heads <= most_changing && change_best(t, read, combination);
             ++step)
        {}
        for (index_t c = t.rank(); c < w.candidates; c += t.size())
        {
            outcomes[c] = read.at_limit({sets + c * w.heads});
        }
        t.sync();
        if (t.rank() != 0) { return; }
        double most = __builtin_huge_val();
        bool alike  = true; // whether the combination is one of the other candidates
        for (index_t c = 0; c < w.candidates; ++c) { most = outcomes[c].most < most ? outcomes[c].most : most; }
        for (index_t h = 0; h < w.heads; ++h) { alike = alike && combination[h] == combination[0]; }
        for (index_t c = 0; c < w.candidates; ++c)
        {
            auto const& here    = outcomes[c];
            found[c].active     = here.edge >= 0 && here.least <= most && !(alike && c == w.sets);
            found[c].left       = here.left;
            found[c].multiplier = static_cast<std::uint32_t>(here.edge > 0 ? here.edge - 1 : 0) << coarse_bits;
            found[c].undecided  = coarse_bits;
        }
        w.lower_bound[limit] = free.least;
    }

private:
    /// Makes the change of one head's set that loses least at the limit. Returns whether one helps.
    template <team Team>
    [[nodiscard]] MDKV_HD bool change_best(Team const& t, curve_reader const& read, std::uint8_t* sets) const
    {
        index_t const changes = w.heads * w.sets;
        double const before   = read.at_limit({sets}).lost;
        double least          = before;
        index_t change        = changes;
        for (index_t c = t.rank(); c < changes; c += t.size())
        {
            if (!read.affords(c % w.sets)) { continue; }
            double const lost = read.at_limit({sets, c / w.sets, c % w.sets}).lost;
            change            = lost < least ? c : change;
            least             = lost < least ? lost : least;
        }
        double const best = -t.largest(-least);
        if (!(best < before)) { return false; }
        change = changes - t.largest(least == best ? changes - change : index_t{0}); // the first of equal changes
        if (t.rank() == 0) { sets[change / w.sets] = static_cast<std::uint8_t>(change % w.sets); }
        t.sync();
        return true;
    }
};

} // namespace MDKV_NAMESPACE::detail::dual
