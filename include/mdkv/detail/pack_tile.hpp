/// \file pack_tile.hpp: the job that writes a packed cache: sixteen tokens of a run at a time, copied or projected or rotated, as elements or as codes (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/hadamard.hpp>
#include <mdkv/detail/quantiser.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/pack.hpp>

#include <cstddef>
#include <cstdint>

namespace mdkv::detail
{

/// sum[k][l] = sum over d, ascending, of direction[k][d] * column[16 d + l]. A backend whose team has a faster way has an
/// overload of its own, with the same sums.
template <team Team, int Sums>
MDKV_HD void column_products(
    Team const&, float const* const (&direction)[Sums], float const* column, int dim, float (&sum)[Sums][Team::lanes])
{
    for (auto& row : sum)
    {
        for (float& x : row) { x = 0.0F; }
    }
    for (int d = 0; d < dim; ++d)
    {
        for (int k = 0; k < Sums; ++k)
        {
            for (int l = 0; l < Team::lanes; ++l) { sum[k][l] += direction[k][d] * column[d * tile_tokens + l]; }
        }
    }
}

/// An item is a strip of the keys, or of the values, of one run of a head; or the head's projections. How many strips a run
/// has is known where the directory is: there are as many items as there can be, and those beyond the last do nothing.
template <element T, backend B>
struct pack_tiles
{
    static constexpr char const* name = "pack_tiles";
    static constexpr int threads      = 128;
    static constexpr int tile         = tile_tokens;
    static constexpr index_t strip    = 4 * tile_tokens;
    static constexpr int piece        = quantised_group; ///< coordinates at a time
    static constexpr int sums         = 8;               ///< of products that grow side by side

    pack_call<T, B> call;
    in_view<std::int32_t, 2, B> positions; // [H, N]    by rung, ascending
    in_view<index_t, 2, B> first;          // [H, R+1]  where each rung's positions begin

    struct scratch
    {
        T const** row;    // [16]              the tile's tokens; places beyond the last repeat it
        float* columns;   // [D or Dv, 16]     of tokens to project
        float* x;         // [piece, 16]       coordinates
        float* minimum;   // [16]
        float* inverse;   // [16]
        std::byte* image; // [piece, 16] elements: what is gathered, then what is stored

        MDKV_HD scratch(carver& cut, index_t projected)
            : row{cut.take<T const*>(tile)}
            , columns{cut.take<float>(projected * tile)}
            , x{cut.take<float>(piece * tile)}
            , minimum{cut.take<float>(tile)}
            , inverse{cut.take<float>(tile)}
            , image{cut.take<std::byte>(piece * tile * index_t{sizeof(float)})}
        {}
    };

    /// The keys or the values of one tile.
    struct place
    {
        index_t h;
        std::size_t r; ///< number of the run
        run_rows rows;
        run_basis basis;
        index_t first; ///< token of the run
        int width;
        bool of_values;
    };

    [[nodiscard]] MDKV_HD index_t widest() const noexcept
    {
        cache_layout const& layout = call.cache.layout;
        bool projected             = false;
        for (std::size_t r = 0; r < layout.rungs; ++r) { projected = projected || layout.projected(r); }
        index_t const dim = layout.dims.keys > layout.dims.values ? layout.dims.keys : layout.dims.values;
        return projected ? dim : 0;
    }
    [[nodiscard]] index_t scratch_bytes() const noexcept
    {
        carver cut;
        static_cast<void>(scratch{cut, widest()});
        return cut.bytes();
    }
    /// Strips of a head, at the most.
    [[nodiscard]] MDKV_HD index_t strips() const noexcept
    {
        cache_layout const& layout = call.cache.layout;
        return (call.keys.extent(1) + layout.window) / strip + static_cast<index_t>(layout.rungs) + 1;
    }
    [[nodiscard]] index_t items() const noexcept { return call.cache.layout.heads * (2 * strips() + 1); }

    template <team Team>
    MDKV_HD void operator()(Team const& t, index_t item) const
    {
        cache_layout const& layout = call.cache.layout;
        index_t const h            = item / (2 * strips() + 1);
        index_t const i            = item % (2 * strips() + 1);
        bool const of_values       = i % 2 != 0;
        index_t n                  = i / 2;
        if (n == strips()) { return write_projections(t, h); }
        head_entry const& entry = call.cache.heads[h];
        for (std::size_t r = 0; r <= layout.rungs; ++r)
        {
            if (r < layout.rungs && !layout.own_run(r)) { continue; }
            index_t const tokens = (r < layout.rungs ? entry.runs[r] : entry.exact).tokens;
            index_t const here   = (tokens + strip - 1) / strip;
            if (n >= here)
            {
                n -= here;
                continue;
            }
            carver cut = t.scratch();
            scratch const mine{cut, widest()};
            stored_run const run = run_of_head(call.cache, h, r);
            index_t const end    = (n + 1) * strip < tokens ? (n + 1) * strip : tokens;
            for (index_t from = n * strip; from < end; from += tile)
            {
                run_rows const& rows = run.rows(of_values);
                write_tile(t, mine, place{h, r, rows, run.basis, from, rows.width(from), of_values});
            }
            return;
        }
    }

private:
    template <team Team>
    MDKV_HD void write_projections(Team const& t, index_t h) const
    {
        head_entry const& entry = call.cache.heads[h];
        head_dims const dims    = call.cache.layout.dims;
        auto const write        = [&](index_t begin, index_t i, float x) {
            store_at(call.cache.arena + begin + i * index_t{sizeof(T)}, narrow<T>(x));
        };
        for (index_t i = t.rank(); i < dims.keys * entry.key_columns; i += t.size())
        {
            write(entry.key_projection, i, call.key_basis(h, i % entry.key_columns, i / entry.key_columns));
        }
        for (index_t i = t.rank(); i < entry.value_columns * dims.values; i += t.size())
        {
            write(entry.value_projection, i, call.value_basis(h, i / dims.values, i % dims.values));
        }
    }

    template <team Team>
    MDKV_HD void write_tile(Team const& t, scratch const& mine, place const& at) const
    {
        t.sync(); // the tile before may still be read
        for (index_t i = t.rank(); i < tile; i += t.size())
        {
            mine.row[i] = row_of(at, at.first + (i < at.width ? i : at.width - 1));
        }
        t.sync();
        bool const exact = at.r == call.cache.layout.rungs;
        if (exact && at.of_values)
        {
            for (int i = 0; i < at.width; ++i)
            {
                copy_bytes(t, reinterpret_cast<std::byte const*>(mine.row[i]),
                    at.rows.begin + at.rows.coordinate(at.first + i, 0), at.rows.token_bytes);
            }
            return;
        }
        auto const dim = static_cast<int>(at.of_values ? call.cache.layout.dims.values : call.cache.layout.dims.keys);
        auto* const image = reinterpret_cast<T*>(mine.image);
        for (int c = 0; at.basis == run_basis::projected && c < dim; c += piece)
        {
            gather(t, mine, c, dim - c < piece ? dim - c : piece, tile, image);
            widen_columns(t, image, dim - c < piece ? dim - c : piece, mine.columns + c * tile);
        }
        for (int c = 0; c < at.rows.coordinates; c += piece)
        {
            int const n = at.rows.coordinates - c < piece ? at.rows.coordinates - c : piece;
            if (exact)
            {
                gather(t, mine, c, n, at.width, image);
                write_elements(t, mine, at, c, n);
                continue;
            }
            if (at.basis == run_basis::projected) { project(t, mine, at, c, n, dim); }
            else
            {
                gather(t, mine, c, n, tile, image);
                widen_columns(t, image, n, mine.x);
            }
            if (at.rows.kind == storage::plain)
            {
                narrow_columns(t, mine, at, n);
                write_elements(t, mine, at, c, n);
            }
            else { write_codes(t, mine, at, c, n); }
        }
    }

    /// Token i of the run, where the caller keeps it.
    [[nodiscard]] MDKV_HD T const* row_of(place const& at, index_t i) const
    {
        cache_layout const& layout = call.cache.layout;
        index_t const window       = call.cache.heads[at.h].exact.tokens - layout.window;
        if (at.r == layout.rungs && i >= window)
        {
            return (at.of_values ? call.window_values : call.window_keys).row(at.h, i - window);
        }
        auto const r = static_cast<index_t>(at.r == layout.rungs ? layout.full_rung : at.r);
        return (at.of_values ? call.values : call.keys).row(at.h, positions(at.h, first(at.h, r) + i));
    }

    /// to[c][i] = row[i][from + c] for c < n and i < width, rows of `width`.
    template <team Team>
    MDKV_OUTLINE MDKV_HD static void gather(Team const& t, scratch const& mine, int from, int n, int width, T* to)
    {
        constexpr int wide = Team::lanes > 1 ? 1 : 32; // members that read neighbours of one row
        auto const rank    = member(t);
        t.sync(); // what was there may still be read
        for (int i = rank / wide; i < width; i += members(t) / wide)
        {
            auto const* const row = reinterpret_cast<std::byte const*>(mine.row[i] + from);
            for (int c = rank % wide; c < n; c += wide) { to[c * width + i] = load_at<T>(row + c * int{sizeof(T)}); }
        }
        t.sync();
    }

    template <team Team>
    MDKV_OUTLINE MDKV_HD static void widen_columns(Team const& t, T const* from, int n, float* to)
    {
        constexpr int lanes = Team::lanes;
        for (int i = member(t) * lanes; i < n * tile; i += members(t) * lanes)
        {
            for (int l = 0; l < lanes; ++l) { to[i + l] = widen(from[i + l]); }
        }
        t.sync();
    }

    /// x[j][i] = sum over d, ascending, of columns[d][i] * basis[c + j][d] for j < n.
    template <team Team>
    MDKV_HD void project(Team const& t, scratch const& mine, place const& at, int c, int n, int dim) const
    {
        constexpr int lanes = Team::lanes;
        constexpr int parts = tile / lanes; // of a column
        auto const& basis   = at.of_values ? call.value_basis : call.key_basis;
        t.sync(); // x may still be read
        for (int i = member(t); i < (n + sums - 1) / sums * parts; i += members(t))
        {
            int const j               = i / parts * sums;
            float const* const column = mine.columns + i % parts * lanes;
            float const* direction[sums]{};
            for (int k = 0; k < sums; ++k) { direction[k] = basis.row(at.h, c + (j + k < n ? j + k : j)); }
            float sum[sums][lanes];
            column_products(t, direction, column, dim, sum);
            for (int k = 0; k < sums && j + k < n; ++k)
            {
                for (int l = 0; l < lanes; ++l) { mine.x[(j + k) * tile + i % parts * lanes + l] = sum[k][l]; }
            }
        }
        t.sync();
    }

    /// Values at `line` of tokens i, i + 1, ... to their places among n rows of what is stored.
    template <class V, int Lanes>
    MDKV_HD static void put(V const (&line)[Lanes], place const& at, int j, int i, int n, V* to)
    {
        int const count = at.width - i < Lanes ? at.width - i : Lanes;
        if (!at.of_values && count == Lanes)
        {
            for (int l = 0; l < Lanes; ++l) { to[j * at.width + i + l] = line[l]; }
            return;
        }
        V* const begin = to + (at.of_values ? i * n + j : j * at.width + i);
        for (int l = 0; l < count; ++l) { begin[at.of_values ? l * n : l] = line[l]; }
    }

    template <team Team>
    MDKV_HD static void narrow_columns(Team const& t, scratch const& mine, place const& at, int n)
    {
        constexpr int lanes = Team::lanes;
        for (int i = member(t) * lanes; i < n * tile; i += members(t) * lanes)
        {
            T line[lanes];
            for (int l = 0; l < lanes; ++l) { line[l] = narrow<T>(mine.x[i + l]); }
            put(line, at, i / tile, i % tile, n, reinterpret_cast<T*>(mine.image));
        }
        t.sync();
    }

    /// The image's n coordinates from c on.
    template <team Team>
    MDKV_OUTLINE MDKV_HD static void write_elements(Team const& t, scratch const& mine, place const& at, int c, int n)
    {
        int const rows  = at.of_values ? at.width : 1; // that are neighbours in the run, too
        int const bytes = (at.of_values ? n : n * at.width) * at.rows.unit;
        for (int i = 0; i < rows; ++i)
        {
            copy_bytes(t, mine.image + i * bytes, at.rows.begin + at.rows.coordinate(at.first + i, c), bytes);
        }
    }

    /// The group of n coordinates from c on.
    template <team Team>
    MDKV_OUTLINE MDKV_HD static void write_codes(Team const& t, scratch const& mine, place const& at, int c, int n)
    {
        constexpr int lanes     = Team::lanes;
        storage const kind      = at.rows.kind;
        coded_group const group = at.rows.group(at.first, c / piece);
        auto* const halves      = reinterpret_cast<half*>(mine.image); // scales, minima
        auto* const codes       = reinterpret_cast<std::uint8_t*>(mine.image + group.codes - group.scales);
        int const most          = most_code(kind);
        for (int i = member(t) * lanes; i < tile; i += members(t) * lanes)
        {
            float* const x = mine.x + i;
            if (at.basis == run_basis::rotated) { hadamard<Team>(x, n, tile); }
            float least[lanes];
            float largest[lanes];
            float spoilt[lanes]; // NaN where a coordinate is NaN or infinite: comparisons may miss it
            for (int l = 0; l < lanes; ++l)
            {
                least[l] = largest[l] = x[l];
                spoilt[l]             = x[l] * 0.0F;
            }
            for (int j = 1; j < n; ++j)
            {
                for (int l = 0; l < lanes; ++l)
                {
                    float const value = x[j * tile + l];
                    least[l]          = value < least[l] ? value : least[l];
                    largest[l]        = value > largest[l] ? value : largest[l];
                    spoilt[l] += value * 0.0F;
                }
            }
            for (int l = 0; l < lanes; ++l)
            {
                quantiser const q{least[l] + spoilt[l], largest[l] + spoilt[l], kind};
                mine.minimum[i + l] = q.minimum;
                mine.inverse[i + l] = q.inverse;
                if (i + l >= at.width) { continue; }
                halves[i + l]            = narrow<half>(q.scale);
                halves[at.width + i + l] = narrow<half>(q.minimum);
            }
        }
        t.sync();
        for (int i = member(t) * lanes; i < group.bytes * tile; i += members(t) * lanes)
        {
            int const j             = i / tile;
            int const token         = i % tile;
            bool const both         = kind == storage::int4 && j + group.bytes < n;
            float const* const low  = mine.x + i;
            float const* const high = both ? low + group.bytes * tile : low;
            std::uint8_t line[lanes];
            for (int l = 0; l < lanes; ++l)
            {
                quantiser q;
                q.minimum       = mine.minimum[token + l];
                q.inverse       = mine.inverse[token + l];
                int const upper = both ? q.code(high[l], most) << 4 : 0;
                line[l]         = static_cast<std::uint8_t>(q.code(low[l], most) + upper);
            }
            put(line, at, j, token, group.bytes, codes);
        }
        t.sync();
        copy_bytes(t, mine.image, at.rows.begin + at.rows.tile(at.first) + group.scales,
            group.codes - group.scales + at.width * group.bytes);
    }
};

} // namespace mdkv::detail
