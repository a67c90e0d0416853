#include <mdkv/gpu/attend.cuh>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/cache.hpp>

#include "gpu/support/device.hpp"
#include "gpu/support/device_cache.hpp"
#include "support/compare.hpp"
#include "support/decoding.hpp"
#include "support/host.hpp"
#include "support/packed.hpp"
#include "support/random.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_cache;
using support::device_tensor;
using support::index_t;
using support::packed_layer;
using support::packed_sizes;
using support::random_queries;
using support::tensor;

/// Counters in device memory, 0 at first.
struct counters
{
    device_tensor<std::uint32_t, 1> memory;

    explicit counters(std::size_t count)
        : memory{zeros(static_cast<index_t>(count))}
    {}

    [[nodiscard]] static tensor<std::uint32_t, 1> zeros(index_t count)
    {
        tensor<std::uint32_t, 1> made{{count}};
        made.assign(std::vector<std::uint32_t>(static_cast<std::size_t>(count), 0));
        return made;
    }
    [[nodiscard]] std::span<std::uint32_t> span() const
    {
        return {memory.data_handle(), static_cast<std::size_t>(memory.extent(0))};
    }
    [[nodiscard]] bool all_zero() const
    {
        return memory.elements() == std::vector<std::uint32_t>(static_cast<std::size_t>(memory.extent(0)), 0);
    }
};

/// Sequences on the device with their queries, half's caches and queries in float.
class case_of_attend
{
public:
    explicit case_of_attend(index_t query_heads, head_dims dims)
        : query_heads_{query_heads}
        , dims_{dims}
    {}

    /// A cache with `appended` tokens in its tail and room for more.
    void add(packed_sizes const& sizes, index_t appended, index_t n, index_t room = 0)
    {
        packed_layer<half> const layer{sizes};
        auto cache = layer.packed(appended + room);
        support::source random{"gpu/arrivals", sizes.tokens};
        append_random(cache, random, appended);
        stored_.emplace_back(cache.view());
        sequences_.push_back({stored_.back().view(), n});
        for (std::size_t i = 0; i < stored_.size(); ++i) { sequences_[i].cache = stored_[i].view(); }
        tokens_ += n;
        needed_ += gpu::attend_arrivals(sizes.heads, query_heads_, n);
    }

    [[nodiscard]] std::size_t needed() const { return needed_; }

    struct result
    {
        std::vector<float> output;
        std::vector<float> lse;
        std::uint64_t launches;

        [[nodiscard]] bool same_bits(result const& other) const
        {
            return support::same_bits(output, other.output) && support::same_bits(lse, other.lse);
        }
    };

    /// The dry run without counters, then the call.
    [[nodiscard]] result attend_with(std::span<std::uint32_t> arrivals) const
    {
        tensor<float, 3> q{{query_heads_, tokens_, dims_.keys}};
        q.assign(random_queries<float>(query_heads_ * tokens_, dims_.keys).elements());
        device_tensor<float, 3> const queries{q};
        device_tensor<float, 3> output{{query_heads_, tokens_, dims_.values}};
        device_tensor<float, 2> lse{{query_heads_, tokens_}};
        auto const call = [&](gpu::backend const& on) {
            if (sequences_.size() == 1) { attend(on, queries.in(), sequences_[0].cache, {}, output.out(), lse.out()); }
            else { attend(on, queries.in(), std::span{sequences_}, {}, output.out(), lse.out()); }
        };
        workspace count;
        call(gpu::backend{nullptr, &count});
        auto const memory = support::device_memory::scratch(count.bytes());
        workspace scratch{{memory.data(), count.bytes()}};
        auto const launches = support::run_on_stream([&](cudaStream_t stream) {
            call(gpu::backend{stream, &scratch, nullptr, arrivals});
        });
        return {output.elements(), lse.elements(), launches};
    }

private:
    index_t query_heads_;
    head_dims dims_;
    std::vector<device_cache<half>> stored_;
    std::vector<sequence_view<half, space::device>> sequences_;
    index_t tokens_     = 0;
    std::size_t needed_ = 0;
};

/// With as many counters as are needed, and one less.
void expects_half_the_launches(case_of_attend const& c, std::uint64_t launches)
{
    REQUIRE(c.needed() > 0);
    auto const want = c.attend_with({});
    CHECK(want.launches == 2 * launches);
    counters const enough{c.needed()};
    for (int call = 0; call < 3; ++call)
    {
        CAPTURE(call);
        auto const got = c.attend_with(enough.span());
        CHECK(got.launches == launches);
        CHECK(got.same_bits(want));
        CHECK(enough.all_zero());
    }
}

std::vector<rung> const codes{drop, fraction(1, 4).as(storage::int8), full_int4, full_int8, full};
std::vector<rung> const rotated{drop, fraction(1, 8), fraction(3, 4).as(storage::int8), full};

TEST_CASE("with counters attention takes one launch and has the same bits, whatever the group and the head dimensions")
{
    for (auto const& rungs : {codes, rotated})
    {
        for (head_dims const dims : {head_dims{64, 64}, {128, 128}, {48, 21}, {64, 320}})
        {
            for (index_t const group : {1, 4, 9})
            {
                CAPTURE(dims.keys);
                CAPTURE(dims.values);
                CAPTURE(group);
                case_of_attend c{2 * group, dims};
                c.add({.heads = 2, .tokens = 330, .window = 5, .dims = dims, .rungs = rungs, .common = 3}, 7, 1);
                expects_half_the_launches(c, 1);
            }
        }
    }
}

TEST_CASE("the last block merges queries of several tokens, slices of long caches, tails with room, and empty caches")
{
    case_of_attend drafts{6, {64, 64}};
    drafts.add({.heads = 2, .tokens = 2000, .window = 33, .dims = {64, 64}, .rungs = codes}, 9, 5); // slices
    expects_half_the_launches(drafts, 1);
    case_of_attend mostly_room{4, {64, 64}}; // blocks without a slice do not arrive
    mostly_room.add({.heads = 2, .tokens = 60, .window = 3, .dims = {64, 64}, .rungs = codes}, 2, 1, 900);
    expects_half_the_launches(mostly_room, 1);
    case_of_attend empty{2, {32, 32}};
    empty.add({.heads = 2, .tokens = 0, .window = 0, .dims = {32, 32}, .rungs = codes}, 0, 1);
    expects_half_the_launches(empty, 1);
}

TEST_CASE("a batch of sequences with counters takes one launch for each 48 neighbours")
{
    case_of_attend c{6, {16, 24}};
    std::vector<rung> const few{drop, full};
    for (index_t i = 0; i < 50; ++i)
    {
        c.add({.heads = 2, .tokens = 3 + i, .window = i % 3, .dims = {16, 24}, .rungs = few}, 5, i % 3);
    }
    expects_half_the_launches(c, 1); // 33 of them have queries
    c.add({.heads = 2, .tokens = 1900, .window = 5, .dims = {16, 24}, .rungs = codes}, 0, 1);
    c.add({.heads = 2, .tokens = 40, .window = 1, .dims = {16, 24}, .rungs = codes}, 20, 7);
    expects_half_the_launches(c, 2); // the other two are laid out in another way
    counters const less{gpu::attend_arrivals(2, 6, 1) + gpu::attend_arrivals(2, 6, 7)};
    auto const got = c.attend_with(less.span());
    CHECK(got.launches == 3); // there are enough for the second
    CHECK(got.same_bits(c.attend_with({})));
    CHECK(less.all_zero());
}

TEST_CASE("too few counters, and values for whose sums a warp has no room, take two launches")
{
    case_of_attend c{8, {64, 64}};
    c.add({.heads = 2, .tokens = 90, .window = 5, .dims = {64, 64}, .rungs = codes}, 3, 3);
    CHECK(c.needed() == 4);
    auto const want = c.attend_with({});
    counters const less{3};
    auto const got = c.attend_with(less.span());
    CHECK(got.launches == 2);
    CHECK(got.same_bits(want));
    CHECK(less.all_zero());
    case_of_attend wide{1, {16, 1032}};
    wide.add({.heads = 1, .tokens = 40, .window = 2, .dims = {16, 1032}, .rungs = codes}, 0, 1);
    counters const one{1};
    CHECK(wide.attend_with(one.span()).launches == 2);
    CHECK(one.all_zero());
}

TEST_CASE("counters are counted for heads, query heads and queries, and none are at no address")
{
    CHECK(gpu::attend_arrivals(8, 32) == 8);
    CHECK(gpu::attend_arrivals(8, 72) == 16);
    CHECK(gpu::attend_arrivals(8, 32, 5) == 24);
    CHECK(gpu::attend_arrivals(0, 0) == 0);
    CHECK(support::error_text<invalid_argument>([] { static_cast<void>(gpu::attend_arrivals(3, 8)); })
          == "attend_arrivals: 3 KV heads, 8 query heads, 1 queries; none may be negative, and KV heads must divide "
             "query "
             "heads");
    case_of_attend c{1, {16, 16}};
    c.add({.heads = 1, .tokens = 4, .window = 1, .dims = {16, 16}, .rungs = codes}, 0, 1);
    CHECK(support::error_text<invalid_argument>([&] {
        static_cast<void>(c.attend_with({static_cast<std::uint32_t*>(nullptr), 3}));
    }) == "attend: arrivals has 3 counters at no address; it must be empty or device memory");
}

} // namespace
