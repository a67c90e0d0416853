/// \file best.cpp: the program of README.md: a prompt by the preset `best`, decoded tokens, a fold and a file, with a small engine around it
#include <mdkv/mdkv.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <span>
#include <vector>

using namespace mdkv;
using host        = cpu::backend;
using layer_cache = cpu::cache<half>;

namespace
{
/// The code of README.md.
void serve(host const& on, prompt_shape<host> const& shape, auto& engine, cache_identity const& model, auto&& file)
{
    prompt<host, half> p{on, presets::best, shape};             // <host, half, float>: queries in float
    for (index_t first = 0; first < shape.tokens; first += 256) // while prefill has their queries
    {
        auto const n = std::min<index_t>(256, shape.tokens - first);
        for (index_t l = 0; l < shape.layers; ++l) { p.read_chunk(on, l, first, engine.rows(l, first, n)); }
    }
    for (index_t l = 0; l < shape.layers; ++l) { p.finish_layer(on, l, engine.layer(l)); }
    p.allocate(on, budget::fraction(1, 16)); // a sixteenth of the bytes, which all layers share
    std::vector<layer_cache> caches(static_cast<std::size_t>(shape.layers));
    for (index_t l = 0; auto& c : caches) { p.pack(on, l, engine.layer(l), c), c.reserve_tail(512), ++l; }
    while (engine.next_token())
    {
        for (index_t l = 0; auto& c : caches) // a full tail of decoded tokens is folded, back into the layer's bytes
        {
            if (c.appended() == c.tail_capacity()) { recompress(on, engine.last_queries(l), presets::best, c); }
            append(on, engine.key(l), engine.value(l), c);
            attend(on, engine.query(l), c, {}, engine.output(l), engine.lse(l)), ++l;
        }
    }
    write(file, model, {}, std::span{caches}); // read<half>(mapped, model) gives views that attention reads from
}

constexpr index_t L = 3, H = 2, G = 3, D = 64, N = 1024, decoded = 600, last = 64; // last queries that score

/// Rows with most energy in few directions; every `step`-th token has such a mean.
std::vector<half> rows(index_t heads, index_t tokens, float mean, index_t step)
{
    static unsigned state = 7;
    std::vector<half> x(static_cast<std::size_t>(heads * tokens * D));
    for (std::size_t i = 0; i < x.size(); ++i)
    {
        state             = state * 1664525U + 1013904223U;
        bool const chosen = static_cast<index_t>(i) / D % step == 0;
        x[i] = narrow<half>(((chosen ? mean : 0.0F) + 10.0F * (static_cast<float>(state >> 8) * 0x1p-24F - 0.5F))
                            * std::pow(0.9F, static_cast<float>(i % D)));
    }
    return x;
}

/// One layer of a model, after position encoding: all tokens' rows, those that are decoded among them.
struct tensors
{
    std::vector<half> queries = rows(H * G, N + decoded, 3, 1); // [H*G, N + decoded, D]
    std::vector<half> keys    = rows(H, N + decoded, 6, 37);    // [H, N + decoded, D]
    std::vector<half> values  = rows(H, N + decoded, 6, 37);
    std::vector<float> lse    = std::vector<float>(H * G * last); // an engine's prefill has log-sum-exps at hand
    std::vector<half> output  = std::vector<half>(H * G * D);
    std::vector<float> sums   = std::vector<float>(H * G);
};

/// A model whose tokens are all known; it compares each 50th output with full attention.
struct small_engine
{
    std::vector<tensors> layers = std::vector<tensors>(L);
    index_t token               = N - 1; // the last that is known
    double error = 0, size = 0;

    small_engine()
    {
        for (tensors& x : layers)
        {
            std::vector<double> output(D);
            for (index_t i = 0; i < H * G * last; ++i)
            {
                x.lse[static_cast<std::size_t>(i)] = attend_fully(x, i / last, N - last + i % last, output);
            }
        }
    }

    prompt_rows<host, half> rows(index_t l, index_t first, index_t n)
    {
        return {part(layer_of(l).queries, H * G, first, n), part(layer_of(l).keys, H, first, n),
            part(layer_of(l).values, H, first, n)};
    }
    prompt_rows<host, half> layer(index_t l)
    {
        prompt_rows<host, half> all = rows(l, 0, N);
        all.queries                 = part(layer_of(l).queries, H * G, N - last, last);
        all.lse                     = in(host{}, layer_of(l).lse.data(), H * G, last);
        return all;
    }
    bool next_token()
    {
        if (token >= N && token % 50 == 0) { compare(); }
        return ++token < N + decoded;
    }
    in_view<half, 2, host> key(index_t l) { return one(layer_of(l).keys, H); }
    in_view<half, 2, host> value(index_t l) { return one(layer_of(l).values, H); }
    in_view<half, 2, host> query(index_t l) { return one(layer_of(l).queries, H * G); }
    in_view<half, 3, host> last_queries(index_t l) { return part(layer_of(l).queries, H * G, token - 8, 8); }
    out_view<half, 2, host> output(index_t l) { return out(host{}, layer_of(l).output.data(), H * G, D); }
    out_view<float, 1, host> lse(index_t l) { return out(host{}, layer_of(l).sums.data(), H * G); }

private:
    tensors& layer_of(index_t l) { return layers[static_cast<std::size_t>(l)]; }
    static in_view<half, 3, host> part(std::vector<half> const& x, index_t heads, index_t first, index_t n)
    {
        return slice<1>(in(host{}, x.data(), heads, N + decoded, D), first, n);
    }
    in_view<half, 2, host> one(std::vector<half> const& x, index_t heads) const
    {
        return {at(x, 0, token), {heads, D}, {(N + decoded) * D, 1}};
    }

    static half const* at(std::vector<half> const& x, index_t head, index_t i)
    {
        return x.data() + (head * (N + decoded) + i) * D;
    }
    /// Full attention of query head h of a token to the tokens up to it; returns the log-sum-exp.
    static float attend_fully(tensors const& x, index_t h, index_t of, std::vector<double>& output)
    {
        double sum = 0;
        output.assign(D, 0);
        for (index_t i = 0; i <= of; ++i)
        {
            double dot = 0;
            for (index_t d = 0; d < D; ++d)
            {
                dot += double{widen(at(x.queries, h, of)[d]) * widen(at(x.keys, h / G, i)[d])};
            }
            sum += dot = std::exp(dot / std::sqrt(double{D}));
            for (std::size_t d = 0; d < D; ++d) { output[d] += dot * double{widen(at(x.values, h / G, i)[d])}; }
        }
        for (double& y : output) { y /= sum; }
        return static_cast<float>(std::log(sum));
    }

    void compare()
    {
        std::vector<double> want(D);
        for (std::size_t i = 0; i < L * H * G * D; ++i)
        {
            tensors const& x = layers[i / (H * G * D)];
            if (i % D == 0) { attend_fully(x, static_cast<index_t>(i / D) % (H * G), token, want); }
            error += std::pow(double{widen(x.output[i % (H * G * D)])} - want[i % D], 2);
            size += std::pow(want[i % D], 2);
        }
    }
};
} // namespace

int main()
{
    small_engine engine;
    cpu::thread_pool threads{2};
    workspace scratch{cpu::host_memory{}}; // grows to what its calls need
    index_t bytes   = 0;                   // an engine writes a temporary file, syncs and renames it
    auto const file = [&](std::span<std::byte const> part) { bytes += std::ssize(part); };
    cache_identity const model{{'b', 'e', 's', 't'}}; // an engine: the SHA-256 of all that must agree
    serve({&scratch, threads}, {.layers = L, .heads = H, .group = G, .dims = {D, D}, .tokens = N}, engine, model, file);
    double const off        = std::sqrt(engine.error / engine.size);
    index_t const all_bytes = L * H * (N + decoded) * (D + D) * index_t{sizeof(half)};
    std::printf("%td tokens decoded, outputs off by %.3f of their size; a file of %td bytes for %td of all tokens\n",
        decoded, off, bytes, all_bytes);
    return bytes < all_bytes / 4 && off < 0.3 ? 0 : 1;
}
