#include <mdkv/compress.hpp>

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/basis.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/gpu/attend.cuh>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/basis.cuh>
#include <mdkv/gpu/score.cuh>
#include <mdkv/presets.hpp>
#include <mdkv/stages/allocate.hpp>
#include <mdkv/stages/pack.hpp>

#include "gpu/support/device.hpp"
#include "gpu/support/device_cache.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"
#include "support/packed.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_tensor;
using support::index_t;
using support::layer;
using support::layer_sizes;
using support::tensor;

using options = compress_options<gpu::backend>;

/// A layer on the device, and room there for what it becomes.
template <class T>
struct device_layer
{
    device_tensor<T, 3> queries;
    device_tensor<T, 3> keys;
    device_tensor<T, 3> values;
    device_tensor<T, 3> window_keys;
    device_tensor<T, 3> window_values;

    explicit device_layer(layer<T> const& from)
        : queries{from.queries}
        , keys{from.keys}
        , values{from.values}
        , window_keys{from.window_keys}
        , window_values{from.window_values}
    {}

    [[nodiscard]] layer_view<gpu::backend, T> view() const
    {
        return {queries.in(), keys.in(), values.in(), window_keys.in(), window_values.in()};
    }
};

/// What the GPU made of a layer, brought to the host.
template <class T>
struct outcome
{
    compress_report report;
    allocation chosen;
    std::vector<std::uint8_t> rungs; // [H, N]
    tensor<float, 2> attention;      // [H*G, Dv]  of the last query of every head, over what was packed
};

template <class T>
cpu::cache<T> empty_cache(layer_sizes const& s, ratio_set const& ratios, index_t bytes)
{
    return cpu::cache<T>{cache_layout{ratios, s.heads, s.window, {s.dim, s.value_dim}}, bytes, 0};
}

template <class T>
tensor<float, 2> last_queries(layer<T> const& x)
{
    tensor<float, 2> q{{x.queries.extent(0), x.queries.extent(2)}};
    for (index_t i = 0; i < q.extent(0); ++i)
    {
        for (index_t d = 0; d < q.extent(1); ++d) { q.set(widen(x.queries.get(i, x.queries.extent(1) - 1, d)), i, d); }
    }
    return q;
}

template <class T>
outcome<T> on_gpu(layer<T> const& x, ratio_set const& ratios, options choice)
{
    layer_sizes const& s = x.sizes;
    choice.on_non_finite = non_finite::unchecked;
    layer_shape const shape{s.heads, s.group, s.tokens, s.window, {s.dim, s.value_dim}, index_t{sizeof(T)}};
    cpu::cache<T> const room = empty_cache<T>(s, ratios, std::min(choice.limit.in_bytes(shape), shape.full_bytes()));
    support::device_cache<T> const stored{room.view()};
    device_layer<T> const from{x};
    device_tensor<std::uint8_t, 2> rungs{{s.heads, s.tokens}};
    device_tensor<allocation, 1> chosen{{1}};
    choice.rungs = rungs.out();
    compress_report report;
    support::run_on_device([&](gpu::backend const& on) {
        compressed_layer<T, space::device> to{stored.view(), chosen.data_handle()};
        report = compress(on, from.view(), ratios, choice, to);
    });
    device_tensor<float, 2> const q{last_queries(x)};
    device_tensor<float, 2> output{{q.extent(0), s.value_dim}};
    device_tensor<float, 1> lse{{q.extent(0)}};
    support::run_on_device(
        [&](gpu::backend const& on) { attend(on, q.in(), stored.view(), {}, output.out(), lse.out()); });
    return {report, chosen.host().get(0), rungs.elements(), output.host()};
}

template <class T>
outcome<T> on_cpu(layer<T> const& x, ratio_set const& ratios, compress_options<cpu::backend> choice)
{
    layer_sizes const& s = x.sizes;
    tensor<std::uint8_t, 2> rungs{{s.heads, s.tokens}};
    choice.rungs = rungs.out();
    cpu::cache<T> cache;
    compress_report report;
    support::run([&](cpu::backend const& on) {
        report = mdkv::compress(on,
            layer_view<cpu::backend, T>{
                x.queries.in(), x.keys.in(), x.values.in(), x.window_keys.in(), x.window_values.in()},
            ratios, choice, cache);
    });
    tensor<float, 2> const q = last_queries(x);
    tensor<float, 2> output{{q.extent(0), s.value_dim}};
    tensor<float, 1> lse{{q.extent(0)}};
    support::run([&](cpu::backend const& on) { attend(on, q.in(), cache.view(), {}, output.out(), lse.out()); });
    return {report, report.chosen, rungs.elements(), std::move(output)};
}

/// Losses differ by rounding, so a token near the multiplier may go to the next rung; its loss is then as good.
template <class T>
void expects_same(layer<T> const& x, ratio_set const& ratios, options choice)
{
    compress_options<cpu::backend> const same{
        .limit = choice.limit, .pooling = choice.pooling, .allocation = choice.allocation};
    outcome<T> const got  = on_gpu(x, ratios, choice);
    outcome<T> const want = on_cpu(x, ratios, same);
    CHECK(got.report.status == want.report.status);
    CHECK(got.report.budget_bytes == want.report.budget_bytes);
    CHECK(got.chosen.status == want.chosen.status);
    CHECK(got.chosen.token_bytes + got.chosen.charged_bytes <= got.chosen.limit);
    CHECK(got.chosen.loss == doctest::Approx(want.chosen.loss).epsilon(1e-3));
    std::size_t differ = 0;
    for (std::size_t i = 0; i < want.rungs.size(); ++i) { differ += got.rungs[i] != want.rungs[i] ? 1 : 0; }
    CAPTURE(differ);
    CHECK(differ * 50 <= want.rungs.size());
    support::worst_error error;
    for (index_t i = 0; i < want.attention.extent(0); ++i)
    {
        for (index_t c = 0; c < want.attention.extent(1); ++c)
        {
            error.add(got.attention.get(i, c), want.attention.get(i, c), 1.0L, i);
        }
    }
    // Equal rungs leave the rounding of projections to T, and the CPU's of queries that multiply codes; a token that changed its
    // rung moves the output a little.
    cache_layout const layout{ratios, x.sizes.heads, x.sizes.window, {x.sizes.dim, x.sizes.value_dim}};
    CHECK_MESSAGE(error.within(differ == 0 ? 4e-3 + 0.2 * support::integer_rounding(layout) : 4e-2), error);
}

TEST_CASE("a layer compressed on the GPU has the CPU's rungs, loss and attention")
{
    layer<half> const x{{.heads = 2, .group = 2, .queries = 8, .tokens = 120, .window = 8, .dim = 32, .value_dim = 32}};
    expects_same(x, ratio_set{std::vector<rung>{drop, part(1, 8), part(1, 4), full}},
        {.limit = budget::fraction(1, 3), .allocation = {.charge = projection_charge::always}});
    expects_same(x, ratio_set{std::vector<rung>{drop, full_int4, full_int8, full}},
        {.limit = budget::fraction(1, 6), .pooling = {.width = 7, .kind = pooling::adaptive}});
    expects_same(x, ratio_set{std::vector<rung>{drop, full}}, {.limit = budget::kv_size(30), .pooling = {.width = 1}});
}

TEST_CASE("a budget that holds the layer stores it whole on the GPU, bit for bit")
{
    layer<bfloat16> const x{{.heads = 2, .tokens = 30, .window = 4, .dim = 24, .value_dim = 16}};
    auto const got = on_gpu(x, ratio_set{std::vector<rung>{drop, full}}, {.limit = budget::fraction(1, 1)});
    CHECK(got.report.status == compress_status::uncompressed);
    CHECK(got.chosen.status == allocation_status::everything_kept);
    CHECK(got.chosen.tokens[1] == 60);
    auto const want = on_cpu(x, ratio_set{std::vector<rung>{drop, full}}, {.limit = budget::fraction(1, 1)});
    support::worst_error error;
    for (index_t i = 0; i < 4; ++i)
    {
        for (index_t c = 0; c < 16; ++c) { error.add(got.attention.get(i, c), want.attention.get(i, c), 1.0L); }
    }
    CHECK_MESSAGE(error.within(1e-5), error);
}

TEST_CASE("every head with a quota has a report of its own on the GPU, also of a layer that is stored whole")
{
    layer<half> const x{{.heads = 2, .tokens = 40, .window = 4, .dim = 16, .value_dim = 16}};
    ratio_set const ratios{std::vector<rung>{drop, full}};
    device_layer<half> const from{x};
    constexpr index_t token_bytes = 64;
    for (bool const whole : {false, true})
    {
        std::vector<index_t> const kept = whole ? std::vector<index_t>{40, 40} : std::vector<index_t>{16, 20};
        tensor<index_t, 1> bytes{{2}};
        bytes.assign(std::vector<index_t>{kept[0] * token_bytes, kept[1] * token_bytes});
        device_tensor<index_t, 1> const quotas{bytes};
        device_tensor<allocation, 1> reports{{2}};
        cpu::cache<half> const room = empty_cache<half>(x.sizes, ratios, 2 * 44 * token_bytes);
        support::device_cache<half> const stored{room.view()};
        options choice{.limit = budget::fraction(1, whole ? 1 : 2), .quotas = quotas.in()};
        choice.on_non_finite = non_finite::unchecked;
        support::run_on_device([&](gpu::backend const& on) {
            compressed_layer<half, space::device> to{stored.view(), reports.data_handle()};
            static_cast<void>(compress(on, from.view(), ratios, choice, to));
        });
        auto const told = reports.elements();
        for (std::size_t h = 0; h < 2; ++h)
        {
            CHECK(told[h].status == (whole ? allocation_status::everything_kept : allocation_status::optimal));
            CHECK(told[h].limit == kept[h] * token_bytes);
            CHECK(told[h].token_bytes == kept[h] * token_bytes);
            CHECK(told[h].tokens[1] == kept[h]);
        }
    }
}

TEST_CASE("a layer without heads is compressed to nothing, with one limit and with none")
{
    device_tensor<half, 3> const rows{{0, 20, 16}};
    device_tensor<half, 3> const window{{0, 4, 16}};
    device_tensor<index_t, 1> const quotas{{0}};
    device_tensor<allocation, 1> reports{{1}};
    ratio_set const ratios{std::vector<rung>{drop, full}};
    cpu::cache<half> const room{cache_layout{ratios, 0, 4, {16, 16}}, 0};
    support::device_cache<half> const stored{room.view()};
    layer_view<gpu::backend, half> const layer{window.in(), rows.in(), rows.in(), window.in(), window.in()};
    for (bool const shared : {true, false})
    {
        options choice{.limit = budget::fraction(1, 1)};
        choice.on_non_finite = non_finite::unchecked;
        if (!shared) { choice.quotas = quotas.in(); }
        compress_report got;
        support::run_on_device([&](gpu::backend const& on) {
            compressed_layer<half, space::device> to{stored.view(), reports.data_handle()};
            got = compress(on, layer, ratios, choice, to);
        });
        CHECK(got.status == compress_status::uncompressed);
        CHECK(got.full_bytes == 0);
    }
}

TEST_CASE("what only the device could tell is refused by name on the GPU, and so is a destination that does not fit")
{
    layer<half> const x{{.heads = 1, .tokens = 20, .window = 4, .dim = 16, .value_dim = 16}};
    ratio_set const ratios{std::vector<rung>{drop, full}};
    device_layer<half> const from{x};
    auto const refused = [&](options const& choice, ratio_set const& set, index_t bytes) {
        cpu::cache<half> const room = empty_cache<half>(x.sizes, set, bytes);
        support::device_cache<half> const stored{room.view()};
        return support::error_text<invalid_argument>([&] {
            support::run_on_device([&](gpu::backend const& on) {
                compressed_layer<half, space::device> to{stored.view()};
                static_cast<void>(compress(on, from.view(), ratios, choice, to));
            });
        });
    };
    options choice{.limit = budget::fraction(1, 2)};
    CHECK(refused(choice, ratios, 4000).find("on_non_finite") != std::string::npos);
    choice.on_non_finite = non_finite::unchecked;
    CHECK(refused(choice, ratios, 10).find("arena_bytes is 10") != std::string::npos);
    CHECK(
        refused(choice, ratio_set{std::vector<rung>{drop, full_int8, full}}, 4000).find("layout") != std::string::npos);
}

} // namespace
