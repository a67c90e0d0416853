/// \file pack_tile.hpp: the job that writes a packed cache: sixteen tokens of a run at a time, copied or projected or rotated, as elements or as codes (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/coded_columns.hpp>
#include <mdkv/detail/columns.hpp>
#include <mdkv/detail/lanes.hpp>
#include <mdkv/detail/quantiser.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/detail/tile_loops.hpp>

#include <cstddef>
#include <cstdint>

namespace mdkv::inline MDKV_MACHINE::detail
{

/// An item is a strip of the keys, or of the values, of one run of a head; or the head's projections and stand-ins. The
/// number of a run's strips stands in the directory, which the host may not read: the number of items is the most there can
/// be, and items beyond the last strip do nothing.
template <element T, backend B>
struct pack_tiles
{
    static constexpr char const* name = "pack_tiles";
    static constexpr int threads      = 128;
    static constexpr int tile         = tile_tokens;
    static constexpr int piece        = quantised_group; ///< coordinates at a time
    static constexpr int sums         = 8;               ///< sums of products that grow side by side

    in_view<T, 3, B> keys;                // [H, N, D]
    in_view<T, 3, B> values;              // [H, N, Dv]
    in_view<T, 3, B> window_keys;         // [H, W, D]
    in_view<T, 3, B> window_values;       // [H, W, Dv]
    in_view<float, 3, B> key_basis;       // [H, D, D]    read only if neither basis is empty
    in_view<float, 3, B> value_basis;     // [H, Dv, Dv]
    in_view<float, 3, B> stand_in_keys;   // [H, M, D]    empty if none are to be written
    in_view<float, 3, B> stand_in_values; // [H, M, Dv]
    cache_view<T, B::memory_space> cache;
    in_view<std::int32_t, 2, B> positions; // [H, N]    by rung, ascending
    in_view<index_t, 2, B> first;          // [H, R+1]  where each rung's positions begin
    in_view<std::uint8_t, 2, B> carried;   // [H, N]    1 for tokens copied afterwards; or empty

    struct scratch
    {
        carver& cut;
        index_t projected;                                  ///< D or Dv of tokens to project, or 0
        index_t channels;                                   ///< D of keys to rotate, or 0
        T const** row  = cut.take<T const*>(tile);          // [16]  the tile's tokens; places beyond the last repeat it
        float* columns = cut.take<float>(projected * tile); // [projected, 16]
        float* x       = cut.take<float>(piece * tile);     // [piece, 16]  coordinates
        float* minimum = cut.take<float>(tile);             // [16]
        float* inverse = cut.take<float>(tile);             // [16]
        float* mean    = cut.take<float>(channels);         // [channels]  means of keys
        float* factor  = cut.take<float>(channels);         // [channels]  1 / scale
    };

    /// The keys or the values of one tile.
    struct place
    {
        index_t h;
        std::size_t r; ///< number of the run
        run_rows rows;
        run_basis basis;
        index_t first; ///< first token, counted in the run
        int width;     ///< number of tokens
    };

    [[nodiscard]] MDKV_HD index_t projected() const noexcept
    {
        auto const [dim, value_dim] = cache.layout.dims;
        return key_basis.empty() || value_basis.empty() ? 0 : dim > value_dim ? dim : value_dim;
    }
    [[nodiscard]] MDKV_HD index_t channels() const noexcept
    {
        return cache.layout.any_rotated() ? cache.layout.dims.keys : 0;
    }
    [[nodiscard]] index_t scratch_bytes() const noexcept { return bytes_of<scratch>(projected(), channels()); }
    [[nodiscard]] MDKV_HD std::size_t runs() const noexcept { return cache.layout.rungs + 1; }
    /// The most strips of a head.
    [[nodiscard]] MDKV_HD index_t strips() const noexcept
    {
        return most_strips(keys.extent(1) + cache.layout.window, runs());
    }
    [[nodiscard]] index_t items() const noexcept { return cache.layout.heads * (2 * strips() + 1); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        index_t const h = item / (2 * strips() + 1);
        index_t const i = item % (2 * strips() + 1);
        if (i == 2 * strips())
        {
            write_projections(t, h);
            return write_stand_ins(t, h);
        }
        auto const strip     = strip_at(cache, h, i / 2, runs());
        run_rows const& rows = strip.run.rows(i % 2 != 0);
        carver cut           = t.scratch();
        scratch const mine{cut, projected(), channels()};
        index_t const rotated = strip.run.basis == run_basis::rotated ? mine.channels : 0;
        for (index_t d = t.rank(); d < rotated; d += t.size())
        {
            mine.mean[d]   = matrix_at<T>(cache.arena, cache.heads[h].key_channels, d);
            mine.factor[d] = 1.0F / matrix_at<T>(cache.arena, cache.heads[h].key_channels, rotated + d);
        }
        for (index_t from = strip.first; from < strip.end; from += tile)
        {
            auto const left = static_cast<int>(strip.end - from < tile ? strip.end - from : tile);
            place const at{h, strip.rung, rows, strip.run.basis, from, left};
            if (!all_carried(at)) { write_tile(t, mine, at); }
        }
    }

private:
    template <team Team>
    MDKV_HD void write_projections(Team const& t, index_t h) const
    {
        head_entry const& entry = cache.heads[h];
        head_dims const dims    = cache.layout.dims;
        auto const write        = [&](index_t begin, index_t i, float x) {
            store_at(cache.arena + begin + i * index_t{sizeof(T)}, narrow<T>(x));
        };
        for (index_t i = t.rank(); i < dims.keys * entry.key_columns; i += t.size())
        {
            write(entry.key_projection, i, key_basis(h, i % entry.key_columns, i / entry.key_columns));
        }
        for (index_t i = t.rank(); i < entry.value_columns * dims.values; i += t.size())
        {
            write(entry.value_projection, i, value_basis(h, i / dims.values, i % dims.values));
        }
    }

    /// Writes stand-ins behind the window, in tiles that may begin with tokens of the window.
    template <team Team>
    MDKV_HD void write_stand_ins(Team const& t, index_t h) const
    {
        if (stand_in_keys.empty()) { return; }
        stored_run const run = run_of_head(cache, h, cache.layout.rungs);
        index_t const count  = cache.heads[h].stand_ins;
        for (int of_values = 0; of_values < 2; ++of_values)
        {
            run_rows const& rows = run.rows(of_values != 0);
            auto const& from     = of_values != 0 ? stand_in_values : stand_in_keys;
            for (index_t i = t.rank(); i < count * rows.coordinates; i += t.size())
            {
                index_t const j = i / rows.coordinates;
                auto const c    = static_cast<int>(i % rows.coordinates);
                store_at(rows.begin + rows.coordinate(run.tokens - count + j, c), narrow<T>(from(h, j, c)));
            }
        }
    }

    [[nodiscard]] MDKV_HD bool all_carried(place const& at) const
    {
        if (carried.empty() || at.r == cache.layout.rungs) { return false; }
        index_t const begin = first(at.h, static_cast<index_t>(at.r)) + at.first;
        int tokens          = 0;
        while (tokens < at.width && carried(at.h, positions(at.h, begin + tokens)) != 0) { ++tokens; }
        return tokens == at.width;
    }

    template <team Team>
    MDKV_HD void write_tile(Team const& t, scratch const& mine, place const& at) const
    {
        auto const dim = static_cast<int>(at.rows.by_token ? cache.layout.dims.values : cache.layout.dims.keys);
        t.sync(); // the tile before may still be read
        for (index_t i = t.rank(); i < tile; i += t.size())
        {
            mine.row[i] = row_of(at, at.first + (i < at.width ? i : at.width - 1));
#if !defined(__CUDA_ARCH__) // the rows of a tile lie anywhere: a thread prefetches all before it reads the first
            for (int c = 0; c < dim; c += 64 / int{sizeof(T)}) { __builtin_prefetch(mine.row[i] + c); }
#endif
        }
        t.sync();
        if (at.r == cache.layout.rungs) { return copy_exact(t, mine, at); }
        bool const in_basis = at.basis == run_basis::projected;
        if (in_basis) { load(t, mine, 0, dim, mine.columns); }
        for (int c = 0; c < at.rows.coordinates; c += piece)
        {
            int const n = at.rows.coordinates - c < piece ? at.rows.coordinates - c : piece;
            if (in_basis) { project(t, mine, at, c, n, dim); }
            else { load(t, mine, c, n, mine.x); }
            if (at.rows.kind == storage::plain) { write_elements(t, mine, at, c, n); }
            else { write_codes(t, mine, at, c, n); }
        }
    }

    /// Token i of the run, where the caller keeps it.
    [[nodiscard]] MDKV_HD T const* row_of(place const& at, index_t i) const
    {
        cache_layout const& layout = cache.layout;
        index_t const window       = cache.heads[at.h].exact.tokens - cache.heads[at.h].stand_ins - layout.window;
        if (at.r == layout.rungs && i >= window)
        {
            return (at.rows.by_token ? window_values : window_keys).row(at.h, i - window);
        }
        auto const r = static_cast<index_t>(at.r == layout.rungs ? layout.full_rung : at.r);
        return (at.rows.by_token ? values : keys).row(at.h, positions(at.h, first(at.h, r) + i));
    }

    template <team Team>
    MDKV_HD static void copy_exact(Team const& t, scratch const& mine, place const& at)
    {
        std::byte* const to = at.rows.begin + at.rows.coordinate(at.first, 0);
        for (int i = 0; at.rows.by_token && i < at.width; ++i)
        {
            copy_bytes(
                t, reinterpret_cast<std::byte const*>(mine.row[i]), to + i * at.rows.token_bytes, at.rows.token_bytes);
        }
        if (at.rows.by_token) { return; }
        int const step = at.rows.step(at.first);
        for_tokens(t, at.width, at.rows.coordinates,
            [&](int i, int c) { store_at(to + c * step + i * at.rows.unit, load_at<T>(mine.row[i] + c)); });
    }

    /// to[c][i] = row[i][from + c] for c < n and all of the tile's places.
    template <team Team>
    MDKV_OUTLINE MDKV_HD static void load(Team const& t, scratch const& mine, int from, int n, float* to)
    {
        t.sync(); // `to` may still be read
        widen_columns(t, tile, n, [&](int i) { return mine.row[i] + from; }, to);
        t.sync();
    }

    /// x[j][i] = sum over d, ascending, of columns[d][i] * basis[c + j][d] for j < n.
    template <team Team>
    MDKV_HD void project(Team const& t, scratch const& mine, place const& at, int c, int n, int dim) const
    {
        constexpr int lanes = Team::lanes;
        constexpr int parts = tile / lanes; // parts of a column
        auto const& basis   = at.rows.by_token ? value_basis : key_basis;
        t.sync(); // x may still be read
        for (int i = member(t); i < (n + sums - 1) / sums * parts; i += members(t))
        {
            int const j               = i / parts * sums;
            float const* const column = mine.columns + i % parts * lanes;
            float const* direction[sums]{};
            for (int k = 0; k < sums; ++k) { direction[k] = basis.row(at.h, c + (j + k < n ? j + k : j)); }
            float sum[sums][std::size_t{lanes}];
            column_products(t, direction, column, dim, sum);
            for (int k = 0; k < sums && j + k < n; ++k)
            {
                for (int l = 0; l < lanes; ++l) { mine.x[(j + k) * tile + i % parts * lanes + l] = sum[k][l]; }
            }
        }
        t.sync();
    }

    /// A row of x and a place in it, for step i over `rows` rows. Neighbouring members write neighbouring bytes.
    struct cell
    {
        int row;
        int token;

        template <team Team>
        MDKV_HD cell(Team const&, place const& at, int i, int rows)
            : row{Team::lanes == 1 && at.rows.by_token ? i % rows : i / tile}
            , token{Team::lanes == 1 && at.rows.by_token ? i / rows : i % tile}
        {}
    };

    /// Stores the first `count` of neighbouring tokens, `step` bytes apart.
    template <class V, std::size_t Lanes>
    MDKV_HD static void put(V const (&line)[Lanes], int count, std::byte* to, int step)
    {
        constexpr int lanes = static_cast<int>(Lanes);
        if (lanes > 1 && count >= lanes && step == int{sizeof(V)})
        {
            __builtin_memcpy(to, line, sizeof line);
            return;
        }
        for (int l = 0; l < lanes && l < count; ++l) { store_at(to + l * step, line[l]); }
    }

    /// n plain coordinates from c on.
    template <team Team>
    MDKV_OUTLINE MDKV_HD static void write_elements(Team const& t, scratch const& mine, place const& at, int c, int n)
    {
        constexpr int lanes = Team::lanes;
        std::byte* const to = at.rows.begin + at.rows.coordinate(at.first, c);
        int const apart     = at.rows.by_token ? at.rows.token_bytes : at.rows.unit; // bytes from token to token
        for (int i = member(t) * lanes; i < n * tile; i += members(t) * lanes)
        {
            cell const from{t, at, i, n};
            float const* const x = mine.x + from.row * tile + from.token;
            T line[std::size_t{lanes}];
            for (int l = 0; l < lanes; ++l) { line[l] = narrow<T>(x[l]); }
            put(line, at.width - from.token, to + from.row * at.rows.step(at.first) + from.token * apart, apart);
        }
    }

    /// The group of n coordinates from c on.
    template <team Team>
    MDKV_OUTLINE MDKV_HD static void write_codes(Team const& t, scratch const& mine, place const& at, int c, int n)
    {
        constexpr int lanes     = Team::register_lanes;
        using floats            = lane_floats<lanes>;
        storage const kind      = at.rows.kind;
        coded_group const group = at.rows.group(at.first, c / piece);
        std::byte* const to     = at.rows.begin + at.rows.tile(at.first);
        auto const most         = static_cast<float>(most_code(kind));
        for (int i = member(t) * lanes; i < tile; i += members(t) * lanes)
        {
            float* const x  = mine.x + i;
            bool const keys = !at.rows.by_token;
            if (at.basis == run_basis::rotated)
            {
                rotate_columns<lanes>(x, n, tile, keys ? mine.mean + c : nullptr, keys ? mine.factor + c : nullptr);
            }
            quantiser<lanes> const q = column_bounds<lanes>{x, n, tile}.fitted(kind);
            store_lanes(mine.minimum + i, q.minimum);
            store_lanes(mine.inverse + i, q.inverse);
            float scale[std::size_t{lanes}];
            store_lanes(scale, q.scale);
            for (int l = 0; l < lanes && i + l < at.width; ++l)
            {
                store_at(to + group.scale(i + l), narrow<half>(scale[l]));
                store_at(to + group.minimum(i + l), narrow<half>(mine.minimum[i + l]));
            }
        }
        t.sync();
        for (int i = member(t) * lanes; i < group.bytes * tile; i += members(t) * lanes)
        {
            quantiser<lanes> q;
            q.minimum       = load_lanes<floats>(mine.minimum + i % tile);
            q.inverse       = load_lanes<floats>(mine.inverse + i % tile);
            floats code     = q.codes(load_lanes<floats>(mine.x + i), most);
            int const other = i + group.bytes * tile; // for 4 bits, the code in the byte's upper half
            if (kind == storage::int4 && other < n * tile)
            {
                code += 16.0F * q.codes(load_lanes<floats>(mine.x + other), most);
            }
            store_lanes(mine.x + i, code);
        }
        t.sync();
        for_codes(t, group, [&](int place, int start, int step, auto count) {
            constexpr int bytes = decltype(count)::value;
            std::uint32_t word  = 0;
            for (int k = 0; k < bytes; ++k)
            {
                word |= static_cast<std::uint32_t>(static_cast<int>(mine.x[start + k * step])) << 8 * k;
            }
            __builtin_memcpy(to + group.codes + place, &word, bytes);
        });
    }
};

} // namespace mdkv::inline MDKV_MACHINE::detail
