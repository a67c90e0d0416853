/// \file replay.hpp: replay: a chunk of a prompt scored by its own queries, rotated to their positions in a later reading; and advance, which rotates them.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/score_options.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/detail/check.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/stages/score.hpp>

#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>

namespace MDKV_NAMESPACE
{

/// The coordinates that turn together, of n rotating ones.
enum class rotary_pairs : std::uint8_t
{
    halves,    ///< i and i + n/2, as Hugging Face's models and vLLM store them
    neighbours ///< 2 i and 2 i + 1, as llama.cpp stores models of the llama architecture
};

/// A model's rotary position encoding: at position p, pair i is turned by p * frequency(i).
template <backend B>
struct rotary_encoding
{
    double base        = 10000;                ///< frequency(i) = base^(-2 i / n) radians
    index_t rotating   = 0;                    ///< n, the first coordinates of a head, even; 0: all
    rotary_pairs pairs = rotary_pairs::halves; ///< which coordinates make a pair

    /// [n/2]  frequencies instead of the base's, in radians: scaled ones (Llama 3, YaRN), or a model's rounded ones.
    std::optional<in_view<double, 1, B>> frequencies = std::nullopt;
};

namespace detail
{

/// Number of coordinates that an encoding turns, of `dim`.
/// \throws invalid_argument   naming the stage: number, base or frequencies are not those of an encoding
template <backend B>
index_t turned_coordinates(char const* stage, rotary_encoding<B> const& encoding, index_t dim)
{
    index_t const n     = encoding.rotating == 0 ? dim : encoding.rotating;
    index_t const given = encoding.frequencies ? encoding.frequencies->extent(0) : n / 2;
    expects(n >= 0 && n <= dim && n % 2 == 0, stage, ": encoding.rotating is ", encoding.rotating, ", which makes ", n,
        " of ", dim, " coordinates; that must be an even number, at most all of them");
    expects(encoding.base > 0 && encoding.base <= (std::numeric_limits<double>::max)(), stage, ": encoding.base is ",
        encoding.base, "; it must be positive and finite");
    expects(given == n / 2, stage, ": encoding.frequencies [n/2] has ", given, "; ", n, " coordinates have ", n / 2,
        " pairs");
    return n;
}

/// Finds cosine and sine of every pair's rotation, once for all rows. One item.
template <backend B>
struct find_turns
{
    static constexpr char const* name = "advance_turns";
    static constexpr int threads      = 128;

    double positions;
    double base;
    in_view<double, 1, B> frequencies; // may be empty
    index_t rotating;
    float* turns; // [rotating]  cosines, then sines

    MDKV_HD void operator()(team auto const& t, index_t) const
    {
        index_t const pairs = rotating / 2;
        for (index_t i = t.rank(); i < pairs; i += t.size())
        {
            double const exponent  = -2.0 * static_cast<double>(i) / static_cast<double>(rotating);
            double const frequency = frequencies.empty() ? pow(base, exponent) : frequencies(i);
            turns[i]               = static_cast<float>(cos(positions * frequency));
            turns[pairs + i]       = static_cast<float>(sin(positions * frequency));
        }
    }
};

/// Rotates rows. An item is some rows of one head.
template <backend B, element T>
struct advance_rows
{
    static constexpr char const* name  = "advance";
    static constexpr int threads       = 128;
    static constexpr index_t rows_each = 64;

    in_view<T, 3, B> queries;
    out_view<T, 3, B> advanced;
    float const* turns; // [rotating]  from find_turns
    index_t rotating;
    bool neighbours;

    [[nodiscard]] MDKV_HD index_t blocks() const noexcept { return (queries.extent(1) + rows_each - 1) / rows_each; }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const pairs = rotating / 2;
        index_t const h     = item / blocks();
        index_t const begin = item % blocks() * rows_each;
        index_t const end   = queries.extent(1) - begin < rows_each ? queries.extent(1) : begin + rows_each;
        index_t const rest  = queries.extent(2) - rotating; // coordinates that stay
        auto const share    = share_rows(t, pairs + rest);
        for (index_t row = begin + share.row; row < end; row += share.rows)
        {
            T const* const from = queries.row(h, row);
            T* const to         = advanced.row(h, row);
            index_t i           = share.column;
            for (constexpr int lanes = Team::lanes; lanes > 1 && i + lanes <= pairs; i += lanes)
            {
                turn_pairs<lanes>(t, from, to, i);
            }
            for (; i < pairs + rest; i += t.size())
            {
                if (i < pairs) { turn_pairs<1>(t, from, to, i); }
                else { store_at(to + pairs + i, load_at<T>(from + pairs + i)); }
            }
        }
    }

private:
    /// Turns `Pairs` pairs at a time, from pair i on: compilers vectorise a thread's work if a pair's distance is known.
    template <int Pairs, team Team>
    MDKV_HD void turn_pairs(Team const& t, T const* from, T* to, index_t i) const
    {
        index_t const pairs       = rotating / 2;
        float const* const cosine = turns + i;
        float const* const sine   = turns + pairs + i;
        if (neighbours)
        {
            float x[std::size_t{2 * Pairs}];
            float turned[std::size_t{2 * Pairs}];
            widen_lanes(t, from + 2 * i, x);
            for (int l = 0; l < Pairs; ++l)
            {
                turned[2 * l]     = x[2 * l] * cosine[l] - x[2 * l + 1] * sine[l];
                turned[2 * l + 1] = x[2 * l] * sine[l] + x[2 * l + 1] * cosine[l];
            }
            narrow_lanes(t, turned, to + 2 * i);
        }
        else
        {
            float x[std::size_t{Pairs}];
            float y[std::size_t{Pairs}];
            float turned[2][std::size_t{Pairs}];
            widen_lanes(t, from + i, x);
            widen_lanes(t, from + pairs + i, y);
            for (int l = 0; l < Pairs; ++l)
            {
                turned[0][l] = x[l] * cosine[l] - y[l] * sine[l];
                turned[1][l] = x[l] * sine[l] + y[l] * cosine[l];
            }
            narrow_lanes(t, turned[0], to + i);
            narrow_lanes(t, turned[1], to + pairs + i);
        }
    }
};

} // namespace detail

/// Rotates position-encoded rows ahead by the same number of positions: they become the rows of the same tokens at later
/// positions, because rotations add up.
///
/// \param on             backend: threads, scratch
/// \param[in]  queries   [H*G, Q, D]  after position encoding; keys will do as well
/// \param[in]  positions number of positions; a negative number turns back
/// \param[in]  encoding  the model's encoding; a factor in its cosines and sines (YaRN's) is in the rows already
/// \param[out] advanced  [H*G, Q, D]  the same view as `queries`, or memory apart from them
/// \pre    positions * frequency at most 2^28: angles are taken in double, so that the result equals encoding the rows
///         anew, to the rounding of T
/// \cost   reads and writes the rows once; scratch of n floats
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument        a shape disagrees; more coordinates are to turn than there are, or an odd number;
///                                 the base is not positive; the views overlap but are not the same; nothing was changed
/// \see    tests/unit/replay/advance.cpp
template <backend B, element T>
void advance(B const& on, in_view<T, 3, B> queries, index_t positions, rotary_encoding<B> const& encoding,
    out_view<T, 3, B> advanced)
{
    array<index_t, 3> const shape = queries.extents();
    index_t const rotating        = detail::turned_coordinates("advance", encoding, shape[2]);
    bool const in_place           = queries.data_handle() == advanced.data_handle() && shape == advanced.extents()
                          && queries.strides() == advanced.strides();
    detail::checks arguments{on, "advance"};
    if (!in_place) { arguments.rows("queries", queries, shape, "H*G,Q,D"); }
    arguments.in("encoding.frequencies", encoding.frequencies, {{rotating / 2}}, "n/2")
        .out("advanced", advanced, shape, "H*G,Q,D");
    workspace::frame frame{on.scratch};
    detail::find_turns<B> const turns{static_cast<double>(positions), encoding.base,
        encoding.frequencies.value_or(in_view<double, 1, B>{}), rotating, frame.template take<float>(rotating)};
    detail::advance_rows<B, T> const job{
        queries, advanced, turns.turns, rotating, encoding.pairs == rotary_pairs::neighbours};
    if (queries.empty()) { return; }
    run(on, turns, 1);
    run(on, job, shape[0] * job.blocks());
}

template <backend B>
struct replay_options
{
    /// Positions by which the chunk's queries are rotated: the chunk's length if it were read again at once, more if later.
    index_t ahead = 256;

    /// If true, replayed queries also attend, causally, to the replayed copies of sinks and chunk. Better for questions,
    /// worse for text that goes on.
    bool own = false;

    rotary_encoding<B> encoding{}; ///< the model's encoding

    /// [H*G, C]  see score_options: sink logits, or keys kept elsewhere.
    std::optional<in_view<float, 2, B>> lse_elsewhere = std::nullopt;

    float scale   = 0.0F;                ///< see score_options
    row_norm norm = row_norm::euclidean; ///< see score_options
};

/// Losses of a chunk of a prompt's tokens by the queries of a second reading, which stand for any later question: the chunk's own,
/// rotated to later positions, see all of the chunk's keys, later ones, too. Call it during prefill, for one chunk of about 256
/// tokens after another, while their queries are in memory. It calls `advance`, then `score`.
///
/// \param on            backend: threads, scratch
/// \param[in]  queries  [H*G, C, D]  queries of the chunk, after position encoding, of any element type U
/// \param[in]  keys     [H, C, D]    same encoding
/// \param[in]  values   [H, C, Dv]
/// \param[in]  sinks    [H, S, D]    keys of the prompt's first few tokens, seen from every chunk; S = 0 for the first one
/// \param[in]  ratios   the rungs, none of them projected: bases are fitted to a whole prompt
/// \param[in]  options  how far ahead, position encoding, norm
/// \param[out] loss     [H, R, C]  the chunk's slice of the prompt's losses
/// \cost   score with C queries of C tokens, with `own` its first sweep twice; scratch of score, rotated queries and keys
/// \sync   returns when done (cpu); enqueued on the stream (gpu)
/// \order  bitwise reproducible for equal inputs, for any number of threads
/// \throws invalid_argument   a rung is projected, or an argument of advance or score is refused; nothing was changed
/// \see    tests/unit/replay/replay.cpp, docs/method.md
template <backend B, element T, element U>
void replay(B const& on, in_view<U, 3, B> queries, in_view<T, 3, B> keys, in_view<T, 3, B> values,
    in_view<T, 3, B> sinks, ratio_set const& ratios, std::type_identity_t<replay_options<B>> const& options,
    out_view<float, 3, B> loss)
{
    expects(!ratios.any_projected(),
        "replay: the ratio set has a projected rung, whose basis is not known before the prompt's end");
    index_t const heads = keys.extent(0);
    index_t const chunk = queries.extent(1);
    index_t const dim   = queries.extent(2);
    index_t const first = sinks.extent(1);
    detail::checks{on, "replay"}
        .rows("keys", keys, {heads, chunk, dim}, "H,C,D")
        .rows("sinks", sinks, {heads, first, dim}, "H,S,D")
        .out("loss", loss, {heads, static_cast<index_t>(ratios.size()), chunk}, "H,R,C"); // expects_score checks the rest
    index_t const own = options.own ? first + chunk : 0;
    in_view<float, 3, B> const none{};
    score_options<B> const choice{.scale = options.scale,
        .first_query                     = chunk + first, // rows see chunk and sinks, and own keys up to their position
        .lse_elsewhere                   = options.lse_elsewhere,
        .norm                            = options.norm};
    detail::expects_score(on, queries, keys, values, sinks, none, none, ratios, choice, loss);
    workspace::frame frame{on.scratch};
    auto const ahead  = detail::scratch_view<U>(on, frame, queries.extent(0), chunk, dim);
    auto const others = detail::scratch_view<T>(on, frame, heads, own, dim);
    advance(on, queries, options.ahead, options.encoding, ahead);
    if (options.own)
    {
        advance(on, sinks, options.ahead, options.encoding, slice<1>(others, 0, first));
        advance(on, keys, options.ahead, options.encoding, slice<1>(others, first, chunk));
    }
    score_impl(
        on, as_input(ahead), keys, values, options.own ? as_input(others) : sinks, none, none, ratios, choice, loss);
}

} // namespace MDKV_NAMESPACE
