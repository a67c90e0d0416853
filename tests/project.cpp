// Tolerances: a coordinate is a float sum over D products, judged against the vector's length: 2e-6 |x| for D <= 256; then one
// rounding to the output's element type, at most 2^-11 (half) or 2^-8 (bfloat16) of the coordinate.
#include <mdkv/project.hpp>

#include <mdkv/cpu/project.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/layer.hpp"
#include "support/oracle.hpp"
#include "support/sparse_memory.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <string>
#include <type_traits>
#include <vector>

namespace
{

using namespace mdkv;
using support::error_text;
using support::layer;
using support::placement;
using support::tensor;
using support::worst_error;
using host       = cpu::backend;
namespace oracle = support::oracle;

constexpr long double sum_error = 2e-6L;

template <class T>
constexpr long double rounding_of = std::is_same_v<T, float>  ? 0x1p-24L
                                    : std::is_same_v<T, half> ? 0x1p-11L
                                                              : 0x1p-8L;

template <class U, class T>
tensor<U, 3> projected(tensor<T, 3> const& x, tensor<float, 3> const& basis, index_t r, cpu::executor_ref threads = {})
{
    tensor<U, 3> c{{x.extent(0), x.extent(1), r}};
    support::run([&](host const& on) { project(on, x.in(), basis.in(), c.out()); }, threads);
    return c;
}

template <class T, class U>
tensor<T, 3> reconstructed(tensor<U, 3> const& c, tensor<float, 3> const& basis, cpu::executor_ref threads = {})
{
    tensor<T, 3> x{{c.extent(0), c.extent(1), basis.extent(2)}};
    support::run([&](host const& on) { reconstruct(on, c.in(), basis.in(), x.out()); }, threads);
    return x;
}

/// Errors of every element in units of what it may be off.
template <class T>
worst_error against(tensor<T, 3> const& got, index_t head, oracle::matrix const& want, oracle::matrix const& lengths_of)
{
    worst_error error;
    oracle::matrix const g = support::rows_of(got, head);
    for (index_t i = 0; i < g.rows; ++i)
    {
        long double const length = oracle::norm(lengths_of, i);
        for (index_t d = 0; d < g.cols; ++d)
        {
            // A half's subnormals are a 2^-25 apart at most.
            long double const allowed = sum_error * length + rounding_of<T> * std::fabs(want(i, d)) + 0x1p-25L;
            error.add(g(i, d), want(i, d), allowed, i * 1000 + d);
        }
    }
    return error;
}

oracle::matrix coordinates_of(oracle::matrix const& x, oracle::matrix const& basis, index_t r)
{
    oracle::matrix c{x.rows, r};
    for (index_t i = 0; i < x.rows; ++i)
    {
        for (index_t j = 0; j < r; ++j) { c(i, j) = oracle::dot(x, i, basis, j); }
    }
    return c;
}

} // namespace

TEST_CASE_TEMPLATE(
    "project gives the products with the leading directions, at every head dimension", T, float, half, bfloat16)
{
    for (index_t const dim : {1, 7, 32, 40, 56, 64, 80, 96, 128, 192, 256, 576})
    {
        for (index_t const r : {index_t{1}, dim / 8, dim / 4, dim})
        {
            if (r == 0) { continue; }
            CAPTURE(dim);
            CAPTURE(r);
            layer<T> const x{{.tokens = 67, .dim = dim, .value_dim = 8}};
            auto const same  = projected<T>(x.keys, x.key_basis, r);
            auto const plain = projected<float>(x.keys, x.key_basis, r);
            for (index_t h = 0; h < 2; ++h)
            {
                oracle::matrix const rows = support::rows_of(x.keys, h);
                oracle::matrix const want = coordinates_of(rows, support::rows_of(x.key_basis, h), r);
                worst_error const error   = against(same, h, want, rows);
                CAPTURE(error);
                CHECK(error.within(1));
                worst_error const exact = against(plain, h, want, rows);
                CAPTURE(exact);
                CHECK(exact.within(1));
            }
        }
    }
}

TEST_CASE_TEMPLATE(
    "reconstruct gives each vector's part in the subspace of the leading directions", T, float, half, bfloat16)
{
    for (index_t const r : {1, 5, 16, 40})
    {
        CAPTURE(r);
        layer<float> const x{{.tokens = 67, .dim = 40, .value_dim = 8}};
        auto const c = projected<float>(x.keys, x.key_basis, r);
        auto const v = reconstructed<T>(c, x.key_basis);
        for (index_t h = 0; h < 2; ++h)
        {
            oracle::matrix const rows = support::rows_of(x.keys, h);
            worst_error const error =
                against(v, h, oracle::compressed(rows, support::rows_of(x.key_basis, h), r), rows);
            CAPTURE(error);
            CHECK(error.within(2));
        }
    }
}

TEST_CASE_TEMPLATE("all coordinates reconstruct the vectors themselves", T, float, half, bfloat16)
{
    layer<T> const x{{.tokens = 33, .dim = 96, .value_dim = 8}};
    auto const v = reconstructed<T>(projected<float>(x.keys, x.key_basis, 96), x.key_basis);
    for (index_t h = 0; h < 2; ++h)
    {
        oracle::matrix const rows = support::rows_of(x.keys, h);
        worst_error const error   = against(v, h, rows, rows);
        CAPTURE(error);
        CHECK(error.within(2));
    }
}

TEST_CASE("fewer coordinates are the first of more, bit for bit")
{
    layer<half> const x{{.tokens = 70, .dim = 80, .value_dim = 8}};
    auto const all = projected<half>(x.keys, x.key_basis, 80);
    for (index_t const r : {1, 10, 20, 79})
    {
        auto const few = projected<half>(x.keys, x.key_basis, r);
        int different  = 0;
        for (index_t h = 0; h < 2; ++h)
        {
            for (index_t t = 0; t < 70; ++t)
            {
                for (index_t c = 0; c < r; ++c)
                {
                    different += widen(few.get(h, t, c)) == widen(all.get(h, t, c)) ? 0 : 1;
                }
            }
        }
        CHECK(different == 0);
    }
}

TEST_CASE("coordinates of an element type are the float ones rounded to nearest even")
{
    layer<float> const x{{.tokens = 40, .dim = 64, .value_dim = 8}};
    auto const wide  = projected<float>(x.keys, x.key_basis, 16);
    auto const brief = projected<bfloat16>(x.keys, x.key_basis, 16);
    int different    = 0;
    for (index_t t = 0; t < 40; ++t)
    {
        for (index_t c = 0; c < 16; ++c)
        {
            different += widen(brief.get(1, t, c)) == widen(narrow<bfloat16>(wide.get(1, t, c))) ? 0 : 1;
        }
    }
    CHECK(different == 0);
}

TEST_CASE_TEMPLATE("strides, slack, odd addresses, forbidden neighbours and threads change no bit of a projection", T,
    float, half, bfloat16)
{
    for (index_t const dim : {8, 40, 64})
    {
        layer<T> const x{{.heads = 3, .tokens = 150, .dim = dim, .value_dim = 8}};
        auto const c                   = projected<float>(x.keys, x.key_basis, dim / 4);
        auto const v                   = reconstructed<T>(c, x.key_basis);
        std::vector<float> const plain = c.elements();
        for (placement const how : {placement{.swapped = true}, placement{.slack = 3}, placement{.misalign = 1},
                 placement{.swapped = true, .slack = 5, .misalign = 3}, placement{.fence = support::guard::after},
                 placement{.fence = support::guard::before}})
        {
            CHECK(support::same_bits(projected<float>(x.keys.relaid(how), x.key_basis, dim / 4).elements(), plain));
            CHECK(reconstructed<T>(c.relaid(how), x.key_basis).memory() == v.memory());
        }
        cpu::thread_pool pool{3};
        CHECK(support::same_bits(projected<float>(x.keys, x.key_basis, dim / 4, pool).elements(), plain));
        CHECK(reconstructed<T>(c, x.key_basis, pool).memory() == v.memory());
    }
}

TEST_CASE("outputs with strides and forbidden neighbours get their elements and nothing else")
{
    layer<half> const x{{.heads = 2, .tokens = 35, .dim = 40, .value_dim = 8}};
    auto const plain = projected<half>(x.keys, x.key_basis, 5);
    for (placement const how : {placement{.swapped = true, .slack = 3}, placement{.fence = support::guard::after},
             placement{.fence = support::guard::before}})
    {
        tensor<half, 3> c{{2, 35, 5}, how};
        support::run([&](host const& on) { project(on, x.keys.in(), x.key_basis.in(), c.out()); });
        CHECK(c.relaid({}).memory() == plain.memory());
        tensor<half, 3> v{{2, 35, 40}, how};
        support::run([&](host const& on) { reconstruct(on, c.in(), x.key_basis.in(), v.out()); });
        CHECK(v.relaid({}).memory() == reconstructed<half>(plain, x.key_basis).memory());
    }
    tensor<half, 3> c{{2, 35, 5}, {.slack = 3}};
    support::run([&](host const& on) { project(on, x.keys.in(), x.key_basis.in(), c.out()); });
    std::vector<std::byte> const memory = c.memory();
    for (std::size_t i = 10; i < 16; ++i) { CHECK(memory[i] == std::byte{0xFF}); }
}

TEST_CASE("offsets beyond 2^31 elements are followed by project and reconstruct")
{
    index_t const step = (index_t{1} << 31) + 64;
    support::sparse_memory const memory{static_cast<std::size_t>(2 * step) * sizeof(half)};
    layer<half> const x{{.tokens = 3, .dim = 16, .value_dim = 8}};
    host const any{};
    auto* const data = memory.as<half>();
    for (index_t h = 0; h < 2; ++h)
    {
        for (index_t t = 0; t < 3; ++t)
        {
            for (index_t d = 0; d < 16; ++d) { data[h * step + t * 16 + d] = x.keys.get(h, t, d); }
        }
    }
    tensor<half, 3> c{{2, 3, 4}};
    support::run([&](host const& on) {
        project(on, in(any, data, {2, 3, 16}, {step, 16, 1}), x.key_basis.in(), c.out());
    });
    CHECK(c.memory() == projected<half>(x.keys, x.key_basis, 4).memory());
    support::run([&](host const& on) {
        reconstruct(on, c.in(), x.key_basis.in(), out(any, data, {2, 3, 16}, {step, 16, 1}));
    });
    CHECK(widen(data[step + 47]) == widen(reconstructed<half>(c, x.key_basis).get(1, 2, 15)));
}

TEST_CASE("no heads and no tokens are projected to nothing")
{
    layer<float> const none{{.heads = 0}};
    CHECK(projected<float>(none.keys, none.key_basis, 4).count() == 0);
    CHECK(reconstructed<float>(projected<float>(none.keys, none.key_basis, 4), none.key_basis).count() == 0);
    layer<float> const empty{{.tokens = 0}};
    CHECK(projected<float>(empty.keys, empty.key_basis, 4).count() == 0);
}

TEST_CASE("project and reconstruct refuse a number of coordinates outside [1, D] and shapes that disagree")
{
    layer<float> const x{{.tokens = 10, .dim = 16, .value_dim = 8}};
    workspace count;
    host const on{&count};
    auto const refusal = [&](std::array<index_t, 3> shape) {
        tensor<float, 3> c{shape};
        return error_text<invalid_argument>([&] { project(on, x.keys.in(), x.key_basis.in(), c.out()); });
    };
    auto const back = [&](std::array<index_t, 3> shape) {
        tensor<float, 3> const c{shape};
        tensor<float, 3> v{{2, 10, 16}};
        return error_text<invalid_argument>([&] { reconstruct(on, c.in(), x.key_basis.in(), v.out()); });
    };
    CHECK(refusal({2, 10, 0}) == "project: coordinates [H, N, r] has r = 0; it must lie in [1, D = 16]");
    CHECK(refusal({2, 10, 17}) == "project: coordinates [H, N, r] has r = 17; it must lie in [1, D = 16]");
    CHECK(refusal({2, 9, 4}) == "project: coordinates must be [H,N,r] = [2, 10, 4], its extent 1 is 9");
    CHECK(back({2, 10, 0}) == "reconstruct: coordinates [H, N, r] has r = 0; it must lie in [1, D = 16]");
    CHECK(back({2, 10, 17}) == "reconstruct: coordinates [H, N, r] has r = 17; it must lie in [1, D = 16]");
    CHECK(back({2, 9, 4}) == "reconstruct: vectors must be [H,N,D] = [2, 9, 16], its extent 1 is 10");
    tensor<float, 3> c{{2, 10, 4}};
    CHECK(error_text<invalid_argument>([&] { project(on, x.keys.in(), x.value_basis.in(), c.out()); })
          == "project: basis must be [H,D,D] = [2, 16, 16], its extent 1 is 8");
}

TEST_CASE("project and reconstruct refuse overlaps, null pointers, misaligned outputs and too little scratch")
{
    layer<float> const x{{.tokens = 10, .dim = 16, .value_dim = 8}};
    tensor<float, 3> c{{2, 10, 4}};
    tensor<float, 3> odd{{2, 10, 4}, {.misalign = 1}};
    host const any{};
    support::scratch_memory memory{1 << 20};
    workspace scratch{memory.span()};
    host const on{&scratch};
    CHECK(error_text<invalid_argument>([&] {
        project(on, x.keys.in(), x.key_basis.in(), out(any, x.keys.data(), 2, 10, 4));
    }) == "project: coordinates overlaps vectors");
    CHECK(error_text<invalid_argument>([&] {
        reconstruct(on, x.keys.in(), x.key_basis.in(), out(any, x.key_basis.data() + 511, 2, 10, 16));
    }) == "reconstruct: vectors overlaps basis");
    CHECK(error_text<invalid_argument>([&] { project(on, x.keys.in(), x.key_basis.in(), odd.out()); })
          == "project: coordinates is not aligned to 4 bytes");
    CHECK(error_text<invalid_argument>([&] {
        project(on, in(any, static_cast<half*>(nullptr), 2, 10, 16), x.key_basis.in(), c.out());
    }) == "project: vectors is null but not empty");
    auto const call         = [&](host const& b) { project(b, x.keys.in(), x.key_basis.in(), c.out()); };
    std::size_t const bytes = support::scratch_bytes(call);
    workspace small{memory.span().first(bytes - 1)};
    std::vector<std::byte> const before = c.memory();
    CHECK(error_text<insufficient_workspace>([&] { call(host{&small}); })
          == "project: the workspace holds " + std::to_string(bytes - 1) + " bytes, " + std::to_string(bytes)
                 + " are needed");
    CHECK(c.memory() == before);
}

TEST_CASE("the scratch of project does not grow with the number of tokens")
{
    auto const bytes = [](index_t tokens) {
        host const any{};
        return support::scratch_bytes([&](host const& on) {
            project(on, in(any, static_cast<half*>(nullptr), 2, tokens, 64),
                in(any, static_cast<float*>(nullptr), 2, 64, 64), out(any, static_cast<half*>(nullptr), 2, tokens, 16));
        });
    };
    CHECK(bytes(1000) == bytes(100000000));
}
