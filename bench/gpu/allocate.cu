// Rungs of all tokens of a layer at 128K tokens: the library's selection without a word to the host,
// and a bisection that waits for the device in each of its passes. Losses are drawn at random: a few tokens of each head
// matter most, and heads differ.

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/device.cuh>
#include <mdkv/stages/allocate.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "bench.cuh"
#include "bisection.cuh"
#include "layers.cuh"
#include "stopwatch.cuh"

namespace
{

using namespace bench;

constexpr index_t tokens    = 128 * 1024;
constexpr std::size_t rungs = mdkv::paper_ratios.size();
constexpr index_t count     = heads * tokens;
constexpr mdkv::rung_costs costs{mdkv::paper_ratios, dims, index_t{sizeof(element)}};

/// What every token would lose: dropped the most, whole nothing.
struct fill_losses
{
    static constexpr char const* name = "fill_losses";
    static constexpr int threads      = 256;

    float* to; // [H, R, N]
    std::uint64_t seed;

    __device__ void operator()() const
    {
        index_t const i = device::block() * threads + device::thread();
        if (i >= count) { return; }
        auto const at    = (seed << 40U) + static_cast<std::uint64_t>(3 * i);
        index_t const h  = i / tokens;
        float* const row = to + h * index_t{rungs} * tokens + i % tokens;
        float loss       = expf((1.5F + 0.25F * static_cast<float>(h)) * kernels::normal(at));
        for (std::size_t r = 0; r + 1 < rungs; ++r)
        {
            row[static_cast<index_t>(r) * tokens] = loss;
            loss *= 0.2F + 0.7F * kernels::uniform(at + r + (std::uint64_t{1} << 36U)); // far from the other numbers
        }
        row[index_t{rungs - 1} * tokens] = 0.0F;
    }
};

/// Losses of one layer, and where its rungs go.
struct scored_layer
{
    device_array<float> loss{count * index_t{rungs}}; // [H, R, N]
    device_array<std::uint8_t> rung{count};           // [H, N]

    explicit scored_layer(std::uint64_t seed)
    {
        launch(fill_losses{loss.data(), seed}, (count + fill_losses::threads - 1) / fill_losses::threads);
    }
};

/// One way to allocate, of every layer in turn.
struct question
{
    std::string name;
    index_t kv_size;
    mdkv::allocate_options options;
    device_array<mdkv::allocation> reports{1}; // [1]  of the layer that came last
    device_array<index_t> limit = to_device(std::vector<index_t>{bytes()});

    question(std::string called, index_t kv, mdkv::allocate_options chosen)
        : name{std::move(called)}
        , kv_size{kv}
        , options{chosen}
    {}

    [[nodiscard]] index_t bytes() const { return heads * kv_size * token_bytes; }

    [[nodiscard]] work over(std::vector<scored_layer> const& layers) const
    {
        return recorded(static_cast<index_t>(layers.size()), [&](gpu::backend const& on, index_t i) {
            scored_layer const& layer = layers[static_cast<std::size_t>(i)];
            mdkv::allocate(on,
                {mdkv::in(on, layer.loss.data(), heads, index_t{rungs}, tokens),
                    mdkv::out(on, layer.rung.data(), heads, tokens)},
                costs, mdkv::in(on, limit.data(), 1), options, mdkv::out(on, reports.data(), 1));
        });
    }
};

void measure(record& results)
{
    stopwatch const clock;
    std::vector<scored_layer> layers;
    constexpr index_t layer_bytes = count * index_t{rungs * sizeof(float)};
    for (index_t i = 0; i < layers_beyond_cache(layer_bytes); ++i)
    {
        layers.emplace_back(static_cast<std::uint64_t>(i));
    }

    std::deque<question> questions;
    for (index_t const kv : {index_t{512}, tokens / 20, tokens / 10})
    {
        questions.emplace_back("allocate", kv, mdkv::allocate_options{});
    }
    questions.emplace_back(
        "allocate/always_charged", tokens / 10, mdkv::allocate_options{.charge = mdkv::projection_charge::always});

    // The naive one pays for every head's projections beforehand, on the layer whose report is read.
    bisection naive;
    scored_layer const& last = layers.back();
    choice<rungs> const losses{last.loss.data(), tokens, costs, 0.0};
    device_array<std::uint8_t> const naive_rung{count};
    index_t const limit = questions.back().bytes() - heads * costs.widest_projection();
    bisected found;
    std::vector<work> works{clock.copy()};
    for (question const& one : questions) { works.push_back(one.over(layers)); }
    works.push_back({[&] { found = naive.solve(losses, count, limit, naive_rung.data()); }});

    auto const times        = clock.medians(works);
    double const bandwidth  = 2 * static_cast<double>(clock.size()) / times[0];
    double const naive_us   = times.back();
    double const naive_loss = naive.loss(choice<rungs>{last.loss.data(), tokens, costs, found.multiplier}, count);
    for (std::size_t i = 0; i < questions.size(); ++i)
    {
        question const& one           = questions[i];
        mdkv::allocation const report = first_of(one.reports);
        fields ratios{{"of_copy", layer_bytes / times[i + 1] / bandwidth}, {"naive_over_this", naive_us / times[i + 1]},
            {"status", static_cast<double>(report.status)},
            {"spent",
                static_cast<double>(report.token_bytes + report.charged_bytes) / static_cast<double>(report.limit)}};
        if (one.kv_size == tokens / 10) { ratios.emplace_back("loss_over_naive", report.loss / naive_loss); }
        results.add({one.name,
            {{"tokens", tokens}, {"kv_size", static_cast<double>(one.kv_size)},
                {"layers", static_cast<double>(layers.size())}},
            times[i + 1], layer_bytes, ratios});
    }
    results.add({"allocate/naive",
        {{"tokens", tokens}, {"kv_size", static_cast<double>(tokens / 10)}, {"passes", bisection::passes}}, naive_us, 0,
        {{"spent", static_cast<double>(found.bytes) / static_cast<double>(limit)}}});
}

} // namespace

int main(int argument_count, char** arguments)
{
    return run(argument_count, arguments, measure);
}
