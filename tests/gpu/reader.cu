// Tolerance: losses differ by rounding, so that a token near the multiplier may take the next rung, whose loss is as good.
#include <mdkv/reader.hpp>

#include <mdkv/attend.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/gpu/attend.cuh>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/gpu/score.cuh>
#include <mdkv/presets.hpp>

#include "gpu/support/device.hpp"
#include "gpu/support/device_packed.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_resource;
using support::device_tensor;
using support::tensor;
using device = gpu::backend;
using host   = cpu::backend;

constexpr index_t layers = 2, tokens = 192, chunk = 64, heads = 2, group = 2, dim = 64;

template <backend B>
prompt_shape<B> shape()
{
    return {.layers = layers, .heads = heads, .group = group, .dims = {dim, dim}, .tokens = tokens};
}

/// What a reader has left.
struct outcome
{
    std::vector<reader_report> reports;
    std::vector<float> outputs; // of the last chunk, all layers
    std::vector<cpu::cache<half>> caches;
};

std::vector<support::layer<half>> text()
{
    std::vector<support::layer<half>> all;
    for (index_t l = 0; l < layers; ++l)
    {
        all.emplace_back(support::layer_sizes{.heads = heads,
            .group                                   = group,
            .queries                                 = tokens,
            .tokens                                  = tokens,
            .window                                  = 0,
            .dim                                     = dim,
            .value_dim                               = dim,
            .first_query                             = 0,
            .salt                                    = l + 1});
    }
    return all;
}

reader_options options()
{
    return {.limit = budget::fraction(1, 4), .chunk = chunk, .slack = 0.25F};
}

outcome on_cpu(std::vector<support::layer<half>> const& x, preset const& p)
{
    outcome made;
    made.caches.resize(layers);
    using reader_of_host = reader<host, cpu::cache<half>>;
    workspace state{support::nan_memory{}};
    reader_of_host r{host{&state}, p, shape<host>(), options(), std::span{made.caches}};
    for (index_t first = 0; first < tokens; first += chunk)
    {
        made.outputs.clear();
        for (std::size_t l = 0; l < layers; ++l)
        {
            tensor<half, 3> output{{heads * group, chunk, dim}};
            tensor<float, 2> lse{{heads * group, chunk}};
            support::run([&](host const& on) {
                r.attend(on, static_cast<index_t>(l),
                    {slice<1>(x[l].queries.in(), first, chunk), slice<1>(x[l].keys.in(), first, chunk),
                        slice<1>(x[l].values.in(), first, chunk)},
                    output.out(), lse.out());
            });
            for (half const one : output.elements()) { made.outputs.push_back(widen(one)); }
        }
        reader_report report;
        bool const last = first + chunk == tokens;
        support::run([&](host const& on) { report = last ? r.finish(on) : r.end_chunk(on); });
        made.reports.push_back(report);
    }
    return made;
}

outcome on_gpu(std::vector<support::layer<half>> const& x, preset const& p)
{
    using cache_type       = gpu::cache<half, device_resource>;
    using reader_of_device = reader<device, cache_type>;
    outcome made;
    device_resource resource;
    std::vector<cache_type> caches;
    for (index_t l = 0; l < layers; ++l) { caches.emplace_back(cache_layout{}, 0, 0, nullptr, resource); }
    device_resource memory{true};
    workspace state{gpu::stream_memory<device_resource>{nullptr, &memory}};
    reader_of_device r{device{nullptr, &state}, p, shape<device>(), options(), std::span{caches}};
    for (index_t first = 0; first < tokens; first += chunk)
    {
        made.outputs.clear();
        for (std::size_t l = 0; l < layers; ++l)
        {
            device_tensor<half, 3> const queries{x[l].queries}, keys{x[l].keys}, values{x[l].values};
            device_tensor<half, 3> output{{heads * group, chunk, dim}};
            device_tensor<float, 2> lse{{heads * group, chunk}};
            support::run_on_device_now([&](device const& on) {
                r.attend(on, static_cast<index_t>(l),
                    {slice<1>(queries.in(), first, chunk), slice<1>(keys.in(), first, chunk),
                        slice<1>(values.in(), first, chunk)},
                    output.out(), lse.out());
            });
            for (half const one : output.elements()) { made.outputs.push_back(widen(one)); }
        }
        reader_report report;
        bool const last = first + chunk == tokens;
        support::run_on_device_now([&](device const& on) { report = last ? r.finish(on) : r.end_chunk(on); });
        made.reports.push_back(report);
    }
    for (auto const& one : caches) { made.caches.push_back(gpu::to_host(one, nullptr)); }
    return made;
}

} // namespace

TEST_CASE("a prompt that is read on a GPU is stored within the limit, nearly as on a CPU")
{
    auto const x = text();
    for (preset const& p : {presets::any_question, presets::best})
    {
        CAPTURE(p.name);
        outcome const got  = on_gpu(x, p);
        outcome const want = on_cpu(x, p);
        for (std::size_t i = 0; i < got.reports.size(); ++i)
        {
            CHECK(got.reports[i].tokens == want.reports[i].tokens);
            CHECK(got.reports[i].limit_bytes == want.reports[i].limit_bytes);
            CHECK(got.reports[i].held_bytes <= got.reports[i].limit_bytes);
            index_t apart = 0;
            for (std::size_t r = 0; r < max_rungs; ++r)
            {
                apart += std::abs(got.reports[i].chosen.tokens[r] - want.reports[i].chosen.tokens[r]);
            }
            CHECK(apart <= 8); // of 768 and more
        }
        CHECK(want.reports.back().chosen.tokens[0] > 0);
        double difference = 0;
        double length     = 0;
        for (std::size_t i = 0; i < got.outputs.size(); ++i)
        {
            difference += std::pow(double{got.outputs[i]} - double{want.outputs[i]}, 2);
            length += std::pow(double{want.outputs[i]}, 2);
        }
        CHECK(difference < 1e-3 * length);
        for (std::size_t l = 0; l < layers; ++l)
        {
            CHECK(got.caches[l].layout() == want.caches[l].layout());
            for (index_t h = 0; h < heads; ++h)
            {
                CHECK(got.caches[l].view().heads[h].stand_ins == want.caches[l].view().heads[h].stand_ins);
            }
        }
    }
}
