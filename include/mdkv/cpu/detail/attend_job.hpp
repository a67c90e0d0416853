/// \file attend_job.hpp: one sequence's attention on the CPU: every head's tokens are cut into splits of equal bytes, attended apart and merged (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/core/cache.hpp>
#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/attention_kernels.hpp>
#include <mdkv/cpu/detail/code_kernels.hpp>
#include <mdkv/cpu/detail/element_kernels.hpp>
#include <mdkv/cpu/detail/hadamard_row.hpp>
#include <mdkv/cpu/detail/rounding.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/detail/attend.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/softmax.hpp>
#include <mdkv/detail/team.hpp>

#include <algorithm>
#include <cmath>

namespace MDKV_NAMESPACE::cpu::detail
{

using mdkv::detail::attend_sizes;
using mdkv::detail::run_basis;
using mdkv::detail::softmax_state;
using mdkv::detail::stored_run;

/// Caches with fewer bytes in all are attended by the calling thread: waking other threads takes longer than they save.
inline constexpr index_t least_shared_bytes = index_t{1} << 16;

/// Least bytes of a split, and most splits that a cache is cut into (besides one a head). Splits depend on the cache and
/// never on the number of threads, so results do not either.
inline constexpr index_t least_split_bytes = index_t{1} << 20;
inline constexpr index_t most_splits       = 512;

/// Rows of a head (query heads times tokens) attended at a time, unless one token has more: scratch does not grow with the
/// number of queries, and every panel of rows reads the stored bytes once.
inline constexpr index_t most_panel_rows = 32;

/// Tokens and bytes attended at a time: a block's logits and rows stay in the first-level cache.
inline constexpr index_t most_block_tokens  = 256;
inline constexpr index_t most_block_bytes   = index_t{1} << 15;
inline constexpr index_t most_coded_bytes   = index_t{9} << 12; // 256 tokens of 4 bits, 128 coordinates
inline constexpr index_t least_block_tokens = 64;

/// Distance in bytes at which page prefetches run ahead of the tokens being read.
inline constexpr index_t looked_up_bytes = index_t{1} << 18;

/// to = to * by + from * from_by, over n coordinates. The last product is not rounded: compilers would choose one of the two
/// anew in each copy of the function.
[[gnu::noinline]] inline void combine(float* to, float by, float const* from, float from_by, index_t n) noexcept
{
    for (index_t c = 0; c < n; ++c) { to[c] = std::fma(from[c], from_by, to[c] * by); }
}

[[gnu::noinline]] inline void multiply_by(float factor, float* x, index_t n) noexcept
{
    for (index_t c = 0; c < n; ++c) { x[c] *= factor; }
}

/// One panel of a sequence's queries: n tokens, followed in the tail by `hidden` more tokens. Row g of a head is its query
/// head g / n at token g % n of the panel. For each row of its head, a split writes to the scratch the softmax state and
/// the sums of values in every basis.
template <element T, element U>
struct attend_job
{
    in_view<U, 3, backend> queries;
    cache_view<T, space::host> cache;
    out_view<U, 3, backend> output;
    out_view<float, 2, backend> lse;
    in_view<float, 2, backend> lse_elsewhere; ///< or null
    attend_sizes sizes;
    float scale;       // factor of queries, for logits in base 2
    index_t head_rows; ///< G * n, rows of a head
    index_t hidden      = 0;
    index_t split_bytes = 0;

    // scratch
    index_t* first_split   = nullptr; // [H + 1]
    index_t* unfinished    = nullptr; // [H] splits still to be attended
    softmax_state* softmax = nullptr; // [splits, G]
    float* sums            = nullptr; // [splits, G, row_sums()]

    /// Most splits that the cache may be cut into, if arena and tail are full.
    [[nodiscard]] index_t most() const
    {
        index_t const heads = cache.layout.heads;
        return tokens() == 0 ? 0 : heads + (std::min)(held() / least_split_bytes, most_splits);
    }
    [[nodiscard]] index_t held() const { return cache.arena_bytes + cache.layout.heads * cache.tail_head_bytes(); }

    /// Takes over another panel of the same sequence and keeps this one's scratch.
    void move_to(attend_job const& next)
    {
        queries       = next.queries;
        output        = next.output;
        lse           = next.lse;
        lse_elsewhere = next.lse_elsewhere;
        head_rows     = next.head_rows;
        hidden        = next.hidden;
    }

    /// Takes the scratch that all threads share; returns the most splits.
    index_t take(workspace::frame& frame)
    {
        index_t const heads = cache.layout.heads;
        first_split         = frame.take<index_t>(heads + 1);
        unfinished          = frame.take<index_t>(heads);
        softmax             = frame.take<softmax_state>(most() * head_rows);
        sums                = frame.take<float>(checked_multiply(most(), head_rows * row_sums()));
        return most();
    }

    /// Cuts the heads into splits and returns the bytes that the heads hold.
    index_t cut(char const* name)
    {
        index_t const heads = cache.layout.heads;
        index_t stored      = 0;
        for (index_t h = 0; h < heads; ++h)
        {
            unfinished[h] = mdkv::detail::bytes_of_head<T>(cache.layout, cache, h);
            stored += unfinished[h];
        }
        split_bytes    = (std::max)(least_split_bytes, (stored + most_splits - 1) / most_splits);
        first_split[0] = 0;
        for (index_t h = 0; h < heads; ++h)
        {
            // An empty head is one split, too, because its rows must be written.
            index_t const wanted = (std::max<index_t>)((unfinished[h] + split_bytes - 1) / split_bytes, 1);
            unfinished[h]        = tokens() == 0 ? 0 : wanted;
            first_split[h + 1]   = first_split[h] + unfinished[h];
        }
        expects<mismatch>(
            splits() <= most(), name, ": the cache's directory names ", stored, " bytes, its memory has ", held());
        return stored;
    }
    [[nodiscard]] index_t splits() const { return first_split[cache.layout.heads]; }

    /// A thread's share of the scratch.
    struct scratch
    {
        float* logits;          // [G, most_block_tokens]
        float* q;               // [G, sizes.queries()]
        float* with_mean;       // [G] products with the mean key, for heads with rotated tokens
        rounded_query* rounded; // [groups, G] queries, rounded for the coded run being read
        std::byte* tile;        // copies: most_logit_tiles of the longest keys, or copy_bytes of the longest values
    };
    [[nodiscard]] scratch carve(mdkv::detail::carver& memory) const
    {
        index_t const groups = (sizes.keys + quantised_group - 1) / quantised_group;
        return {memory.take<float>(head_rows * most_block_tokens), memory.take<float>(head_rows * sizes.queries()),
            memory.take<float>(sizes.rotated ? head_rows : 0), memory.take<rounded_query>(head_rows * groups),
            memory.take<std::byte>(
                (std::max)(most_logit_tiles * tile_tokens * sizes.key_bytes, copy_bytes(sizes.value_bytes)))};
    }

    [[nodiscard]] index_t tokens() const { return queries.extent(1); }
    [[nodiscard]] index_t query_head(index_t h, index_t g) const { return (h * head_rows + g) / tokens(); }
    /// Sums of a row in every basis, and behind them the weight of rotated tokens, whose values are centred.
    [[nodiscard]] index_t row_sums() const { return sizes.sums() + (sizes.rotated ? tile_tokens : 0); }
    [[nodiscard]] float* sums_of(index_t split) const { return sums + split * head_rows * row_sums(); }

    /// out[g] += x[g] * matrix. The matrix [n, columns] has the cache's element type; rows of x and of out are `step` apart.
    void multiply(float const* x, index_t offset, index_t n, index_t columns, float* out, index_t step) const
    {
        run_rows matrix;
        matrix.begin       = cache.arena + offset;
        matrix.coordinates = static_cast<int>(columns);
        matrix.token_bytes = static_cast<int>(columns * index_t{sizeof(T)});
        block_values(values_as<T>, {x, step}, head_rows, matrix, 0, n, {out, step}, read_ahead{matrix.begin});
    }

    /// Writes the scaled queries of head h as floats, in every basis, and their products with the mean key.
    void load_queries(index_t h, float* q, float* with_mean) const
    {
        head_entry const& entry = cache.heads[h];
        bool const centred      = mdkv::detail::has_channels(cache.layout, cache, h);
        auto const* const means = reinterpret_cast<T const*>(cache.arena + entry.channels);
        std::fill_n(q, head_rows * sizes.queries(), 0.0F);
        for (index_t g = 0; g < head_rows; ++g)
        {
            float* const row     = q + g * sizes.queries();
            float* const rotated = row + sizes.queries_of(run_basis::rotated);
            tile::widen_row(queries.row(query_head(h, g), g % tokens()), row, sizes.keys);
            multiply_by(scale, row, sizes.keys);
            if (!centred) { continue; }
            tile::widen_row(means, rotated, sizes.keys);
            with_mean[g] = tile::dot(row, rotated, sizes.keys);
            tile::widen_row(means + sizes.keys, rotated, sizes.keys); // channel scales
            for (index_t c = 0; c < sizes.keys; ++c) { rotated[c] *= row[c]; }
            hadamard_row(rotated, sizes.keys);
        }
        if (entry.key_columns > 0)
        {
            multiply(q, entry.key_projection, sizes.keys, entry.key_columns, q + sizes.queries_of(run_basis::projected),
                sizes.queries());
        }
    }

    /// Attends tokens [begin, end) of a run; begin is a multiple of 16, and `last` says that the run is the tail. Prefetch
    /// order: this block's values while its keys are read; the next block's keys during softmax, which reads nothing, and
    /// while its values are read. After the last block the next keys are the bytes at `behind`.
    void attend_tokens(stored_run const& run, bool last, index_t begin, index_t end, std::byte const* behind,
        scratch const& memory, index_t split) const
    {
        storage const kind    = run.keys.kind;
        bool const coded      = kind != storage::plain;
        auto const& logits_by = !coded ? logits_as<T> : kind == storage::int8 ? coded_logits_as<8> : coded_logits_as<4>;
        sum_rows const logits{memory.logits, most_block_tokens};
        sum_rows const to{sums_of(split) + sizes.sums_of(run.basis), row_sums()};
        query_rows q{memory.q + sizes.queries_of(run.basis), sizes.queries()};
        if (coded)
        {
            round_queries(kind == storage::int8 ? 8 : 4, q.x, q.step, head_rows, run.keys.coordinates, memory.rounded);
            q = {q.x, q.step, memory.rounded, head_rows};
        }
        index_t const block = std::clamp(
            (coded ? most_coded_bytes : most_block_bytes) / run.token_bytes() / least_block_tokens * least_block_tokens,
            least_block_tokens, most_block_tokens);
        read_ahead{run.keys.begin + begin * run.keys.token_bytes}.fetch(
            (std::min)(block, end - begin) * run.keys.token_bytes);
        for (index_t t = begin; t < end; t += block)
        {
            index_t const n = (std::min)(block, end - t);
            read_ahead const values{run.values.begin + t * run.values.token_bytes};
            read_ahead const keys{t + n < end ? run.keys.begin + (t + n) * run.keys.token_bytes : behind};
            read_ahead next = keys; // one cursor for the softmaxes of all rows
            look_up_pages(run, t + looked_up_bytes / run.token_bytes(), block);
            block_logits(logits_by, q, head_rows, run.keys, t, n, logits, values, memory.tile);
            for (index_t g = 0; g < head_rows; ++g)
            {
                float* const row       = logits.x + g * logits.step;
                index_t const visible  = last ? run.tokens - hidden - (tokens() - 1 - g % tokens()) - t : n;
                index_t const softened = tile::round_up(n, tile_tokens);
                if (visible < n) { std::fill(row + (std::max<index_t>)(visible, 0), row + n, mdkv::detail::empty_lse); }
                if (visible <= 0) // the row sees none of the block
                {
                    std::fill_n(row, softened, 0.0F);
                    continue;
                }
                float const factor = soften(row, softened, softmax[split * head_rows + g], next);
                if (factor != 1.0F) { multiply_by(factor, sums_of(split) + g * row_sums(), row_sums()); }
            }
            query_rows const weights{logits.x, logits.step};
            if (!coded) { block_values(values_as<T>, weights, head_rows, run.values, t, n, to, keys); }
            else
            {
                coded_block_values(kind == storage::int8 ? coded_sums_as<8> : coded_sums_as<4>, weights, head_rows,
                    run.values, t, n, to, keys, memory.tile);
            }
        }
    }

    /// Prefetches one line of each page of n tokens of a run from token t on, up to the run's end.
    [[gnu::always_inline]] static void look_up_pages(stored_run const& run, index_t t, index_t n) noexcept
    {
        if (t >= run.tokens) { return; }
        for (run_rows const* const rows : {&run.keys, &run.values})
        {
            look_up(rows->begin + t * rows->token_bytes, (std::min)(n, run.tokens - t) * rows->token_bytes);
        }
    }

    /// Prefetches a head's key projection, and one line of each page in the first `looked_up_bytes` of every run.
    [[gnu::always_inline]] void ask_for_beginnings(index_t h) const noexcept
    {
        head_entry const& entry = cache.heads[h];
        read_ahead{cache.arena + entry.key_projection}.fetch(sizes.keys * entry.key_columns * index_t{sizeof(T)});
        for (std::size_t r = 0; r < mdkv::detail::most_runs(cache.layout); ++r)
        {
            stored_run const run = mdkv::detail::run_of_head(cache, h, r);
            if (run.tokens > 0) { look_up_pages(run, 0, looked_up_bytes / run.token_bytes()); }
        }
    }

    /// Begin of the keys read after run r of head h, in its next run or a later head. After the last run: begin of its own keys.
    [[nodiscard]] std::byte const* begin_behind(index_t h, std::size_t r) const noexcept
    {
        std::size_t const runs = mdkv::detail::most_runs(cache.layout);
        auto const heads       = static_cast<std::size_t>(cache.layout.heads);
        std::size_t const own  = static_cast<std::size_t>(h) * runs + r;
        for (std::size_t i = own + 1; i < heads * runs; ++i)
        {
            stored_run const run = mdkv::detail::run_of_head(cache, static_cast<index_t>(i / runs), i % runs);
            if (run.tokens > 0) { return run.keys.begin; }
        }
        return mdkv::detail::run_of_head(cache, h, r).keys.begin;
    }

    /// Attends split number `number` of head h: from every run the pieces that begin inside the split's bytes.
    void attend_split(index_t h, index_t split, index_t number, scratch const& memory) const
    {
        std::fill_n(softmax + split * head_rows, head_rows, softmax_state{});
        std::fill_n(sums_of(split), head_rows * row_sums(), 0.0F);
        if (number == 0) { ask_for_beginnings(h); }
        if (h + 1 < cache.layout.heads && split + 1 == first_split[h + 1]) { ask_for_beginnings(h + 1); }
        load_queries(h, memory.q, memory.with_mean);
        index_t run_begin      = 0;
        std::size_t const runs = mdkv::detail::most_runs(cache.layout);
        for (std::size_t r = 0; r < runs; ++r)
        {
            stored_run const run = mdkv::detail::run_of_head(cache, h, r);
            if (run.tokens == 0) { continue; }
            index_t const begin = cut_run(run, run_begin, number * split_bytes);
            index_t const end   = cut_run(run, run_begin, (number + 1) * split_bytes);
            run_begin += run.tokens * run.token_bytes();
            if (begin == end) { continue; }
            std::byte const* const behind =
                end < run.tokens ? run.keys.begin + end * run.keys.token_bytes : begin_behind(h, r);
            // Rotated keys are centred: logits are lower by q.mean. Shift the running maximum by q.mean during this run. The
            // weights of its tokens are what it adds to the sum.
            auto const shift = [&, this](float sign) {
                for (index_t g = 0; run.basis == run_basis::rotated && g < head_rows; ++g)
                {
                    softmax_state& state = softmax[split * head_rows + g];
                    state.largest += sign * memory.with_mean[g];
                    combine(sums_of(split) + g * row_sums() + sizes.sums(), 1.0F, &state.sum, sign, 1);
                }
            };
            shift(-1.0F);
            attend_tokens(run, r + 1 == runs, begin, end, behind, memory, split);
            shift(1.0F);
        }
    }

    /// Merges a head's splits in their order and writes the head's rows.
    void finish(index_t h) const
    {
        head_entry const& entry    = cache.heads[h];
        softmax_state* const state = softmax + first_split[h] * head_rows;
        float* const all           = sums_of(first_split[h]);
        bool const centred         = mdkv::detail::has_channels(cache.layout, cache, h);
        for (index_t i = head_rows; i < (first_split[h + 1] - first_split[h]) * head_rows; ++i)
        {
            auto const [by, other_by] = state[i % head_rows].merge(state[i]);
            combine(all + i % head_rows * row_sums(), by, all + i * row_sums(), other_by, row_sums());
        }
        if (entry.value_columns > 0)
        {
            multiply(all + sizes.sums_of(run_basis::projected), entry.value_projection, entry.value_columns,
                sizes.values, all, row_sums());
        }
        for (index_t g = 0; g < head_rows; ++g)
        {
            index_t const row    = query_head(h, g);
            index_t const i      = g % tokens();
            float* const x       = all + g * row_sums();
            float* const rotated = x + sizes.sums_of(run_basis::rotated);
            if (sizes.rotated)
            {
                hadamard_row(rotated, sizes.values); // rotates back
                combine(x, 1.0F, rotated, 1.0F, sizes.values);
            }
            if (centred)
            {
                auto const* const means = reinterpret_cast<T const*>(cache.arena + entry.channels) + 2 * sizes.keys;
                tile::widen_row(means, rotated, sizes.values);
                combine(x, 1.0F, rotated, x[sizes.sums()], sizes.values);
            }
            softmax_state const other = mdkv::detail::softmax_of(
                lse_elsewhere.empty() ? mdkv::detail::empty_lse : mdkv::detail::of_query(lse_elsewhere, row, i));
            float const share  = state[g].merge(other).first;
            float const weight = state[g].empty() ? 0.0F : share / state[g].sum;
            multiply_by(weight, x, sizes.values);
            U* const to = output.row(row, i);
            for (index_t c = 0; c < sizes.values; ++c) { to[c] = narrow<U>(x[c]); }
            lse(row, i) = state[g].lse();
        }
    }

    /// Attends a split. The thread that completes a head's last split finishes the head.
    void operator()(index_t split, std::byte* memory) const
    {
        index_t const heads = cache.layout.heads;
        index_t const h     = std::upper_bound(first_split, first_split + heads + 1, split) - first_split - 1;
        mdkv::detail::carver own{memory};
        attend_split(h, split, split - first_split[h], carve(own));
        if (__atomic_sub_fetch(&unfinished[h], 1, __ATOMIC_ACQ_REL) == 0) { finish(h); }
    }
};

} // namespace MDKV_NAMESPACE::cpu::detail
