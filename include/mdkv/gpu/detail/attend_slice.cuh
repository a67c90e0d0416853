/// \file attend_slice.cuh: the kernel that attends slices of heads' bytes and leaves a mergeable state (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/detail/attend.hpp>
#include <mdkv/detail/hadamard.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/detail/team.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/detail/attend_batch.cuh>
#include <mdkv/gpu/detail/attend_parts.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstddef>

// How it works. A head's stored bytes, over all its runs, are cut into slices of equal size; a block attends one slice for
// up to eight query heads at once, so that every stored byte is read once for any G. Tokens come in blocks of up to 64:
// their bytes are copied to shared memory as they are, the next block while this one is worked on. Then
//   softmax  a warp has one query: running maximum and sum, base 2
//   values   a thread has one coordinate and a share of the tokens, and the sums of four queries
// Sums of values are kept in shared memory, one set for each basis a run may be in; nothing is projected back here.

namespace mdkv::inline MDKV_MACHINE::gpu::kernels
{

using mdkv::detail::attend_sizes;
using mdkv::detail::coded_group;
using mdkv::detail::run_basis;
using mdkv::detail::run_rows;
using mdkv::detail::stored_run;

template <element T, element U, int Most>
struct attend_slice
{
    // Inside a block everything is counted in int: 64-bit division takes as long as a row.
    static constexpr char const* name              = "attend_slice";
    static constexpr int threads                   = attend_threads;
    static constexpr int blocks_per_multiprocessor = 4;
    static constexpr int most_queries              = attend_queries;
    static constexpr int most_tokens               = attend_tokens;
    static constexpr int chunk                     = 4; ///< queries whose sums a thread holds
    static constexpr int group_size                = quantised_group;

    attend_batch<Most> batch;
    in_view<U, 3, backend> queries;
    attend_sizes sizes;
    float* states;    // [batch.blocks, most_queries, sizes.state()]
    float scale;      // factor of queries, for logits in base 2
    int block_tokens; // tokens staged at once: 64, 32 or 16
    int stages;       // 2: the next block is copied while this one is worked on

    /// A block's shared memory.
    struct scratch
    {
        float* q;          // [most_queries, sizes.queries()]
        float* with_mean;  // [most_queries]: products with the mean key, for heads with rotated tokens
        float* logits;     // [parts, most_queries, block_tokens], then weights [most_queries, block_tokens]
        float* softmax;    // [most_queries, 2]: largest, sum
        float* factor;     // [most_queries]
        float* sums;       // [most_queries, sizes.sums()]
        float* partial;    // [threads, chunk]
        std::byte* staged; // [stages, staged_bytes()]
    };

    [[nodiscard]] MDKV_HD int groups() const { return (sizes.keys + group_size - 1) / group_size; }
    [[nodiscard]] MDKV_HD index_t staged_keys() const { return align(index_t{block_tokens} * sizes.key_bytes); }
    [[nodiscard]] MDKV_HD index_t staged_bytes() const
    {
        return staged_keys() + align(index_t{block_tokens} * sizes.value_bytes);
    }
    [[nodiscard]] MDKV_HD static index_t align(index_t bytes) { return (bytes + 15) / 16 * 16; }

    [[nodiscard]] MDKV_HD scratch carve(mdkv::detail::carver& memory) const
    {
        return {memory.take<float>(most_queries * sizes.queries()), memory.take<float>(most_queries),
            memory.take<float>(threads * most_queries), memory.take<float>(most_queries * 2),
            memory.take<float>(most_queries), memory.take<float>(most_queries * sizes.sums()),
            memory.take<float>(threads * chunk), memory.take<std::byte>(stages * staged_bytes())};
    }
    [[nodiscard]] index_t shared_bytes() const
    {
        mdkv::detail::carver count;
        static_cast<void>(carve(count));
        return count.bytes();
    }

    /// Work of one block: some rows of a head over one slice.
    struct place
    {
        attend_sequence const& sequence;
        index_t head;
        int first_query; ///< the block's first row of the head
        int queries;     ///< 1 to most_queries
        index_t slice;
    };

    __device__ void operator()() const
    {
        attend_sequence const& own = batch.at(device::block(), [](attend_sequence const& s) { return s.first_block; });
        index_t const block        = device::block() - own.first_block;
        index_t const item         = block / own.slices;
        int const before           = static_cast<int>(item % own.query_blocks()) * most_queries;
        place const at{own, item / own.query_blocks(), before,
            own.group - before < most_queries ? own.group - before : most_queries, block % own.slices};
        mdkv::detail::carver memory{device::shared_memory()};
        scratch const mine = carve(memory);
        begin(at, mine);
        index_t const total = mdkv::detail::bytes_of_head<T>(batch.layout, own, at.head);
        index_t run_begin   = 0;
        bool projected      = false;
        for (std::size_t i = 0; i < mdkv::detail::most_runs(batch.layout); ++i)
        {
            stored_run const run = mdkv::detail::run_of_head<T>(batch.layout, own, at.head, i);
            if (run.tokens == 0) { continue; }
            index_t const first = cut_run(run, run_begin, total * at.slice / own.slices);
            index_t const end   = cut_run(run, run_begin, total * (at.slice + 1) / own.slices);
            run_begin += run.tokens * run.token_bytes();
            if (first == end) { continue; }
            if (run.basis == run_basis::projected && !projected)
            {
                project_queries(at, mine);
                projected = true;
            }
            // Rotated keys are centred: logits are lower by q.mean. Shift the running maximum by q.mean during this run.
            bool const centred = run.basis == run_basis::rotated;
            if (centred) { move_logits(at, mine, -1.0F); }
            attend_run(run, i + 1 == mdkv::detail::most_runs(batch.layout), first, end, at, mine);
            if (centred) { move_logits(at, mine, 1.0F); }
        }
        finish(at, mine);
    }

    /// Clears sums and softmax, and loads the scaled queries in the original basis and rotated; rows past `at.queries`
    /// stay zero.
    __device__ void begin(place const& at, scratch const& mine) const
    {
        for (int i = device::thread(); i < most_queries * sizes.queries(); i += threads) { mine.q[i] = 0.0F; }
        for (int i = device::thread(); i < most_queries * sizes.sums(); i += threads) { mine.sums[i] = 0.0F; }
        for (int i = device::thread(); i < most_queries; i += threads)
        {
            mine.softmax[2 * i]     = mdkv::detail::empty_lse;
            mine.softmax[2 * i + 1] = 0.0F;
        }
        device::sync();
        for (int i = device::thread(); i < at.queries * sizes.keys; i += threads)
        {
            int const g                     = i / sizes.keys;
            int const d                     = i % sizes.keys;
            index_t const row               = at.head * at.sequence.group + at.first_query + g;
            index_t const token             = at.sequence.first_token + row % at.sequence.tokens;
            mine.q[g * sizes.queries() + d] = widen(queries(row / at.sequence.tokens, token, d)) * scale;
        }
        device::sync();
        if (!mdkv::detail::has_channels(batch.layout, at.sequence, at.head)) { return; }
        std::byte const* const arena = at.sequence.arena;
        index_t const channels       = at.sequence.heads[at.head].key_channels;
        for (int g = device::warp(); g < at.queries; g += threads / device::warp_size)
        {
            float sum = 0.0F;
            for (int d = device::lane(); d < sizes.keys; d += device::warp_size)
            {
                sum += mine.q[g * sizes.queries() + d] * mdkv::detail::matrix_at<T>(arena, channels, d);
            }
            sum = over_lanes(sum, [](float a, float b) { return a + b; });
            if (device::lane() == 0) { mine.with_mean[g] = sum; }
        }
        for (int i = device::thread(); i < at.queries * groups(); i += threads)
        {
            int const g       = i / groups();
            int const first   = i % groups() * group_size;
            int const n       = sizes.keys - first < group_size ? sizes.keys - first : group_size;
            float const* from = mine.q + g * sizes.queries() + first;
            float* const to   = mine.q + g * sizes.queries() + sizes.queries_of(run_basis::rotated) + first;
            for (int d = 0; d < n; ++d)
            {
                to[d] = from[d] * mdkv::detail::matrix_at<T>(arena, channels, sizes.keys + first + d); // channel scales
            }
            mdkv::detail::hadamard(to, n);
        }
        device::sync();
    }

    /// Adds `sign` times the products with the mean key to the running maxima, which stand for all logits so far.
    __device__ void move_logits(place const& at, scratch const& mine, float sign) const
    {
        device::sync();
        for (int g = device::thread(); g < at.queries; g += threads)
        {
            mine.softmax[2 * g] += sign * mine.with_mean[g];
        }
        device::sync();
    }

    /// Projects the queries to the head's basis, the columns of the stored projection.
    __device__ void project_queries(place const& at, scratch const& mine) const
    {
        head_entry const& entry = at.sequence.heads[at.head];
        int const columns       = static_cast<int>(entry.key_columns);
        for (int i = device::thread(); i < at.queries * columns; i += threads)
        {
            int const g = i / columns;
            int const c = i % columns;
            float sum   = 0.0F;
            for (int d = 0; d < sizes.keys; ++d)
            {
                sum += mine.q[g * sizes.queries() + d]
                       * mdkv::detail::matrix_at<T>(at.sequence.arena, entry.key_projection, d * columns + c);
            }
            mine.q[g * sizes.queries() + sizes.queries_of(run_basis::projected) + c] = sum;
        }
        device::sync();
    }

    /// Attends tokens [first, end) of a run; `last` says that the run is the tail.
    __device__ void attend_run(
        stored_run const& run, bool last, index_t first, index_t end, place const& at, scratch const& mine) const
    {
        stage(run, first, end, mine.staged);
        int const tokens = at.sequence.tokens;
        int current      = 0;
        for (index_t t = first; t < end; t += block_tokens)
        {
            index_t const next = t + block_tokens;
            if (stages == 2 && next < end)
            {
                stage(run, next, end, mine.staged + (1 - current) * staged_bytes());
                device::copy_async_wait<1>();
            }
            else { device::copy_async_wait<0>(); }
            device::sync();
            std::byte* const staged = mine.staged + current * staged_bytes();
            int const count         = next < end ? block_tokens : static_cast<int>(end - t);
            logits(staged_rows(run.keys, t, staged), run.basis, count, mine);
            device::sync();
            auto const seen = [&](int g) {
                index_t const left = run.tokens - (tokens - 1 - (at.first_query + g) % tokens) - t;
                return !last || left >= count ? count : left > 0 ? static_cast<int>(left) : 0;
            };
            soften(mine.logits, shares(), count, block_tokens, at.queries, seen, mine.softmax, mine.factor);
            device::sync();
            add_values(staged_rows(run.values, t, staged + staged_keys()), run.basis, count, mine);
            if (stages == 2) { current = 1 - current; }
            else if (next < end) { stage(run, next, end, mine.staged); }
        }
    }

    /// Copies the bytes of a block of tokens from t on, none from `end` on, to shared memory, as one group of asynchronous
    /// copies.
    __device__ void stage(stored_run const& run, index_t t, index_t end, std::byte* to) const
    {
        index_t const last = t + block_tokens < end ? t + block_tokens : end;
        auto const tokens  = static_cast<int>(run.keys.whole_tiles(last) - t);
        stage_bytes(run.keys.begin + t * run.keys.token_bytes, tokens * run.keys.token_bytes, to);
        stage_bytes(run.values.begin + t * run.values.token_bytes, tokens * run.values.token_bytes, to + staged_keys());
        device::copy_async_commit();
    }

    /// Rows of a run from token `first` on as they are staged at `begin`; tokens are counted from `first`.
    [[nodiscard]] __device__ static run_rows staged_rows(run_rows rows, index_t first, std::byte* begin)
    {
        rows.begin = begin;
        rows.stored -= first;
        return rows;
    }

    /// Shares that a token's coordinates are cut into, one a thread.
    [[nodiscard]] __device__ int shares() const { return threads / block_tokens; }

    /// logits[share, query, token] of a staged block.
    __device__ void logits(run_rows const& keys, run_basis basis, int count, scratch const& mine) const
    {
        int const token             = device::thread() % block_tokens;
        int const share             = device::thread() / block_tokens;
        int const in_tile           = token % int{tile_tokens};
        bool const there            = token < count;
        float const* const q        = mine.q + sizes.queries_of(basis);
        std::byte const* const rows = keys.begin + keys.tile(token);
        int const width             = keys.width(token);
        bool const coded            = keys.kind != storage::plain;
        for (int g = 0; g < most_queries; g += chunk)
        {
            float sum[chunk]{};
            auto const add = [&](int d, float k) {
                for (int i = 0; i < chunk; ++i) { sum[i] += q[(g + i) * sizes.queries() + d] * k; }
            };
            if (there && !coded)
            {
                int const each        = (keys.coordinates + shares() - 1) / shares();
                int const end         = (share + 1) * each < keys.coordinates ? (share + 1) * each : keys.coordinates;
                auto const* const key = reinterpret_cast<T const*>(rows) + in_tile;
                for (int d = share * each; d < end; ++d) { add(d, widen(key[d * width])); }
            }
            for (int d = share * group_size; there && coded && d < keys.coordinates; d += shares() * group_size)
            {
                coded_group const codes = keys.group(token, d / group_size);
                float const scale_of    = half_at(rows, codes.scale(in_tile));
                float const minimum     = half_at(rows, codes.minimum(in_tile));
                for (int j = 0; j < codes.coordinates; ++j)
                {
                    add(d + j, minimum + scale_of * static_cast<float>(codes.code_of(rows, in_tile, j)));
                }
            }
            for (int i = 0; i < chunk; ++i)
            {
                mine.logits[(share * most_queries + g + i) * block_tokens + token] = sum[i];
            }
        }
    }

    /// Scales all sums of values by the growth of the softmax, then adds the weighted values of a staged block.
    __device__ void add_values(run_rows const& values, run_basis basis, int count, scratch const& mine) const
    {
        for (int i = device::thread(); i < most_queries * sizes.sums(); i += threads)
        {
            mine.sums[i] *= mine.factor[i / sizes.sums()];
        }
        int columns = 16; // threads with a coordinate each; the other threads share the tokens
        while (columns < threads && columns < values.coordinates) { columns *= 2; }
        int const column  = device::thread() % columns;
        int const share   = device::thread() / columns;
        float* const sums = mine.sums + sizes.sums_of(basis);
        for (int first = 0; first < values.coordinates; first += columns)
        {
            int const c = first + column;
            for (int g = 0; g < most_queries; g += chunk)
            {
                float sum[chunk]{};
                for (int i = share; c < values.coordinates && i < count; i += threads / columns)
                {
                    float const v = staged_value(values, i, c);
                    for (int j = 0; j < chunk; ++j) { sum[j] += mine.logits[(g + j) * block_tokens + i] * v; }
                }
                device::sync(); // the sums before these have been read, and the scaling above is done
                for (int j = 0; j < chunk; ++j) { mine.partial[device::thread() * chunk + j] = sum[j]; }
                device::sync();
                for (int i = device::thread(); i < columns * chunk; i += threads)
                {
                    int const to = first + i / chunk;
                    if (to >= values.coordinates) { continue; }
                    float all = 0.0F;
                    for (int s = 0; s < threads / columns; ++s) { all += mine.partial[s * columns * chunk + i]; }
                    sums[(g + i % chunk) * sizes.sums() + to] += all;
                }
            }
        }
        device::sync();
    }

    /// Coordinate c of a staged token's value.
    [[nodiscard]] __device__ static float staged_value(run_rows const& values, int token, int c)
    {
        if (values.kind == storage::plain)
        {
            return widen(reinterpret_cast<T const*>(values.begin)[token * values.coordinates + c]);
        }
        int const place             = token % int{tile_tokens};
        coded_group const codes     = values.group(token, c / group_size);
        std::byte const* const tile = values.begin + values.tile(token);
        return half_at(tile, codes.minimum(place))
               + half_at(tile, codes.scale(place)) * static_cast<float>(codes.code_of(tile, place, c % group_size));
    }

    __device__ void finish(place const& at, scratch const& mine) const
    {
        float* const state = states + device::block() * most_queries * sizes.state();
        for (int i = device::thread(); i < at.queries * sizes.state(); i += threads)
        {
            int const g = i / sizes.state();
            int const j = i % sizes.state();
            state[i]    = j < 2 ? mine.softmax[2 * g + j] : mine.sums[g * sizes.sums() + j - 2];
        }
    }
};

} // namespace mdkv::inline MDKV_MACHINE::gpu::kernels
