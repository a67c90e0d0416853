#include "runner/layers.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "support/compare.hpp"
#include "support/random.hpp"

TEST_CASE("RMS norm divides by the root of the mean square and weighs each coordinate")
{
    support::source random("rms norm");
    for (std::int64_t const count : {1, 7, 16, 100})
    {
        std::vector<float> x, weight, out(static_cast<std::size_t>(count), NAN);
        double squares = 0;
        for (std::int64_t i = 0; i < count; ++i)
        {
            x.push_back(static_cast<float>(random.normal()));
            weight.push_back(static_cast<float>(random.uniform(-2, 2)));
            squares += double{x.back()} * double{x.back()};
        }
        runner::rms_norm(x.data(), weight.data(), count, 0.25F, out.data());
        double const rms = std::sqrt(squares / static_cast<double>(count) + 0.25);
        support::worst_error worst;
        for (std::size_t i = 0; i < x.size(); ++i) { worst.add(out[i], double{x[i]} / rms * double{weight[i]}, 1); }
        CHECK_MESSAGE(worst.within(1e-6), worst);
    }
}

TEST_CASE("the gated activation is x / (1 + e^-x) times up, and finite for any x")
{
    std::vector<float> gate = {-1e30F, -200, -89, -1, -0.0F, 0, 0.5F, 3, 88, 200, 1e30F};
    auto const before       = gate;
    std::vector<float> const up(gate.size(), 2.0F);
    runner::gated_silu(gate.data(), up.data(), std::ssize(gate));
    for (std::size_t i = 0; i < gate.size(); ++i)
    {
        double const x    = double{before[i]};
        double const want = 2 * x / (1 + std::exp(-x));
        CAPTURE(x);
        CHECK(std::abs(double{gate[i]} - want) <= 1e-6 * (1 + std::abs(want)));
    }
}

TEST_CASE("a bias is added to every coordinate of a row, and an absent one to none")
{
    std::vector<float> row = {1, 2, 3, 4};
    runner::add_bias({}, row.data());
    CHECK(row == std::vector<float>{1, 2, 3, 4});
    runner::add_bias({10, 20, -3}, row.data());
    CHECK(row == std::vector<float>{11, 22, 0, 4});
}

TEST_CASE(
    "rotation turns pairs of neighbours or of halves by position over base to the power of 2i/D, and nothing else")
{
    std::vector<float> const factors = {1.0F, 4.0F, 0.5F};
    for (auto const pairs : {mdkv::rotary_pairs::neighbours, mdkv::rotary_pairs::halves})
    {
        runner::rotary const rotation(6, 100.0, factors, pairs);
        CHECK(rotation.pairs() == pairs);
        CHECK(rotation.table_size() == 6);
        for (std::int64_t const position : {0, 1, 77, 131071})
        {
            std::vector<float> table(6);
            rotation.angles(position, table.data());
            std::vector<float> x      = {1, 2, 3, 4, 5, 6, 7, 8}; // the last two are outside the rotated part
            std::vector<float> before = x;
            rotation.turn(x.data(), table.data());
            for (std::size_t pair = 0; pair < 3; ++pair)
            {
                double const angle = static_cast<double>(position) * std::pow(100.0, -static_cast<double>(pair) / 3.0)
                                     / double{factors[pair]};
                bool const halves        = pairs == mdkv::rotary_pairs::halves;
                std::size_t const first  = halves ? pair : 2 * pair;
                std::size_t const second = halves ? pair + 3 : 2 * pair + 1;
                double const a           = double{before[first]};
                double const b           = double{before[second]};
                CHECK(std::abs(double{x[first]} - (a * std::cos(angle) - b * std::sin(angle))) < 2e-6);
                CHECK(std::abs(double{x[second]} - (a * std::sin(angle) + b * std::cos(angle))) < 2e-6);
            }
            CHECK(x[6] == 7);
            CHECK(x[7] == 8);
        }
    }
}
