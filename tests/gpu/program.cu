// The program of README.md with the same lines on both backends: an engine on a GPU makes its caches with a stream and a resource,
// and counts appended tokens itself. Tolerance: attention of each backend rounds in its own order, and a token near the multiplier
// may take the next rung.
#include <mdkv/mdkv.cuh>
#include <mdkv/mdkv.hpp>

#include "gpu/support/device.hpp"
#include "support/cases.hpp"
#include "support/host.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_resource;
using support::device_tensor;
using support::tensor;

constexpr index_t prompt_tokens = 160, decoded = 20, tail = 8, last = 64;

/// The lines of README. `engine.full` says whether the tail is full; `write` reads caches in host memory.
template <backend B>
void serve(
    B const& on, prompt_shape<B> const& shape, auto& engine, auto& caches, cache_identity const& model, auto&& file)
{
    prompt<B, half> p{on, presets::best, shape};
    for (index_t first = 0; first < shape.tokens; first += 256)
    {
        auto const n = std::min<index_t>(256, shape.tokens - first);
        for (index_t l = 0; l < shape.layers; ++l) { p.read_chunk(on, l, first, engine.rows(l, first, n)); }
    }
    for (index_t l = 0; l < shape.layers; ++l) { p.finish_layer(on, l, engine.layer(l)); }
    p.allocate(on, budget::fraction(1, 4));
    for (index_t l = 0; auto& c : caches) { p.pack(on, l, engine.layer(l), c), c.reserve_tail(tail), ++l; }
    while (engine.next_token())
    {
        for (index_t l = 0; auto& c : caches)
        {
            if (engine.full(c)) { recompress(on, engine.last_queries(l), presets::best, c); }
            append(on, engine.key(l), engine.value(l), c);
            attend(on, engine.query(l), c, {}, engine.output(l), engine.lse(l)), ++l;
        }
    }
    auto const stored = engine.on_host(caches);
    write(file, model, {}, std::span{stored});
}

template <class T, std::size_t Rank>
using known_rows = tensor<T, Rank> const&;

/// An engine of one layer whose rows are known: `Rows` brings them to memory of the backend, where `Tensor` lies.
template <backend B, template <class, std::size_t> class Tensor, template <class, std::size_t> class Rows = Tensor>
struct engine_of
{
    support::text<half> const& x;
    Rows<half, 3> queries{x.all[0].queries};
    Rows<half, 3> keys{x.all[0].keys};
    Rows<half, 3> values{x.all[0].values};
    Rows<float, 2> sums{x.lse[0]};
    Tensor<half, 2> out{{x.heads * x.group, x.dims.values}};
    Tensor<float, 1> lse_of_token{{x.heads * x.group}};
    index_t token = prompt_tokens - 1; // the last that is known
    std::vector<float> outputs{};

    using rows_of = prompt_rows<B, half>;

    rows_of rows(index_t, index_t first, index_t n) const
    {
        return {slice<1>(queries.in(), first, n), slice<1>(keys.in(), first, n), slice<1>(values.in(), first, n)};
    }
    rows_of layer(index_t) const
    {
        rows_of all = rows(0, 0, prompt_tokens);
        all.queries = slice<1>(queries.in(), prompt_tokens - last, last);
        all.lse     = slice<1>(sums.in(), 0, last);
        return all;
    }
    bool next_token()
    {
        if (token >= prompt_tokens)
        {
            for (half const one : out.elements()) { outputs.push_back(widen(one)); }
        }
        return ++token < prompt_tokens + decoded;
    }
    [[nodiscard]] bool full(auto const&) const { return token > prompt_tokens && (token - prompt_tokens) % tail == 0; }
    static in_view<half, 2, B> one(in_view<half, 3, B> const& all, index_t t)
    {
        return {all.data_handle() + t * all.stride(1), {all.extent(0), all.extent(2)}, {all.stride(0), 1}};
    }
    in_view<half, 2, B> key(index_t) const { return one(keys.in(), token); }
    in_view<half, 2, B> value(index_t) const { return one(values.in(), token); }
    in_view<half, 2, B> query(index_t) const { return one(queries.in(), token); }
    in_view<half, 3, B> last_queries(index_t) const { return slice<1>(queries.in(), token - tail, tail); }
    out_view<half, 2, B> output(index_t) { return out.out(); }
    out_view<float, 1, B> lse(index_t) { return lse_of_token.out(); }
    static std::vector<cpu::cache<half>> on_host(std::vector<cpu::cache<half>>& caches) { return std::move(caches); }
    static std::vector<cpu::cache<half>> on_host(std::vector<gpu::cache<half, device_resource>> const& caches)
    {
        std::vector<cpu::cache<half>> made;
        for (auto const& one : caches) { made.push_back(gpu::to_host(one, nullptr)); }
        return made;
    }
};

TEST_CASE("the program of README.md has on a GPU, by the same lines, the outputs of the CPU")
{
    support::text<half> const x{{.layers = 1,
        .tokens                          = prompt_tokens + decoded,
        .heads                           = 2,
        .group                           = 2,
        .dims                            = {32, 32},
        .last                            = last + decoded}};
    auto const shape = [&]<class B>(B const&) {
        return prompt_shape<B>{.layers = 1, .heads = 2, .group = 2, .dims = {32, 32}, .tokens = prompt_tokens};
    };
    cache_identity const model{{'t', 'e', 's', 't'}};
    index_t bytes_here = 0, bytes_there = 0;
    std::vector<cpu::cache<half>> caches(1);
    engine_of<cpu::backend, tensor, known_rows> here{x};
    support::run([&](cpu::backend const& on) {
        serve(on, shape(on), here, caches, model, [&](auto part) { bytes_here += std::ssize(part); });
    });

    device_resource resource;
    std::vector<gpu::cache<half, device_resource>> on_device;
    on_device.emplace_back(cache_layout{}, 0, 0, nullptr, resource);
    engine_of<gpu::backend, device_tensor> there{x};
    support::run_on_device_now([&](gpu::backend const& on) {
        serve(on, shape(on), there, on_device, model, [&](auto part) { bytes_there += std::ssize(part); });
    });

    REQUIRE(there.outputs.size() == here.outputs.size());
    REQUIRE(here.outputs.size() == static_cast<std::size_t>(decoded * 4 * 32));
    double error = 0, size = 0;
    for (std::size_t i = 0; i < here.outputs.size(); ++i)
    {
        error += std::pow(double{there.outputs[i]} - double{here.outputs[i]}, 2);
        size += std::pow(double{here.outputs[i]}, 2);
    }
    CHECK(std::sqrt(error / size) < 0.02);
    CHECK(std::abs(bytes_here - bytes_there) < bytes_here / 50);
}

} // namespace
