#include <mdkv/core/ranks.hpp>

#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/leverage.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/basis.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/gpu/score.cuh>
#include <mdkv/recompress.hpp>
#include <mdkv/replay/balance.hpp>
#include <mdkv/replay/join.hpp>
#include <mdkv/replay/leverage.hpp>
#include <mdkv/stages/allocate.hpp>
#include <mdkv/stages/pack.hpp>

#include "gpu/support/device.hpp"
#include "gpu/support/device_packed.hpp"
#include "support/allocation.hpp"
#include "support/folding.hpp"
#include "support/host.hpp"
#include "support/message.hpp"
#include "support/packed.hpp"
#include "support/random.hpp"
#include "support/ranks.hpp"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace support;

/// A thread with a stream of its own; numbers are exchanged in the host's memory.
struct device_rank
{
    static constexpr mdkv::space memory_space = mdkv::space::device;

    thread_rank const& host;
    cudaStream_t stream;

    [[nodiscard]] int rank() const { return host.rank(); }
    [[nodiscard]] int size() const { return host.size(); }
    void sum(std::int64_t* x, index_t n) const
    {
        through_host(x, n, [&](std::int64_t* y) { host.sum(y, n); });
    }
    void least(std::uint64_t* x, index_t n) const
    {
        through_host(x, n, [&](std::uint64_t* y) { host.least(y, n); });
    }
    void agree(std::uint64_t* x, index_t n) const { host.least(x, n); }

private:
    template <class V, class Exchange>
    void through_host(V* x, index_t n, Exchange const& exchange) const
    {
        mdkv::gpu::backend const on{stream};
        std::vector<V> copy(static_cast<std::size_t>(n));
        mdkv::gpu::copy(on, x, copy.data(), n * index_t{sizeof(V)});
        exchange(copy.data());
        mdkv::gpu::copy(on, copy.data(), x, n * index_t{sizeof(V)});
    }
};

static_assert(device_rank::memory_space == mdkv::gpu::backend::memory_space);

/// Calls body(backend) as run_on_device_now does, on a rank with some heads.
template <class Body>
void run_on_rank(thread_rank const& transport, mdkv::rank_heads const& own, Body const& body)
{
    run_on_device_now([&](mdkv::gpu::backend on) {
        device_rank const device{transport, on.stream};
        mdkv::ranks const all{device, own};
        on.ranks = &all;
        body(on);
    });
}

template <class V>
std::vector<V> part_of(std::vector<V> const& all, index_t first, index_t count)
{
    return {all.begin() + first, all.begin() + first + count};
}

template <class T, std::size_t Rank>
device_tensor<T, Rank> on_device(std::array<index_t, Rank> extents, std::vector<T> const& values)
{
    tensor<T, Rank> copy{extents};
    copy.assign(values);
    return device_tensor<T, Rank>{copy};
}

} // namespace

TEST_CASE("GPUs as ranks, of some heads or none, choose the CPU's rungs, bit for bit")
{
    source random{"gpu ranks"};
    for (int round = 0; round < 3; ++round)
    {
        index_t const heads  = 3;
        index_t const tokens = round == 2 ? 11000 : 1 + random.below(2500); // the last ones are sampled
        layer const in       = round == 1 ? with_projections(random, heads, tokens, 4)
                                          : heavy_tailed(random, heads, tokens, {0, 64, 128, 512});
        index_t const limit  = some_limit(random, in);
        outcome one{std::vector<std::uint8_t>(at(heads * tokens)), std::vector<allocation>(1)};
        support::run([&](mdkv::cpu::backend const& on) {
            mdkv::allocate(on, mdkv::in(on, in.loss.data(), heads, in.rungs(), tokens), in.costs(),
                mdkv::in(on, &limit, 1), {}, mdkv::out(on, one.rung.data(), heads, tokens),
                mdkv::out(on, one.report.data(), 1));
        });
        std::vector<index_t> const cuts{0, 1, 1, 3};
        rank_team team{3};
        auto const errors = on_ranks(team, [&](thread_rank const& transport) {
            index_t const first = cuts[at(transport.number)];
            index_t const count = cuts[at(transport.number + 1)] - first;
            index_t const row   = in.rungs() * tokens;
            auto const loss =
                on_device<float, 3>({count, in.rungs(), tokens}, part_of(in.loss, first * row, count * row));
            auto const bytes = on_device<index_t, 1>({1}, {limit});
            device_tensor<std::uint8_t, 2> rung{{count, tokens}};
            device_tensor<allocation, 1> report{{1}};
            run_on_rank(transport, {first, heads}, [&](mdkv::gpu::backend const& on) {
                mdkv::allocate(on, loss.in(), in.costs(), bytes.in(), {}, rung.out(), report.out());
            });
            if (rung.elements() != part_of(one.rung, first * tokens, count * tokens)) { throw mdkv::error{"rungs"}; }
            if (!same(report.elements().front(), one.one())) { throw mdkv::error{"report"}; }
        });
        for (std::string const& error : errors) { CHECK(error == ""); }
    }
}

TEST_CASE("joined and balanced losses of GPUs as ranks are those of one GPU, bit for bit; a refused argument is an "
          "error on all")
{
    source random{"gpu ranks losses"};
    index_t const L = 2, H = 3, R = 2, N = 4500, D = 8;
    auto const some = [&] {
        std::vector<float> all(at(L * H * R * N));
        for (float& x : all) { x = static_cast<float>(std::exp(2 * random.normal())); }
        return all;
    };
    std::vector<float> const first = some(), second = some();
    auto const joined                   = [&](mdkv::gpu::backend const& on, device_tensor<float, 3>& a,
                            device_tensor<float, 3> const& b) { mdkv::join(on, a.in(), b.in(), 2.0F, a.out()); };
    device_tensor<float, 3> one         = on_device<float, 3>({H, R, N}, part_of(first, 0, H * R * N));
    device_tensor<float, 3> const other = on_device<float, 3>({H, R, N}, part_of(second, 0, H * R * N));
    run_on_device_now([&](mdkv::gpu::backend const& on) { joined(on, one, other); });
    std::vector<float> keys; // [H, N, D], of both layers
    for (index_t i = 0; i < H * N * D; ++i) { keys.push_back(static_cast<float>(std::exp(random.normal()))); }
    auto const balanced = [&](mdkv::gpu::backend const& on, device_tensor<float, 4>& losses,
                              device_tensor<float, 3> const& own_keys,
                              device_tensor<mdkv::leverage_sum, 1>& leverages) {
        for (index_t l = 0; l < L; ++l) { mdkv::add_leverage(on, own_keys.in(), leverages.out()); }
        mdkv::balance(on, losses.out(), {.depth = 1.0F, .leverage_power = 4.0F, .leverages = leverages.in()});
    };
    std::vector<mdkv::leverage_sum> const zeros(at(N));
    device_tensor<float, 4> whole             = on_device<float, 4>({L, H, R, N}, first);
    device_tensor<float, 3> const whole_keys  = on_device<float, 3>({H, N, D}, keys);
    device_tensor<mdkv::leverage_sum, 1> sums = on_device<mdkv::leverage_sum, 1>({N}, zeros);
    run_on_device_now([&](mdkv::gpu::backend const& on) { balanced(on, whole, whole_keys, sums); });
    std::vector<std::string> wrong(2); // a rank that threw would leave the other one
    rank_team team{2};
    auto const errors = on_ranks(team, [&](thread_rank const& transport) {
        index_t const from  = transport.number == 0 ? 0 : 1;
        index_t const heads = transport.number == 0 ? 1 : 2;
        auto const mine     = [&](std::vector<float> const& all, index_t l) {
            return part_of(all, (l * H + from) * R * N, heads * R * N);
        };
        device_tensor<float, 3> a       = on_device<float, 3>({heads, R, N}, mine(first, 0));
        device_tensor<float, 3> const b = on_device<float, 3>({heads, R, N}, mine(second, 0));
        run_on_rank(transport, {from, H}, [&](mdkv::gpu::backend const& on) { joined(on, a, b); });
        if (a.elements() != mine(one.elements(), 0)) { wrong[at(transport.number)] += "joined"; }
        std::vector<float> both = mine(first, 0);
        std::vector<float> want = mine(whole.elements(), 0);
        for (float const x : mine(first, 1)) { both.push_back(x); }
        for (float const x : mine(whole.elements(), 1)) { want.push_back(x); }
        device_tensor<float, 4> c = on_device<float, 4>({L, heads, R, N}, both);
        device_tensor<float, 3> const own_keys =
            on_device<float, 3>({heads, N, D}, part_of(keys, from * N * D, heads * N * D));
        device_tensor<mdkv::leverage_sum, 1> own_sums = on_device<mdkv::leverage_sum, 1>({N}, zeros);
        run_on_rank(transport, {.first_head = from, .heads = H, .layers = L},
            [&](mdkv::gpu::backend const& on) { balanced(on, c, own_keys, own_sums); });
        if (c.elements() != want) { wrong[at(transport.number)] += "balanced"; }
        // A dry run is each rank's own, so it has valid arguments.
        run_on_rank(transport, {from, H}, [&](mdkv::gpu::backend const& on) {
            bool const refused = transport.number == 1 && !on.scratch->counting();
            mdkv::join(on, a.in(), b.in(), refused ? -1.0F : 1.0F, a.out());
        });
    });
    for (std::string const& what : wrong) { CHECK(what == ""); }
    says(errors[0], "join: rank 1 refuses its arguments");
    says(errors[1], "join: weight is -1");
}

TEST_CASE("a fold of heads of GPUs as ranks is that of one GPU, bit for bit")
{
    packed_layer<mdkv::half> const x{
        packed_sizes{.heads = 3, .tokens = 70, .window = 4, .dims = {40, 24}, .rungs = listed(mdkv::bit_ratios)}};
    source random{"gpu ranks fold"};
    tensor<mdkv::half, 3> queries{{6, 4, 40}};
    std::vector<mdkv::half> rows;
    for (index_t i = 0; i < queries.count(); ++i)
    {
        rows.push_back(mdkv::narrow<mdkv::half>(static_cast<float>(random.normal())));
    }
    queries.assign(rows);
    /// The arena of heads [first, end) after a fold within `bytes`; on one rank without a transport.
    auto const folded = [&](index_t first, index_t end, index_t bytes, thread_rank const* transport) {
        index_t const n = end - first;
        auto const mine = [&](auto const& all) { return mdkv::slice<0>(all.in(), first, n); };
        mdkv::cache_layout const form{x.ratios, n, 4, {40, 24}};
        index_t arena = 0;
        support::run(
            [&](mdkv::cpu::backend const& on) { arena = mdkv::packed_bytes<mdkv::half>(on, mine(x.rung), form); });
        mdkv::cpu::cache<mdkv::half> cache{form, arena};
        support::run([&](mdkv::cpu::backend const& on) {
            mdkv::pack(on, mine(x.keys), mine(x.values), mine(x.window_keys), mine(x.window_values), mine(x.key_basis),
                mine(x.value_basis), mine(x.rung), cache.view());
        });
        device_resource memory;
        auto there       = mdkv::gpu::to_device(cache, nullptr, memory);
        auto const asked = on_device<mdkv::half, 3>({2 * n, 4, 40}, part_of(rows, 2 * first * 160, 2 * n * 160));
        auto const fold  = [&](mdkv::gpu::backend const& on) {
            mdkv::recompress(on, asked.in(), x.ratios,
                 mdkv::recompress_options<mdkv::gpu::backend>{.limit = mdkv::budget::bytes(bytes), .longest_head = 74},
                 there);
        };
        if (transport == nullptr) { run_on_device_now(fold); }
        else { run_on_rank(*transport, {first, 3}, fold); }
        cache = mdkv::gpu::to_host(there, nullptr);
        return std::vector<std::byte>{cache.view().arena, cache.view().arena + cache.arena_bytes()};
    };
    for (index_t const bytes : {5000, 9000, 100000})
    {
        CAPTURE(bytes);
        std::vector<index_t> const cuts{0, 1, 1, 3};
        rank_team team{3};
        std::vector<std::vector<std::byte>> parts(3);
        auto const errors = on_ranks(team, [&](thread_rank const& transport) {
            auto const r = at(transport.number);
            parts[r]     = folded(cuts[r], cuts[r + 1], bytes, &transport);
        });
        for (std::string const& error : errors) { CHECK(error == ""); }
        std::vector<std::byte> all;
        for (auto const& part : parts) { all.insert(all.end(), part.begin(), part.end()); }
        CHECK(all == folded(0, 3, bytes, nullptr));
    }
}
