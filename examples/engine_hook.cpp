/// \file engine_hook.cpp: mdkv in an engine: its pointers and strides, a preset of its own, its threads
#include <mdkv/mdkv.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

namespace engine
{
constexpr mdkv::index_t heads = 2, query_heads = 6, dim = 64, asked = 64, tokens = 1024;
constexpr mdkv::preset chosen = [] { // a preset of one's own, checked when compiled
    mdkv::preset p = mdkv::presets::by_window;
    p.name         = "engine";
    p.ratios       = {mdkv::drop, mdkv::full_int4, mdkv::full_int8}; // no token in 16 bits but the window's
    return p;
}();
using host = mdkv::cpu::backend;

mdkv::cpu::thread_pool threads{2};
mdkv::workspace scratch{mdkv::cpu::host_memory{}}; // grows; an engine's own memory will do, too
host const on{&scratch, threads};

/// Keys and values lie as [tokens, heads, dim], the last queries as [query_heads, asked, dim].
mdkv::compress_report after_prefill(float const* q, float const* k, float const* v, mdkv::preset const& by,
    mdkv::budget limit, mdkv::cpu::cache<float>& cache)
{
    mdkv::prompt_rows<host, float> const rows{mdkv::in(on, q, query_heads, asked, dim),
        mdkv::in(on, k, {heads, tokens, dim}, {dim, heads * dim, 1}), // read as [H, N, D]
        mdkv::in(on, v, {heads, tokens, dim}, {dim, heads * dim, 1})};
    return mdkv::compress(on, rows, by, limit, cache);
}

/// One decode step: the new token goes into the tail, then its queries see everything. Returns [query_heads, dim].
std::vector<float> decode(float const* q, float const* k, float const* v, mdkv::cpu::cache<float>& cache)
{
    std::vector<float> output(query_heads * dim), lse(query_heads); // lse: to merge with segments kept elsewhere
    mdkv::append(on, mdkv::in(on, k, heads, dim), mdkv::in(on, v, heads, dim), cache);
    mdkv::attend(on, mdkv::in(on, q, query_heads, dim), cache, {},
        mdkv::out(on, output.data(), query_heads, dim), mdkv::out(on, lse.data(), query_heads));
    return output;
}
} // namespace engine

int main()
{
    using namespace engine;
    unsigned state  = 7;
    auto const rows = [&](std::size_t n, float mean) { // most energy in few directions
        std::vector<float> x(n * dim);
        for (std::size_t i = 0; i < x.size(); ++i)
        {
            state = state * 1664525U + 1013904223U;
            x[i]  = (mean + 10.0F * (float(state >> 8) * 0x1p-24F - 0.5F)) * std::pow(0.9F, float(i % dim));
        }
        return x;
    };
    auto const k = rows((tokens + 1) * heads, 0), v = rows((tokens + 1) * heads, 0); // the last token is decoded
    auto const prompt_q = rows(query_heads * asked, 6), q = rows(query_heads, 6);    // queries have much in common
    float const *const new_k = &k[tokens * heads * dim], *const new_v = &v[tokens * heads * dim];
    mdkv::cpu::cache<float> small, whole;
    auto const report = after_prefill(prompt_q.data(), k.data(), v.data(), chosen, mdkv::budget::fraction(1, 8), small);
    after_prefill(prompt_q.data(), k.data(), v.data(), mdkv::presets::by_window, mdkv::budget::fraction(1, 1), whole);
    for (auto* cache : {&small, &whole}) { cache->reserve_tail(512); } // room for the tokens to come
    auto const got = decode(q.data(), new_k, new_v, small), want = decode(q.data(), new_k, new_v, whole);
    float off = 0; // the values have a spread of 3
    for (std::size_t i = 0; i < want.size(); ++i) { off = std::max(off, std::abs(got[i] - want[i])); }
    std::printf("%td of %td bytes; outputs off by up to %g\n", report.resident_bytes, report.full_bytes, double{off});
    return report.resident_bytes <= report.budget_bytes && off < 0.25F ? 0 : 1;
}
