/// \file ranks.cpp: one layer's heads over MPI's ranks: one budget, the rungs of one rank; then decode over shards of the tokens
///
///   mpiexec -n 3 example_ranks
#include <mdkv/mdkv.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <vector>

#include "mpi.hpp"

namespace
{
using mdkv::index_t;
constexpr index_t heads = 8, group = 3, dim = 64, tokens = 2048, asked = 64; // last queries that score
constexpr auto limit         = mdkv::budget::fraction(1, 8);
constexpr auto const& chosen = mdkv::presets::by_window;

/// MPI, and the bytes that this rank has given to it.
struct counting
{
    MPI_Comm comm = MPI_COMM_WORLD;
    index_t bytes = 0;

    static void sum(void* state, std::int64_t* numbers, index_t n)
    {
        auto& with = *static_cast<counting*>(state);
        with.bytes += 8 * n;
        sum_over_mpi(&with.comm, numbers, n);
    }
};

/// Compresses heads first, first + 1, ... of the layer. Returns their tokens' rungs.
std::vector<std::uint8_t> compressed(std::vector<float> const& q, std::vector<float> const& k,
    std::vector<float> const& v, index_t first, index_t count, mdkv::ranks const* ranks, mdkv::cpu::cache<float>& cache)
{
    mdkv::workspace scratch{mdkv::cpu::host_memory{}};
    mdkv::cpu::backend const on{&scratch};
    mdkv::prompt_rows<mdkv::cpu::backend, float> const rows{
        mdkv::in(on, q.data() + first * group * asked * dim, count * group, asked, dim),
        mdkv::in(on, k.data() + first * tokens * dim, count, tokens, dim),
        mdkv::in(on, v.data() + first * tokens * dim, count, tokens, dim)};
    mdkv::prompt<mdkv::cpu::backend, float> p{on, chosen,
        {.layers = 1, .heads = count, .group = group, .dims = {dim, dim}, .tokens = tokens, .ranks = ranks}};
    p.finish_layer(on, 0, rows);
    p.allocate(on, limit);
    p.pack(on, 0, rows, cache);
    auto const rungs = p.rungs_of(0);
    return {rungs.data_handle(), rungs.data_handle() + rungs.extent(0) * rungs.extent(1)};
}

/// Attention of one query over some tokens of a head, and its log-sum-exp: each rank has a shard, an empty one perhaps. Every rank
/// gathers all parts, and merges them in the order of ranks.
std::vector<float> over_shards(float const* q, float const* k, float const* v, index_t n, int ranks)
{
    std::vector<float> part(dim + 1), parts(static_cast<std::size_t>(ranks) * part.size());
    double sum = 0;
    std::vector<double> out(dim);
    for (index_t i = 0; i < n; ++i)
    {
        double logit = 0;
        for (index_t d = 0; d < dim; ++d) { logit += double{q[d]} * double{k[i * dim + d]}; }
        double const weight = std::exp(logit / 8); // sqrt(dim)
        sum += weight;
        for (std::size_t d = 0; d < out.size(); ++d)
        {
            out[d] += weight * double{v[i * dim + static_cast<index_t>(d)]};
        }
    }
    for (std::size_t d = 0; d < out.size(); ++d) { part[d] = n > 0 ? static_cast<float>(out[d] / sum) : 0; }
    part[dim] = n > 0 ? static_cast<float>(std::log(sum)) : -std::numeric_limits<float>::infinity();
    MPI_Allgather(part.data(), dim + 1, MPI_FLOAT, parts.data(), dim + 1, MPI_FLOAT, MPI_COMM_WORLD);
    mdkv::workspace none{mdkv::cpu::host_memory{}};
    mdkv::cpu::backend const on{&none};
    for (int r = 1; r < ranks; ++r)
    {
        float* const other = parts.data() + r * (dim + 1);
        mdkv::merge_attention(on, mdkv::in(on, parts.data(), 1, dim), mdkv::in(on, parts.data() + dim, 1),
            mdkv::in(on, other, 1, dim), mdkv::in(on, other + dim, 1), mdkv::out(on, parts.data(), 1, dim),
            mdkv::out(on, parts.data() + dim, 1));
    }
    return {parts.begin(), parts.begin() + dim};
}
} // namespace

int main(int count, char** arguments)
{
    MPI_Init(&count, &arguments);
    unsigned state  = 7; // the same numbers on every rank
    auto const rows = [&](index_t n, float mean) {
        std::vector<float> x(static_cast<std::size_t>(n * dim));
        for (std::size_t i = 0; i < x.size(); ++i)
        {
            state = state * 1664525U + 1013904223U;
            x[i]  = (mean + 8.0F * (float(state >> 8) * 0x1p-24F - 0.5F)) * std::pow(0.93F, float(i % dim));
        }
        return x;
    };
    auto const q = rows(heads * group * asked, 2), k = rows(heads * tokens, 0), v = rows(heads * tokens, 0);
    int rank = 0, size = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    index_t const first = heads * rank / size, own = heads * (rank + 1) / size - first;
    counting state_of_sums;
    mdkv::ranks const all{first, heads, counting::sum, &state_of_sums};
    mdkv::cpu::cache<float> cache, whole;
    auto const rungs = compressed(q, k, v, first, own, &all, cache);
    auto const one   = compressed(q, k, v, 0, heads, nullptr, whole);
    bool same        = std::equal(rungs.begin(), rungs.end(), one.begin() + first * (tokens - chosen.window));

    index_t const begin = tokens * rank / size, end = tokens * (rank + 1) / size;
    auto const merged = over_shards(q.data(), k.data() + begin * dim, v.data() + begin * dim, end - begin, size);
    auto const want   = over_shards(q.data(), k.data(), v.data(), rank == 0 ? tokens : 0, size);
    float off         = 0;
    for (std::size_t d = 0; d < want.size(); ++d) { off = std::max(off, std::abs(want[d] - merged[d])); }
    std::printf(
        "rank %d of %d: heads %td to %td, %zu arena bytes, %td bytes sent, rungs %s; decode over shards off by %g\n",
        rank, size, first, first + own, static_cast<std::size_t>(cache.view().arena_bytes), state_of_sums.bytes,
        same ? "of one rank" : "DIFFER", double{off});
    MPI_Finalize();
    return same && off < 1e-4F ? 0 : 1;
}
