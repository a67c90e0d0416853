/// \file pack_coordinates.cuh: tokens brought to some coordinates, their own or a basis', and written as elements or codes (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/quantiser.hpp>
#include <mdkv/detail/rotation.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/detail/pack_rows.cuh>
#include <mdkv/gpu/detail/warp_group.cuh>
#include <mdkv/gpu/device.cuh>

#include <cmath>
#include <cstddef>
#include <cstdint>

#include <vector_types.h>

namespace mdkv::gpu::kernels
{

/// Keys or values of one strip of a run after another, a piece of coordinates after another.
template <element T>
struct pack_coordinates
{
    static constexpr char const* name              = "pack_coordinates";
    static constexpr int blocks_per_multiprocessor = 4;
    static constexpr int threads                   = 128;
    static constexpr int warps                     = threads / device::warp_size;
    static constexpr int strip                     = 64;                   ///< tokens: two a lane
    static constexpr int piece                     = int{quantised_group}; ///< coordinates
    static constexpr int part                      = 32;                   ///< coordinates of a product, at once
    static constexpr int each                      = part / warps;         ///< of a thread
    static constexpr int depth                     = 64;                   ///< of a product, at once
    static constexpr int row_pitch                 = depth + 1;            // tokens in different banks
    static constexpr int piece_pitch               = piece + 1;
    static constexpr int most_bytes                = piece * static_cast<int>(sizeof(T)); // codes take fewer
    static constexpr index_t most_blocks           = 2048;                                ///< of all heads
    static_assert(most_bytes >= piece + 2 * int{sizeof(half)});

    packing<T> job;
    int blocks_per_head;

    struct shared
    {
        T const** row;   // [strip]
        float* rows;     // [strip, row_pitch]    a part of every token
        float* basis;    // [part, depth]        the same part of some directions
        float* at;       // [strip, piece_pitch]  coordinates
        std::byte* made; // [strip, most_bytes]   what is stored of them

        __host__ __device__ explicit shared(device::shared_carver& memory)
            : row{memory.take<T const*>(strip)}
            , rows{memory.take<float>(strip * row_pitch)}
            , basis{memory.take<float>(part * depth)}
            , at{memory.take<float>(strip * piece_pitch)}
            , made{memory.take<std::byte>(strip * most_bytes)}
        {}
    };

    /// One of a token's two vectors.
    struct vectors
    {
        int dim;
        bool whole;         ///< rows are whole pieces of 16 bytes
        bool by_token;      ///< how codes, and elements, are stored: token by token, or coordinate by coordinate
        float const* basis; // [coordinates, step]  null: their own coordinates
        index_t step;
        int coordinates;
        std::byte* run; ///< from the strip's first token on
        index_t token_bytes;
    };

    [[nodiscard]] index_t shared_bytes() const
    {
        device::shared_carver size{nullptr};
        static_cast<void>(shared{size});
        return size.bytes();
    }

    __device__ void operator()() const
    {
        device::shared_carver memory{device::shared_memory()};
        shared const at{memory};
        auto const block = static_cast<int>(device::block());
        index_t const h  = block / blocks_per_head;
        int next         = block % blocks_per_head; // of this block's strips, counted over all runs, two for each strip
        int passed       = 0;                       // those of the runs before
        for (std::size_t r = 0; r < job.cache.layout.rungs; ++r)
        {
            if (!job.cache.layout.own_run(r)) { continue; }
            int const tokens = static_cast<int>(job.cache.heads[h].runs[r].tokens);
            int const strips = (tokens + strip - 1) / strip * 2;
            for (; next < passed + strips; next += blocks_per_head)
            {
                int const first = (next - passed) / 2 * strip;
                write_strip(at, h, r, (next - passed) % 2 != 0, first, tokens - first < strip ? tokens - first : strip);
            }
            passed += strips;
        }
    }

    __device__ void write_strip(shared const& at, index_t h, std::size_t r, bool of_values, index_t first, int n) const
    {
        cache_layout const& form = job.cache.layout;
        run_entry const& run     = job.cache.heads[h].runs[r];
        auto const& basis        = of_values ? job.value_basis : job.key_basis;
        device::sync();
        if (device::thread() < n)
        {
            at.row[device::thread()] =
                row_of(of_values ? job.values : job.keys, h, job.position(h, r, first + device::thread()));
        }
        device::sync();
        index_t const token_bytes = of_values ? form.value_bytes(r, sizeof(T)) : form.key_bytes(r, sizeof(T));
        write_vectors(at, r, n,
            {static_cast<int>(of_values ? form.dims.values : form.dims.keys),
                of_values ? job.vector_values : job.vector_keys, of_values,
                form.projected(r) ? row_of(basis, h, 0) : nullptr, basis.mapping().stride(1),
                static_cast<int>(of_values ? form.value_coordinates[r] : form.key_coordinates[r]),
                job.cache.arena + (of_values ? run.values : run.keys) + first * token_bytes, token_bytes});
    }

    __device__ void write_vectors(shared const& at, std::size_t r, int n, vectors const& x) const
    {
        storage const kind = job.cache.layout.kinds[r];
        for (int c0 = 0; c0 < x.coordinates; c0 += piece)
        {
            int const g = x.coordinates - c0 < piece ? x.coordinates - c0 : piece;
            if (x.basis == nullptr) { read(at, x, c0, g, g, n, at.at, piece_pitch); }
            for (int first = 0; x.basis != nullptr && first < g; first += part)
            {
                project(at, x, c0, first, g - first < part ? g - first : part, n);
                device::sync();
            }
            device::sync();
            bool const rows = kind == storage::plain && x.by_token && g < x.coordinates; // a piece of every one
            if (kind == storage::plain) { make_elements(at, x, g, n); }
            else { make_codes(at, x, g, n, kind, job.cache.layout.turned(r)); }
            device::sync();
            stored_pieces{at.made, x.run, x.token_bytes, stored_bytes(kind, c0, sizeof(T)),
                static_cast<int>(stored_bytes(kind, g, sizeof(T))), n, rows ? 1 : int{tile_tokens}}
                .write();
        }
    }

    /// to[t * pitch + c] = row[t][c0 + c] for c < n, at most `depth`; 0 for n <= c < filled.
    __device__ void read(
        shared const& at, vectors const& x, int c0, int n, int filled, int tokens, float* to, int pitch) const
    {
        constexpr int per         = piece_of<T>;
        constexpr int row_threads = depth / per;
        if (x.whole && n % per == 0 && filled == n)
        {
            int const c = device::thread() % row_threads * per;
            for (int t = device::thread() / row_threads; t < tokens && c < n; t += threads / row_threads)
            {
                float wide[per];
                widen_piece<T>(device::load16(at.row[t] + c0 + c), wide);
                for (int k = 0; k < per; ++k) { to[t * pitch + c + k] = wide[k]; }
            }
            return;
        }
        for (int t = device::warp(); t < tokens; t += warps)
        {
            for (int c = device::lane(); c < filled; c += device::warp_size)
            {
                to[t * pitch + c] = c < n ? widen(at.row[t][c0 + c]) : 0.0F;
            }
        }
    }

    /// at[t][first + c] = sum over d, ascending, of row[t][d] * basis[c0 + first + c][d] for c < g <= part: lanes are tokens,
    /// warps some coordinates each.
    __device__ void project(shared const& at, vectors const& x, int c0, int first, int g, int n) const
    {
        constexpr int four = 4;
        float acc[each][2]{};
        int const c = device::warp() * each;
        for (int d0 = 0; d0 < x.dim; d0 += depth)
        {
            int const m      = x.dim - d0 < depth ? x.dim - d0 : depth;
            int const filled = (m + four - 1) / four * four;
            if (d0 > 0) { device::sync(); }
            read(at, x, d0, m, filled, n, at.rows, row_pitch);
            for (int row = device::warp(); row < part; row += warps)
            {
                float const* const direction = x.basis + (c0 + first + row) * x.step + d0;
                for (int d = device::lane(); d < filled; d += device::warp_size)
                {
                    at.basis[row * depth + d] = row < g && d < m ? direction[d] : 0.0F;
                }
            }
            device::sync();
            if (c < g) { add_products(at, c, filled, acc); }
        }
        for (int j = 0; j < each; ++j)
        {
            for (int k = 0; k < 2; ++k)
            {
                at.at[(device::lane() + k * device::warp_size) * piece_pitch + first + c + j] = acc[j][k];
            }
        }
    }

    __device__ void add_products(shared const& at, int c, int m, float (&acc)[each][2]) const
    {
        float const* const x = at.rows + device::lane() * row_pitch;
        float const* const y = x + device::warp_size * row_pitch;
        for (int d = 0; d < m; d += 4)
        {
            float const xs[4] = {x[d], x[d + 1], x[d + 2], x[d + 3]};
            float const ys[4] = {y[d], y[d + 1], y[d + 2], y[d + 3]};
            for (int j = 0; j < each; ++j)
            {
                auto const b      = *reinterpret_cast<float4 const*>(at.basis + (c + j) * depth + d);
                float const bs[4] = {b.x, b.y, b.z, b.w};
                for (int k = 0; k < 4; ++k)
                {
                    acc[j][0] += bs[k] * xs[k];
                    acc[j][1] += bs[k] * ys[k];
                }
            }
        }
    }

    /// Keys coordinate by coordinate inside a tile, values token by token.
    __device__ void make_elements(shared const& at, vectors const& x, int g, int n) const
    {
        auto* const to = reinterpret_cast<T*>(at.made);
        if (x.by_token)
        {
            for (int t = device::warp(); t < n; t += warps)
            {
                for (int c = device::lane(); c < g; c += device::warp_size)
                {
                    to[t * g + c] = narrow<T>(at.at[t * piece_pitch + c]);
                }
            }
            return;
        }
        for (int i = device::thread(); i < g * strip; i += threads)
        {
            int const t = i % strip;
            if (t >= n) { continue; }
            int const tile                              = t / int{tile_tokens} * int{tile_tokens};
            int const width                             = n - tile < int{tile_tokens} ? n - tile : int{tile_tokens};
            to[tile * g + i / strip * width + t - tile] = narrow<T>(at.at[t * piece_pitch + i / strip]);
        }
    }

    /// A warp takes a token, a lane two of the group's coordinates.
    __device__ void make_codes(shared const& at, vectors const& x, int g, int n, storage kind, bool turned) const
    {
        constexpr int halves = warp_group::halves;
        int const lane       = device::lane();
        int const half_way   = (g + 1) / 2;
        int const bytes      = kind == storage::int8 ? g : half_way; // of a token's codes
        for (int t = device::warp(); t < n; t += warps)
        {
            float const* const from = at.at + t * piece_pitch;
            warp_group group{{0.0F, 0.0F}, g};
            for (int k = 0; k < halves; ++k)
            {
                if (group.has(k)) { group.x[k] = from[k * device::warp_size + lane]; }
            }
            if (turned && mdkv::detail::turns(g)) { group.turn(); }
            auto const scaled = group.quantiser_of(kind);
            int code[halves];
            for (int k = 0; k < halves; ++k)
            {
                code[k] = group.has(k) ? scaled.code(group.x[k], mdkv::detail::most_code(kind)) : 0;
            }
            if (kind == storage::int4) { code[0] += upper_code(code, half_way, g) << 4; }
            int const tile      = t / int{tile_tokens} * int{tile_tokens};
            int const width     = n - tile < int{tile_tokens} ? n - tile : int{tile_tokens};
            std::byte* const to = at.made + tile * (bytes + 2 * int{sizeof(half)});
            auto* const scales  = reinterpret_cast<half*>(to); // [width], then minima [width]
            if (lane == 0)
            {
                scales[t - tile]         = narrow<half>(scaled.scale);
                scales[width + t - tile] = narrow<half>(scaled.minimum);
            }
            std::byte* const codes = to + width * 2 * int{sizeof(half)};
            for (int k = 0; k < halves; ++k)
            {
                int const b = k * device::warp_size + lane;
                if (b < bytes)
                {
                    codes[x.by_token ? (t - tile) * bytes + b : b * width + t - tile] = static_cast<std::byte>(code[k]);
                }
            }
        }
    }

    /// The code that shares a byte with this lane's first one; 0 where there is none.
    [[nodiscard]] __device__ static int upper_code(int const (&code)[warp_group::halves], int half_way, int g)
    {
        int const at    = device::lane() + half_way;
        int const low   = device::shuffle(code[0], at % device::warp_size);
        int const high  = device::shuffle(code[1], at % device::warp_size);
        bool const mine = device::lane() < half_way && at < g;
        return !mine ? 0 : at < device::warp_size ? low : high;
    }
};

} // namespace mdkv::gpu::kernels
