/// \file attend.hpp: attend on the CPU: splits of all sequences are attended by all threads (arXiv 2603.20616, section 5).
#pragma once

#include <mdkv/attend.hpp>

#include <mdkv/core/ground.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/detail/attend_job.hpp>
#include <mdkv/cpu/tile.hpp>
#include <mdkv/detail/attend.hpp>
#include <mdkv/detail/team.hpp>

#include <algorithm>
#include <new>
#include <span>

namespace MDKV_NAMESPACE::cpu
{

/// The backend's part of attend.
template <element T, element U, std::size_t N>
void attend_impl(backend const& on, in_view<U, 3, backend> queries,
    std::span<sequence_view<T, space::host> const, N> sequences, attend_options<backend> const& options,
    out_view<U, 3, backend> output, out_view<float, 2, backend> lse)
{
    using job_of_panel  = detail::attend_job<T, U>;
    index_t const rows  = queries.extent(0);
    auto const count    = static_cast<index_t>(sequences.size());
    index_t most_splits = 0; // in all sequences
    index_t own_bytes   = 0; // scratch of a thread
    index_t panels      = 0; // most panels of a sequence
    if (rows == 0) { return; }
    // Panel `number` of sequence i; the sequence's queries begin at token `first` of all queries.
    auto const panel_of = [&](index_t i, index_t number, index_t first) {
        auto const& [cache, n]    = sequences[static_cast<std::size_t>(i)];
        index_t const query_group = rows / cache.layout.heads;
        index_t const step        = (std::max<index_t>)(detail::most_panel_rows / query_group, 1);
        index_t const begin       = (std::min)(number * step, n);
        index_t const tokens      = (std::min)(step, n - begin);
        panels                    = (std::max)(panels, (n + step - 1) / step);
        return job_of_panel{slice<1>(queries, first + begin, tokens), mdkv::detail::without_const(cache),
            slice<1>(output, first + begin, tokens), slice<1>(lse, first + begin, tokens),
            mdkv::detail::of_queries(options.lse_elsewhere, first + begin, tokens)
                .value_or(in_view<float, 2, backend>{}),
            {cache.layout, sizeof(T)}, mdkv::detail::attend_scale(options.scale, cache.layout), query_group * tokens,
            n - begin - tokens};
    };
    workspace::frame frame{on.scratch};
    auto* const jobs     = frame.take<job_of_panel>(count);
    index_t* const first = frame.take<index_t>(count + 1); // first split of each job
    for (index_t i = 0, token = 0; i < count; ++i)
    {
        job_of_panel job = panel_of(i, 0, token); // no later panel has more tokens
        mdkv::detail::carver own;
        static_cast<void>(job.carve(own));
        own_bytes = (std::max)(own_bytes, tile::round_up(own.bytes(), workspace::alignment));
        most_splits += job.take(frame);
        token += sequences[static_cast<std::size_t>(i)].queries;
        new (jobs + i) job_of_panel{job};
    }
    std::byte* const memory = frame.take<std::byte>(on.workers(most_splits) * own_bytes);

    auto const body = [&](index_t split, index_t worker) {
        index_t const i = std::upper_bound(first, first + count + 1, split) - first - 1;
        jobs[i](split - first[i], memory + worker * own_bytes);
    };
    for (index_t number = 0; number < panels; ++number)
    {
        index_t stored = 0;
        first[0]       = 0;
        for (index_t i = 0, token = 0; i < count; ++i)
        {
            if (number > 0) { jobs[i].move_to(panel_of(i, number, token)); }
            token += sequences[static_cast<std::size_t>(i)].queries;
            stored += jobs[i].cut(mdkv::detail::attend_name(i, N != 1).text);
            first[i + 1] = first[i] + jobs[i].splits();
        }
        if (stored < detail::least_shared_bytes) { backend{on.scratch}.for_each(first[count], body); }
        else { on.for_each(first[count], body); }
    }
}

} // namespace MDKV_NAMESPACE::cpu
