#include "runner/matmul.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <mdkv/cpu/thread_pool.hpp>

#include "runner/ggml_type.hpp"
#include "support/compare.hpp"
#include "support/random.hpp"

namespace
{

using runner::ggml_type;

constexpr std::array every_type = {ggml_type::f32, ggml_type::f16, ggml_type::bf16, ggml_type::q4_0, ggml_type::q4_1,
    ggml_type::q5_0, ggml_type::q5_1, ggml_type::q8_0, ggml_type::q4_k, ggml_type::q5_k, ggml_type::q6_k};

/// A random matrix of the format together with its bytes.
struct random_matrix
{
    std::vector<std::byte> bytes;
    runner::weight_matrix weights;

    random_matrix(ggml_type type, std::int64_t rows, std::int64_t columns, std::int64_t salt)
    {
        support::source random("random matrix", salt);
        std::int64_t const size = rows * columns / runner::block_elements(type) * runner::block_bytes(type);
        // Without bit 6 of any byte no half, bfloat16 or float among them is infinite, NaN or even large.
        for (std::int64_t i = 0; i < size; ++i) { bytes.push_back(static_cast<std::byte>(random.bits() & 0xBB)); }
        weights = runner::weight_matrix(describe(type, rows, columns));
    }
    random_matrix(random_matrix const&) = delete;

    [[nodiscard]] runner::tensor_info describe(ggml_type type, std::int64_t rows, std::int64_t columns) const
    {
        return {.name = "random", .type = type, .dims = {columns, rows, 1, 1}, .n_dims = 2, .data = bytes};
    }
};

std::vector<float> random_inputs(std::int64_t count, std::int64_t salt)
{
    support::source random("matmul inputs", salt);
    std::vector<float> out;
    for (std::int64_t i = 0; i < count; ++i) { out.push_back(static_cast<float>(random.normal())); }
    return out;
}

/// Every output against a sum in double, relative to the sum of the products' magnitudes.
support::worst_error product_error(runner::weight_matrix const& weights, std::vector<float> const& x,
    std::int64_t tokens, std::vector<float> const& got)
{
    support::worst_error worst;
    std::int64_t const columns = weights.columns();
    std::vector<float> row(static_cast<std::size_t>(columns));
    for (std::int64_t r = 0; r < weights.rows(); ++r)
    {
        weights.dequantise_rows(r, 1, row.data());
        for (std::int64_t t = 0; t < tokens; ++t)
        {
            double sum       = 0;
            double magnitude = 0;
            for (std::int64_t c = 0; c < columns; ++c)
            {
                double const term =
                    double{row[static_cast<std::size_t>(c)]} * double{x[static_cast<std::size_t>(t * columns + c)]};
                sum += term;
                magnitude += std::abs(term);
            }
            worst.add(got[static_cast<std::size_t>(t * weights.rows() + r)], sum, magnitude, t * weights.rows() + r);
        }
    }
    return worst;
}

std::string message_of(auto const& call)
{
    try
    {
        call();
    }
    catch (std::invalid_argument const& error)
    {
        return error.what();
    }
    return "(nothing was thrown)";
}

} // namespace

TEST_CASE("products of every format equal dequantised rows times tokens")
{
    for (ggml_type const type : every_type)
    {
        CAPTURE(std::string(runner::name_of(type)));
        for (std::int64_t const rows : {1, 5, 203})
        {
            random_matrix const matrix(type, rows, 512, rows);
            for (std::int64_t const tokens : {1, 2, 4, 13, 16, 17, 40})
            {
                CAPTURE(rows);
                CAPTURE(tokens);
                auto const x = random_inputs(tokens * 512, tokens);
                std::vector<float> out(static_cast<std::size_t>(tokens * rows), NAN);
                runner::multiply({}, matrix.weights, x.data(), tokens, out.data());
                auto const worst = product_error(matrix.weights, x, tokens, out);
                CHECK_MESSAGE(worst.within(2e-6), worst);
            }
        }
    }
}

TEST_CASE("columns need not fill vector registers")
{
    for (std::int64_t const columns : {1, 3, 15, 17, 100})
    {
        random_matrix const matrix(ggml_type::f32, 9, columns, columns);
        for (std::int64_t const tokens : {1, 3, 30})
        {
            CAPTURE(columns);
            CAPTURE(tokens);
            auto const x = random_inputs(tokens * columns, tokens);
            std::vector<float> out(static_cast<std::size_t>(tokens * 9), NAN);
            runner::multiply({}, matrix.weights, x.data(), tokens, out.data());
            auto const worst = product_error(matrix.weights, x, tokens, out);
            CHECK_MESSAGE(worst.within(1e-6), worst);
        }
    }
}

TEST_CASE("a product's bits depend neither on threads nor on the products beside it")
{
    random_matrix const first(ggml_type::q4_1, 300, 288, 1);
    random_matrix const second(ggml_type::q8_0, 77, 288, 2);
    for (std::int64_t const tokens : {1, 13, 60})
    {
        auto const x = random_inputs(tokens * 288, tokens);
        std::vector<float> a(static_cast<std::size_t>(tokens * 300)), b(static_cast<std::size_t>(tokens * 77));
        runner::multiply({}, first.weights, x.data(), tokens, a.data());
        runner::multiply({}, second.weights, x.data(), tokens, b.data());
        for (int const threads : {1, 2, 3, 4})
        {
            mdkv::cpu::thread_pool pool(threads);
            std::vector<float> c(a.size(), NAN), d(b.size(), NAN);
            runner::multiply(pool, {{&first.weights, c.data()}, {&second.weights, d.data()}}, x.data(), tokens);
            CHECK(support::same_bits(a, c));
            CHECK(support::same_bits(b, d));
        }
    }
}

TEST_CASE("no tokens write nothing")
{
    random_matrix const matrix(ggml_type::q8_0, 4, 32, 3);
    std::vector<float> out(4, 7.0F);
    runner::multiply({}, matrix.weights, nullptr, 0, out.data());
    CHECK(out == std::vector<float>(4, 7.0F));
}

TEST_CASE("products of different columns are refused before anything is written")
{
    random_matrix const wide(ggml_type::q8_0, 4, 64, 4);
    random_matrix const narrow(ggml_type::q8_0, 4, 32, 5);
    auto const x = random_inputs(64, 1);
    std::vector<float> a(4, 7.0F), b(4, 7.0F);
    auto const message = message_of([&] {
        runner::multiply({}, {{&wide.weights, a.data()}, {&narrow.weights, b.data()}}, x.data(), 1);
    });
    CHECK(message.find("multiply: random has 32 columns, random has 64") != std::string::npos);
    CHECK(a == std::vector<float>(4, 7.0F));
    CHECK(b == std::vector<float>(4, 7.0F));
}

TEST_CASE("a tensor that is no matrix, or too short for one, is refused by name and sizes")
{
    random_matrix const matrix(ggml_type::q8_0, 4, 64, 6);
    runner::tensor_info info = matrix.describe(ggml_type::q8_0, 4, 64);
    info.data                = info.data.first(info.data.size() - 1);
    CHECK(message_of([&] { (void)runner::weight_matrix(info); })
          == "tensor random: 4 rows of 68 bytes do not fit in its 271 bytes");
    info         = matrix.describe(ggml_type::q8_0, 4, 64);
    info.n_dims  = 3;
    info.dims[2] = 2;
    CHECK(message_of([&] { (void)runner::weight_matrix(info); }).find("3 dimensions") != std::string::npos);
    info = matrix.describe(ggml_type::q8_0, 4, 63);
    CHECK(message_of([&] { (void)runner::weight_matrix(info); }).find("blocks of 32 elements") != std::string::npos);
}
