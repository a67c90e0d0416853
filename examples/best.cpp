/// \file best.cpp: a whole prompt by the preset `best`: chunks are replayed as they are read, and all layers share one budget
#include <mdkv/mdkv.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <vector>

using namespace mdkv;
using host = cpu::backend;

namespace
{
constexpr index_t L = 4, H = 2, G = 3, D = 64, N = 1024, last = 64; // last queries that score

/// The code of README.md.
std::vector<cpu::cache<float>> compress(host const& on, prompt_shape<host> const& shape, auto& engine)
{
    prompt<host, float> p{on, presets::best, shape};
    for (index_t first = 0; first < shape.tokens; first += 256) // while prefill has their queries
    {
        auto const count = std::min<index_t>(256, shape.tokens - first);
        for (index_t l = 0; l < shape.layers; ++l) { p.read_chunk(on, l, first, engine.rows(l, first, count)); }
    }
    for (index_t l = 0; l < shape.layers; ++l) { p.finish_layer(on, l, engine.layer(l)); }
    p.allocate(on, budget::fraction(1, 4)); // a quarter of the bytes, which all layers share
    std::vector<cpu::cache<float>> caches(static_cast<std::size_t>(shape.layers));
    for (index_t l = 0; auto& cache : caches) { p.pack(on, l, engine.layer(l), cache), ++l; }
    return caches;
}

/// One layer of a model after position encoding: [H*G, N, D], [H, N, D], [H, N, D], [H*G, last].
struct tensors
{
    std::vector<float> queries, keys, values, lse;
};

/// Views of what an engine's prefill leaves.
struct small_engine
{
    std::vector<tensors> layers;

    prompt_rows<host, float> rows(index_t l, index_t first, index_t count) const
    {
        tensors const& x = layers[static_cast<std::size_t>(l)];
        host const on{};
        return {slice<1>(in(on, x.queries.data(), H * G, N, D), first, count),
            slice<1>(in(on, x.keys.data(), H, N, D), first, count),
            slice<1>(in(on, x.values.data(), H, N, D), first, count)};
    }
    prompt_rows<host, float> layer(index_t l) const // the last queries, all keys and values
    {
        prompt_rows<host, float> all = rows(l, 0, N);
        all.queries                  = rows(l, N - last, last).queries;
        all.lse                      = in(host{}, layers[static_cast<std::size_t>(l)].lse.data(), H * G, last);
        return all;
    }
};

/// Full attention of query head h to the first n tokens; returns the log-sum-exp.
float attend_fully(tensors const& x, index_t h, float const* query, index_t n, float* output)
{
    double sum = 0, weighted[D] = {};
    for (index_t i = h / G * N * D; i < (h / G * N + n) * D; i += D)
    {
        double dot = 0;
        for (index_t d = 0; d < D; ++d) { dot += double{query[d]} * double{x.keys[i + d]}; }
        sum += dot = std::exp(dot / std::sqrt(double{D}));
        for (index_t d = 0; d < D; ++d) { weighted[d] += dot * double{x.values[i + d]}; }
    }
    for (index_t d = 0; d < D; ++d) { output[d] = static_cast<float>(weighted[d] / sum); }
    return static_cast<float>(std::log(sum));
}

std::vector<float> rows(std::size_t count, float mean) // most energy in few directions
{
    static unsigned state = 7;
    std::vector<float> x(count * D);
    for (std::size_t i = 0; i < x.size(); ++i)
    {
        state = state * 1664525U + 1013904223U;
        x[i]  = (mean + 10.0F * (float(state >> 8) * 0x1p-24F - 0.5F)) * std::pow(0.9F, float(i % D));
    }
    return x;
}
} // namespace

int main()
{
    small_engine engine{std::vector<tensors>(L)};
    std::vector<float> got(H * G * D), want(H * G * D), lse(H * G);
    for (tensors& x : engine.layers)
    {
        x = {rows(H * G * N, 3), rows(H * N, 0), rows(H * N, 0), std::vector<float>(H * G * last)};
        for (index_t i = 0; i < H * G * last; ++i) // an engine's prefill has log-sum-exps at hand
        {
            index_t const h = i / last, t = N - last + i % last;
            x.lse[i] = attend_fully(x, h, &x.queries[(h * N + t) * D], t + 1, want.data());
        }
    }

    prompt_shape<host> const shape{.layers = L, .heads = H, .group = G, .dims = {D, D}, .tokens = N};
    cpu::thread_pool threads{2};
    workspace scratch{cpu::host_memory{}}; // grows to what its calls need
    host const on{&scratch, threads};
    auto caches = compress(on, shape, engine);

    index_t resident = 0;
    double error = 0, size = 0;
    for (std::size_t l = 0; l < L; ++l) // one decode step
    {
        auto const query = rows(H * G, 3);
        attend(on, in(on, query.data(), H * G, D), caches[l], {}, out(on, got.data(), H * G, D),
            out(on, lse.data(), H * G));
        for (index_t h = 0; h < H * G; ++h) { attend_fully(engine.layers[l], h, &query[h * D], N, &want[h * D]); }
        for (std::size_t i = 0; i < got.size(); ++i)
        {
            error += std::pow(double{got[i] - want[i]}, 2);
            size += std::pow(double{want[i]}, 2);
        }
        resident += caches[l].arena_bytes() + caches[l].tail_bytes();
    }
    index_t const uncompressed = L * H * N * (D + D) * index_t{sizeof(float)};
    std::printf(
        "%td of %td bytes; outputs off by %.3f of their size\n", resident, uncompressed, std::sqrt(error / size));
    return resident <= uncompressed / 4 && std::sqrt(error / size) < 0.05 ? 0 : 1;
}
