#include <mdkv/merge.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/thread_pool.hpp>
#include <mdkv/detail/softmax.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <concepts>
#include <limits>
#include <vector>

namespace
{

using namespace mdkv;
using support::index_t;
using support::tensor;

constexpr float none = -std::numeric_limits<float>::infinity();

template <class U>
struct segment
{
    tensor<U, 2> output;
    tensor<float, 1> lse;

    explicit segment(index_t rows, index_t dim, support::placement how = {})
        : output{{rows, dim}, how}
        , lse{{rows}}
    {}
};

template <class U>
segment<U> random_segment(char const* name, index_t rows, index_t dim)
{
    support::source random{name};
    segment<U> made{rows, dim};
    for (index_t i = 0; i < rows; ++i)
    {
        made.lse.set(static_cast<float>(random.uniform(-8.0, 8.0)), i);
        for (index_t c = 0; c < dim; ++c) { made.output.set(narrow<U>(static_cast<float>(random.normal())), i, c); }
    }
    return made;
}

template <class U>
void merge(segment<U> const& a, segment<U> const& b, segment<U>& into, cpu::executor_ref threads = {})
{
    support::run(
        [&](cpu::backend const& on) {
            merge_attention(
                on, a.output.in(), a.lse.in(), b.output.in(), b.lse.in(), into.output.out(), into.lse.out());
        },
        threads);
}

} // namespace

TEST_CASE_TEMPLATE("two segments merge as their exponential sums say", U, float, half, bfloat16)
{
    auto const a = random_segment<U>("a", 33, 40);
    auto const b = random_segment<U>("b", 33, 40);
    segment<U> got{33, 40};
    merge(a, b, got);
    support::worst_error output;
    support::worst_error lse;
    for (index_t i = 0; i < 33; ++i)
    {
        long double const x = std::exp(static_cast<long double>(a.lse.get(i)));
        long double const y = std::exp(static_cast<long double>(b.lse.get(i)));
        lse.add(got.lse.get(i), std::log(x + y), 1.0L, i);
        for (index_t c = 0; c < 40; ++c)
        {
            long double const want = (x * widen(a.output.get(i, c)) + y * widen(b.output.get(i, c))) / (x + y);
            output.add(widen(got.output.get(i, c)), want, 1.0L, i);
        }
    }
    INFO(output);
    CHECK(output.within(std::same_as<U, float> ? 2e-6 : std::same_as<U, half> ? 2e-3 : 2e-2));
    INFO(lse);
    CHECK(lse.within(2e-6));
}

TEST_CASE("an empty segment leaves the other's bits, whatever its own rows hold")
{
    auto full = random_segment<float>("full", 3, 9);
    full.output.set(-0.0F, 1, 4);
    segment<float> empty{3, 9}; // its rows are NaN
    for (index_t i = 0; i < 3; ++i) { empty.lse.set(none, i); }
    for (bool const first : {true, false})
    {
        segment<float> got{3, 9};
        if (first) { merge(empty, full, got); }
        else { merge(full, empty, got); }
        CHECK(support::same_bits(got.output.elements(), full.output.elements()));
        CHECK(support::same_bits(got.lse.elements(), full.lse.elements()));
    }
}

TEST_CASE("two empty segments merge to zeros and minus infinity, not NaN")
{
    segment<half> a{2, 5};
    segment<half> b{2, 5};
    for (index_t i = 0; i < 2; ++i)
    {
        a.lse.set(none, i);
        b.lse.set(none, i);
    }
    segment<half> got{2, 5};
    merge(a, b, got);
    for (index_t i = 0; i < 2; ++i) { CHECK(got.lse.get(i) == none); }
    for (half const x : got.output.elements()) { CHECK(widen(x) == 0.0F); }
}

TEST_CASE("a far larger segment drowns the other without overflow")
{
    auto a = random_segment<float>("a", 1, 4);
    auto b = random_segment<float>("b", 1, 4);
    a.lse.set(3000.0F, 0);
    b.lse.set(-3000.0F, 0);
    segment<float> got{1, 4};
    merge(a, b, got);
    CHECK(support::same_bits(got.output.elements(), a.output.elements()));
    CHECK(got.lse.get(0) == 3000.0F);
}

TEST_CASE("merging in place on the first segment gives the same bits, with any number of threads and any stride")
{
    auto a       = random_segment<float>("a", 1200, 128);
    auto const b = random_segment<float>("b", 1200, 128);
    segment<float> want{1200, 128};
    merge(a, b, want);
    segment<float> strided{1200, 128, {.slack = 7}};
    cpu::thread_pool pool{4};
    merge(a, b, strided, pool);
    CHECK(support::same_bits(want.output.elements(), strided.output.elements()));
    merge(a, b, a);
    CHECK(support::same_bits(want.output.elements(), a.output.elements()));
    CHECK(support::same_bits(want.lse.elements(), a.lse.elements()));
}

TEST_CASE("no rows are merged to no rows")
{
    auto const a = random_segment<float>("a", 0, 12);
    segment<float> got{0, 12};
    merge(a, a, got);
    CHECK(got.lse.count() == 0);
}

TEST_CASE("a softmax state takes in others in any order, empty ones included")
{
    using mdkv::detail::softmax_state;
    softmax_state empty;
    CHECK(empty.lse() == none);
    auto by = empty.merge(softmax_state{});
    CHECK(by.second == 0.0F);
    CHECK(empty.lse() == none);
    by = empty.merge(softmax_state{3.0F, 2.0F});
    CHECK(by.first == 0.0F);
    CHECK(by.second == 1.0F);
    CHECK(empty.lse() == doctest::Approx(std::log(16.0)));
    by = empty.merge(softmax_state{5.0F, 1.0F});
    CHECK(by.first == 0.25F);
    CHECK(by.second == 1.0F);
    CHECK(empty.lse() == doctest::Approx(std::log(48.0)));
}
