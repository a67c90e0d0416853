#include <mdkv/gpu/allocate.cuh>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>

#include "gpu/support/cpu_reference.hpp"
#include "gpu/support/device.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using mdkv::allocate_options;
using mdkv::allocation;
using mdkv::allocation_status;
using mdkv::index_t;
using mdkv::projection_charge;
using support::device_tensor;
using support::source;
using support::tensor;

constexpr float nan      = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

mdkv::rung_costs<> costs_of(std::vector<index_t> const& bytes, std::vector<index_t> const& projection = {})
{
    mdkv::rung_costs<> costs;
    costs.rungs = bytes.size();
    for (std::size_t r = 0; r < bytes.size(); ++r)
    {
        costs.bytes[r]      = bytes[r];
        costs.projection[r] = projection.empty() ? 0 : projection[r];
        costs.projected[r]  = costs.projection[r] > 0;
    }
    return costs;
}

struct outcome
{
    std::vector<std::uint8_t> rung; ///< [H, N]
    std::vector<allocation> report;
};

tensor<index_t, 1> as_tensor(std::vector<index_t> const& values)
{
    tensor<index_t, 1> result{{static_cast<index_t>(values.size())}};
    result.assign(values);
    return result;
}

outcome on_cpu(tensor<float, 3> const& loss, mdkv::rung_costs<> const& costs, std::vector<index_t> const& limits,
    allocate_options options)
{
    outcome result{std::vector<std::uint8_t>(static_cast<std::size_t>(loss.extent(0) * loss.extent(2))),
        std::vector<allocation>(limits.size())};
    support::run([&](mdkv::cpu::backend const& on) {
        support::allocate_on_cpu(on, loss.in(), costs, mdkv::in(on, limits.data(), static_cast<index_t>(limits.size())),
            options, mdkv::out(on, result.rung.data(), loss.extent(0), loss.extent(2)),
            mdkv::out(on, result.report.data(), static_cast<index_t>(limits.size())));
    });
    return result;
}

template <std::size_t R = mdkv::run_time>
outcome on_gpu(tensor<float, 3> const& loss, mdkv::rung_costs<R> const& costs, std::vector<index_t> const& limits,
    allocate_options options, support::placement how = {})
{
    device_tensor<float, 3> const from{loss};
    device_tensor<index_t, 1> const bytes{as_tensor(limits)};
    device_tensor<std::uint8_t, 2> rung{{loss.extent(0), loss.extent(2)}, how};
    device_tensor<allocation, 1> report{{static_cast<index_t>(limits.size())}};
    support::run_on_device([&](mdkv::gpu::backend const& on) {
        mdkv::allocate(on, from.in(), costs, bytes.in(), options, rung.out(), report.out());
    });
    return {rung.elements(), report.elements()};
}

/// The sum of the magnitudes of all losses that say something: what rounding is measured by.
double magnitude(tensor<float, 3> const& loss)
{
    double sum = 0;
    for (float const x : loss.elements()) { sum += std::isfinite(x) ? std::fabs(double{x}) : 0.0; }
    return sum;
}

/// Rungs, bytes, counts, status and multiplier are the same; sums of doubles are, but for the order of their summands, of
/// which there are fewer than 2^20 here: each rounds to 2^-53 of the sum at most.
bool agree(outcome const& got, outcome const& want, double scale)
{
    bool all = got.rung == want.rung;
    CHECK(got.rung == want.rung);
    for (std::size_t i = 0; i < want.report.size(); ++i)
    {
        allocation const& g = got.report[i];
        allocation const& w = want.report[i];
        CHECK(g.status == w.status);
        CHECK(g.limit == w.limit);
        CHECK(g.token_bytes == w.token_bytes);
        CHECK(g.charged_bytes == w.charged_bytes);
        CHECK(g.multiplier == w.multiplier);
        CHECK(g.tokens == w.tokens);
        CHECK(std::fabs(g.loss - w.loss) <= 1e-12 * scale);
        CHECK(std::fabs(g.dual - w.dual) <= 1e-9 * scale);
        all = all && g.status == w.status && g.token_bytes == w.token_bytes && g.multiplier == w.multiplier;
    }
    return all;
}

/// Which losses a layer has.
enum class kind : std::uint8_t
{
    falling, ///< from rung to rung, of heavy tails
    unruly,  ///< neither falling nor convex
    plateaus,
    nothing,
    tiny,  ///< denormal
    huge,  ///< with differences beyond the range of float
    silent ///< some are no numbers
};

tensor<float, 3> losses(
    source& random, index_t heads, index_t rungs, index_t tokens, kind what, support::placement how = {})
{
    tensor<float, 3> loss{{heads, rungs, tokens}, how};
    for (index_t h = 0; h < heads; ++h)
    {
        for (index_t i = 0; i < tokens; ++i)
        {
            auto left = static_cast<float>(std::exp(random.normal()));
            for (index_t r = 0; r < rungs; ++r)
            {
                float x = left;
                if (what == kind::unruly) { x = static_cast<float>(random.normal()); }
                if (what == kind::plateaus) { x = static_cast<float>(random.below(3) + rungs - r); }
                if (what == kind::nothing) { x = 1.0F; }
                if (what == kind::tiny) { x = static_cast<float>(random.below(100)) * 0x1p-149F; }
                if (what == kind::huge) { x = static_cast<float>(random.below(3) - 1) * 3e38F; }
                if (what == kind::silent && random.below(20) == 0)
                {
                    x = random.below(2) == 0 ? nan : random.below(2) == 0 ? infinity : -infinity;
                }
                loss.set(x, h, r, i);
                left *= r + 2 == rungs ? 0.0F : static_cast<float>(random.uniform(0.1, 0.9));
            }
        }
    }
    return loss;
}

/// Whether the GPU chooses what the CPU chooses.
bool same(tensor<float, 3> const& loss, mdkv::rung_costs<> const& costs, std::vector<index_t> const& limits,
    allocate_options options)
{
    return agree(on_gpu(loss, costs, limits, options), on_cpu(loss, costs, limits, options), magnitude(loss) + 1e-30);
}

constexpr kind all_kinds[] = {
    kind::falling, kind::unruly, kind::plateaus, kind::nothing, kind::tiny, kind::huge, kind::silent};

std::vector<index_t> ascending_bytes(source& random, index_t rungs)
{
    std::vector<index_t> bytes;
    for (index_t r = 0, at = random.below(2) * 8; r < rungs; ++r, at += 4 * (1 + random.below(20)))
    {
        bytes.push_back(at);
    }
    return bytes;
}

} // namespace

TEST_CASE("allocate on the GPU chooses what the CPU chooses, whatever the losses, the rungs and the limit")
{
    source random{"gpu/allocate"};
    for (kind const what : all_kinds)
    {
        for (index_t const rungs : {1, 2, 3, 4, 8, 16})
        {
            index_t const heads  = 1 + random.below(3);
            index_t const tokens = 1 + random.below(400);
            tensor<float, 3> const loss =
                losses(random, heads, rungs, tokens, what, {.swapped = rungs == 3, .slack = 3});
            mdkv::rung_costs<> const cost = costs_of(ascending_bytes(random, rungs));
            index_t const least           = heads * tokens * cost.bytes[0];
            index_t const most            = heads * tokens * cost.bytes[cost.rungs - 1];
            auto const limit              = static_cast<index_t>(
                static_cast<double>(least) + random.uniform(-0.02, 1.02) * static_cast<double>(most - least));
            allocate_options options;
            options.spend_leftover = random.below(4) != 0;
            CAPTURE(static_cast<int>(what));
            CAPTURE(rungs);
            CAPTURE(heads);
            CAPTURE(tokens);
            CAPTURE(limit);
            REQUIRE(same(loss, cost, {limit > 0 ? limit : 0}, options));
        }
    }
}

TEST_CASE("allocate on the GPU decides who pays for projections as the CPU does")
{
    source random{"gpu/allocate by use"};
    for (kind const what : {kind::falling, kind::unruly, kind::plateaus, kind::silent})
    {
        for (index_t const heads : {1, 3, 7})
        {
            index_t const tokens                = 40 + random.below(200);
            std::vector<index_t> const bytes    = {0, 16, 32, 64};
            index_t const price                 = (1 + random.below(40)) * 32;
            std::vector<index_t> const widths[] = {
                {0, price, 2 * price, 0}, {0, 2 * price, price, 0}, {0, price, price, 0}, {price, price, price, price}};
            mdkv::rung_costs<> const cost = costs_of(bytes, widths[random.below(4)]);
            tensor<float, 3> const loss   = losses(random, heads, 4, tokens, what);
            auto const limit =
                static_cast<index_t>(random.uniform(0.0, 1.05) * static_cast<double>(heads * (tokens * 64)));
            allocate_options options;
            options.spend_leftover = random.below(3) != 0;
            CAPTURE(static_cast<int>(what));
            CAPTURE(heads);
            CAPTURE(tokens);
            CAPTURE(limit);
            CAPTURE(price);
            CAPTURE(options.spend_leftover);
            CHECK(same(loss, cost, {limit}, options));
        }
    }
}

TEST_CASE("allocate on the GPU guesses, brackets and lists who pays as the CPU does, where heads and tokens are many")
{
    source random{"gpu/allocate many"};
    mdkv::rung_costs<> const cost = costs_of({0, 16, 32, 64}, {0, 4096, 8192, 0});
    for (bool const spend : {true, false})
    {
        // Heads that gain very differently from projections, so that they turn one after the other.
        tensor<float, 3> loss = losses(random, 5, 4, 2300, kind::falling);
        for (index_t h = 0; h < 5; ++h)
        {
            auto const more = static_cast<float>(std::pow(3.0, h) / 81);
            for (index_t i = 0; i < 2300; ++i)
            {
                for (index_t r : {1, 2}) { loss.set(loss.get(h, r, i) * more, h, r, i); }
            }
        }
        allocate_options options;
        options.spend_leftover = spend;
        CHECK(same(loss, cost, {5 * 2300 * 20}, options));
    }
}

TEST_CASE("allocate on the GPU gives every head its own limit as the CPU does")
{
    source random{"gpu/allocate limits"};
    tensor<float, 3> const loss      = losses(random, 4, 4, 300, kind::falling, {.swapped = true});
    std::vector<index_t> const limit = {300 * 64 * 2, 300 * 20, 2500, 0};
    for (projection_charge const charge : {projection_charge::always, projection_charge::by_use})
    {
        allocate_options options;
        options.charge = charge;
        CHECK(same(loss, costs_of({0, 16, 32, 64}), limit, options));
        CHECK(same(loss, costs_of({0, 16, 32, 64}, {0, 1000, 2000, 0}), limit, options));
        CHECK(same(loss, costs_of({8, 16, 32, 64}, {0, 1000, 2000, 0}), limit, options));
    }
}

TEST_CASE("allocate on the GPU fills plateaus by head and position, over many pieces of tokens")
{
    source random{"gpu/allocate plateau"};
    mdkv::rung_costs<> const cost = costs_of({0, 16, 24, 64});
    tensor<float, 3> loss{{2, 4, 2500}};
    for (index_t h = 0; h < 2; ++h)
    {
        for (index_t i = 0; i < 2500; ++i)
        {
            for (index_t r = 0; r < 4; ++r)
            {
                loss.set(static_cast<float>(64 - cost.bytes[static_cast<std::size_t>(r)]), h, r, i);
            }
        }
    }
    for (double const part : {0.01, 0.4, 0.77, 0.99999})
    {
        CAPTURE(part);
        CHECK(same(loss, cost, {static_cast<index_t>(part * 2 * 2500 * 64)}, {}));
    }
}

TEST_CASE("allocate on the GPU serves steps of very different widths, and of more bytes than 32 bits hold")
{
    source random{"gpu/allocate widths"};
    tensor<float, 3> const loss = losses(random, 2, 3, 500, kind::falling);
    for (std::vector<index_t> const& bytes : {std::vector<index_t>{0, 1, 3000},
             {0, (index_t{1} << 33) + 5, index_t{1} << 40}, {3, 5, (index_t{1} << 32) + 2}})
    {
        for (double const part : {0.1, 0.5, 0.9})
        {
            CAPTURE(part);
            CHECK(same(
                loss, costs_of(bytes), {static_cast<index_t>(part * 2 * 500 * static_cast<double>(bytes.back()))}, {}));
        }
    }
}

TEST_CASE("allocate on the GPU tells every status as the CPU does, and a negative limit as one that is too low")
{
    source random{"gpu/allocate status"};
    tensor<float, 3> const good   = losses(random, 2, 4, 100, kind::falling);
    tensor<float, 3> const silent = losses(random, 2, 4, 100, kind::silent);
    mdkv::rung_costs<> const cost = costs_of({8, 16, 32, 64}, {0, 500, 500, 0});
    for (projection_charge const charge : {projection_charge::always, projection_charge::by_use})
    {
        auto const status = [&](tensor<float, 3> const& loss, index_t limit) {
            allocate_options options;
            options.charge = charge;
            CHECK(same(loss, cost, {limit}, options));
            return on_gpu(loss, cost, {limit}, options).report[0].status;
        };
        CHECK(status(good, 2 * 100 * 64 + 1000) == allocation_status::everything_kept);
        CHECK(status(silent, 2 * 100 * 64 + 1000) == allocation_status::everything_kept);
        CHECK(status(good, 2 * 100 * 30) == allocation_status::optimal);
        CHECK(status(silent, 2 * 100 * 30) == allocation_status::non_finite_loss);
        CHECK(status(good, 2 * 100 * 8 + 100) == allocation_status::unprojected_only);
        CHECK(status(good, 2 * 100 * 8 - 1) == allocation_status::over_limit);
        CHECK(status(silent, 0) == allocation_status::over_limit);
        allocate_options options;
        options.charge         = charge;
        outcome const negative = on_gpu(good, cost, {std::numeric_limits<index_t>::min()}, options);
        CHECK(negative.report[0].status == allocation_status::over_limit);
        CHECK(negative.rung == std::vector<std::uint8_t>(200, 0));
    }
}

TEST_CASE("allocate on the GPU never loses more than what all allocations together tell, on tiny layers")
{
    source random{"gpu/allocate brute"};
    mdkv::rung_costs<> const cost = costs_of({0, 1, 3});
    for (int repeat = 0; repeat < 8; ++repeat)
    {
        tensor<float, 3> const loss = losses(random, 1, 3, 6, repeat % 2 == 0 ? kind::falling : kind::unruly);
        index_t const limit         = random.below(18); // at 18 all is kept, whatever it loses
        double best                 = std::numeric_limits<double>::infinity();
        for (index_t all = 0; all < 729; ++all)
        {
            double sum    = 0;
            index_t bytes = 0;
            for (index_t i = 0, rest = all; i < 6; ++i, rest /= 3)
            {
                sum += double{loss.get(0, rest % 3, i)};
                bytes += cost.bytes[static_cast<std::size_t>(rest % 3)];
            }
            if (bytes <= limit && sum < best) { best = sum; }
        }
        allocation const got = on_gpu(loss, cost, {limit}, {}).report[0];
        CHECK(got.token_bytes <= limit);
        CHECK(got.loss >= best - 1e-6);
        CHECK(got.dual <= best + 1e-6);
        // One token's widest step is all that the dual can miss.
        CHECK(got.loss <= best + got.multiplier * 3 + 1e-6);
    }
}

TEST_CASE("allocate on the GPU serves no tokens, sets known at compile time, and outputs with gaps")
{
    source random{"gpu/allocate shapes"};
    allocation const none = on_gpu(tensor<float, 3>{{3, 2, 0}}, costs_of({0, 4}, {0, 10}), {7}, {}).report[0];
    CHECK(none.status == allocation_status::everything_kept);
    CHECK(none.limit == 7);
    CHECK(none.loss == 0);
    CHECK(none.charged_bytes == 0);

    tensor<float, 3> const loss = losses(random, 2, 4, 130, kind::falling);
    mdkv::rung_costs<4> const fixed{mdkv::paper_ratios, {32, 32}, 2};
    mdkv::rung_costs<> open;
    open.rungs = 4;
    for (std::size_t r = 0; r < 4; ++r)
    {
        open.bytes[r]      = fixed.bytes[r];
        open.projected[r]  = fixed.projected[r];
        open.projection[r] = fixed.projection[r];
    }
    std::vector<index_t> const limit = {2 * 130 * 60 + fixed.widest_projection()};
    outcome const want               = on_cpu(loss, open, limit, {});
    CHECK(agree(on_gpu(loss, fixed, limit, {}, {.slack = 5}), want, magnitude(loss)));
}

TEST_CASE(
    "allocate on the GPU takes the search by bisection for that among thresholds, and refuses equal counts by name")
{
    source random{"gpu/allocate options"};
    tensor<float, 3> const loss = losses(random, 2, 3, 90, kind::falling);
    allocate_options halving;
    halving.search     = mdkv::search::bisection;
    outcome const got  = on_gpu(loss, costs_of({0, 4, 8}), {2 * 90 * 3}, halving);
    outcome const want = on_cpu(loss, costs_of({0, 4, 8}), {2 * 90 * 3}, halving);
    CHECK(got.rung == want.rung);

    allocate_options alike;
    alike.same_count_per_head = true;
    std::string const text    = support::error_text<mdkv::invalid_argument>([&] {
        static_cast<void>(on_gpu(loss, costs_of({0, 4, 8}), {100}, alike));
    });
    CHECK(text.find("same_count_per_head") != std::string::npos);
}

TEST_CASE("allocate on the GPU asks for its scratch without touching anything")
{
    mdkv::workspace count;
    mdkv::gpu::backend const on{nullptr, &count};
    mdkv::allocate(on, mdkv::in(on, static_cast<float const*>(nullptr), 8, 4, 5000),
        costs_of({0, 16, 32, 64}, {0, 9, 9, 0}), mdkv::in(on, static_cast<index_t const*>(nullptr), 1), {},
        mdkv::out(on, static_cast<std::uint8_t*>(nullptr), 8, 5000),
        mdkv::out(on, static_cast<allocation*>(nullptr), 1));
    CHECK(count.bytes() > 8 * 5000);
}
