/// \file passes.hpp: allocate's passes that give rungs: those at a multiplier, then ties and upgrades (arXiv 2603.20616, section 4.3).
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/detail/allocate/work.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/detail/threshold.hpp>

#include <cstddef>
#include <cstdint>

namespace mdkv::detail::dual
{

/// Decides ties: by head and position as far as there is room. Then looks for the best upgrade of every pair of rungs, and
/// counts.
struct settle
{
    static constexpr char const* name = "allocate_settle";

    /// A piece's rungs, and sums in double.
    struct room
    {
        open_piece* tokens;
        double* sums; // [columns]
        float* theta; // [rungs, columns]
        index_t bytes;

        MDKV_HD room(carver cut, work const& w)
            : tokens{cut.take<open_piece>(1)}
            , sums{cut.take<double>(columns)}
            , theta{cut.take<float>(static_cast<index_t>(w.costs.rungs) * columns)}
            , bytes{cut.bytes()}
        {}
    };

    work w;

    [[nodiscard]] index_t items() const { return w.pieces() * w.problems(); }
    [[nodiscard]] index_t scratch_bytes() const { return room{carver{}, w}.bytes; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const problem = item / w.pieces();
        if (!w.found[problem].active || w.tied[item] == 0) { return; }
        room const own{t.scratch(), w};
        own.tokens->open(t, w, problem, item % w.pieces());
        finish(t, own, item, true);
    }

    /// Of a piece whose codes are known, and the bytes tied before it unless it has none itself.
    template <team Team>
    MDKV_HD void finish(Team const& t, room const& own, index_t item, bool silent) const
    {
        index_t const problem    = item / w.pieces();
        index_t const head       = item % w.pieces() / w.pieces_per_head;
        index_t const first      = item % w.pieces_per_head * piece_tokens;
        candidate_state& found   = w.found[problem];
        std::uint8_t* const rung = w.rungs_at(problem, head, first);
        t.sync();
        break_ties(t, *own.tokens, rung, found, w.tied[item] == 0 ? 0 : w.before[item], w.tied[item]);
        t.sync();
        if (w.spends(problem))
        {
            search(t, *own.tokens, rung, found.room, head * w.tokens + first, w.best + problem * pairs);
        }
        count(t, own, rung, silent, found, w.losses + item, w.unused_sets + problem * w.heads + head);
    }

private:
    template <team Team>
    MDKV_HD void break_ties(Team const& t, open_piece const& tokens, std::uint8_t* rung, candidate_state& found,
        index_t before, index_t tied) const
    {
        bool const all = before + tied <= found.room;
        if (all || before >= found.room)
        {
            int const shift   = all ? 4 : 0;  // to the costlier rung, or the other
            index_t const end = tokens.count; // codes may alias everything
            for (index_t i = t.rank(); i < end; i += t.size())
            {
                std::uint8_t const code = rung[i];
                rung[i] = static_cast<std::uint8_t>(code == rung_code::silent ? rung_code::mute : code >> shift & 15);
            }
            if (all && tied > 0 && t.rank() == 0) { t.add_across(&found.given, tied); }
            return;
        }
        index_t given = 0;
        for (index_t from = 0; from < tokens.count; from += t.size())
        {
            index_t const i         = from + t.rank();
            std::uint8_t const code = i < tokens.count ? rung[i] : rung_code::silent;
            bool const silent       = code == rung_code::silent;
            index_t const bytes     = silent ? 0 : w.tied_bytes(code);
            auto const sums         = t.prefix(bytes);
            bool const fits         = before + sums.before + bytes <= found.room;
            before += sums.total;
            given += fits ? bytes : 0;
            if (i < tokens.count)
            {
                rung[i] = silent ? rung_code::mute : static_cast<std::uint8_t>(fits ? code >> 4 : code & 15);
            }
        }
        given = t.sum(given);
        if (t.rank() == 0) { t.add_across(&found.given, given); }
    }

    template <team Team>
    MDKV_HD void search(Team const& t, open_piece const& tokens, std::uint8_t const* rung, index_t left, index_t first,
        std::uint64_t* best) const
    {
        rung_table const& rungs = tokens.rungs;
        for (std::size_t a = 0; a < rungs.count; ++a)
        {
            for (std::size_t c = a + 1; c < rungs.count && rungs.cost[c] - rungs.cost[a] <= left; ++c)
            {
                float const factor     = rungs.inverse[a][c];
                float const* const low = tokens.rows[a];
                float const* const up  = tokens.rows[c];
                std::int32_t const at  = rungs.index[a];
                float most             = 0;
                index_t where          = 0;
                for (index_t i = t.rank() * Team::lanes; i < tokens.count; i += t.size() * Team::lanes)
                {
                    std::int32_t code[Team::lanes];
                    float saved[Team::lanes];
                    float less[Team::lanes];
                    std::uint32_t more = 0;
                    read_lanes(code, rung, i, tokens.count, -1);
                    read_lanes(saved, low, i, tokens.count, 0.0F);
                    read_lanes(less, up, i, tokens.count, 0.0F);
                    MDKV_FOR_LANES(l, Team::lanes)
                    {
                        saved[l] = code[l] == at ? (saved[l] - less[l]) * factor : 0.0F;
                        more |= saved[l] > most ? 1U : 0U;
                    }
                    for (int l = 0; more != 0 && l < Team::lanes; ++l)
                    {
                        where = saved[l] > most ? i + l : where;
                        most  = saved[l] > most ? saved[l] : most;
                    }
                }
                // Of the complements: the most saved, by the first token.
                std::uint64_t largest = most > 0 ? ~upgrade_of(most, first + where) : 0;
                largest               = t.max(largest);
                if (t.rank() == 0 && largest != 0)
                {
                    t.min_across(best + index_t{at} * index_t{max_rungs} + rungs.index[c], ~largest);
                }
            }
        }
    }

    /// In the order of what is saved, then of the tokens.
    [[nodiscard]] MDKV_HD static std::uint64_t upgrade_of(float saved, index_t token)
    {
        return static_cast<std::uint64_t>(0x7fffffffU - bits_of(saved)) << 33U | static_cast<std::uint64_t>(token);
    }

    template <team Team>
    MDKV_HD void count(Team const& t, room const& own, std::uint8_t* rung, bool silent, candidate_state& found,
        double* loss, index_t* unused_sets) const
    {
        open_piece const& tokens = *own.tokens;
        for (index_t c = t.rank(); c < columns; c += t.size()) { own.sums[c] = 0; }
        t.sync();
        std::int32_t there[max_rungs][Team::lanes]{};
        for (index_t at = t.rank() * Team::lanes; at < tokens.count; at += t.size() * Team::lanes)
        {
            std::int32_t code[Team::lanes];
            float chosen[Team::lanes]{};
            read_lanes(code, rung, at, tokens.count, -1);
            for (std::size_t j = 0; j < tokens.rungs.count; ++j)
            {
                std::int32_t const here = tokens.rungs.index[j];
                float x[Team::lanes];
                read_lanes(x, tokens.rows[j], at, tokens.count, 0.0F);
                MDKV_FOR_LANES(l, Team::lanes)
                {
                    chosen[l] += code[l] == here ? x[l] : 0.0F;
                    there[j][l] += code[l] == here ? 1 : 0;
                }
            }
            double* const sums = own.sums + at % columns;
            MDKV_FOR_LANES(l, Team::lanes)
            {
                sums[l] += double{chosen[l]};
            }
        }
        for (std::size_t j = 0; j < tokens.rungs.count; ++j)
        {
            index_t sum = 0;
            for (int l = 0; l < Team::lanes; ++l) { sum += there[j][l]; }
            sum = t.sum(sum);
            if (t.rank() == 0 && sum > 0) { note(t, found, tokens.rungs.index[j], sum, unused_sets); }
        }
        double const total = tree_sum(t, own.sums);
        if (t.rank() == 0) { *loss = total; }
        if (!silent) { return; }
        index_t muted = 0;
        for (index_t i = t.rank(); i < tokens.count; i += t.size())
        {
            if (rung[i] != rung_code::mute) { continue; }
            rung[i] = tokens.rungs.index[0];
            ++muted;
        }
        muted = t.sum(muted);
        if (t.rank() == 0 && muted > 0) { note(t, found, tokens.rungs.index[0], muted, unused_sets); }
    }

    template <team Team>
    MDKV_HD void note(
        Team const& t, candidate_state& found, std::uint8_t rung, index_t tokens, index_t* unused_sets) const
    {
        t.add_across(found.tokens + rung, tokens);
        if (w.choose) { t.min_across(unused_sets, w.sets - 1 - w.set_with(rung)); }
    }
};

/// Gives every token its rungs at the multiplier, without the thresholds that equal it and with them.
struct assign
{
    static constexpr char const* name = "allocate_assign";

    work w;

    [[nodiscard]] index_t items() const { return w.pieces() * w.problems(); }
    [[nodiscard]] index_t scratch_bytes() const { return settle::room{carver{}, w}.bytes; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const problem  = item / w.pieces();
        index_t const piece    = item % w.pieces();
        candidate_state& found = w.found[problem];
        if (!found.active) { return; }
        settle::room const own{t.scratch(), w};
        open_piece& tokens = *own.tokens;
        tokens.open(t, w, problem, piece);
        std::uint8_t* const codes =
            w.rungs_at(problem, piece / w.pieces_per_head, piece % w.pieces_per_head * piece_tokens);
        bool special = false;
        for (index_t at = 0; at < tokens.count; at += columns)
        {
            find_thresholds(t, tokens, w.costs.rungs, at, own.theta);
            special |= go(t, tokens, float_of(found.prefix), w.spends(problem), own.theta, at, codes);
        }
        index_t tied   = 0;
        index_t silent = 0;
        for (index_t i = t.rank() * Team::lanes; special && i < tokens.count; i += t.size() * Team::lanes)
        {
            for (int l = 0; l < Team::lanes && i + l < tokens.count; ++l)
            {
                std::uint8_t const code = codes[i + l];
                if (code == rung_code::silent) { ++silent; }
                else { tied += w.tied_bytes(code); }
            }
        }
        tied   = t.sum(tied);
        silent = t.sum(silent);
        if (t.rank() == 0)
        {
            w.tied[item] = tied;
            if (silent > 0) { t.add_across(&found.silent, silent); }
        }
        if (tied == 0) { settle{w}.finish(t, own, item, silent > 0); }
    }

private:
    /// The codes of one chunk. Whether some of this member's tokens have a loss that is not finite, or a threshold that
    /// equals the multiplier.
    template <team Team>
    [[nodiscard]] MDKV_HD bool go(Team const& t, open_piece const& tokens, float multiplier, bool ties,
        float const* theta, index_t first, std::uint8_t* codes) const
    {
        constexpr int lanes     = Team::lanes;
        rung_table const& rungs = tokens.rungs;
        std::size_t const open  = rungs.count; // codes may alias everything
        index_t const end       = tokens.count;
        std::uint32_t special[lanes]{};
        for (index_t i = t.rank() * lanes; i < columns; i += t.size() * lanes)
        {
            std::uint32_t base[lanes];
            std::uint32_t top[lanes];
            MDKV_FOR_LANES(l, lanes)
            {
                base[l] = top[l] = rungs.index[0];
            }
            for (std::size_t j = 1; j < open; ++j)
            {
                std::uint32_t const here = rungs.index[j];
                float x[lanes];
                MDKV_FOR_LANES(l, lanes)
                {
                    x[l] = theta[static_cast<index_t>(j) * columns + i + l];
                }
                MDKV_FOR_LANES(l, lanes)
                {
                    std::uint32_t const above = x[l] > multiplier ? here : 0U; // `here` only rises
                    std::uint32_t const from  = x[l] >= multiplier ? here : 0U;
                    base[l]                   = base[l] > above ? base[l] : above;
                    top[l]                    = top[l] > from ? top[l] : from;
                }
            }
            MDKV_FOR_LANES(l, lanes)
            {
                std::uint32_t const upper = ties ? top[l] : base[l];
                bool const silent         = theta[i + l] != 0.0F;
                special[l] |= silent || upper != base[l] ? 1U : 0U;
                base[l] = silent ? std::uint32_t{rung_code::silent} : base[l] | upper << 4U;
            }
            index_t const at = first + i;
            if (at + lanes <= end)
            {
                MDKV_FOR_LANES(l, lanes)
                {
                    codes[at + l] = static_cast<std::uint8_t>(base[l]);
                }
            }
            else
            {
                for (int l = 0; at + l < end; ++l) { codes[at + l] = static_cast<std::uint8_t>(base[l]); }
            }
        }
        std::uint32_t any = 0;
        for (int l = 0; l < lanes; ++l) { any |= special[l]; }
        return any != 0;
    }
};

} // namespace mdkv::detail::dual
