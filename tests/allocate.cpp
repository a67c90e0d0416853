#include <mdkv/cpu/allocate.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "support/host.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <rapidcheck.h>

namespace
{

using mdkv::allocate_options;
using mdkv::allocation;
using mdkv::allocation_status;
using mdkv::index_t;
using support::error_text;
using support::source;
using support::tensor;

constexpr float nan      = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

std::size_t at(index_t i)
{
    return static_cast<std::size_t>(i);
}

/// Losses and costs of one layer.
struct layer
{
    index_t heads  = 1;
    index_t tokens = 0;
    std::vector<index_t> cost;
    std::vector<bool> projected = std::vector<bool>(cost.size(), false);
    index_t projection          = 0;
    std::vector<float> loss     = std::vector<float>(at(heads * rungs() * tokens), 0.0F);

    [[nodiscard]] index_t rungs() const { return static_cast<index_t>(cost.size()); }
    [[nodiscard]] float& of(index_t h, index_t r, index_t i) { return loss[at((h * rungs() + r) * tokens + i)]; }
    [[nodiscard]] float of(index_t h, index_t r, index_t i) const { return loss[at((h * rungs() + r) * tokens + i)]; }
    [[nodiscard]] index_t most() const { return heads * tokens * cost.back(); }

    [[nodiscard]] bool finite(index_t h, index_t i) const
    {
        bool all = true;
        for (index_t r = 0; r < rungs(); ++r) { all = all && std::isfinite(of(h, r, i)); }
        return all;
    }

    template <std::size_t R = mdkv::run_time>
    [[nodiscard]] mdkv::rung_costs<R> costs() const
    {
        mdkv::rung_costs<R> c;
        c.rungs      = cost.size();
        c.projection = projection;
        for (std::size_t r = 0; r < cost.size(); ++r)
        {
            c.bytes[r]     = cost[r];
            c.projected[r] = projected[r];
        }
        return c;
    }
};

struct outcome
{
    std::vector<std::uint8_t> rung; ///< [H, N]
    std::vector<allocation> report;

    [[nodiscard]] allocation const& one() const { return report.front(); }
};

template <std::size_t R = mdkv::run_time>
outcome solve(layer const& in, std::vector<index_t> const& limits, allocate_options options = {},
    mdkv::cpu::executor_ref threads = {})
{
    outcome result{std::vector<std::uint8_t>(at(in.heads * in.tokens), 0xAA), std::vector<allocation>(limits.size())};
    support::run(
        [&](mdkv::cpu::backend const& on) {
            mdkv::allocate(on, mdkv::in(on, in.loss.data(), in.heads, in.rungs(), in.tokens), in.costs<R>(),
                mdkv::in(on, limits.data(), limits.size()), options,
                mdkv::out(on, result.rung.data(), in.heads, in.tokens),
                mdkv::out(on, result.report.data(), limits.size()));
        },
        threads);
    return result;
}

bool same(allocation const& a, allocation const& b)
{
    return a.status == b.status && a.multiplier == b.multiplier && a.loss == b.loss && a.dual == b.dual
           && a.limit == b.limit && a.token_bytes == b.token_bytes && a.charged_bytes == b.charged_bytes
           && a.tokens == b.tokens;
}

bool same(outcome const& a, outcome const& b)
{
    return a.rung == b.rung
           && std::equal(a.report.begin(), a.report.end(), b.report.begin(), b.report.end(),
               [](allocation const& x, allocation const& y) { return same(x, y); });
}

/// Loss and bytes of an allocation, counted anew; tokens whose losses say nothing count for nothing.
struct account
{
    long double loss      = 0;
    long double magnitude = 0; ///< of the summands: what rounding is measured by
    index_t bytes         = 0;
    std::array<index_t, mdkv::max_rungs> tokens{};
};

account count(layer const& in, std::vector<std::uint8_t> const& rung)
{
    account sum;
    for (index_t h = 0; h < in.heads; ++h)
    {
        for (index_t i = 0; i < in.tokens; ++i)
        {
            index_t const r = rung[at(h * in.tokens + i)];
            sum.bytes += in.cost[at(r)];
            ++sum.tokens[at(r)];
            if (!in.finite(h, i)) { continue; }
            sum.loss += static_cast<long double>(in.of(h, r, i));
            sum.magnitude += std::fabs(static_cast<long double>(in.of(h, r, i)));
        }
    }
    return sum;
}

/// The oracle: bisection in long double, its own loop over everything, two hundred halvings.
struct bisected
{
    long double multiplier = 0;
    std::vector<std::uint8_t> rung;
};

bisected bisect(layer const& in, index_t limit)
{
    auto const at_multiplier = [&](long double m) {
        bisected b{m, std::vector<std::uint8_t>(at(in.heads * in.tokens))};
        for (index_t h = 0; h < in.heads; ++h)
        {
            for (index_t i = 0; i < in.tokens; ++i)
            {
                index_t best = 0;
                for (index_t r = 1; in.finite(h, i) && r < in.rungs(); ++r)
                {
                    long double const saved =
                        static_cast<long double>(in.of(h, best, i)) - static_cast<long double>(in.of(h, r, i));
                    best = saved > m * static_cast<long double>(in.cost[at(r)] - in.cost[at(best)]) ? r : best;
                }
                b.rung[at(h * in.tokens + i)] = static_cast<std::uint8_t>(best);
            }
        }
        return b;
    };
    bisected const free = at_multiplier(0);
    if (count(in, free.rung).bytes <= limit) { return free; }
    long double low  = 0;
    long double high = 1e6L;
    for (int halvings = 0; halvings < 90; ++halvings)
    {
        long double const middle                                            = (low + high) / 2;
        (count(in, at_multiplier(middle).rung).bytes <= limit ? high : low) = middle;
    }
    return at_multiplier(high);
}

/// The greedy rule for what is left, taken literally: for every upgrade all upgrades of all tokens are compared.
void spend(layer const& in, index_t limit, float cap, std::vector<std::uint8_t>& rung)
{
    index_t left    = limit - count(in, rung).bytes;
    auto const unit = static_cast<double>(in.cost.back() - in.cost.front());
    while (true)
    {
        float best        = 0;
        std::size_t token = 0;
        index_t target    = 0;
        for (std::size_t t = 0; t < rung.size(); ++t)
        {
            index_t const h = static_cast<index_t>(t) / in.tokens;
            index_t const i = static_cast<index_t>(t) % in.tokens;
            index_t const a = rung[t];
            for (index_t c = a + 1; in.finite(h, i) && c < in.rungs(); ++c)
            {
                index_t const bytes = in.cost[at(c)] - in.cost[at(a)];
                if (bytes > left) { break; }
                float const saved =
                    (in.of(h, a, i) - in.of(h, c, i)) * static_cast<float>(unit / static_cast<double>(bytes));
                float const key = saved < cap ? saved : cap;
                if (key > best)
                {
                    best   = key;
                    token  = t;
                    target = c;
                }
            }
        }
        if (best == 0) { return; }
        left -= in.cost[at(target)] - in.cost[rung[token]];
        rung[token] = static_cast<std::uint8_t>(target);
    }
}

/// Losses as a real layer has them: many small, few large, falling with the rung.
layer heavy_tailed(source& random, index_t heads, index_t tokens, std::vector<index_t> cost)
{
    layer in{heads, tokens, std::move(cost)};
    for (index_t h = 0; h < heads; ++h)
    {
        for (index_t i = 0; i < tokens; ++i)
        {
            double x = std::exp(2.0 * random.normal());
            for (index_t r = 0; r < in.rungs(); ++r)
            {
                in.of(h, r, i) = r + 1 == in.rungs() ? 0.0F : static_cast<float>(x);
                x *= random.uniform(0.3, 1.02); // now and then a costlier rung loses more
            }
        }
    }
    return in;
}

/// Ascending costs from 0.
std::vector<index_t> some_costs(source& random, index_t rungs)
{
    std::vector<index_t> cost{random.below(2) * random.below(9)};
    while (static_cast<index_t>(cost.size()) < rungs) { cost.push_back(cost.back() + 1 + random.below(64)); }
    return cost;
}

/// Every kind of float, and few distinct ones, so that there are ties.
float nasty(source& random)
{
    static constexpr std::array<float, 18> values{0.0F, -0.0F, 1.0F, 1.0F, 2.0F, 3.0F, 0.5F, -1.0F, 1e30F, -1e30F,
        3e38F, -3e38F, 1e-40F, 3e-45F, nan, infinity, -infinity, 1e-30F};
    return random.below(3) == 0 ? static_cast<float>(random.normal()) : values[at(random.below(values.size()))];
}

} // namespace

TEST_CASE("allocate agrees with a long double bisection on 100,000 tokens at four and at eight rungs")
{
    source random{"allocate oracle"};
    std::vector<std::vector<index_t>> const costs{{0, 64, 128, 512}, {0, 32, 64, 96, 128, 192, 256, 512}};
    for (std::vector<index_t> const& cost : costs)
    {
        layer const in = heavy_tailed(random, 4, 25000, cost);
        for (index_t const share : {250, 20, 10, 2})
        {
            index_t const limit    = in.most() / share;
            bisected const oracle  = bisect(in, limit);
            account const expected = count(in, oracle.rung);
            outcome const plain    = solve(in, {limit}, {.spend_leftover = false});
            account const got      = count(in, plain.rung);
            CAPTURE(share);
            CHECK(plain.one().status == allocation_status::optimal);
            CHECK(plain.one().multiplier == doctest::Approx(static_cast<double>(oracle.multiplier)).epsilon(1e-6));
            CHECK(got.bytes <= limit);
            CHECK(plain.one().token_bytes == got.bytes);
            // A threshold within rounding of the multiplier may fall on either side.
            index_t different = 0;
            for (std::size_t t = 0; t < plain.rung.size(); ++t)
            {
                different += plain.rung[t] != oracle.rung[t] ? 1 : 0;
            }
            CHECK(different <= 2);
            CHECK(plain.one().loss == doctest::Approx(static_cast<double>(got.loss)).epsilon(1e-12));
            CHECK(std::fabs(got.loss - expected.loss) <= 2 * oracle.multiplier * 512);

            outcome const spent = solve(in, {limit});
            CHECK(spent.one().loss <= plain.one().loss);
            CHECK(spent.one().dual == plain.one().dual);
            CHECK(spent.one().gap() >= -1e-9 * spent.one().loss);
            CHECK(spent.one().gap() <= plain.one().gap());
            CHECK(limit - spent.one().token_bytes < 64); // the narrowest step there is to most tokens
        }
    }
}

TEST_CASE("both searches choose the same rungs")
{
    source random{"allocate searches"};
    for (index_t rungs = 2; rungs <= 6; ++rungs)
    {
        layer const in = heavy_tailed(random, 2, 3000, some_costs(random, rungs));
        for (index_t const share : {50, 10, 3})
        {
            index_t const limit  = in.heads * in.tokens * in.cost.front() + in.most() / share;
            outcome const exact  = solve(in, {limit});
            outcome const halved = solve(in, {limit}, {.search = mdkv::search::bisection});
            CHECK(exact.one().status == halved.one().status);
            CHECK(exact.one().multiplier == doctest::Approx(halved.one().multiplier).epsilon(1e-6));
            CHECK(exact.one().loss == doctest::Approx(halved.one().loss).epsilon(1e-6));
            CHECK(halved.one().token_bytes <= limit);
            CHECK(halved.one().gap() >= -1e-6 * halved.one().loss);
        }
    }
}

TEST_CASE(
    "no allocation of as many bytes loses less, and none within the limit loses less than the dual: all R^N tried")
{
    bool const holds = rc::check("brute force", [] {
        source random{"allocate brute force", *rc::gen::arbitrary<std::int32_t>()};
        index_t const rungs  = 2 + random.below(3);
        index_t const tokens = 1 + random.below(5);
        layer in{1 + random.below(2), 0, some_costs(random, rungs)};
        in.tokens = tokens;
        in.loss.assign(at(in.heads * rungs * tokens), 0.0F);
        bool const few = random.below(2) == 0;
        for (float& x : in.loss)
        {
            x = few ? static_cast<float>(random.below(4) - 1) : static_cast<float>(random.normal());
        }
        index_t const limit = random.below(in.most() + 2);
        outcome const plain = solve(in, {limit}, {.spend_leftover = false});
        outcome const spent = solve(in, {limit});
        if (plain.one().status != allocation_status::optimal) { return; }
        account const plain_account = count(in, plain.rung);
        account const spent_account = count(in, spent.rung);

        long double best_of_same_bytes = plain_account.loss;
        long double best_within_limit  = spent_account.loss;
        std::vector<std::uint8_t> every(plain.rung.size(), 0);
        for (bool more = true; more;)
        {
            account const other = count(in, every);
            if (other.bytes <= plain_account.bytes) { best_of_same_bytes = std::min(best_of_same_bytes, other.loss); }
            if (other.bytes <= limit) { best_within_limit = std::min(best_within_limit, other.loss); }
            std::size_t digit = 0;
            while (digit < every.size() && every[digit] + 1 == rungs) { every[digit++] = 0; }
            more = digit < every.size();
            if (more) { ++every[digit]; }
        }
        long double const rounding = 1e-5L * (1 + plain_account.magnitude);
        RC_ASSERT(plain_account.loss <= best_of_same_bytes + rounding);
        RC_ASSERT(spent_account.loss <= plain_account.loss + rounding);
        RC_ASSERT(static_cast<long double>(spent.one().dual) <= best_within_limit + rounding);
        RC_ASSERT(spent_account.bytes <= limit);
    });
    CHECK(holds);
}

TEST_CASE("what is left is spent in the documented order, upgrade by upgrade")
{
    bool const holds = rc::check("greedy", [] {
        source random{"allocate greedy", *rc::gen::arbitrary<std::int32_t>()};
        index_t const rungs = 2 + random.below(5);
        layer in{1 + random.below(3), 1 + random.below(40), some_costs(random, rungs)};
        bool const few = random.below(2) == 0;
        for (float& x : in.loss)
        {
            x = few ? static_cast<float>(random.below(5)) : static_cast<float>(random.uniform());
        }
        index_t const cheapest             = in.heads * in.tokens * in.cost.front();
        index_t const limit                = cheapest + random.below(in.most() - cheapest + 1);
        outcome const plain                = solve(in, {limit}, {.spend_leftover = false});
        outcome const spent                = solve(in, {limit});
        std::vector<std::uint8_t> expected = plain.rung;
        if (plain.one().status == allocation_status::optimal)
        {
            auto const unit = static_cast<double>(in.cost.back() - in.cost.front());
            spend(in, limit, static_cast<float>(plain.one().multiplier * unit), expected);
        }
        RC_ASSERT(spent.rung == expected);
        account const recount = count(in, expected);
        RC_ASSERT(spent.one().token_bytes == recount.bytes);
        RC_ASSERT(spent.one().tokens == recount.tokens);
        RC_ASSERT(
            std::fabs(static_cast<long double>(spent.one().loss) - recount.loss) <= 1e-12L * (1 + recount.magnitude));
    });
    CHECK(holds);
}

TEST_CASE(
    "with the ratio set {0, 1} exactly the tokens of largest loss are kept, of equals those of lower head and position")
{
    source random{"allocate top k"};
    for (index_t const distinct : {3, 40, 1 << 20})
    {
        for (index_t const bytes : {512, 192, 7})
        {
            layer in{3, 1000, {0, bytes}};
            std::vector<std::pair<float, std::size_t>> order;
            for (index_t h = 0; h < in.heads; ++h)
            {
                for (index_t i = 0; i < in.tokens; ++i)
                {
                    // neighbouring floats: rounding a product of two could make them equal
                    in.of(h, 0, i) = 1.0F + static_cast<float>(random.below(distinct)) * 0x1p-23F;
                    order.emplace_back(-in.of(h, 0, i), at(h * in.tokens + i));
                }
            }
            std::sort(order.begin(), order.end());
            for (std::size_t const kept : {0U, 1U, 700U, 2999U})
            {
                std::vector<std::uint8_t> expected(order.size(), 0);
                for (std::size_t k = 0; k < kept; ++k) { expected[order[k].second] = 1; }
                outcome const got = solve(in, {static_cast<index_t>(kept) * bytes + bytes - 1});
                CHECK(got.rung == expected);
                CHECK(got.one().tokens[1] == static_cast<index_t>(kept));
            }
        }
    }
}

TEST_CASE("raising the limit never raises the loss")
{
    bool const holds = rc::check("monotone", [] {
        source random{"allocate monotone", *rc::gen::arbitrary<std::int32_t>()};
        layer in = heavy_tailed(random, 2, 1 + random.below(60), some_costs(random, 2 + random.below(5)));
        if (random.below(2) == 0)
        {
            for (float& x : in.loss) { x = std::round(x); }
        }
        index_t const cheapest = in.heads * in.tokens * in.cost.front();
        double before          = std::numeric_limits<double>::infinity();
        index_t const step     = 1 + random.below(50);
        for (index_t limit = cheapest; limit <= in.most(); limit += step)
        {
            allocation const got = solve(in, {limit}).one();
            RC_ASSERT(got.loss <= before * (1 + 1e-6) + 1e-6);
            RC_ASSERT(got.token_bytes <= limit);
            before = got.loss;
        }
    });
    CHECK(holds);
}

TEST_CASE("whatever the losses, the call ends, keeps the limit, and says when a loss was not finite")
{
    bool const holds = rc::check("nasty losses", [] {
        source random{"allocate nasty", *rc::gen::arbitrary<std::int32_t>()};
        layer in{1 + random.below(3), random.below(80), some_costs(random, 1 + random.below(16))};
        for (float& x : in.loss) { x = nasty(random); }
        in.projection = random.below(3) * 50;
        for (std::size_t r = 1; r + 1 < in.cost.size(); ++r) { in.projected[r] = in.projection > 0; }
        index_t const limit = random.below(in.most() + in.heads * in.projection + 10);
        allocate_options const options{random.below(2) == 0 ? mdkv::search::thresholds : mdkv::search::bisection,
            random.below(3) != 0, random.below(3) == 0};
        outcome const got      = solve(in, {limit}, options);
        allocation const& said = got.one();
        account const recount  = count(in, got.rung);
        RC_ASSERT(said.token_bytes == recount.bytes);
        RC_ASSERT(said.tokens == recount.tokens);
        RC_ASSERT(said.limit == limit);
        RC_ASSERT(std::isfinite(said.loss) && std::isfinite(said.dual) && std::isfinite(said.multiplier));
        RC_ASSERT(said.status == allocation_status::over_limit || said.token_bytes + said.charged_bytes <= limit);
        if (said.status == allocation_status::over_limit || said.status == allocation_status::everything_kept)
        {
            return;
        }
        bool all_finite = true;
        for (index_t h = 0; h < in.heads; ++h)
        {
            for (index_t i = 0; i < in.tokens; ++i)
            {
                if (in.finite(h, i)) { continue; }
                all_finite = false;
                RC_ASSERT(got.rung[at(h * in.tokens + i)] == 0);
            }
        }
        RC_ASSERT((said.status == allocation_status::non_finite_loss) == !all_finite);
    });
    CHECK(holds);
}

TEST_CASE("any number of threads gives the same bits")
{
    source random{"allocate threads"};
    layer in = heavy_tailed(random, 3, 30011, {0, 64, 128, 512});
    for (index_t i = 5000; i < 12000; ++i) { in.of(1, 0, i) = in.of(1, 0, 5000); } // a plateau
    for (bool const equal : {false, true})
    {
        for (mdkv::search const how : {mdkv::search::thresholds, mdkv::search::bisection})
        {
            allocate_options const options{how, true, equal};
            outcome const serial = solve(in, {in.most() / 9}, options);
            for (int const threads : {2, 3, 5})
            {
                mdkv::cpu::thread_pool pool{threads};
                CHECK(same(solve(in, {in.most() / 9}, options, pool), serial));
            }
        }
    }
}

TEST_CASE("a sample that misleads costs a pass and changes nothing")
{
    // Of 65,536 tokens of one head the sample sees every fourth block of sixteen.
    source random{"allocate sample"};
    for (bool const sampled_are_large : {true, false})
    {
        layer in{1, 65536, {0, 64, 128, 512}};
        for (index_t i = 0; i < in.tokens; ++i)
        {
            bool const sampled = i / 16 % 4 == 2;
            auto const size =
                static_cast<float>((sampled == sampled_are_large ? 1000.0 : 1.0) * (1.0 + random.uniform()));
            in.of(0, 0, i) = size;
            in.of(0, 1, i) = size * 0.8F;
            in.of(0, 2, i) = size * 0.5F;
        }
        // a limit that reaches into the tokens the sample knows nothing of
        index_t const limit = sampled_are_large ? in.most() / 2 : in.most() / 3;

        std::vector<index_t> counters(at(mdkv::cpu::dual::bins::sample_count));
        mdkv::cpu::backend const on;
        std::vector<std::uint8_t> unused(at(in.tokens));
        mdkv::cpu::dual::problem p;
        p.loss  = mdkv::in(on, in.loss.data(), 1, 4, in.tokens);
        p.rung  = mdkv::out(on, unused.data(), 1, in.tokens);
        p.heads = 1;
        p.rungs = mdkv::detail::rung_table{512};
        for (std::size_t r = 0; r < 4; ++r) { p.allow(r, in.cost[r]); }
        mdkv::cpu::dual::bracket const guess =
            mdkv::cpu::dual::guess_bracket<4>(p, limit, {counters.data(), nullptr, nullptr});
        bisected const oracle  = bisect(in, limit);
        auto const multiplier  = static_cast<double>(oracle.multiplier) * 512;
        bool const guess_holds = multiplier > double{guess.low} && multiplier <= double{guess.high};
        CAPTURE(guess.low);
        CAPTURE(guess.high);
        CAPTURE(multiplier);
        REQUIRE_FALSE(guess_holds);

        outcome const got = solve(in, {limit}, {.spend_leftover = false});
        CHECK(got.one().multiplier * 512 == doctest::Approx(multiplier).epsilon(1e-6));
        index_t different = 0;
        for (std::size_t t = 0; t < got.rung.size(); ++t) { different += got.rung[t] != oracle.rung[t] ? 1 : 0; }
        CHECK(different <= 2);
    }
}

TEST_CASE("plateaus of any length are filled by head and position")
{
    for (index_t const tokens : {1, 15, 513, 4096, 5000, 20000})
    {
        layer in{2, tokens, {0, 64, 128, 512}};
        for (index_t h = 0; h < 2; ++h)
        {
            for (index_t i = 0; i < tokens; ++i)
            {
                in.of(h, 0, i) = 4.0F;
                in.of(h, 1, i) = 3.9F; // on no token's hull
                in.of(h, 2, i) = 3.8F;
            }
        }
        for (index_t const kept : {index_t{0}, tokens / 2, tokens, tokens + tokens / 3})
        {
            outcome const got = solve(in, {kept * 512 + 500});
            CHECK(got.one().token_bytes <= kept * 512 + 500);
            for (index_t t = 0; t < 2 * tokens; ++t)
            {
                if (t < kept) { REQUIRE(got.rung[at(t)] == 3); }
                // 500 bytes more: three tokens at rung 2 and one at rung 1, by what they save per byte
                else { REQUIRE(got.rung[at(t)] < 3); }
            }
        }
    }
}

namespace
{

template <std::size_t R>
void check_count_of_rungs(source& random)
{
    layer in = heavy_tailed(random, 2, 300, some_costs(random, R));
    for (index_t const share : {20, 4})
    {
        index_t const limit = in.heads * in.tokens * in.cost.front() + in.most() / share;
        outcome const fixed = solve<R>(in, {limit});
        CHECK(same(fixed, solve<>(in, {limit})));
        if (fixed.one().status == allocation_status::everything_kept) { continue; }
        bisected const oracle = bisect(in, limit);
        CHECK(fixed.one().multiplier == doctest::Approx(static_cast<double>(oracle.multiplier)).epsilon(1e-6));
        CHECK(solve<R>(in, {limit}, {.spend_leftover = false}).one().token_bytes == count(in, oracle.rung).bytes);
    }
}

} // namespace

TEST_CASE("one to sixteen rungs, known at compile time or at run time, agree with the oracle")
{
    source random{"allocate rungs"};
    [&]<std::size_t... I>(std::index_sequence<I...>) { (check_count_of_rungs<I + 1>(random), ...); }(
        std::make_index_sequence<mdkv::max_rungs>{});
}

TEST_CASE("H limits in one call are H calls")
{
    source random{"allocate own limits"};
    layer in        = heavy_tailed(random, 4, 5000, {0, 64, 128, 512});
    in.projection   = 8192;
    in.projected[1] = in.projected[2] = true;
    std::vector<index_t> const limits{40000, 1 << 30, 5000, 700001};
    outcome const together = solve(in, limits);
    for (index_t h = 0; h < in.heads; ++h)
    {
        layer one{1, in.tokens, in.cost};
        one.projected  = in.projected;
        one.projection = in.projection;
        for (index_t r = 0; r < in.rungs(); ++r)
        {
            for (index_t i = 0; i < in.tokens; ++i) { one.of(0, r, i) = in.of(h, r, i); }
        }
        outcome const alone = solve(one, {limits[at(h)]});
        CHECK(same(alone.one(), together.report[at(h)]));
        CHECK(std::equal(alone.rung.begin(), alone.rung.end(), together.rung.begin() + h * in.tokens));
    }
    CHECK(together.report[1].status == allocation_status::everything_kept);
    CHECK(together.report[2].status == allocation_status::unprojected_only);
}

TEST_CASE("how the losses lie in memory, and what lies between them, changes nothing")
{
    source random{"allocate strides"};
    layer const in       = heavy_tailed(random, 3, 1234, {0, 64, 128, 512});
    index_t const limit  = in.most() / 7;
    outcome const packed = solve(in, {limit});
    for (support::placement const how : {support::placement{.swapped = true}, support::placement{.slack = 5},
             support::placement{.fence = support::guard::after}, support::placement{.fence = support::guard::before}})
    {
        tensor<float, 3> loss{{in.heads, in.rungs(), in.tokens}, how};
        loss.assign(in.loss);
        tensor<std::uint8_t, 2> rung{{in.heads, in.tokens}, {.slack = how.slack, .fence = how.fence}};
        allocation report;
        support::run([&](mdkv::cpu::backend const& on) {
            mdkv::allocate(
                on, loss.in(), in.costs(), mdkv::in(on, &limit, 1), {}, rung.out(), mdkv::out(on, &report, 1));
        });
        CHECK(rung.elements() == packed.rung);
        CHECK(same(report, packed.one()));
    }
}

TEST_CASE("every head gets the same number of tokens at every rung when that is asked for")
{
    source random{"allocate equal"};
    for (int trial = 0; trial < 30; ++trial)
    {
        layer in        = heavy_tailed(random, 1 + random.below(5), 1 + random.below(3000), {0, 64, 128, 512});
        in.projection   = random.below(2) * 4096;
        in.projected[1] = in.projected[2] = in.projection > 0;
        index_t const limit               = random.below(in.most());
        outcome const joint               = solve(in, {limit});
        outcome const equal               = solve(in, {limit}, {.same_count_per_head = true});
        allocation const& said            = equal.one();
        CHECK(said.token_bytes + said.charged_bytes <= limit);
        CHECK(said.dual == joint.one().dual);
        CHECK(said.gap() >= -1e-9 * (1 + said.loss));
        for (index_t h = 0; h < in.heads; ++h)
        {
            for (index_t r = 0; r < in.rungs(); ++r)
            {
                auto const* const first = equal.rung.data() + h * in.tokens;
                CHECK(std::count(first, first + in.tokens, r) * in.heads == said.tokens[at(r)]);
            }
        }
    }
}

TEST_CASE("the same number of tokens in every head are those of largest loss when the choice is keep or drop")
{
    source random{"allocate equal top k"};
    layer const in      = heavy_tailed(random, 3, 5000, {0, 512});
    index_t const kept  = 777;
    outcome const equal = solve(in, {(3 * kept + 2) * 512}, {.same_count_per_head = true});
    for (index_t h = 0; h < 3; ++h)
    {
        std::vector<std::pair<float, index_t>> order;
        for (index_t i = 0; i < in.tokens; ++i) { order.emplace_back(-in.of(h, 0, i), i); }
        std::sort(order.begin(), order.end());
        for (index_t k = 0; k < in.tokens; ++k)
        {
            REQUIRE(equal.rung[at(h * in.tokens + order[at(k)].second)] == (k < kept ? 1 : 0));
        }
    }
}

TEST_CASE("a limit that holds everything keeps everything, one that cannot pay for projections uses none")
{
    source random{"allocate status"};
    layer in        = heavy_tailed(random, 2, 100, {0, 64, 128, 512});
    in.projected[1] = in.projected[2] = true;
    in.projection                     = 10000;
    std::fill(in.loss.begin(), in.loss.begin() + 7, 0.0F); // dropping these tokens would lose nothing

    outcome const all = solve(in, {in.most()});
    CHECK(all.one().status == allocation_status::everything_kept);
    CHECK(all.one().charged_bytes == 0);
    CHECK(all.one().multiplier == 0);
    CHECK(std::count(all.rung.begin(), all.rung.end(), 3) == 200);
    CHECK(solve(in, {in.most() - 1}).one().status == allocation_status::optimal);

    outcome const paying = solve(in, {20000});
    CHECK(paying.one().status == allocation_status::optimal);
    CHECK(paying.one().charged_bytes == 20000);
    CHECK(paying.one().token_bytes == 0);

    outcome const without = solve(in, {19999});
    CHECK(without.one().status == allocation_status::unprojected_only);
    CHECK(without.one().charged_bytes == 0);
    CHECK(without.one().tokens[1] + without.one().tokens[2] == 0);
    CHECK(without.one().tokens[3] == 19999 / 512);

    layer narrow        = in; // the costliest rung is projected, and nothing can be dropped
    narrow.cost         = {16, 64, 128, 512};
    narrow.projected[3] = true;
    CHECK(solve(narrow, {200 * 512 + 19999}).one().status == allocation_status::optimal);
    CHECK(solve(narrow, {200 * 512 + 20000}).one().status == allocation_status::everything_kept);
    CHECK(solve(narrow, {200 * 512 + 20000}).one().charged_bytes == 20000);
    CHECK(solve(narrow, {200 * 16}).one().status == allocation_status::unprojected_only);
    outcome const over = solve(narrow, {200 * 16 - 1});
    CHECK(over.one().status == allocation_status::over_limit);
    CHECK(over.one().token_bytes == 200 * 16);
    CHECK(std::count(over.rung.begin(), over.rung.end(), 0) == 200);

    narrow.projected[0] = true; // no rung without a projection
    CHECK(solve(narrow, {200 * 16 + 19999}).one().status == allocation_status::over_limit);
    CHECK(solve(narrow, {200 * 16 + 20000}).one().status == allocation_status::optimal);
}

TEST_CASE("nothing to lose, everything the same, and nothing at all are served")
{
    for (mdkv::search const how : {mdkv::search::thresholds, mdkv::search::bisection})
    {
        for (float const value : {0.0F, 1.0F, -5.0F, 1e30F, 1e-44F})
        {
            layer in{2, 50, {0, 64, 128, 512}};
            std::fill(in.loss.begin(), in.loss.end(), value);
            outcome const got = solve(in, {12345}, {.search = how});
            CHECK(got.one().status == allocation_status::optimal);
            CHECK(got.one().token_bytes == 0);
            CHECK(got.one().multiplier == 0);
            CHECK(got.one().loss == doctest::Approx(100 * static_cast<double>(value)));
        }
        for (auto const& [heads, tokens] : {std::pair<index_t, index_t>{0, 5}, {3, 0}, {0, 0}})
        {
            layer const none{heads, tokens, {0, 64, 128, 512}};
            for (bool const equal : {false, true})
            {
                allocation const got = solve(none, {100}, {how, true, equal}).one();
                CHECK(got.status == allocation_status::everything_kept);
                CHECK(got.loss == 0);
                CHECK(got.token_bytes + got.charged_bytes == 0);
                CHECK(got.limit == 100);
            }
        }
    }
    CHECK(solve(layer{0, 5, {0, 64}}, {}).report.empty());
}

TEST_CASE("a loss far larger than the others does not drown them")
{
    source random{"allocate outlier"};
    layer in         = heavy_tailed(random, 1, 2000, {0, 64, 128, 512});
    in.of(0, 0, 700) = 1e30F;
    for (mdkv::search const how : {mdkv::search::thresholds, mdkv::search::bisection})
    {
        outcome const got     = solve(in, {in.most() / 5}, {.search = how});
        account const recount = count(in, got.rung);
        CHECK(got.rung[700] > 0);
        CHECK(got.one().loss == doctest::Approx(static_cast<double>(recount.loss)).epsilon(1e-9));
        CHECK(got.one().loss < 1e6);
        CHECK(recount.bytes > in.most() / 5 - 64);
    }
}

TEST_CASE("allocate names what is wrong with its arguments and changes nothing")
{
    layer const in{2, 10, {0, 64, 128, 512}};
    std::vector<std::uint8_t> rung(20, 0xAA);
    std::vector<allocation> report(3);
    std::vector<index_t> limits{100, 100, 100};
    std::vector<std::byte> memory(1 << 20);
    void* start       = memory.data();
    std::size_t space = memory.size();
    std::align(mdkv::workspace::alignment, 1, start, space);
    mdkv::workspace scratch{{static_cast<std::byte*>(start), space}};
    mdkv::cpu::backend const on{&scratch, {}};
    auto const loss = mdkv::in(on, in.loss.data(), 2, 4, 10);
    auto const call = [&](auto const& l, auto const& costs, index_t limit_count, allocate_options options,
                          auto const& r, index_t report_count) {
        return error_text<mdkv::invalid_argument>([&] {
            mdkv::allocate(on, l, costs, mdkv::in(on, limits.data(), limit_count), options, r,
                mdkv::out(on, report.data(), report_count));
        });
    };
    auto const out = mdkv::out(on, rung.data(), 2, 10);
    CHECK(call(loss, layer{1, 0, {0, 512}}.costs(), 1, {}, out, 1)
          == "allocate: loss must be [H,R,N] = [2, 2, 10], its extent 1 is 4");
    CHECK(call(loss, in.costs(), 1, {}, mdkv::out(on, rung.data(), 2, 9), 1)
          == "allocate: rung must be [H,N] = [2, 10], its extent 1 is 9");
    CHECK(call(loss, in.costs(), 3, {}, out, 3)
          == "allocate: limits has 3 entries; it must have 1 (shared) or 2 (one a head)");
    CHECK(call(loss, in.costs(), 2, {}, out, 1) == "allocate: report must be [1 or H] = [2], its extent 0 is 1");
    CHECK(call(loss, in.costs(), 2, {.same_count_per_head = true}, out, 2)
          == "allocate: same_count_per_head needs one shared limit, got 2");
    CHECK(call(loss, layer{1, 0, {0, 64, 64, 512}}.costs(), 1, {}, out, 1)
          == "allocate: costs.bytes must ascend; [2] = 64 does not exceed 64");
    CHECK(call(loss, layer{1, 0, {-1, 64, 128, 512}}.costs(), 1, {}, out, 1)
          == "allocate: costs.bytes[0] is -1; it must not be negative");
    CHECK(call(loss, mdkv::rung_costs<>{}, 1, {}, out, 1) == "allocate: costs has 0 rungs");
    CHECK(call(mdkv::in(on, static_cast<float const*>(nullptr), 2, 4, 10), in.costs(), 1, {}, out, 1)
          == "allocate: loss is null but not empty");
    CHECK(call(loss, in.costs(), 1, {}, mdkv::out(on, rung.data(), {2, 10}, {0, 1}), 1)
          == "allocate: rung overlaps itself: stride 0 of dimension 0 is below 1");
    CHECK(call(loss, layer{1, 0, {0, 64, 128, std::numeric_limits<index_t>::max()}}.costs(), 1, {}, out, 1)
          == "size 20 * 9223372036854775807 is beyond 64 bits");
    limits[1] = -1;
    CHECK(call(loss, in.costs(), 2, {}, out, 2) == "allocate: limits[1] is -1; it must not be negative");

    auto const whole = [&](mdkv::cpu::backend const& with) {
        mdkv::allocate(
            with, loss, in.costs(), mdkv::in(with, limits.data(), 1), {}, out, mdkv::out(with, report.data(), 1));
    };
    std::size_t const needed = support::scratch_bytes(whole);
    mdkv::workspace small{{static_cast<std::byte*>(start), needed - 1}};
    CHECK(error_text<mdkv::insufficient_workspace>([&] {
        whole({&small, {}});
    })
          == "allocate: the workspace holds " + std::to_string(needed - 1) + " bytes, " + std::to_string(needed)
                 + " are needed");
    CHECK(std::count(rung.begin(), rung.end(), 0xAA) == 20);
    CHECK(error_text<mdkv::invalid_argument>([&] { whole({}); })
          == "backend: it has no workspace; give it one (an empty one only counts)");
}

TEST_CASE("a dry run touches nothing")
{
    mdkv::workspace counting;
    mdkv::cpu::backend const on{&counting, {}};
    mdkv::allocate(on, mdkv::in(on, static_cast<float const*>(nullptr), 2, 4, 5000),
        layer{1, 0, {0, 64, 128, 512}}.costs(), mdkv::in(on, static_cast<index_t const*>(nullptr), 1), {},
        mdkv::out(on, static_cast<std::uint8_t*>(nullptr), 2, 5000),
        mdkv::out(on, static_cast<allocation*>(nullptr), 1));
    CHECK(counting.bytes() > 0);
}
