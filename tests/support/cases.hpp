/// \file cases.hpp: texts, and the four ways of their rows into packed caches: compress, prompt, reader, fold
#pragma once

#include <mdkv/mdkv.hpp>

#include "support/folding.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace support
{

using host = mdkv::cpu::backend;

struct text_sizes
{
    index_t layers = 1;
    index_t tokens = 250;
    index_t heads  = 2;
    index_t group  = 2;
    mdkv::head_dims dims{32, 48};
    index_t last = 70;      ///< last queries that have log-sum-exps
    index_t rank = 1 << 20; ///< of keys and values
};

/// Queries, keys and values of all tokens of all layers, and the log-sum-exps of the last queries.
template <mdkv::element T>
struct text : text_sizes
{
    using rows = mdkv::prompt_rows<host, T>;

    std::vector<layer<T>> all;
    std::vector<tensor<float, 2>> lse; // [H*G, last]
    std::vector<float> elsewhere{};    // [H*G, n]  log-sum-exps of keys elsewhere, as for n = 1 sink logits; or none

    explicit text(text_sizes const& s, placement how = {})
        : text_sizes{s}
    {
        last = std::min(last, tokens);
        for (index_t l = 0; l < layers; ++l)
        {
            all.emplace_back(layer_sizes{.heads = heads,
                                 .group         = group,
                                 .queries       = tokens,
                                 .tokens        = tokens,
                                 .window        = 0,
                                 .dim           = dims.keys,
                                 .value_dim     = dims.values,
                                 .first_query   = 0,
                                 .rank          = rank,
                                 .salt          = l + 1},
                how);
            lse.emplace_back(std::array{heads * group, last}, placement{.slack = how.slack});
            for (index_t i = 0; i < heads * group * last; ++i)
            {
                lse.back().set(static_cast<float>(log_sum(l, i / last, tokens - last + i % last)), i / last, i % last);
            }
        }
    }

    [[nodiscard]] rows part(index_t l, index_t first, index_t n) const
    {
        auto const& x = all[static_cast<std::size_t>(l)];
        rows of{mdkv::slice<1>(x.queries.in(), first, n), mdkv::slice<1>(x.keys.in(), first, n),
            mdkv::slice<1>(x.values.in(), first, n)};
        if (!elsewhere.empty())
        {
            index_t const columns = std::ssize(elsewhere) / (heads * group);
            of.lse_elsewhere      = {elsewhere.data(), {heads * group, columns}, {columns, 1}};
        }
        return of;
    }
    /// All keys and values, the last queries.
    [[nodiscard]] rows whole(index_t l) const
    {
        rows x    = part(l, 0, tokens);
        x.queries = mdkv::slice<1>(x.queries, tokens - last, last);
        x.lse     = lse[static_cast<std::size_t>(l)].in();
        return x;
    }
    [[nodiscard]] mdkv::prompt_shape<host> shape() const
    {
        return {.layers = layers, .heads = heads, .group = group, .dims = dims, .tokens = tokens};
    }
    /// Bytes of one token of all heads, and of a layer.
    [[nodiscard]] index_t token_bytes() const { return heads * (dims.keys + dims.values) * index_t{sizeof(T)}; }
    [[nodiscard]] index_t layer_bytes() const { return tokens * token_bytes(); }

    /// Log-sum-exp of token t's query over the tokens up to its own, by the definition.
    [[nodiscard]] double log_sum(index_t l, index_t query_head, index_t t) const
    {
        auto const& x = all[static_cast<std::size_t>(l)];
        std::vector<double> query;
        for (index_t d = 0; d < dims.keys; ++d)
        {
            query.push_back(double{mdkv::widen(x.queries.get(query_head, t, d))});
        }
        double sum = 0;
        for (index_t i = 0; i <= t; ++i)
        {
            double logit = 0;
            for (index_t d = 0; d < dims.keys; ++d)
            {
                logit += query[static_cast<std::size_t>(d)] * double{mdkv::widen(x.keys.get(query_head / group, i, d))};
            }
            sum += std::exp(logit * x.scale());
        }
        return std::log(sum);
    }
};

template <class T>
[[nodiscard]] std::vector<cache_contents<T>> contents_of(std::vector<mdkv::cpu::cache<T>> const& caches)
{
    return {caches.begin(), caches.end()};
}

/// What a way has made.
template <class T>
struct outcome
{
    std::vector<cache_contents<T>> caches;
    std::vector<float> outputs{}; // of a reader's attention

    [[nodiscard]] friend bool operator==(outcome const&, outcome const&) = default;
};

/// Makes a call that has this name, by a backend of the test's choice.
using calls = std::function<void(char const* name, std::function<void(host const&)> const& call)>;

/// Each call has a workspace of its own.
[[nodiscard]] inline calls each(mdkv::cpu::executor_ref threads = {})
{
    return [threads](char const*, auto const& call) { run(call, threads); };
}

/// The conditions under which a way is taken.
template <class T>
struct conditions
{
    calls make                           = each();
    index_t part                         = 128;     ///< tokens of read_chunk, and of a reader's chunks
    index_t beyond                       = 0;       ///< tokens that the prompt could have had more
    mdkv::ranks const* ranks             = nullptr; ///< over which a prompt is spread
    std::vector<mdkv::cpu::cache<T>>* to = nullptr; ///< where the caches are to be
};

/// A prompt's calls, to its packed caches. Returns what `allocate` returns.
template <class T, class Prompt>
mdkv::allocation feed(Prompt& p, text<T> const& x, mdkv::preset const& chosen, mdkv::budget limit,
    std::vector<mdkv::cpu::cache<T>>& caches, conditions<T> const& c = {})
{
    // The window's tokens are left out by the caller where the prompt cannot know them.
    index_t const end = c.beyond > 0 ? std::max<index_t>(x.tokens - chosen.window, 0) : x.tokens;
    for (index_t first = 0; first < end; first += c.part)
    {
        for (index_t l = 0; l < x.layers; ++l)
        {
            auto const rows = x.part(l, first, std::min(c.part, end - first));
            c.make("read_chunk", [&](host const& on) { p.read_chunk(on, l, first, rows); });
        }
    }
    for (index_t l = x.layers; l-- > 0;)
    {
        c.make("finish_layer", [&](host const& on) { p.finish_layer(on, l, x.whole(l)); });
    }
    mdkv::allocation total;
    c.make("allocate", [&](host const& on) { total = p.allocate(on, limit); });
    for (index_t l = 0; l < x.layers; ++l)
    {
        c.make("pack", [&](host const& on) { p.pack(on, l, x.whole(l), caches[static_cast<std::size_t>(l)]); });
    }
    return total;
}

/// Checks that the call throws an error whose message begins so.
template <class Call>
void refused(std::string const& want, Call const& call)
{
    std::string const said = error_text<mdkv::error>(call);
    CAPTURE(want);
    CAPTURE(said);
    CHECK(said.starts_with(want));
}

/// A reader, and what it has made.
template <class T>
struct read_text
{
    using cache = mdkv::cpu::cache<T>;

    text<T> const& x;
    std::vector<cache> own;
    std::vector<cache>& caches;
    calls make;
    mdkv::workspace state{nan_memory{}};
    std::unique_ptr<mdkv::reader<host, cache>> r{};
    std::vector<float> outputs{}; // of all calls, one after another
    std::vector<mdkv::reader_report> reports{};

    read_text(
        text<T> const& x_, mdkv::preset const& chosen, mdkv::reader_options const& options, conditions<T> const& c = {})
        : x{x_}
        , own(static_cast<std::size_t>(c.to == nullptr ? x.layers : 0))
        , caches{c.to == nullptr ? own : *c.to}
        , make{c.make}
    {
        auto shape = x.shape();
        shape.tokens += c.beyond;
        r = std::make_unique<mdkv::reader<host, cache>>(host{&state}, chosen, shape, options, std::span{caches});
    }

    void attend(index_t l, index_t first, index_t n)
    {
        tensor<T, 3> output{{x.heads * x.group, n, x.dims.values}};
        tensor<float, 2> lse{{x.heads * x.group, n}};
        make("attend", [&](host const& on) { r->attend(on, l, x.part(l, first, n), output.out(), lse.out()); });
        for (T const one : output.elements()) { outputs.push_back(mdkv::widen(one)); }
        for (float const one : lse.elements()) { outputs.push_back(one); }
    }
    mdkv::reader_report end_chunk(bool last = false)
    {
        make(last ? "finish" : "end_chunk",
            [&](host const& on) { reports.push_back(last ? r->finish(on) : r->end_chunk(on)); });
        return reports.back();
    }
    mdkv::reader_report finish() { return end_chunk(true); }
    void read(index_t first, index_t end, index_t chunk)
    {
        for (; first < end; first += chunk)
        {
            index_t const n = std::min(chunk, end - first);
            for (index_t l = 0; l < x.layers; ++l) { attend(l, first, n); }
            end_chunk();
        }
    }
    /// Of one head, without the window.
    [[nodiscard]] index_t tokens_at(index_t l, index_t h, std::size_t rung) const
    {
        auto const v                  = caches[static_cast<std::size_t>(l)].view();
        mdkv::head_entry const& entry = v.heads[h];
        return rung < v.layout.full_rung ? entry.runs[rung].tokens
                                         : entry.exact.tokens - v.layout.window - entry.stand_ins;
    }
    [[nodiscard]] outcome<T> made() const { return {contents_of(caches), outputs}; }
};

/// A preset with blocks so short that a short prompt has several.
[[nodiscard]] inline mdkv::preset with_refit(mdkv::preset p)
{
    p.refitted = {.blocks = 2, .apart = 45, .span = 16, .rows = 9};
    return p;
}

// The ways: (text, preset, limit of an average layer, conditions)

/// Each layer by one call.
template <class T>
outcome<T> by_compress(text<T> const& x, mdkv::preset const& p, mdkv::budget limit, conditions<T> const& c = {})
{
    std::vector<mdkv::cpu::cache<T>> own(static_cast<std::size_t>(x.layers));
    auto& caches = c.to == nullptr ? own : *c.to;
    for (index_t l = 0; l < x.layers; ++l)
    {
        auto& cache = caches[static_cast<std::size_t>(l)];
        c.make("compress", [&](host const& on) { compress(on, x.whole(l), p, limit, cache); });
    }
    return {contents_of(caches)};
}

template <class T>
outcome<T> by_prompt(text<T> const& x, mdkv::preset const& p, mdkv::budget limit, conditions<T> const& c = {})
{
    std::vector<mdkv::cpu::cache<T>> own(static_cast<std::size_t>(x.layers));
    auto& caches = c.to == nullptr ? own : *c.to;
    auto shape   = x.shape();
    shape.tokens += c.beyond;
    shape.ranks = c.ranks;
    mdkv::workspace state{nan_memory{}};
    mdkv::prompt<host, T> one{host{&state}, p, shape};
    feed(one, x, p, limit, caches, c);
    return {contents_of(caches)};
}

/// The prompt's end ends the last chunk.
template <class T>
outcome<T> by_reader(text<T> const& x, mdkv::preset const& p, mdkv::budget limit, conditions<T> const& c = {})
{
    read_text<T> r{x, p, {.limit = limit, .chunk = c.part}, c};
    index_t const last = std::max<index_t>(x.tokens - 1, 0) / c.part * c.part;
    r.read(0, last, c.part);
    for (index_t l = 0; l < x.layers && x.tokens > 0; ++l) { r.attend(l, last, x.tokens - last); }
    r.finish();
    return r.made();
}

/// A prompt to whose caches tokens are appended, 40 or 64, and which are folded back to their limit, twice.
template <class T>
outcome<T> by_fold(text<T> const& x, mdkv::preset const& p, mdkv::budget limit, conditions<T> const& c = {})
{
    std::vector<mdkv::cpu::cache<T>> own(static_cast<std::size_t>(x.layers));
    auto& caches = c.to == nullptr ? own : *c.to;
    by_prompt(x, p, limit, {.to = &caches});
    for (index_t l = 0; l < x.layers; ++l)
    {
        auto& cache = caches[static_cast<std::size_t>(l)];
        cache.reserve_tail(64);
        for (index_t const n : {40, 64})
        {
            auto const more = x.part(l, 0, n);
            run([&](host const& on) { append(on, more.keys, more.values, cache.view()); });
            c.make("fold", [&](host const& on) { recompress(on, mdkv::slice<1>(more.queries, n - 30, 30), p, cache); });
        }
    }
    return {contents_of(caches)};
}

} // namespace support
