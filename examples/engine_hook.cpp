/// \file engine_hook.cpp: mdkv in an engine: its pointers and strides, its ratio set, its memory, its threads
#include <mdkv/mdkv.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <span>
#include <vector>

namespace engine
{
constexpr mdkv::ratio_set ratios{mdkv::drop, mdkv::part(1, 16), mdkv::part(1, 4), mdkv::full}; // checked when compiled
constexpr mdkv::index_t heads = 2, query_heads = 6, dim = 64, window = 32, tokens = 1024;      // window included
struct alignas(mdkv::workspace::alignment) line
{
    std::byte bytes[mdkv::workspace::alignment];
};
std::vector<line> scratch;
mdkv::cpu::thread_pool threads{2};

/// Makes a call twice: an empty workspace makes it a dry run that only counts the scratch it needs.
template <class Call>
auto lend(Call const& call)
{
    mdkv::workspace counting;
    static_cast<void>(call(mdkv::cpu::backend{&counting, threads}));
    scratch.resize(counting.bytes() / sizeof(line));
    mdkv::workspace lent{std::as_writable_bytes(std::span{scratch})};
    return call(mdkv::cpu::backend{&lent, threads});
}

/// Keys and values lie as [tokens, heads, dim], the last `window` queries as [query_heads, window, dim].
mdkv::compress_report after_prefill(
    float const* q, float const* k, float const* v, mdkv::budget limit, mdkv::cpu::cache<float>& cache)
{
    return lend([&](mdkv::cpu::backend on) {
        auto const queries = mdkv::in(on, q, query_heads, window, dim);
        auto const keys    = mdkv::in(on, k, {heads, tokens, dim}, {dim, heads * dim, 1}); // read as [H, N + W, D]
        auto const values  = mdkv::in(on, v, {heads, tokens, dim}, {dim, heads * dim, 1});
        mdkv::compress_options<mdkv::cpu::backend> const options{.limit = limit};
        return mdkv::compress(on, mdkv::split_window(on, queries, keys, values, window), ratios, options, cache);
    });
}

/// One decode step: the new token goes into the tail, then its queries see everything. Returns [query_heads, dim].
std::vector<float> decode(float const* q, float const* k, float const* v, mdkv::cpu::cache<float>& cache)
{
    std::vector<float> output(query_heads * dim), lse(query_heads); // lse: to merge with segments kept elsewhere
    return lend([&](mdkv::cpu::backend on) {
        mdkv::append(on, mdkv::in(on, k, heads, dim), mdkv::in(on, v, heads, dim), cache.view());
        mdkv::attend(on, mdkv::in(on, q, query_heads, dim), cache.view(), {},
            mdkv::out(on, output.data(), query_heads, dim), mdkv::out(on, lse.data(), query_heads));
        return output;
    });
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
    auto const prompt_q = rows(query_heads * window, 6), q = rows(query_heads, 6);   // queries have much in common
    float const *const new_k = &k[tokens * heads * dim], *const new_v = &v[tokens * heads * dim];
    mdkv::cpu::cache<float> small, whole;
    auto const report = after_prefill(prompt_q.data(), k.data(), v.data(), mdkv::budget::fraction(1, 4), small);
    after_prefill(prompt_q.data(), k.data(), v.data(), mdkv::budget::fraction(1, 1), whole);
    for (auto* cache : {&small, &whole}) { cache->reserve_tail(512); } // room for the tokens to come
    auto const got = decode(q.data(), new_k, new_v, small), want = decode(q.data(), new_k, new_v, whole);
    float off = 0; // the values have a spread of 3
    for (std::size_t i = 0; i < want.size(); ++i) { off = std::max(off, std::abs(got[i] - want[i])); }
    std::printf("%td of %td bytes; outputs off by up to %g\n", report.resident_bytes, report.full_bytes, double{off});
    return report.resident_bytes <= report.budget_bytes && off < 0.25F ? 0 : 1;
}
