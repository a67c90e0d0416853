/// \file attend.hpp: attend on the CPU: every head's tokens are cut into parts of equal bytes, attended apart and merged (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/attend.hpp>

#include <mdkv/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/attend_parts.hpp>
#include <mdkv/cpu/detail/attention_kernels.hpp>
#include <mdkv/cpu/detail/hadamard.hpp>
#include <mdkv/cpu/detail/logit_kernels.hpp>
#include <mdkv/cpu/detail/value_kernels.hpp>
#include <mdkv/cpu/simd.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/cpu/width.hpp>
#include <mdkv/detail/run_of_head.hpp>
#include <mdkv/detail/softmax.hpp>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <type_traits>
#include <utility>

namespace mdkv::cpu::inline MDKV_CPU_WIDTH
{

namespace detail
{

using mdkv::detail::run_basis;
using mdkv::detail::stored_run;

/// One call of attend, over its scratch.
template <element T, element U>
struct attend_job
{
    in_view<U, 2, backend> queries;
    cache_view<T, space::host> cache;
    out_view<U, 2, backend> output;
    out_view<float, 1, backend> lse;
    float scale; // of the logits, in base 2
    index_t group;
    index_t key_latents    = 0; // widest projected rung of the layout
    index_t value_latents  = 0;
    index_t rotated_keys   = 0; // D where a rung of the layout is rotated
    index_t rotated_values = 0; // Dv where one is
    index_t state_floats   = 0;
    attend_cut cut{0};

    // scratch
    index_t* first_part = nullptr; // [H + 1]
    index_t* finished   = nullptr; // [H] parts done
    float* states       = nullptr; // [parts, state_floats]
    float* own          = nullptr; // [slots, own_floats]

    /// A thread's part of the scratch.
    struct own_memory
    {
        float* q;           // [G, D]
        float* q_rotated;   // [G, rotated_keys]
        float* q_projected; // [G, key_latents]
        float* q_sums;      // [G, groups]: sums over the groups of the run being read
        float* logits;      // [G, most_block_tokens]
    };

    [[nodiscard]] index_t most_groups() const
    {
        return tile::round_up(cache.layout.dims.keys, quantised_group) / quantised_group;
    }

    [[nodiscard]] index_t own_floats() const
    {
        return tile::round_up(
            group * (cache.layout.dims.keys + rotated_keys + key_latents + most_groups() + most_block_tokens), 16);
    }

    [[nodiscard]] own_memory own_of(index_t slot) const
    {
        float* const q           = own + slot * own_floats();
        float* const q_rotated   = q + group * cache.layout.dims.keys;
        float* const q_projected = q_rotated + group * rotated_keys;
        float* const q_sums      = q_projected + group * key_latents;
        return {q, q_rotated, q_projected, q_sums, q_sums + group * most_groups()};
    }

    [[nodiscard]] attend_state state(index_t part) const
    {
        return {states + part * state_floats, group, cache.layout.dims.values, rotated_values, value_latents};
    }

    /// Scaled queries of head h as floats. A row that is not finite poisons its state: vector comparisons would hide it.
    void load_queries(index_t h, float* q, attend_state const& to) const
    {
        index_t const dim = cache.layout.dims.keys;
        for (index_t g = 0; g < group; ++g)
        {
            float* const row = q + g * dim;
            tile::widen_row(queries.data_handle() + queries.offset(h * group + g, 0), row, dim);
            simd::floats zeros = simd::broadcast(0.0F);
            index_t d          = 0;
            for (; d + simd::lanes <= dim; d += simd::lanes)
            {
                simd::floats const x = simd::load(row + d) * simd::broadcast(scale);
                simd::store(row + d, x);
                zeros += x * simd::broadcast(0.0F);
            }
            float zero = simd::sum(zeros);
            for (; d < dim; ++d)
            {
                row[d] *= scale;
                zero += row[d] * 0.0F;
            }
            to.softmax[g].sum += zero;
        }
    }

    /// out[g] += x[g] * matrix, the matrix [n, columns] in the cache's element type.
    void multiply(
        float const* x, index_t x_step, index_t offset, index_t n, index_t columns, float* out, index_t out_step) const
    {
        run_rows matrix;
        matrix.begin       = cache.arena + offset;
        matrix.coordinates = static_cast<int>(columns);
        matrix.token_bytes = static_cast<int>(columns * index_t{sizeof(T)});
        block_values<T>({x, x_step}, group, matrix, 0, n, {out, out_step}, read_ahead{matrix.begin});
    }

    /// The queries in the basis of a run, and where its sums grow.
    struct query_basis
    {
        query_rows queries;
        sum_rows sums;
    };

    /// Attends tokens [begin, end) of a run; begin is a multiple of 16. While a block's keys are read its values are
    /// asked for, and while its values are read the next keys, at last those of the run that follows.
    void attend_tokens(stored_run const& run, index_t begin, index_t end, query_basis in, own_memory const& mine,
        attend_state const& to, std::byte const* following) const
    {
        index_t const block = block_tokens(run);
        sum_rows const logits{mine.logits, most_block_tokens};
        if (run.keys.kind != storage::plain)
        {
            sum_groups(in.queries.x, in.queries.step, group, run.keys.coordinates, mine.q_sums);
            in.queries.sums   = mine.q_sums;
            in.queries.groups = run.keys.groups();
        }
        for (index_t t = begin; t < end; t += block)
        {
            index_t const n = std::min(block, end - t);
            read_ahead const values{run.values.begin + t * run.values.token_bytes};
            with_stored<T>(run.keys.kind, [&](auto stored) {
                block_logits<decltype(stored)>(in.queries, group, run.keys, t, n, logits, values);
            });
            for (index_t g = 0; g < group; ++g)
            {
                float const factor =
                    soften(mine.logits + g * most_block_tokens, tile::round_up(n, tile_tokens), to.softmax[g]);
                if (factor != 1.0F) { to.scale(g, factor); }
            }
            read_ahead const keys{t + n < end ? run.keys.begin + (t + n) * run.keys.token_bytes : following};
            with_stored<T>(run.values.kind, [&](auto stored) {
                block_values<decltype(stored)>({logits.x, logits.step}, group, run.values, t, n, in.sums, keys);
            });
        }
    }

    void project_queries(head_entry const& entry, own_memory const& mine) const
    {
        index_t const dim = cache.layout.dims.keys;
        std::fill_n(mine.q_projected, group * key_latents, 0.0F);
        multiply(mine.q, dim, entry.key_projection, dim, entry.key_columns, mine.q_projected, key_latents);
    }

    void rotate_queries(own_memory const& mine) const
    {
        std::copy_n(mine.q, group * rotated_keys, mine.q_rotated);
        for (index_t g = 0; g < group; ++g) { hadamard_row(mine.q_rotated + g * rotated_keys, rotated_keys); }
    }

    /// Attends part p of head h: of every run the pieces of 64 tokens that begin inside the part's bytes.
    void attend_part(index_t h, index_t part, index_t parts, own_memory const& mine) const
    {
        attend_head const head{cache, h};
        bool projected_yet = false;
        bool rotated_yet   = false;

        attend_state const to = state(first_part[h] + part);
        to.clear(group);
        load_queries(h, mine.q, to);
        index_t run_begin = 0;
        for (std::size_t r = 0; r < head.count; ++r)
        {
            stored_run const& run     = head.runs[r];
            index_t const piece_bytes = part_tokens * run.token_bytes();
            auto const token_at       = [&](index_t bytes) {
                index_t const pieces = bytes <= run_begin ? 0 : (bytes - run_begin + piece_bytes - 1) / piece_bytes;
                return std::min(pieces * part_tokens, run.tokens);
            };
            index_t const begin = token_at(part * cut.part);
            index_t const end   = part + 1 == parts ? run.tokens : token_at((part + 1) * cut.part);
            run_begin += run.tokens * run.token_bytes();
            if (begin == end) { continue; }
            if (run.basis == run_basis::projected && !std::exchange(projected_yet, true))
            {
                project_queries(cache.heads[h], mine);
            }
            if (run.basis == run_basis::rotated && !std::exchange(rotated_yet, true)) { rotate_queries(mine); }
            query_basis const in = run.basis == run_basis::projected
                                       ? query_basis{{mine.q_projected, key_latents}, {to.latent, to.latent_step}}
                                   : run.basis == run_basis::rotated
                                       ? query_basis{{mine.q_rotated, rotated_keys}, {to.rotated, to.rotated_step}}
                                       : query_basis{{mine.q, cache.layout.dims.keys}, {to.sums, to.value_step}};
            attend_tokens(
                run, begin, end, in, mine, to, r + 1 < head.count ? head.runs[r + 1].keys.begin : run.values.begin);
        }
    }

    /// Joins a head's parts in their order and writes its rows.
    void finish(index_t h) const
    {
        head_entry const& entry = cache.heads[h];
        attend_state const all  = state(first_part[h]);
        for (index_t p = first_part[h] + 1; p < first_part[h + 1]; ++p) { all.merge(state(p), group); }
        if (entry.value_columns > 0)
        {
            multiply(all.latent, all.latent_step, entry.value_projection, entry.value_columns, cache.layout.dims.values,
                all.sums, all.value_step);
        }
        for (index_t g = 0; g < group && all.rotated_step > 0; ++g)
        {
            float* const rotated = all.rotated + g * all.rotated_step;
            float* const sums    = all.sums + g * all.value_step;
            hadamard_row(rotated, all.rotated_step); // back
            combine(sums, 1.0F, rotated, 1.0F, all.rotated_step);
        }
        for (index_t g = 0; g < group; ++g)
        {
            index_t const row    = h * group + g;
            float const weight   = all.softmax[g].empty() ? 0.0F : 1.0F / all.softmax[g].sum;
            U* const to          = output.data_handle() + output.offset(row, 0);
            float const* const x = all.sums + g * all.value_step;
            for (index_t c = 0; c < all.value_step; ++c) { to[c] = narrow<U>(x[c] * weight); }
            lse(row) = all.softmax[g].lse();
        }
    }

    /// Work item i: a part; whoever completes a head's last one finishes the head.
    void run_item(index_t i, index_t slot) const
    {
        index_t const heads = cache.layout.heads;
        index_t const h     = std::upper_bound(first_part, first_part + heads + 1, i) - first_part - 1;
        index_t const parts = first_part[h + 1] - first_part[h];
        attend_part(h, i - first_part[h], parts, own_of(slot));
        std::atomic_ref<index_t> const done{finished[h]};
        if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == parts) { finish(h); }
    }
};

} // namespace detail

template <element T, element U>
void attend_impl(backend const& on, in_view<U, 2, backend> queries, cache_view<T, space::host> const& cache,
    attend_options options, out_view<U, 2, backend> output, out_view<float, 1, backend> lse)
{
    cache_layout const& layout = cache.layout;
    index_t const heads        = layout.heads;
    if (heads == 0) { return; }
    float const scale = options.scale > 0.0F ? options.scale : 1.0F / std::sqrt(static_cast<float>(layout.dims.keys));
    detail::attend_job<T, U> job{queries, cache, output, lse, scale * mdkv::detail::log2_e, queries.extent(0) / heads};
    for (std::size_t r = 0; r < layout.rungs; ++r)
    {
        if (!layout.projected(r)) { continue; }
        job.key_latents   = std::max(job.key_latents, layout.key_coordinates[r]);
        job.value_latents = std::max(job.value_latents, layout.value_coordinates[r]);
    }
    job.rotated_keys   = layout.any_rotated() ? layout.dims.keys : 0;
    job.rotated_values = layout.any_rotated() ? layout.dims.values : 0;
    job.state_floats =
        detail::attend_state::floats(job.group, layout.dims.values, job.rotated_values, job.value_latents);

    // The directory may not exist yet in a dry run, so room is made for what the arena and the tail could hold.
    index_t const room     = cache.arena_bytes + heads * cache.tail_head_bytes();
    index_t const capacity = heads + std::min(room / detail::part_bytes, detail::most_parts);
    workspace::frame frame{*on.scratch, "attend"};
    job.first_part = frame.take<index_t>(heads + 1);
    job.finished   = frame.take<index_t>(heads);
    job.states     = frame.take<float>(checked_multiply(capacity, job.state_floats));
    job.own        = frame.take<float>(on.slots(capacity) * job.own_floats());
    if (!frame.ready()) { return; }

    index_t stored = 0;
    for (index_t h = 0; h < heads; ++h) { stored += detail::attend_head{cache, h}.bytes; }
    job.cut           = detail::attend_cut{stored};
    job.first_part[0] = 0;
    for (index_t h = 0; h < heads; ++h)
    {
        job.first_part[h + 1] = job.first_part[h] + job.cut.parts(detail::attend_head{cache, h}.bytes);
        job.finished[h]       = 0;
    }
    index_t const parts = job.first_part[heads];
    expects<mismatch>(
        parts <= capacity, "attend: the cache's directory names ", stored, " bytes, its memory has ", room);
    auto const body = [&](index_t i, index_t slot) { job.run_item(i, slot); };
    if (stored < detail::serial_bytes) { backend{on.scratch}.for_each(parts, body); }
    else { on.for_each(parts, body); }
}

} // namespace mdkv::cpu::inline MDKV_CPU_WIDTH
