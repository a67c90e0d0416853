#include <mdkv/compress.hpp>

#include <mdkv/core/allocation.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/gpu/attend.cuh>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/gpu/memory.cuh>
#include <mdkv/gpu/score.cuh>
#include <mdkv/presets.hpp>
#include <mdkv/prompt.hpp>

#include "gpu/support/device.hpp"
#include "gpu/support/device_packed.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"
#include "support/packed.hpp"

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_resource;
using support::device_tensor;
using support::index_t;
using support::layer;
using support::layer_sizes;
using support::tensor;

/// A layer's tokens and window as one prompt, on the host and on the device.
template <class T>
struct whole_layer
{
    layer_sizes sizes;
    tensor<T, 3> queries, keys, values;
    device_tensor<T, 3> device_queries, device_keys, device_values;

    explicit whole_layer(layer<T> const& from)
        : sizes{from.sizes}
        , queries{joined(from.queries, 0, from.queries)}
        , keys{joined(from.keys, from.sizes.window, from.window_keys)}
        , values{joined(from.values, from.sizes.window, from.window_values)}
        , device_queries{queries}
        , device_keys{keys}
        , device_values{values}
    {}

    [[nodiscard]] prompt_rows<cpu::backend, T> host_rows() const { return {queries.in(), keys.in(), values.in()}; }
    [[nodiscard]] prompt_rows<gpu::backend, T> rows() const
    {
        return {device_queries.in(), device_keys.in(), device_values.in()};
    }
    [[nodiscard]] preset by(ratio_set const& ratios) const
    {
        return {.name = "test",
            .ratios   = ratios,
            .charge   = projection_charge::always,
            .window   = sizes.window,
            .queries  = sizes.queries,
            .question = sizes.queries};
    }

private:
    /// The rows of `first`, then n of `second`.
    static tensor<T, 3> joined(tensor<T, 3> const& first, index_t n, tensor<T, 3> const& second)
    {
        tensor<T, 3> all{{first.extent(0), first.extent(1) + n, first.extent(2)}};
        for (index_t h = 0; h < all.extent(0); ++h)
        {
            for (index_t d = 0; d < all.extent(2); ++d)
            {
                for (index_t i = 0; i < first.extent(1); ++i) { all.set(first.get(h, i, d), h, i, d); }
                for (index_t i = 0; i < n; ++i) { all.set(second.get(h, i, d), h, first.extent(1) + i, d); }
            }
        }
        return all;
    }
};

/// What a backend made of a layer, brought to the host.
template <class T>
struct outcome
{
    compress_report report;
    cpu::cache<T> cache;
    tensor<float, 2> attention; // [H*G, Dv]  of the last query of every head, over what was packed
};

template <class T>
tensor<float, 2> last_queries(whole_layer<T> const& x)
{
    tensor<float, 2> q{{x.queries.extent(0), x.queries.extent(2)}};
    for (index_t i = 0; i < q.extent(0); ++i)
    {
        for (index_t d = 0; d < q.extent(1); ++d) { q.set(widen(x.queries.get(i, x.queries.extent(1) - 1, d)), i, d); }
    }
    return q;
}

/// With scratch that grows, into an owner.
template <class T>
outcome<T> on_gpu(whole_layer<T> const& x, preset const& by, budget limit)
{
    device_resource pool;
    gpu::cache<T, device_resource> cache{cache_layout{}, 0, 0, nullptr, pool};
    workspace scratch{gpu::stream_memory<device_resource>{nullptr, &pool}};
    gpu::backend const on{nullptr, &scratch};
    compress_report const report = compress(on, x.rows(), by, limit, cache);
    CHECK(report.resident_bytes == cache.arena_bytes());
    device_tensor<float, 2> const q{last_queries(x)};
    device_tensor<float, 2> output{{q.extent(0), x.values.extent(2)}};
    device_tensor<float, 1> lse{{q.extent(0)}};
    attend(on, q.in(), cache.view(), {}, output.out(), lse.out());
    return {report, gpu::to_host(cache, nullptr), output.host()};
}

template <class T>
outcome<T> on_cpu(whole_layer<T> const& x, preset const& by, budget limit)
{
    cpu::cache<T> cache;
    compress_report report;
    support::run([&](cpu::backend const& on) { report = compress(on, x.host_rows(), by, limit, cache); });
    tensor<float, 2> const q = last_queries(x);
    tensor<float, 2> output{{q.extent(0), x.values.extent(2)}};
    tensor<float, 1> lse{{q.extent(0)}};
    support::run([&](cpu::backend const& on) { attend(on, q.in(), cache.view(), {}, output.out(), lse.out()); });
    return {report, std::move(cache), std::move(output)};
}

/// Losses differ by rounding, so a token near the multiplier may go to the next rung; its loss is then as good.
template <class T>
void expects_same(whole_layer<T> const& x, preset const& by, budget limit)
{
    outcome<T> const got  = on_gpu(x, by, limit);
    outcome<T> const want = on_cpu(x, by, limit);
    CHECK(got.report.status == want.report.status);
    CHECK(got.report.budget_bytes == want.report.budget_bytes);
    CHECK(got.report.chosen.status == want.report.chosen.status);
    CHECK(got.report.resident_bytes <= got.report.budget_bytes);
    CHECK(got.report.chosen.loss == doctest::Approx(want.report.chosen.loss).epsilon(1e-3));
    index_t differ = 0;
    for (std::size_t r = 0; r < by.ratios.size(); ++r)
    {
        differ += std::abs(got.report.chosen.tokens[r] - want.report.chosen.tokens[r]);
    }
    CAPTURE(differ);
    CHECK(differ * 50 <= x.sizes.heads * x.sizes.tokens);
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
    CHECK_MESSAGE(
        error.within(differ == 0 ? 4e-3 + 0.2 * support::integer_rounding(want.cache.layout()) : 4e-2), error);
}

TEST_CASE("a layer compressed on the GPU has the CPU's rungs, loss and attention")
{
    whole_layer<half> const x{
        layer<half>{{.heads = 2, .group = 2, .queries = 8, .tokens = 120, .window = 8, .dim = 32, .value_dim = 32}}};
    expects_same(
        x, x.by(ratio_set{std::vector<rung>{drop, fraction(1, 8), fraction(1, 4), full}}), budget::fraction(1, 3));
    preset coded  = x.by(ratio_set{std::vector<rung>{drop, full_int4, full_int8, full}});
    coded.pooling = {.width = 7, .kind = pooling::adaptive};
    expects_same(x, coded, budget::fraction(1, 6));
    preset kept  = x.by(ratio_set{std::vector<rung>{drop, full}});
    kept.pooling = {.width = 1};
    expects_same(x, kept, budget::kv_size(30));
}

TEST_CASE("a budget that holds the layer stores it whole on the GPU, bit for bit")
{
    whole_layer<bfloat16> const x{layer<bfloat16>{{.heads = 2, .tokens = 30, .window = 4, .dim = 24, .value_dim = 16}}};
    preset const by = x.by(ratio_set{std::vector<rung>{drop, full}});
    auto const got  = on_gpu(x, by, budget::fraction(1, 1));
    CHECK(got.report.status == compress_status::uncompressed);
    CHECK(got.report.chosen.status == allocation_status::everything_kept);
    CHECK(got.report.chosen.tokens[1] == 60);
    auto const want = on_cpu(x, by, budget::fraction(1, 1));
    REQUIRE(got.cache.arena_bytes() == want.cache.arena_bytes());
    CHECK(
        std::memcmp(got.cache.view().arena, want.cache.view().arena, static_cast<std::size_t>(want.cache.arena_bytes()))
        == 0);
}

TEST_CASE("every head has its own quota on the GPU, too")
{
    whole_layer<half> const x{
        layer<half>{{.heads = 2, .group = 1, .tokens = 40, .window = 4, .dim = 16, .value_dim = 16}}};
    constexpr index_t token_bytes = 64;
    tensor<index_t, 2> bytes{{1, 2}};
    bytes.set(16 * token_bytes, 0, 0);
    bytes.set(20 * token_bytes, 0, 1);
    device_tensor<index_t, 2> const quotas{bytes};
    device_resource pool;
    gpu::cache<half, device_resource> cache{cache_layout{}, 0, 0, nullptr, pool};
    workspace scratch{gpu::stream_memory<device_resource>{nullptr, &pool}};
    gpu::backend const on{nullptr, &scratch};
    prompt<gpu::backend, half> p{on, x.by(ratio_set{std::vector<rung>{drop, full}}),
        {.layers = 1, .heads = 2, .group = 1, .dims = {16, 16}, .tokens = 44}};
    p.finish_layer(on, 0, x.rows());
    CHECK(p.allocate(on, quotas.in()).tokens[1] == 36);
    p.pack(on, 0, x.rows(), cache);
    auto const made = gpu::to_host(cache, nullptr);
    CHECK(made.view().heads[0].exact.tokens == 16 + 4);
    CHECK(made.view().heads[1].exact.tokens == 20 + 4);
}

TEST_CASE("a layer without heads is compressed to nothing on the GPU")
{
    device_tensor<half, 3> const rows{{0, 24, 16}};
    device_resource pool;
    gpu::cache<half, device_resource> cache{cache_layout{}, 0, 0, nullptr, pool};
    workspace scratch{gpu::stream_memory<device_resource>{nullptr, &pool}};
    prompt_rows<gpu::backend, half> const none{slice<1>(rows.in(), 0, 4), rows.in(), rows.in()};
    auto const got = compress(gpu::backend{nullptr, &scratch}, none, presets::by_window, budget::fraction(1, 1), cache);
    CHECK(got.status == compress_status::uncompressed);
    CHECK(got.full_bytes == 0);
}

TEST_CASE("NaNs are refused by name on the GPU, and the destination stays as it was")
{
    layer<half> from{{.heads = 1, .group = 1, .tokens = 20, .window = 4, .dim = 16, .value_dim = 16}};
    from.keys.set(half{0x7e00}, 0, 7, 3);
    whole_layer<half> const x{from};
    device_resource pool;
    gpu::cache<half, device_resource> cache{cache_layout{}, 0, 0, nullptr, pool};
    workspace scratch{gpu::stream_memory<device_resource>{nullptr, &pool}};
    gpu::backend const on{nullptr, &scratch};
    preset const by    = x.by(ratio_set{std::vector<rung>{drop, full}});
    auto const refusal = [&](budget limit) {
        return support::error_text<error>([&] { compress(on, x.rows(), by, limit, cache); });
    };
    CHECK(refusal(budget::fraction(1, 2)) == "keys: NaN or infinity in layer 0, head 0, row 7");
    CHECK(cache.arena_bytes() == 0);
}

} // namespace
