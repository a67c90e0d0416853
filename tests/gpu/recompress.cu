#include <mdkv/recompress.hpp>

#include <mdkv/append.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/gpu/score.cuh>
#include <mdkv/stages/allocate.hpp>
#include <mdkv/stages/pack.hpp>

#include "gpu/support/device.hpp"
#include "gpu/support/device_packed.hpp"
#include "support/compare.hpp"
#include "support/folding.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory_resource>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_resource;
using support::device_tensor;
using support::error_text;
using support::every_kind;
using support::index_t;
using support::listed;
using support::owned_cache;
using support::packed_layer;
using support::tensor;
using device  = gpu::backend;
using options = recompress_options<device>;

/// Rungs of every kind, ascending for elements of four bytes.
std::vector<rung> const every_kind_of_floats{
    drop, fraction(1, 4).as(storage::int8), full_int4, fraction(3, 4).as(storage::int8), fraction(1, 4), full};

/// A cache that the GPU folds: taken to the device, and brought back.
template <class T>
struct growing : support::growing_cache<T>
{
    using support::growing_cache<T>::growing_cache;

    /// Folds on another stream than the cache's.
    recompress_report fold(tensor<T, 3> const& queries, options choice, tensor<std::int32_t, 2>* sources = nullptr)
    {
        device_resource memory;
        auto there = gpu::to_device(this->cache, nullptr, memory);
        device_tensor<T, 3> const asked{queries};
        std::optional<device_tensor<std::int32_t, 2>> listed_there;
        if (sources != nullptr) { choice.sources = listed_there.emplace(*sources).out(); }
        recompress_report report;
        support::run_on_device_now(
            [&](device const& on) { report = recompress(on, asked.in(), this->layer.ratios, choice, there); });
        this->cache = gpu::to_host(there, nullptr);
        if (sources != nullptr) { sources->assign(listed_there->elements()); }
        return report;
    }

    /// What the CPU makes of the same.
    struct outcome
    {
        cpu::cache<T> cache;
        recompress_report report;
        tensor<std::int32_t, 2> sources;
    };
    [[nodiscard]] outcome on_cpu(tensor<T, 3> const& queries, options const& choice, index_t slots,
        tensor<float, 2> const* elsewhere = nullptr) const
    {
        outcome made{this->cache.copy(), {}, tensor<std::int32_t, 2>{{3, slots}}};
        recompress_options<cpu::backend> same{.limit = choice.limit,
            .pooling                                 = choice.pooling,
            .allocation                              = choice.allocation,
            .sources                                 = made.sources.out()};
        if (elsewhere != nullptr) { same.lse_elsewhere = elsewhere->in(); }
        support::run([&](cpu::backend const& on) {
            made.report = mdkv::recompress(on, queries.in(), this->layer.ratios, same, made.cache);
        });
        return made;
    }
};

/// Of all heads, the tokens of one outcome that are not in the other, or at another rung.
template <class T>
index_t tokens_apart(
    growing<T> const& got, tensor<std::int32_t, 2> const& sources, typename growing<T>::outcome const& want)
{
    index_t apart = 0;
    for (index_t h = 0; h < 3; ++h)
    {
        auto const ours   = support::stored_tokens(got.view(), h);
        auto const theirs = support::stored_tokens(want.cache.view(), h);
        std::vector<int> rungs(static_cast<std::size_t>(sources.extent(1)), -3); // by old slot
        for (std::size_t i = 0; i < theirs.size(); ++i)
        {
            rungs[static_cast<std::size_t>(want.sources.get(h, static_cast<index_t>(i)))] = theirs[i].rung;
        }
        for (std::size_t i = 0; i < ours.size(); ++i)
        {
            int& rung = rungs[static_cast<std::size_t>(sources.get(h, static_cast<index_t>(i)))];
            apart += rung == ours[i].rung ? 0 : 1;
            rung = -3;
        }
        for (int const rung : rungs) { apart += rung == -3 ? 0 : 1; } // the CPU's alone
    }
    return apart;
}

/// Largest difference of what the CPU attends to in both caches.
template <class T>
double attention_difference(growing<T>& g, cpu::cache<T> const& other)
{
    auto const [dim, value_dim] = g.layer.sizes.dims;
    auto const drawn            = g.draw(1, 3 * g.group, dim);
    tensor<float, 2> queries{{3 * g.group, dim}}, a{{3 * g.group, value_dim}}, b{{3 * g.group, value_dim}};
    tensor<float, 1> lse{{3 * g.group}};
    std::vector<float> elements;
    for (T const x : drawn.elements()) { elements.push_back(widen(x)); }
    queries.assign(elements);
    support::run([&](cpu::backend const& on) { attend(on, queries.in(), g.view(), {}, a.out(), lse.out()); });
    support::run([&](cpu::backend const& on) { attend(on, queries.in(), other.view(), {}, b.out(), lse.out()); });
    double worst = 0;
    for (index_t i = 0; i < 3 * g.group; ++i)
    {
        for (index_t d = 0; d < value_dim; ++d)
        {
            worst = std::max(worst, std::abs(double{a.get(i, d)} - double{b.get(i, d)}));
        }
    }
    return worst;
}

/// One fold beside the CPU's of the same, to the bit. Only where tokens are scored (not `exact`) and both round differently,
/// losses differ, and a token near the multiplier may go to the next rung, and with it one that pays for it.
template <class T>
recompress_report check_fold(
    growing<T>& g, options choice, index_t queries = 4, bool exact = false, tensor<float, 2> const* elsewhere = nullptr)
{
    std::optional<device_tensor<float, 2>> there;
    if (elsewhere != nullptr) { choice.lse_elsewhere = there.emplace(*elsewhere).in(); }
    auto const asked    = g.draw(3 * g.group, queries, g.layer.sizes.dims.keys);
    index_t const slots = most_slots(g.view()) + 2;
    auto const want     = g.on_cpu(asked, choice, slots, elsewhere);
    tensor<std::int32_t, 2> sources{{3, slots}};
    recompress_report const got = g.fold(asked, choice, &sources);
    index_t const apart         = tokens_apart(g, sources, want);
    CAPTURE(apart);
    CHECK(apart <= (exact ? 0 : 4));
    CHECK(got.limit_bytes == want.report.limit_bytes);
    CHECK(got.window_bytes == want.report.window_bytes);
    CHECK(got.chosen.status == want.report.chosen.status);
    CHECK(got.chosen.limit == want.report.chosen.limit);
    CHECK(got.chosen.loss == doctest::Approx(want.report.chosen.loss).epsilon(1e-3));
    CHECK(got.kept + got.lowered + got.dropped == want.report.kept + want.report.lowered + want.report.dropped);
    CHECK(got.resident_bytes == g.cache.arena_bytes());
    CHECK(got.resident_bytes <= got.limit_bytes);
    CHECK(g.cache.appended() == 0);
    CHECK(g.cache.tail_capacity() == want.cache.tail_capacity());
    CHECK(g.cache.layout() == want.cache.layout());
    support::cache_contents<T> const ours{g.cache};
    support::cache_contents<T> const theirs{want.cache};
    if (apart == 0)
    {
        CHECK(sources.elements() == want.sources.elements());
        CHECK(ours.heads == theirs.heads);
        CHECK(got.kept == want.report.kept);
        CHECK(got.lowered == want.report.lowered);
        CHECK(got.chosen.tokens == want.report.chosen.tokens);
        CHECK(got.chosen.token_bytes == want.report.chosen.token_bytes);
        CHECK(got.chosen.charged_bytes == want.report.chosen.charged_bytes);
    }
    if (exact || (support::rounds_like_host && apart == 0)) { CHECK(ours == theirs); }
    CHECK(attention_difference(g, want.cache) < (apart == 0 ? 2e-3 : 5e-2) * (std::is_same_v<T, bfloat16> ? 8 : 1));
    return got;
}

/// A limit that holds what is there, and one byte less.
template <class T>
void check_everything_kept(std::vector<rung> const& rungs, head_dims dims = {40, 24})
{
    growing<T> g{rungs, 24, std::pmr::get_default_resource(), dims};
    g.append(9);
    growing<T> tight{rungs, 24, std::pmr::get_default_resource(), dims};
    tight.cache        = g.cache.copy();
    index_t const need = g.cache.arena_bytes() + 9 * g.token_bytes();
    auto const got     = check_fold(g, {.limit = budget::bytes(need)}, 4, true);
    CHECK(got.chosen.status == allocation_status::everything_kept);
    CHECK(got.resident_bytes == need);
    CHECK(got.lowered + got.dropped == 0);
    auto const lost = check_fold(tight, {.limit = budget::bytes(need - 1)});
    CHECK(lost.resident_bytes < need);
    CHECK(lost.lowered + lost.dropped > 0);
}

TEST_CASE(
    "a limit that holds everything gives the CPU's bytes, report and sources on the GPU, and one byte less does not")
{
    check_everything_kept<half>(every_kind);
    check_everything_kept<bfloat16>(listed(paper_ratios));
    check_everything_kept<float>(every_kind_of_floats);
    check_everything_kept<half>(support::turned_kinds, support::turned_dims);
}

TEST_CASE("stand-ins outlive folds on the GPU bit for bit")
{
    packed_layer<half> const layer{
        {.heads = 3, .tokens = 70, .window = 4, .dims = {40, 24}, .rungs = every_kind, .stand_ins = 8}};
    auto cache = layer.packed(6);
    support::run([&](cpu::backend const& on) {
        append(on, slice<1>(layer.keys.in(), 0, 6), slice<1>(layer.values.in(), 0, 6), cache.view());
    });
    device_resource memory;
    auto there         = gpu::to_device(cache, nullptr, memory);
    index_t const need = cache.arena_bytes() + 6 * 3 * (40 + 24) * 2;
    auto const limit   = budget::bytes(need); // everything is kept: the same bytes
    device_tensor<half, 3> const queries{layer.window_keys};
    recompress_report got, want;
    support::run_on_device_now(
        [&](device const& on) { got = recompress(on, queries.in(), layer.ratios, options{.limit = limit}, there); });
    support::run([&](cpu::backend const& on) {
        want = recompress(on, layer.window_keys.in(), layer.ratios, {.limit = limit}, cache);
    });
    CHECK(got.stand_in_bytes == (layer.stand_ins(0) + layer.stand_ins(1) + layer.stand_ins(2)) * (40 + 24) * 2);
    CHECK(got.stand_in_bytes == want.stand_in_bytes);
    CHECK(got.resident_bytes == need);
    auto const back = gpu::to_host(there, nullptr);
    CHECK(support::cache_contents<half>{back} == support::cache_contents<half>{cache});
}

TEST_CASE("folds on the GPU are the CPU's for every kind of rung, element type, pooling and number of queries")
{
    index_t lowered = 0, dropped = 0;
    for (std::vector<rung> const& rungs : {listed(bit_ratios), listed(paper_ratios), every_kind})
    {
        growing<half> g{rungs};
        CAPTURE(rungs.size());
        for (index_t const limit : {9700, 9100})
        {
            CAPTURE(limit);
            g.append(1 + g.random.below(24));
            recompress_report const report = check_fold(g, {.limit = budget::bytes(limit)});
            lowered += report.lowered;
            dropped += report.dropped;
        }
        CHECK(g.view().heads[0].key_columns == 0);
    }
    CHECK(lowered > 20);
    CHECK(dropped > 50);
    growing<bfloat16> brain{every_kind};
    brain.append(24);
    check_fold(brain, {.limit = budget::kv_size(20), .pooling = {1, pooling::adaptive}}, 24);
    growing<float> single{every_kind_of_floats};
    single.append(11);
    check_fold(single, {.limit = budget::kv_size(24), .pooling = {1, pooling::max}}, 1);
    growing<half> turned{support::turned_kinds, 24, std::pmr::get_default_resource(), support::turned_dims};
    for (index_t const limit : {28000, 20000})
    {
        turned.append(12);
        check_fold(turned, {.limit = budget::bytes(limit)});
    }
    growing<half> beside{listed(bit_ratios)};
    beside.append(20);
    tensor<float, 2> elsewhere{{3 * beside.group, 4}};
    for (index_t i = 0; i < 3 * beside.group * 4; ++i)
    {
        elsewhere.set(0.5F * static_cast<float>(i % 7), i / 4, i % 4);
    }
    check_fold(beside, {.limit = budget::bytes(9100)}, 4, false, &elsewhere);
    growing<half> without_tail{listed(paper_ratios), 0};
    check_fold(without_tail, {.limit = budget::bytes(6000)});
}

TEST_CASE("no token is raised on the GPU, and none made of what pads a shorter head, where the limit holds every slot")
{
    auto const layer   = support::short_heads();
    cpu::cache<half> a = layer.packed();
    device_resource memory;
    auto there = gpu::to_device(a, nullptr, memory);
    device_tensor<half, 3> const asked{layer.window_keys};
    recompress_report got, want;
    support::run_on_device_now([&](device const& on) {
        got = recompress(on, asked.in(), layer.ratios, {.limit = budget::bytes(support::short_limit)}, there);
    });
    support::run([&](cpu::backend const& on) {
        want = mdkv::recompress(
            on, layer.window_keys.in(), layer.ratios, {.limit = budget::bytes(support::short_limit)}, a);
    });
    CHECK(got.kept == want.kept);
    CHECK(got.lowered == 0);
    CHECK(got.kept + got.dropped == 16);
    CHECK(support::cache_contents<half>{gpu::to_host(there, nullptr)} == support::cache_contents<half>{a});
}

TEST_CASE("a cache without heads is left alone on the GPU, one without a layout refused")
{
    owned_cache<half> none;
    device_resource memory;
    owned_cache<half> no_heads{{paper_ratios, 0, 0, {40, 40}}, 0, 0, nullptr, memory};
    device_tensor<half, 3> const asked{{6, 4, 40}};
    auto const folded = [&](owned_cache<half>& cache) {
        recompress_report report;
        support::run_on_device_now([&](device const& on) {
            report = recompress(on, asked.in(), growing<half>{listed(paper_ratios)}.layer.ratios, {}, cache);
        });
        return report;
    };
    CHECK(folded(no_heads).resident_bytes == 0);
    CHECK(error_text<invalid_argument>([&] { folded(none); })
          == "recompress: the cache has no layout: nothing was packed into it, or it was moved from");
    CHECK(none.view().heads == nullptr);
    CHECK(most_slots(device{}, none.view()) == 0);
}

TEST_CASE("a tail that was asked to hold more than it can is folded on the GPU as a full one")
{
    growing<half> g{listed(bit_ratios), 8};
    g.append(8);
    auto const asked = g.draw(6, 4, 40);
    options const choice{.limit = budget::bytes(100000)};
    device_resource memory;
    auto there            = gpu::to_device(g.cache, nullptr, memory);
    index_t const counted = 11;
    gpu::copy({}, &counted, there.view().appended, sizeof counted);
    CHECK(most_slots(device{}, there.view()) == most_slots(g.view()));
    device_tensor<half, 3> const queries{asked};
    recompress_report report;
    support::run_on_device_now(
        [&](device const& on) { report = recompress(on, queries.in(), g.layer.ratios, choice, there); });
    auto const want = g.on_cpu(asked, choice, most_slots(g.view()));
    CHECK(support::cache_contents<half>{gpu::to_host(there, nullptr)} == support::cache_contents<half>{want.cache});
}

TEST_CASE("bad input is refused on the GPU, some of it when the device has read it, and nothing is changed")
{
    growing<half> g{listed(bit_ratios)};
    auto nan = g.draw(1, 3, 40);
    nan.set(narrow<half>(std::numeric_limits<float>::quiet_NaN()), 0, 1, 7);
    growing<half> spoilt_cache{listed(bit_ratios)};
    spoilt_cache.add(nan, g.draw(1, 3, 24));
    for (growing<half>* x : {&g, &spoilt_cache}) { x->append(5); }
    device_resource memory;
    auto const text = [&](growing<half> const& x, tensor<half, 3> const& queries, options const& choice) {
        auto there = gpu::to_device(x.cache, nullptr, memory);
        device_tensor<half, 3> const asked{queries};
        std::string said = error_text<mdkv::error>([&] {
            support::run_on_device_now(
                [&](device const& on) { recompress(on, asked.in(), x.layer.ratios, choice, there); });
        });
        CHECK(support::cache_contents<half>{gpu::to_host(there, nullptr)} == support::cache_contents<half>{x.cache});
        CHECK(memory.outstanding() == 3);
        return said;
    };
    auto const says = [](std::string const& whole, char const* part) { return whole.find(part) != std::string::npos; };
    auto const good = g.draw(6, 9, 40);
    options const small{.limit = budget::bytes(6000)};
    CHECK(says(text(g, good, {.limit = budget::bytes(1535)}), "at least 1536 bytes are needed"));
    CHECK(says(text(g, g.draw(6, 10, 40), small), "Q = 10"));
    device_tensor<std::int32_t, 2> narrow_list{{3, most_slots(g.view()) - 1}};
    options listing = small;
    listing.sources = narrow_list.out();
    CHECK(says(text(g, good, listing), "options.sources"));
    auto spoilt = g.draw(6, 9, 40);
    spoilt.set(narrow<half>(std::numeric_limits<float>::infinity()), 2, 3, 4);
    CHECK(says(text(g, spoilt, small), "queries: NaN or infinity in head 2, row 3"));

    // Numbers are known on the device only: losses that they spoil are refused.
    tensor<float, 2> elsewhere{{6, 9}};
    elsewhere.assign(std::vector<float>(54, std::numeric_limits<float>::quiet_NaN()));
    device_tensor<float, 2> const no_numbers{elsewhere};
    options beside       = small;
    beside.lse_elsewhere = no_numbers.in();
    CHECK(says(text(g, good, beside), "lse_elsewhere"));

    // A token that is no number is refused where it would have to be scored, and moved where not.
    CHECK(says(text(spoilt_cache, good, small), "keys by slot: NaN or infinity in head 1"));
    auto const want = spoilt_cache.on_cpu(good, {.limit = budget::bytes(100000)}, most_slots(spoilt_cache.view()));
    CHECK(spoilt_cache.fold(good, {.limit = budget::bytes(100000)}).dropped == 0);
    CHECK(support::cache_contents<half>{spoilt_cache.cache} == support::cache_contents<half>{want.cache});
}

TEST_CASE("an allocation that fails, or a workspace too small by a byte, leaves the cache on the GPU as it was")
{
    growing<half> g{listed(paper_ratios)};
    g.append(20);
    support::cache_contents<half> const before{g.cache};
    device_resource memory;
    {
        auto there = gpu::to_device(g.cache, nullptr, memory);
        device_tensor<half, 3> const asked{g.draw(6, 4, 40)};
        device_tensor<std::int32_t, 2> sources{{3, most_slots(g.view())}};
        auto const untouched = sources.elements();
        options const choice{.limit = budget::bytes(6000), .sources = sources.out()};
        recompress_report report;
        auto const call = [&](device const& on) { report = recompress(on, asked.in(), g.layer.ratios, choice, there); };
        auto const unchanged = [&] {
            return support::cache_contents<half>{gpu::to_host(there, nullptr)} == before
                   && sources.elements() == untouched && memory.outstanding() == 3;
        };
        for (int k = 0; k < 3; ++k)
        {
            memory.fail_after(k);
            CHECK_THROWS_AS(support::run_on_device_now(call), std::bad_alloc);
            memory.fail_after(-1);
            CHECK(unchanged());
        }
        device_resource own;
        for (int k = 0, failed = 1; failed == 1; ++k)
        {
            own.fail_after(k);
            workspace scratch{gpu::stream_memory<device_resource>{nullptr, &own}};
            failed = error_text<std::bad_alloc>([&] { call(device{nullptr, &scratch}); }) == "threw nothing" ? 0 : 1;
            CHECK((failed == 0 || unchanged()));
        }
        CHECK(report.resident_bytes <= 6000);
        CHECK(sources.elements() != untouched);
        CHECK(memory.outstanding() == 3);
    }
    CHECK(memory.outstanding() == 0);
}

} // namespace
