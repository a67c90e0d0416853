#include <mdkv/stages/allocate.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "support/allocation.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
namespace
{

using namespace support;
using mdkv::allocate_options;
using mdkv::allocation_status;

constexpr allocate_options always{.charge = mdkv::projection_charge::always};

outcome solve(layer const& in, std::vector<index_t> const& limits, allocate_options options = {},
    mdkv::cpu::executor_ref threads = {})
{
    outcome result{std::vector<std::uint8_t>(at(in.heads * in.tokens), 0xAA), std::vector<allocation>(limits.size())};
    support::run(
        [&](mdkv::cpu::backend const& on) {
            mdkv::allocate(on,
                {mdkv::in(on, in.loss.data(), in.heads, in.rungs(), in.tokens),
                    mdkv::out(on, result.rung.data(), in.heads, in.tokens)},
                in.costs(), mdkv::in(on, limits.data(), limits.size()), options,
                mdkv::out(on, result.report.data(), limits.size()));
        },
        threads);
    return result;
}

} // namespace

TEST_CASE("allocate agrees with a bisection of the oracle's on 100,000 tokens at four and at eight rungs")
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
            outcome const plain    = solve(in, {limit});
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

            CHECK(plain.one().gap() >= -1e-9 * plain.one().loss);
            CHECK(plain.one().gap() <= 512 * plain.one().multiplier);
            CHECK(limit - plain.one().token_bytes < 512); // the widest step
        }
    }
}

TEST_CASE(
    "no allocation of as many bytes loses less, and none within the limit loses less than the dual: all R^N tried")
{
    for (int round = 0; round < 100; ++round)
    {
        CAPTURE(round);
        source random{"allocate brute force", round};
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
        outcome const plain = solve(in, {limit});
        if (plain.one().status != allocation_status::optimal) { continue; }
        account const plain_account = count(in, plain.rung);

        support::real best_of_same_bytes = plain_account.loss;
        support::real best_within_limit  = plain_account.loss;
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
        support::real const rounding = 1e-5 * (1 + plain_account.magnitude);
        REQUIRE(plain_account.loss <= best_of_same_bytes + rounding);
        REQUIRE(static_cast<support::real>(plain.one().dual) <= best_within_limit + rounding);
        REQUIRE(plain_account.bytes <= limit);
    }
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
    for (int round = 0; round < 100; ++round)
    {
        CAPTURE(round);
        source random{"allocate monotone", round};
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
            REQUIRE(got.loss <= before * (1 + 1e-6) + 1e-6);
            REQUIRE(got.token_bytes <= limit);
            before = got.loss;
        }
    }
}

TEST_CASE("whatever the losses, the call ends, keeps the limit, and says when a loss was not finite")
{
    for (int round = 0; round < 100; ++round)
    {
        CAPTURE(round);
        source random{"allocate nasty", round};
        layer in{1 + random.below(3), random.below(80), some_costs(random, 1 + random.below(16))};
        for (float& x : in.loss) { x = nasty(random); }
        for (index_t r = 0; r < in.rungs(); ++r)
        {
            if (random.below(3) == 0) { in.project({r}, random.below(4) * 50); }
        }
        index_t const widest           = *std::max_element(in.projection.begin(), in.projection.end());
        index_t const limit            = random.below(in.most() + in.heads * widest + 10);
        allocate_options const options = random.below(3) == 0 ? always : allocate_options{};
        outcome const got              = solve(in, {limit}, options);
        allocation const& said         = got.one();
        account const recount          = count(in, got.rung);
        REQUIRE(said.token_bytes == recount.bytes);
        REQUIRE(said.tokens == recount.tokens);
        REQUIRE(said.limit == limit);
        REQUIRE((std::isfinite(said.loss) && std::isfinite(said.dual) && std::isfinite(said.multiplier)));
        REQUIRE((said.status == allocation_status::over_limit || said.token_bytes + said.charged_bytes <= limit));
        REQUIRE(said.charged_bytes >= charged(in, got.rung));
        REQUIRE((said.charged_bytes == 0 || said.charged_bytes == in.heads * widest));
        if (said.status == allocation_status::over_limit) { continue; }
        bool all_finite = true;
        for (index_t h = 0; h < in.heads; ++h)
        {
            for (index_t i = 0; i < in.tokens; ++i)
            {
                if (in.finite(h, i)) { continue; }
                all_finite = false;
                // of the rungs open to its head
                index_t const r = got.rung[at(h * in.tokens + i)];
                for (index_t cheaper = 0; cheaper < r; ++cheaper) { REQUIRE(in.projected[at(cheaper)]); }
            }
        }
        REQUIRE((said.status == allocation_status::non_finite_loss) == !all_finite);
    }
}

TEST_CASE("any number of threads gives the same bits")
{
    source random{"allocate threads"};
    layer in = heavy_tailed(random, 3, 30011, {0, 64, 128, 512});
    for (index_t i = 5000; i < 12000; ++i) { in.of(1, 0, i) = in.of(1, 0, 5000); } // a plateau
    for (bool const projects : {false, true})
    {
        if (projects)
        {
            in.project({1}, 4096);
            in.project({2}, 8192);
        }
        for (allocate_options const& options : {allocate_options{}, always})
        {
            outcome const serial = solve(in, {in.most() / 9}, options);
            CHECK(same(solve(in, {in.most() / 9}, options), serial));
            for (int const threads : {2, 3, 5})
            {
                mdkv::cpu::thread_pool pool{threads};
                CHECK(same(solve(in, {in.most() / 9}, options, pool), serial));
            }
        }
    }
}

TEST_CASE("the multiplier is found wherever it lies among the floats")
{
    for (int const exponent : {-149, -130, -126, -40, -1, 0, 1, 63, 117})
    {
        CAPTURE(exponent);
        layer in{1, 1000, {0, 8}};
        for (index_t i = 0; i < in.tokens; ++i) { in.of(0, 0, i) = std::ldexp(static_cast<float>(i + 1), exponent); }
        for (index_t const kept : {0, 1, 488, 489, 744, 745, 999})
        {
            outcome const got = solve(in, {kept * 8 + 7});
            CHECK(got.one().tokens[1] == kept);
            // The loss of the dearest token that is dropped, per byte.
            CHECK(got.one().multiplier == std::ldexp(static_cast<double>(in.tokens - kept) / 8, exponent));
        }
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
                else { REQUIRE(got.rung[at(t)] == 0); } // 500 bytes more hold no other tie
            }
        }
    }
}

namespace
{

void check_count_of_rungs(source& random, index_t rungs)
{
    layer in = heavy_tailed(random, 2, 300, some_costs(random, rungs));
    for (index_t const share : {20, 4})
    {
        CAPTURE(rungs);
        index_t const limit   = in.heads * in.tokens * in.cost.front() + in.most() / share;
        outcome const fixed   = solve(in, {limit});
        bisected const oracle = bisect(in, limit);
        CHECK(fixed.one().multiplier == doctest::Approx(static_cast<double>(oracle.multiplier)).epsilon(1e-6));
        CHECK(fixed.one().token_bytes == count(in, oracle.rung).bytes);
    }
}

} // namespace

TEST_CASE("one to sixteen rungs agree with the oracle")
{
    source random{"allocate rungs"};
    for (index_t rungs = 1; rungs <= index_t{mdkv::max_rungs}; ++rungs) { check_count_of_rungs(random, rungs); }
}

TEST_CASE("limits of as many heads in one call are as many calls")
{
    source random{"allocate own limits"};
    layer in = heavy_tailed(random, 4, 5000, {0, 64, 128, 512});
    in.project({1}, 4096);
    in.project({2}, 8192);
    outcome together;
    for (std::vector<index_t> const& limits : {std::vector<index_t>{90000, 700001}, {40000, 1 << 30, 4000, 700001}})
    {
        together         = solve(in, limits);
        auto const count = static_cast<index_t>(limits.size());
        for (index_t n = 0; n < count; ++n)
        {
            layer some      = in;
            some.heads      = in.heads / count;
            auto const size = some.heads * in.rungs() * in.tokens;
            some.loss.assign(in.loss.begin() + n * size, in.loss.begin() + (n + 1) * size);
            outcome const alone = solve(some, {limits[at(n)]});
            CHECK(same(alone.one(), together.report[at(n)]));
            CHECK(std::equal(alone.rung.begin(), alone.rung.end(), together.rung.begin() + n * some.heads * in.tokens));
        }
    }
    CHECK(together.report[1].status == allocation_status::optimal);
    CHECK(together.report[1].multiplier == 0);
    CHECK(together.report[2].status == allocation_status::unprojected_only);
}

TEST_CASE("a limit that holds everything leaves no loss, one that cannot pay for projections uses none")
{
    source random{"allocate status"};
    layer in = heavy_tailed(random, 2, 100, {0, 64, 128, 512});
    in.project({1}, 5000);
    in.project({2}, 10000);
    std::fill(in.loss.begin(), in.loss.begin() + 7, 0.0F); // dropping these tokens loses nothing
    for (allocate_options const& options : {allocate_options{}, always})
    {
        outcome const all = solve(in, {in.most() + 20000}, options);
        CHECK(all.one().status == allocation_status::optimal);
        CHECK(all.one().loss == 0);
        CHECK(all.one().multiplier == 0);
        CHECK(std::count(all.rung.begin(), all.rung.begin() + 7, 0) == 7);
        CHECK(all.one().limit == in.most() + 20000);
        CHECK(solve(in, {in.most() - 1}, options).one().status == allocation_status::optimal);
    }
    outcome const paying = solve(in, {20000}, always);
    CHECK(paying.one().status == allocation_status::optimal);
    CHECK(paying.one().charged_bytes == 20000);
    CHECK(paying.one().token_bytes == 0);
    CHECK(solve(in, {20000}).one().loss < paying.one().loss);

    outcome const without = solve(in, {19999}, always);
    CHECK(without.one().status == allocation_status::unprojected_only);
    CHECK(without.one().charged_bytes == 0);
    CHECK(without.one().tokens[1] + without.one().tokens[2] == 0);
    CHECK(without.one().tokens[3] == 19999 / 512);

    CHECK(same(solve(in, {19999}).one(), without.one()));

    layer narrow = in; // the costliest rung is projected, and nothing can be dropped
    narrow.cost  = {16, 64, 128, 512};
    narrow.project({1, 2, 3}, 10000);
    for (allocate_options const& options : {allocate_options{}, always})
    {
        CHECK(solve(narrow, {200 * 512 + 19999}, options).one().status == allocation_status::optimal);
        CHECK(solve(narrow, {200 * 512 + 20000}, options).one().status == allocation_status::optimal);
        CHECK(solve(narrow, {200 * 512 + 20000}, options).one().loss == 0);
        CHECK(solve(narrow, {200 * 16}, options).one().status == allocation_status::unprojected_only);
        outcome const over = solve(narrow, {200 * 16 - 1}, options);
        CHECK(over.one().status == allocation_status::over_limit);
        CHECK(over.one().token_bytes == 200 * 16);
        CHECK(std::count(over.rung.begin(), over.rung.end(), 0) == 200);
    }
    narrow.project({0}, 10000); // no rung without a projection
    for (allocate_options const& options : {allocate_options{}, always})
    {
        CHECK(solve(narrow, {200 * 16 + 19999}, options).one().status == allocation_status::over_limit);
        CHECK(solve(narrow, {200 * 16 + 20000}, options).one().status == allocation_status::optimal);
    }
}

TEST_CASE("mean keys are set aside for every head, and charged to those whose tokens need one")
{
    source random{"allocate mean keys"};
    layer plain    = heavy_tailed(random, 3, 200, {0, 64, 128, 512});
    layer in       = plain;
    in.channels    = 700;
    in.rotated     = {false, true, true, false};
    index_t charge = 0;
    for (index_t const limit : {2101, 5000, 60000, 300000})
    {
        outcome const got  = solve(in, {limit});
        outcome const want = solve(plain, {limit - 3 * 700});
        CHECK(got.rung == want.rung);
        CHECK(got.one().status == allocation_status::optimal);
        CHECK(got.one().limit == limit);
        index_t heads = 0;
        for (index_t h = 0; h < 3; ++h)
        {
            auto const first = got.rung.begin() + h * 200;
            heads += std::any_of(first, first + 200, [](std::uint8_t r) { return r == 1 || r == 2; }) ? 1 : 0;
        }
        CHECK(got.one().charged_bytes == heads * 700);
        CHECK(got.one().token_bytes + got.one().charged_bytes <= limit);
        charge += got.one().charged_bytes;
    }
    CHECK(charge > 0);
    for (index_t const limit : {0, 699, 2100}) // not a byte left for tokens
    {
        CHECK(solve(in, {limit}).one().token_bytes + solve(in, {limit}).one().charged_bytes == 0);
        CHECK(solve(in, {limit}).one().status == allocation_status::optimal);
    }
    outcome const apart = solve(in, {100, 800, 100000}); // a limit of its own for each head
    CHECK(apart.report[0].token_bytes == 0);
    CHECK(apart.report[1].token_bytes <= 100);
    CHECK(apart.report[2].token_bytes <= 100000 - 700);
    in.cost = {16, 64, 128, 512}; // nothing can be dropped
    CHECK(solve(in, {600 * 16 + 2099}).one().status == allocation_status::over_limit);
    CHECK(solve(in, {600 * 16 + 2100}).one().status == allocation_status::optimal);
    in.channels = -1;
    CHECK(error_text<mdkv::invalid_argument>([&] { solve(in, {100}); })
          == "allocate: costs.channels is -1; it must not be negative");
}

TEST_CASE("nothing to lose, everything the same, and nothing at all are served")
{
    for (float const value : {0.0F, 1.0F, -5.0F, 1e30F, 1e-44F})
    {
        layer in{2, 50, {0, 64, 128, 512}};
        std::fill(in.loss.begin(), in.loss.end(), value);
        outcome const got = solve(in, {12345});
        CHECK(got.one().status == allocation_status::optimal);
        CHECK(got.one().token_bytes == 0);
        CHECK(got.one().multiplier == 0);
        CHECK(got.one().loss == doctest::Approx(100 * static_cast<double>(value)));
    }
    for (auto const& [heads, tokens] : {std::pair<index_t, index_t>{0, 5}, {3, 0}, {0, 0}})
    {
        layer none{heads, tokens, {0, 64, 128, 512}};
        none.project({1, 2}, 4096);
        for (allocate_options const& options : {allocate_options{}, always})
        {
            allocation const got = solve(none, {100}, options).one();
            CHECK(got.status == allocation_status::optimal);
            CHECK(got.loss == 0);
            CHECK(got.token_bytes + got.charged_bytes == 0);
            CHECK(got.limit == 100);
        }
    }
    CHECK(solve(layer{0, 5, {0, 64}}, {}).report.empty());
}

TEST_CASE("a loss far larger than the others does not drown them")
{
    source random{"allocate outlier"};
    layer in         = heavy_tailed(random, 1, 2000, {0, 64, 128, 512});
    in.of(0, 0, 700) = 1e30F;
    for (index_t const bytes : {0, 3000})
    {
        in.project({1, 2}, bytes);
        outcome const got     = solve(in, {in.most() / 5});
        account const recount = count(in, got.rung);
        CHECK(got.rung[700] > 0);
        CHECK(got.one().loss == doctest::Approx(static_cast<double>(recount.loss)).epsilon(1e-9));
        CHECK(got.one().loss < 1e6);
        CHECK(recount.bytes + got.one().charged_bytes > in.most() / 5 - 512);
    }
}

TEST_CASE("allocate names what is wrong with its arguments and changes nothing")
{
    layer const in{2, 10, {0, 64, 128, 512}};
    std::vector<std::uint8_t> rung(20, 0xAA);
    std::vector<allocation> report(3);
    std::vector<index_t> limits{100, 100, 100};
    mdkv::workspace scratch{support::nan_memory{}};
    mdkv::cpu::backend const on{&scratch, {}};
    auto const loss = mdkv::in(on, in.loss.data(), 2, 4, 10);
    auto const call = [&](auto const& l, auto const& costs, index_t limit_count, allocate_options options,
                          auto const& r, index_t report_count) {
        return error_text<mdkv::invalid_argument>([&] {
            mdkv::allocate(on, {l, r}, costs, mdkv::in(on, limits.data(), limit_count), options,
                mdkv::out(on, report.data(), report_count));
        });
    };
    auto const out = mdkv::out(on, rung.data(), 2, 10);
    CHECK(call(loss, in.costs(), 3, {}, out, 3) == "allocate: limits has 3 entries, which do not divide the 2 heads");
    CHECK(call(loss, layer{1, 0, {0, 64, 64, 512}}.costs(), 1, {}, out, 1)
          == "allocate: costs.bytes must ascend; [2] = 64 does not exceed 64");
    CHECK(call(loss, layer{1, 0, {-1, 64, 128, 512}}.costs(), 1, {}, out, 1)
          == "allocate: costs.bytes[0] is -1; it must not be negative");
    CHECK(call(loss, mdkv::rung_costs{}, 1, {}, out, 1) == "allocate: costs has 0 rungs");
    CHECK(call(loss, layer{1, 0, {0, 64, 128, std::numeric_limits<index_t>::max()}}.costs(), 1, {}, out, 1)
          == "size 20 * 9223372036854775807 is beyond 64 bits");
    limits[1] = -1;
    CHECK(call(loss, in.costs(), 2, {}, out, 2) == "allocate: limits[1] is -1; it must not be negative");
    CHECK(std::count(rung.begin(), rung.end(), 0xAA) == 20);
}

TEST_CASE("heads with different numbers of tokens get the rungs that they get if padded to one length")
{
    source random{"ragged heads"};
    mdkv::cpu::thread_pool pool{3};
    for (index_t const heads : {1, 2, 5})
    {
        for (index_t const longest : {0, 1, 100, 9000})
        {
            layer in{heads, longest, {0, 72, 136, 256}};
            std::vector<index_t> first{0};
            std::vector<float> ragged; // [M, R], then [R, M]
            for (index_t h = 0; h < heads; ++h)
            {
                // the longest head is any of them, and some may have no token
                index_t const n = h == heads / 2 ? longest : random.below(longest + 1);
                first.push_back(first.back() + n);
                for (index_t i = 0; i < longest; ++i)
                {
                    double const size = std::exp(4 * random.normal());
                    for (index_t r = 0; r < in.rungs(); ++r)
                    {
                        float const x =
                            i >= n ? 0.0F : static_cast<float>(size * std::pow(0.1, static_cast<double>(r)));
                        in.loss[at((h * in.rungs() + r) * longest + i)] = r + 1 == in.rungs() ? 0.0F : x;
                    }
                }
            }
            index_t const all = first.back();
            ragged.resize(at(in.rungs() * all));
            for (index_t h = 0; h < heads; ++h)
            {
                for (index_t r = 0; r < in.rungs(); ++r)
                {
                    std::copy_n(in.loss.begin() + (h * in.rungs() + r) * longest, first[at(h) + 1] - first[at(h)],
                        ragged.begin() + r * all + first[at(h)]);
                }
            }
            for (index_t const share : {0, 3, 20, 60, 200})
            {
                CAPTURE(heads);
                CAPTURE(longest);
                CAPTURE(share);
                std::vector<index_t> const limits{all * 256 * share / 100};
                outcome const want = solve(in, limits);
                std::vector<std::uint8_t> rung(at(all), 0xAA);
                allocation report;
                support::run(
                    [&](mdkv::cpu::backend const& on) {
                        mdkv::allocate(on,
                            {mdkv::in(on, ragged.data(), in.rungs(), all), mdkv::out(on, rung.data(), all),
                                mdkv::in(on, first.data(), heads + 1), longest},
                            in.costs(), mdkv::in(on, limits.data(), 1), {}, mdkv::out(on, &report, 1));
                    },
                    pool);
                std::vector<std::uint8_t> wanted;
                for (index_t h = 0; h < heads; ++h)
                {
                    auto const row = want.rung.begin() + h * longest;
                    wanted.insert(wanted.end(), row, row + first[at(h) + 1] - first[at(h)]);
                }
                CHECK(rung == wanted);
                CHECK(report.loss == want.report[0].loss);
                CHECK(report.token_bytes == want.report[0].token_bytes);
                CHECK(report.tokens[0] == want.report[0].tokens[0] - (heads * longest - all));
            }
        }
    }
}

TEST_CASE("heads with different numbers of tokens need a rung that takes no bytes")
{
    layer const in{2, 10, {1, 64}};
    std::vector<index_t> const first{0, 10, 20};
    index_t const limit = 100;
    std::vector<std::uint8_t> rung(20);
    allocation report;
    CHECK(error_text<mdkv::invalid_argument>([&] {
        support::run([&](mdkv::cpu::backend const& on) {
            mdkv::allocate(on,
                {mdkv::in(on, in.loss.data(), 2, 20), mdkv::out(on, rung.data(), 20), mdkv::in(on, first.data(), 3),
                    10},
                in.costs(), mdkv::in(on, &limit, 1), {}, mdkv::out(on, &report, 1));
        });
    })
          == "allocate: the cheapest rung takes 1 bytes a token; heads with different numbers of tokens need one that "
             "takes none");
}

TEST_CASE("heads that leave the tokens, or are longer than said, are refused by name")
{
    layer const in{2, 10, {0, 64}};
    index_t const limit = 100;
    std::vector<std::uint8_t> rung(20);
    allocation report;
    auto const call = [&](std::vector<index_t> const& first, index_t longest) {
        return error_text<mdkv::invalid_argument>([&] {
            support::run([&](mdkv::cpu::backend const& on) {
                mdkv::allocate(on,
                    {mdkv::in(on, in.loss.data(), 2, 20), mdkv::out(on, rung.data(), 20), mdkv::in(on, first.data(), 3),
                        longest},
                    in.costs(), mdkv::in(on, &limit, 1), {}, mdkv::out(on, &report, 1));
            });
        });
    };
    CHECK(call({0, 10, 21}, 20)
          == "allocate: tokens of head 1 are 10 to 21; they must be among the 20 and follow those of the head before");
    CHECK(call({0, 12, 10}, 20).starts_with("allocate: tokens of head 1 are 12 to 10;"));
    CHECK(call({-1, 10, 20}, 20).starts_with("allocate: tokens of head 0 are -1 to 10;"));
    CHECK(call({0, 5, 20}, 14) == "allocate: head 1 has 15 tokens, above longest = 14");
}

namespace
{

/// The least loss if every head pays for the widest projections, or has no projected rung: by an allocation that is charged
/// for nothing, with the losses of the other rungs out of reach.
double least_loss_with(layer in, bool paying, index_t limit)
{
    index_t const paid = paying ? in.heads * *std::max_element(in.projection.begin(), in.projection.end()) : 0;
    for (index_t h = 0; h < in.heads; ++h)
    {
        for (index_t r = 0; r < in.rungs() && !paying; ++r)
        {
            for (index_t i = 0; i < in.tokens && in.projection[at(r)] > 0; ++i) { in.of(h, r, i) = 1e30F; }
        }
    }
    bool const unreachable = !paying && in.projection.front() > 0;
    std::fill(in.projected.begin(), in.projected.end(), false);
    std::fill(in.projection.begin(), in.projection.end(), 0);
    constexpr double none = std::numeric_limits<double>::infinity();
    if (limit < paid || unreachable) { return none; }
    allocation const got = solve(in, {limit - paid}).one();
    return got.status == allocation_status::optimal ? got.loss : none;
}

/// Calls body with every way to give each of `digits` one of `values`.
template <class Value, class Body>
void for_all(std::size_t digits, std::vector<Value> const& values, Body const& body)
{
    std::vector<std::size_t> every(digits, 0);
    while (true)
    {
        std::vector<Value> chosen;
        for (std::size_t const v : every) { chosen.push_back(values[v]); }
        body(chosen);
        std::size_t digit = 0;
        while (digit < digits && every[digit] + 1 == values.size()) { every[digit++] = 0; }
        if (digit == digits) { return; }
        ++every[digit];
    }
}

index_t widest_projection(layer const& in)
{
    return *std::max_element(in.projection.begin(), in.projection.end());
}

} // namespace

TEST_CASE("if_better loses what every head paying loses, or none, whichever is less, and charges at least what pack "
          "will store")
{
    for (int round = 0; round < 100; ++round)
    {
        CAPTURE(round);
        source random{"allocate if better", round};
        layer const in      = with_projections(random, 1 + random.below(6), 1 + random.below(200), 2 + random.below(5));
        index_t const limit = some_limit(random, in);
        outcome const got   = solve(in, {limit});
        allocation const& said = got.one();
        account const recount  = count(in, got.rung);
        REQUIRE(said.token_bytes == recount.bytes);
        REQUIRE(said.charged_bytes >= charged(in, got.rung));
        if (said.status == allocation_status::over_limit) { continue; }
        REQUIRE(said.token_bytes + said.charged_bytes <= limit);
        REQUIRE(said.gap() >= 0);
        double const none   = least_loss_with(in, false, limit);
        double const paying = least_loss_with(in, true, limit);
        REQUIRE(said.loss == doctest::Approx(std::min(none, paying)).epsilon(1e-6));
    }
}

TEST_CASE("the dual bounds every allocation in which all heads pay, or none: all tried")
{
    for (int round = 0; round < 100; ++round)
    {
        CAPTURE(round);
        source random{"allocate if better brute force", round};
        index_t const heads = 1 + random.below(2);
        index_t const rungs = 2 + random.below(3);
        layer const in = with_projections(random, heads, 1 + random.below(heads == 2 && rungs == 4 ? 3 : 4), rungs);
        index_t const limit = some_limit(random, in);
        outcome const got   = solve(in, {limit});
        if (got.one().status != allocation_status::optimal) { continue; }
        double best = got.one().loss;
        std::vector<std::uint8_t> every(at(rungs));
        for (std::size_t r = 0; r < every.size(); ++r) { every[r] = static_cast<std::uint8_t>(r); }
        for_all(at(heads * in.tokens), every, [&](std::vector<std::uint8_t> const& rung) {
            account const other = count(in, rung);
            index_t const paid  = charged(in, rung) > 0 ? in.heads * widest_projection(in) : 0;
            if (other.bytes + paid <= limit) { best = std::min(best, static_cast<double>(other.loss)); }
        });
        double const rounding = 1e-5 * (1 + got.one().loss);
        REQUIRE(got.one().token_bytes + got.one().charged_bytes <= limit);
        REQUIRE(got.one().dual <= best + rounding);
    }
}

TEST_CASE("a limit that rises through the price of the projections never loses more")
{
    source random{"allocate if better monotone"};
    // Real figures: dimension 64 in 16 bits, the paper's set, three heads, up to 64 tokens a head.
    layer in = heavy_tailed(random, 3, 700, {0, 32, 64, 256});
    in.project({1}, 2048);
    in.project({2}, 4096);
    for (index_t i = 0; i < in.tokens; ++i) { in.of(1, 1, i) = in.of(1, 0, i); } // of little use to one head
    double before = std::numeric_limits<double>::infinity();
    for (index_t limit = 0; limit <= index_t{3} * 64 * 256; limit += 97)
    {
        allocation const got = solve(in, {limit}).one();
        REQUIRE(got.token_bytes + got.charged_bytes <= limit);
        REQUIRE(got.loss <= before * (1 + 1e-6));
        REQUIRE(got.loss <= solve(in, {limit}, always).one().loss * (1 + 1e-6));
        before = std::min(before, got.loss);
    }
}

TEST_CASE("a set without projections, and one whose projections cost nothing, do not know who pays")
{
    source random{"allocate nobody pays"};
    for (std::vector<index_t> const& cost : {std::vector<index_t>{0, 512}, std::vector<index_t>{0, 64, 128, 512}})
    {
        layer in = heavy_tailed(random, 3, 2000, cost);
        if (cost.size() == 4) { in.project({1, 2}, 0); }
        CHECK(same(solve(in, {in.most() / 9}), solve(in, {in.most() / 9}, always)));
        layer none = layer{3, 0, cost};
        none.project({1}, 4096);
        for (allocate_options const& options : {allocate_options{}, always})
        {
            CHECK(solve(none, {0}, options).one().status == allocation_status::optimal);
            CHECK(solve(none, {0}, options).one().charged_bytes == 0);
        }
    }
}
