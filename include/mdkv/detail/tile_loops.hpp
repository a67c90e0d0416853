/// \file tile_loops.hpp: loops of a team over a packed cache: tiles of a head's runs, and a token copied from run to run.
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/detail/tile_codec.hpp>

#include <type_traits>

// Offsets: see run_of_head.hpp.

namespace MDKV_NAMESPACE::detail
{

/// The keys or the values of one tile.
struct tile_ref
{
    index_t h;
    std::size_t r; ///< number of the run
    run_rows rows;
    run_basis basis;
    index_t first; ///< first token, counted in the run
    int count;     ///< number of tokens
    index_t slot;  ///< slot of the first token; stand-ins have none
};

/// How a team packs the tiles of a cache or, unless `Packs`, reads them: a tile has sixteen tokens of the keys, or of the
/// values, of one run of a head. An item is a strip of tiles; or a head, for its work beside the tiles. Directories are known
/// to the device alone: the number of items is the most there can be, and items beyond the last strip do nothing.
template <element T, space S, bool Packs>
struct tile_walk
{
    static constexpr int tile      = tile_tokens;
    static constexpr index_t strip = 4 * tile;        ///< tokens of a strip
    static constexpr int at_once   = quantised_group; ///< coordinates at a time

    using row = std::conditional_t<Packs, T const*, T*>;

    cache_view<T, S> cache;
    view<float const, 3, S> key_basis;   // [H, D, D]    read only if neither basis is empty
    view<float const, 3, S> value_basis; // [H, Dv, Dv]
    std::size_t runs;                    ///< runs of a head
    index_t tokens;                      ///< most tokens of a head that it goes over
    bool stand_ins = false;              ///< whether it goes over stand-ins, too

    struct scratch
    {
        carver& cut;
        index_t projected;                                  ///< D or Dv of projected tokens, or 0
        index_t channels;                                   ///< the larger of D and Dv if vectors are rotated, or 0
        row* rows      = cut.take<row>(tile);               // [16]  the tokens outside of the cache
        float* columns = cut.take<float>(projected * tile); // [projected, 16]
        float* x       = cut.take<float>(at_once * tile);   // [at_once, 16]  coordinates
        float* minimum = cut.take<float>(tile);             // [16]
        float* scale   = cut.take<float>(tile);             // [16]  1 / scale if packed
        float* mean    = cut.take<float>(channels);         // [channels]  means
        float* factor  = cut.take<float>(channels);         // [channels]  scales (1 for values), or 1 / scale if packed
    };

    [[nodiscard]] MDKV_HD index_t strips() const noexcept { return tokens / strip + static_cast<index_t>(runs); }
    [[nodiscard]] index_t items() const noexcept { return cache.layout.heads * (2 * strips() + 1); }
    [[nodiscard]] MDKV_HD index_t projected() const noexcept
    {
        return key_basis.empty() || value_basis.empty() ? 0 : cache.layout.dims.larger();
    }
    [[nodiscard]] MDKV_HD index_t channels() const noexcept
    {
        return cache.layout.any_rotated() ? cache.layout.dims.larger() : 0;
    }
    [[nodiscard]] index_t scratch_bytes() const noexcept { return bytes_of<scratch>(projected(), channels()); }

    /// Calls body(scratch, tile_ref) for each tile of the item's strip, or beside(head).
    MDKV_HD void operator()(team auto const& t, index_t item, auto const& body, auto const& beside) const
    {
        index_t const h = item / (2 * strips() + 1);
        index_t const i = item % (2 * strips() + 1);
        if (i == 2 * strips()) { return beside(h); }
        index_t first = i / 2 * strip; // in the run, or behind all of its strips
        index_t slot  = 0;             // first slot of the run
        std::size_t r = 0;
        stored_run run;
        for (;; ++r)
        {
            if (r == runs) { return; }
            run = stand_ins ? run_of_head(cache, h, r) : slots_of_head(cache, h, r);
            if (first < run.tokens) { break; }
            first -= (run.tokens + strip - 1) / strip * strip;
            slot += slots_of_head(cache, h, r).tokens;
        }
        bool const of_values = i % 2 != 0;
        index_t const end    = first + strip < run.tokens ? first + strip : run.tokens;
        tile_ref ref{h, r, run.rows(of_values), run.basis, first, 0, slot + first};
        carver cut = t.scratch();
        scratch const memory{cut, projected(), channels()};
        index_t const dim     = cache.layout.dims.keys;
        index_t const rotated = ref.basis != run_basis::rotated ? 0 : of_values ? cache.layout.dims.values : dim;
        for (index_t d = t.rank(); d < rotated; d += t.size())
        {
            auto const channel = [&](index_t at) { return matrix_at<T>(cache.arena, cache.heads[h].channels, at); };
            float const scale  = of_values ? 1.0F : channel(dim + d);
            memory.mean[d]     = channel(of_values ? 2 * dim + d : d);
            memory.factor[d]   = Packs ? 1.0F / scale : scale;
        }
        for (; ref.first < end; ref.first += tile, ref.slot += tile)
        {
            ref.count = static_cast<int>(end - ref.first < tile ? end - ref.first : tile);
            body(memory, ref);
        }
    }
};

/// Calls body(i, j, place) for coordinate c + j, j < n, of each token i of a plain run's tile, which lies at `place`.
MDKV_OUTLINE MDKV_HD void for_elements(team auto const& t, tile_ref const& ref, int c, int n, auto const& body)
{
    std::byte* const begin = ref.rows.begin + ref.rows.coordinate(ref.first, c);
    int const step         = ref.rows.step(ref.first);
    int const apart        = ref.rows.by_token ? ref.rows.token_bytes : ref.rows.unit; // bytes from token to token
    for_tokens(t, ref.count, n, [&](int i, int j) { body(i, j, begin + j * step + i * apart); });
}

/// Copies a token's stored key or value, as elements or codes, with the number of coordinates of the target run.
template <element T, team Team>
MDKV_HD void copy_token(Team const& t, run_rows const& from, index_t source, run_rows const& to, index_t target)
{
    bool const plain            = to.kind == storage::plain;
    std::byte* const dest       = to.begin + (plain ? to.coordinate(target, 0) : to.tile(target));
    std::byte const* const here = from.begin + (plain ? from.coordinate(source, 0) : from.tile(source));
    for (int c = member(t); plain && c < to.coordinates; c += members(t))
    {
        store_at(dest + c * to.step(target), load_at<T>(here + c * from.step(source)));
    }
    auto const i = static_cast<int>(source % tile_tokens);
    auto const j = static_cast<int>(target % tile_tokens);
    for (int k = 0; !plain && k < to.groups(); ++k)
    {
        coded_group const a = from.group(source, k);
        coded_group const b = to.group(target, k);
        if (t.rank() == 0)
        {
            store_at(dest + b.scale(j), load_at<half>(here + a.scale(i)));
            store_at(dest + b.minimum(j), load_at<half>(here + a.minimum(i)));
        }
        int const fours = a.by_token ? 0 : a.bytes / 4; // that lie together
        for (int f = member(t); f < fours; f += members(t))
        {
            store_at(dest + b.code(j, 4 * f), load_at<std::uint32_t>(here + a.code(i, 4 * f)));
        }
        for (int n = 4 * fours + member(t); n < a.bytes; n += members(t)) { dest[b.code(j, n)] = here[a.code(i, n)]; }
    }
}

} // namespace MDKV_NAMESPACE::detail
