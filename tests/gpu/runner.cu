#include "examples/runner/cuda_layers.cuh"

#include <mdkv/compress.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/stages/allocate.hpp>
#include <mdkv/stages/pack.hpp>

#include "examples/runner/device_layers.hpp"
#include "examples/runner/scratch_memory.hpp"
#include "gpu/support/device_packed.hpp"
#include "runner/systems/layer_cache.hpp"
#include "runner/systems/packed_cache.hpp"
#include "runner/systems/prompt_layer.hpp"
#include "support/compare.hpp"
#include "support/packed.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_resource;
using support::error_text;

template <class T>
using layers_on_device = runner::cuda_layers<T, device_resource>;

struct sizes
{
    std::int64_t tokens    = 100;
    std::int64_t window    = 8;
    std::int64_t heads     = 2;
    std::int64_t group     = 2;
    std::int64_t queries   = 16;
    std::int64_t key_dim   = 32;
    std::int64_t value_dim = 16;
};

/// A prompt's layer with the log-sum-exps that prefill hands over, and the rows of tokens after it.
template <class T>
struct prompt
{
    support::source random{"gpu/runner"};
    std::vector<T> keys, values, queries;
    std::vector<float> lse;
    runner::prompt_layer<T> layer;

    explicit prompt(sizes const& s)
        : keys{rows(s.heads * s.tokens * s.key_dim)}
        , values{rows(s.heads * s.tokens * s.value_dim)}
        , queries{rows(s.heads * s.group * s.queries * s.key_dim)}
    {
        layer.layer        = 3;
        layer.heads        = s.heads;
        layer.group        = s.group;
        layer.tokens       = s.tokens;
        layer.window       = s.window;
        layer.key_dim      = s.key_dim;
        layer.value_dim    = s.value_dim;
        layer.query_tokens = s.queries;
        layer.keys         = keys.data();
        layer.values       = values.data();
        layer.queries      = queries.data();
        for (std::int64_t row = 0; row < s.heads * s.group * s.queries; ++row) { lse.push_back(lse_of(row)); }
        layer.lse = lse.data();
    }
    prompt(prompt const&)            = delete;
    prompt& operator=(prompt const&) = delete;

    [[nodiscard]] std::vector<float> floats(std::int64_t count)
    {
        std::vector<float> all;
        for (std::int64_t i = 0; i < count; ++i) { all.push_back(static_cast<float>(random.normal())); }
        return all;
    }

private:
    [[nodiscard]] std::vector<T> rows(std::int64_t count)
    {
        std::vector<T> all;
        for (std::int64_t i = 0; i < count; ++i) { all.push_back(narrow<T>(static_cast<float>(random.normal()))); }
        return all;
    }

    [[nodiscard]] float lse_of(std::int64_t row) const
    {
        std::int64_t const head = row / (layer.group * layer.query_tokens);
        std::int64_t const last = layer.tokens - layer.query_tokens + row % layer.query_tokens; // that it sees
        T const* const query    = layer.queries + row * layer.key_dim;
        double sum              = 0;
        for (std::int64_t t = 0; t <= last; ++t)
        {
            T const* const key = layer.keys + (head * layer.tokens + t) * layer.key_dim;
            double product     = 0;
            for (std::int64_t d = 0; d < layer.key_dim; ++d)
            {
                product += double{widen(query[d])} * double{widen(key[d])};
            }
            sum += std::exp(product / std::sqrt(static_cast<double>(layer.key_dim)));
        }
        return static_cast<float>(std::log(sum));
    }
};

/// A preset for the layer's window and `scoring` queries.
template <class T>
runner::device_request request_of(
    preset from, std::int64_t bytes, runner::prompt_layer<T> const& layer, std::int64_t scoring)
{
    from.window   = layer.window;
    from.question = layer.window;
    from.queries  = scoring;
    from.uniform  = 0;
    return {.by = from, .bytes = bytes};
}

/// What a layer became, where it was made.
struct outcome
{
    std::unique_ptr<runner::layer_cache> cache;
    compress_report report;
    std::vector<std::uint8_t> rungs; // [heads, past]
};

template <class T>
outcome on_cpu(runner::prompt_layer<T> const& layer, runner::device_request const& request)
{
    outcome made;
    made.rungs.resize(static_cast<std::size_t>(layer.heads * layer.past()));
    cpu::cache<T> cache;
    workspace scratch{cpu::host_memory{}};
    cpu::backend const on{&scratch};
    prompt_rows<cpu::backend, T> const rows{
        in(on, layer.queries, layer.heads * layer.group, layer.query_tokens, layer.key_dim),
        in(on, layer.keys, layer.heads, layer.tokens, layer.key_dim),
        in(on, layer.values, layer.heads, layer.tokens, layer.value_dim),
        in(on, layer.lse, layer.heads * layer.group, layer.query_tokens)};
    mdkv::prompt<cpu::backend, T> p{on, request.by,
        {.layers    = 1,
            .heads  = layer.heads,
            .group  = layer.group,
            .dims   = {layer.key_dim, layer.value_dim},
            .tokens = layer.tokens}};
    p.finish_layer(on, 0, rows);
    auto const chosen  = p.allocate(on, budget::bytes(request.bytes));
    made.report        = p.pack(on, 0, rows, cache);
    made.report.chosen = chosen;
    auto const rungs   = p.rungs_of(0);
    std::copy_n(rungs.data_handle(), made.rungs.size(), made.rungs.begin());
    made.cache = std::make_unique<runner::packed_cache<T>>(std::move(cache), layer.group, request.tail_tokens);
    return made;
}

template <class T>
outcome on_device(layers_on_device<T>& layers, runner::prompt_layer<T> const& layer, runner::device_request request)
{
    outcome made;
    made.rungs.resize(static_cast<std::size_t>(layer.heads * layer.past()));
    request.rungs = made.rungs.data();
    made.cache    = layers.compress(layer, request, made.report);
    return made;
}

/// Decodes with both caches.
template <class T>
support::worst_error difference(prompt<T>& from, outcome const& a, outcome const& b, int steps)
{
    runner::prompt_layer<T> const& layer = from.layer;
    runner::scratch_memory scratch;
    auto const size = static_cast<std::size_t>(layer.heads * layer.group * layer.value_dim);
    std::vector<float> first(size);
    std::vector<float> second(size);
    support::worst_error error;
    for (int step = 0; step < steps; ++step)
    {
        auto const query = from.floats(layer.heads * layer.group * layer.key_dim);
        auto const key   = from.floats(layer.heads * layer.key_dim);
        auto const value = from.floats(layer.heads * layer.value_dim);
        a.cache->attend({}, scratch, query.data(), key.data(), value.data(), first.data());
        b.cache->attend({}, scratch, query.data(), key.data(), value.data(), second.data());
        for (std::size_t i = 0; i < size; ++i) { error.add(first[i], second[i], 1.0L, step); }
    }
    return error;
}

/// Losses differ by rounding, so a token near the multiplier may go to the next rung; its loss is then as good.
template <class T>
void expects_same(preset const& from, sizes const& s, std::int64_t scoring, budget limit)
{
    prompt<T> x{s};
    auto const& layer = x.layer;
    layer_shape const shape{
        layer.heads, layer.group, layer.past(), layer.window, {layer.key_dim, layer.value_dim}, index_t{sizeof(T)}};
    auto request        = request_of(from, limit.in_bytes(shape), layer, scoring);
    request.tail_tokens = 2; // of 20: it has to grow
    device_resource memory;
    {
        layers_on_device<T> layers{nullptr, memory};
        outcome const got  = on_device(layers, layer, request);
        outcome const want = on_cpu(layer, request);
        CHECK(got.report.status == want.report.status);
        CHECK(got.report.shape.tokens == want.report.shape.tokens);
        CHECK(got.report.full_bytes == want.report.full_bytes);
        CHECK(got.report.window_bytes == want.report.window_bytes);
        CHECK(got.report.resident_bytes == got.cache->resident_bytes());
        CHECK(got.report.resident_bytes <= request.bytes);
        CHECK(got.report.chosen.loss == doctest::Approx(want.report.chosen.loss).epsilon(1e-3));
        std::size_t differ = 0;
        std::vector<std::int64_t> tokens(from.ratios.size());
        for (std::size_t i = 0; i < want.rungs.size(); ++i)
        {
            differ += got.rungs[i] != want.rungs[i] ? 1 : 0;
            ++tokens[got.rungs[i]];
        }
        for (std::size_t r = 0; r < tokens.size(); ++r) { CHECK(got.report.chosen.tokens[r] == tokens[r]); }
        CAPTURE(differ);
        CHECK(differ * 50 <= want.rungs.size());
        if (differ == 0) { CHECK(got.report.resident_bytes == want.report.resident_bytes); }
        // As in compress.cu: the rounding of projections to T, or what a token at another rung moves.
        auto const error      = difference(x, got, want, 20);
        double const integers = support::integer_rounding(cache_layout{from.ratios, 1, 0, {64, 64}});
        CHECK_MESSAGE(error.within((differ == 0 ? 4e-3 : 4e-2) + integers), error);
    }
    CHECK(memory.outstanding() == 0);
}

TEST_CASE("the runner's layers on the device attend as its packed caches do, under the policies by_window and paper")
{
    expects_same<half>(presets::by_window, {.key_dim = 64, .value_dim = 72}, 16, budget::fraction(1, 4));
    expects_same<half>(presets::paper, {.group = 3}, 8, budget::fraction(1, 3));
}

TEST_CASE("a layer that was made on the host attends on the device as there")
{
    prompt<half> x{{.key_dim = 64, .value_dim = 72}};
    std::vector<std::uint8_t> rungs(static_cast<std::size_t>(x.layer.heads * x.layer.past()));
    for (std::size_t i = 0; i < rungs.size(); ++i) { rungs[i] = static_cast<std::uint8_t>(i * 7 % 4); }
    device_resource memory;
    {
        layers_on_device<half> layers{nullptr, memory};
        runner::scratch_memory scratch;
        auto made = runner::pack_layer(cpu::executor_ref{}, scratch, x.layer, bit_ratios, {}, rungs);
        made.reserve_tail(2);
        outcome got, want;
        got.cache  = layers.copy(made, x.layer.group);
        want.cache = std::make_unique<runner::packed_cache<half>>(std::move(made), x.layer.group);
        CHECK(got.cache->resident_bytes() == want.cache->resident_bytes());
        auto const error      = difference(x, got, want, 20);
        double const integers = support::integer_rounding(cache_layout{bit_ratios, 1, 0, {64, 64}});
        CHECK_MESSAGE(error.within(1e-5 + integers), error);
    }
    CHECK(memory.outstanding() == 0);
}

TEST_CASE("one device holds the layers of a sequence, and a layer may be whole or a window alone")
{
    device_resource memory;
    layers_on_device<bfloat16> layers{nullptr, memory};
    prompt<bfloat16> whole{{.tokens = 40, .key_dim = 24}};
    prompt<bfloat16> brief{{.tokens = 8, .queries = 8}};
    auto const request = request_of(presets::evict, 1 << 20, whole.layer, 8);
    outcome const a    = on_device(layers, whole.layer, request);
    outcome const b    = on_device(layers, brief.layer, request);
    CHECK(a.report.status == compress_status::uncompressed);
    CHECK(a.cache->resident_bytes() == 2 * 40 * (24 + 16) * 2);
    CHECK(b.cache->resident_bytes() == 2 * 8 * (32 + 16) * 2);
    // Everything is stored bit for bit: what is left is the order of sums in float.
    auto const first  = difference(whole, a, on_cpu(whole.layer, request), 3);
    auto const second = difference(brief, b, on_cpu(brief.layer, request), 3);
    CHECK_MESSAGE(first.within(1e-5), first);
    CHECK_MESSAGE(second.within(1e-5), second);
}

TEST_CASE("a layer on the device takes the bytes of its tokens, however much more the budget would allow")
{
    device_resource memory;
    layers_on_device<half> layers{nullptr, memory};
    prompt<half> x{{}};
    std::int64_t const token = (32 + 16) * 2;
    // Both heads' windows, 20 tokens beside them, and what is less than a token; then twice what everything takes.
    for (std::int64_t const bytes : {36 * token + token - 1, 400 * token})
    {
        auto const request = request_of(presets::evict, bytes, x.layer, 8);
        outcome const got  = on_device(layers, x.layer, request);
        outcome const want = on_cpu(x.layer, request);
        CHECK(got.report.resident_bytes == std::min<std::int64_t>(bytes / token, 200) * token);
        CHECK(got.report.resident_bytes == want.report.resident_bytes);
        CHECK(got.cache->resident_bytes() == want.cache->resident_bytes());
        auto const error = difference(x, got, want, 3);
        CHECK_MESSAGE(error.within(4e-3), error);
    }
}

TEST_CASE("the device refuses what the host does, and nothing stays allocated")
{
    device_resource memory;
    {
        layers_on_device<float> layers{nullptr, memory};
        prompt<float> x{{.tokens = 30}};
        auto const refused = [&](ratio_set const& ratios, std::int64_t bytes) {
            preset by = presets::evict;
            by.ratios = ratios;
            return error_text<error>(
                [&] { static_cast<void>(on_device(layers, x.layer, request_of(by, bytes, x.layer, 8))); });
        };
        std::int64_t const token = 2 * (32 + 16) * 4;
        CHECK(refused(evict_ratios, 8 * token - 1).find("cannot hold the window of 8 tokens") != std::string::npos);
        CHECK(refused(ratio_set{std::vector<rung>{full_int8, full}}, 9 * token)
                  .find("cannot hold every token at its cheapest rung; at least ")
              != std::string::npos);

        x.keys[31 * 32] = std::numeric_limits<float>::infinity(); // head 1, token 1
        CHECK(refused(evict_ratios, 12 * token) == "keys: NaN or infinity in layer 3, head 1, row 1");
    }
    CHECK(memory.outstanding() == 0);
}

} // namespace
