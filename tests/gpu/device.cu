#include <mdkv/gpu/device.cuh>

#include <mdkv/core/types.hpp>
#include <mdkv/gpu/backend.cuh>

#include "gpu/support/device.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <doctest/doctest.h>

// The executor of PTX must answer here as a real GPU does.

namespace
{

using namespace mdkv;
using support::device_tensor;
using support::tensor;

/// Sums in shared memory whose low words overflow, the second one below zero.
struct shared_sums
{
    static constexpr char const* name = "shared_sums";
    static constexpr int threads      = 96;

    out_view<index_t, 1, gpu::backend> to; // [2]

    [[nodiscard]] index_t shared_bytes() const { return 2 * index_t{sizeof(index_t)}; }

    __device__ void operator()() const
    {
        auto* const sums = reinterpret_cast<index_t*>(gpu::device::shared_memory());
        int const t      = gpu::device::thread();
        if (t < 2) { sums[t] = -7; }
        gpu::device::sync();
        gpu::device::shared_add(&sums[0], (index_t{3} << 32) - t);
        gpu::device::shared_add(&sums[1], index_t{-t});
        gpu::device::sync();
        if (t < 2) { to(t) = sums[t]; }
    }
};

struct warp_functions
{
    static constexpr char const* name = "warp_functions";
    static constexpr int threads      = 64;

    out_view<int, 2, gpu::backend> to; // [4, 64]

    __device__ void operator()() const
    {
        int const t = gpu::device::thread();
        to(0, t)    = gpu::device::shuffle_xor(t, 3);
        to(1, t)    = gpu::device::lane() + 100 * gpu::device::warp();
        to(2, t)    = gpu::device::any(t == 40) ? 1 : 0;
        to(3, t)    = gpu::device::thread_again();
    }
};

/// Every thread adds to one number, and takes part in a minimum.
struct atomics
{
    static constexpr char const* name = "atomics";
    static constexpr int threads      = 96;

    out_view<unsigned, 1, gpu::backend> to;  // [2]
    out_view<index_t, 1, gpu::backend> wide; // [1]

    __device__ void operator()() const
    {
        auto const t = static_cast<unsigned>(gpu::device::thread());
        gpu::device::atomic_add(&to(0), t);
        gpu::device::atomic_min(&to(1), t);
        gpu::device::atomic_add(&wide(0), (index_t{1} << 40) + t);
    }
};

/// Two groups of asynchronous copies of `Bytes` bytes; the second is still on its way while the first is read.
template <int Bytes>
struct copies
{
    static constexpr char const* name = "copies";
    static constexpr int threads      = 32;

    in_view<float, 1, gpu::backend> from; // [256]
    out_view<float, 1, gpu::backend> to;  // [256]

    [[nodiscard]] index_t shared_bytes() const { return 256 * index_t{sizeof(float)}; }

    __device__ void operator()() const
    {
        auto* const staged = reinterpret_cast<float*>(gpu::device::shared_memory());
        int const t        = gpu::device::thread();
        for (int half_of : {0, 128})
        {
            for (int i = 0; i < 4; i += Bytes / 4)
            {
                gpu::device::copy_async<Bytes>(staged + half_of + 4 * t + i, &from(half_of + 4 * t + i));
            }
            gpu::device::copy_async_commit();
        }
        gpu::device::copy_async_wait<1>();
        gpu::device::sync();
        for (int i = t; i < 128; i += threads) { to(i) = staged[127 - i]; }
        gpu::device::copy_async_wait<0>();
        gpu::device::sync();
        for (int i = 128 + t; i < 256; i += threads) { to(i) = staged[i] + 1; }
    }
};

/// Four matrices of 8 x 8 numbers, transposed on their way from shared memory, the first of them back again, and words' bytes.
struct transposed_matrices
{
    static constexpr char const* name = "transposed_matrices";
    static constexpr int threads      = 32;

    out_view<int, 3, gpu::backend> to; // [7, 32, 2]

    [[nodiscard]] index_t shared_bytes() const { return 32 * 8 * index_t{sizeof(std::uint16_t)}; }

    __device__ void operator()() const
    {
        auto* const rows = reinterpret_cast<std::uint16_t*>(gpu::device::shared_memory());
        int const lane   = gpu::device::lane();
        for (int i = 0; i < 8; ++i) { rows[lane * 8 + i] = static_cast<std::uint16_t>(100 * lane + i); }
        gpu::device::sync_warp();
        std::uint32_t got[4];
        gpu::device::load_transposed(got, rows + lane * 8);
        auto const write = [&](int number, std::uint32_t pair) {
            to(number, lane, 0) = static_cast<int>(pair & 0xffffU);
            to(number, lane, 1) = static_cast<int>(pair >> 16U);
        };
        for (int i = 0; i < 4; ++i) { write(i, got[i]); }
        write(4, gpu::device::transpose(got[0]));
        write(5, gpu::device::every_other_byte<0>(0xf1e2d3c4U + static_cast<unsigned>(lane)));
        write(6, gpu::device::every_other_byte<1>(0xf1e2d3c4U + static_cast<unsigned>(lane)));
    }
};

/// 2^x, and pairs of rounded numbers.
template <class T>
struct numbers_of_lanes
{
    static constexpr char const* name = "numbers_of_lanes";
    static constexpr int threads      = 32;

    in_view<float, 1, gpu::backend> x;   // [33]
    out_view<float, 2, gpu::backend> to; // [3, 32]

    __device__ void operator()() const
    {
        int const lane           = gpu::device::lane();
        std::uint32_t const pair = gpu::device::pair<T>(x(lane), x(lane + 1));
        to(0, lane)              = gpu::device::exp2(x(lane));
        to(1, lane)              = widen(T{static_cast<std::uint16_t>(pair & 0xffffU)});
        to(2, lane)              = widen(T{static_cast<std::uint16_t>(pair >> 16U)});
    }
};

/// d = a b + d of one warp, fragments filled by the table in device.cuh.
template <class T>
struct one_tile
{
    static constexpr char const* name = "one_tile";
    static constexpr int threads      = 32;

    in_view<T, 2, gpu::backend> a;      // [16, 16]
    in_view<T, 2, gpu::backend> b;      // [16, 8]
    out_view<float, 2, gpu::backend> d; // [16, 8]

    [[nodiscard]] __device__ static std::uint32_t pair(T low, T high)
    {
        std::uint16_t bits[2];
        memcpy(&bits[0], &low, 2);
        memcpy(&bits[1], &high, 2);
        return bits[0] | static_cast<std::uint32_t>(bits[1]) << 16;
    }

    __device__ void operator()() const
    {
        int const g = gpu::device::lane() / 4;
        int const p = gpu::device::lane() % 4 * 2;
        std::uint32_t fragment_a[4];
        std::uint32_t fragment_b[2];
        for (int i = 0; i < 4; ++i)
        {
            int const row    = g + i % 2 * 8;
            int const column = p + i / 2 * 8;
            fragment_a[i]    = pair(a(row, column), a(row, column + 1));
        }
        for (int i = 0; i < 2; ++i) { fragment_b[i] = pair(b(p + 8 * i, g), b(p + 8 * i + 1, g)); }
        float sum[4]{d(g, p), d(g, p + 1), d(g + 8, p), d(g + 8, p + 1)};
        gpu::device::multiply_tile<T>(sum, fragment_a, fragment_b);
        for (int i = 0; i < 4; ++i) { d(g + i / 2 * 8, p + i % 2) = sum[i]; }
    }
};

} // namespace

TEST_CASE("lanes read each other's values, and vote")
{
    device_tensor<int, 2> to{{4, 64}};
    support::run_on_device([&](gpu::backend const& on) { gpu::launch(on, warp_functions{to.out()}, 1); });
    auto const got = to.host();
    for (int t = 0; t < 64; ++t)
    {
        CHECK(got.get(0, t) == (t ^ 3));
        CHECK(got.get(1, t) == t % 32 + 100 * (t / 32));
        CHECK(got.get(2, t) == t / 32);
        CHECK(got.get(3, t) == t);
    }
}

TEST_CASE("sums of 64 bits in shared memory carry from one word to the other")
{
    device_tensor<index_t, 1> to{{2}};
    support::run_on_device([&](gpu::backend const& on) { gpu::launch(on, shared_sums{to.out()}, 1); });
    CHECK(to.elements() == std::vector<index_t>{96 * (index_t{3} << 32) - 95 * 48 - 7, -95 * 48 - 7});
}

TEST_CASE("atomics of all blocks add up, of 32 and of 64 bits")
{
    tensor<unsigned, 1> start{{2}};
    start.assign(std::vector<unsigned>{0, 1000});
    tensor<index_t, 1> start_wide{{1}};
    start_wide.set(-5, 0);
    device_tensor<unsigned, 1> to{start};
    device_tensor<index_t, 1> wide{start_wide};
    support::run_on_device([&](gpu::backend const& on) { gpu::launch(on, atomics{to.out(), wide.out()}, 7); });
    CHECK(to.elements() == std::vector<unsigned>{7 * 95 * 96 / 2, 0});
    CHECK(wide.host().get(0) == 7 * 96 * (index_t{1} << 40) + 7 * 95 * 96 / 2 - 5);
}

TEST_CASE("a group of asynchronous copies has arrived when it was waited for")
{
    tensor<float, 1> numbers{{256}};
    for (int i = 0; i < 256; ++i) { numbers.set(static_cast<float>(i), i); }
    device_tensor<float, 1> const from{numbers};
    device_tensor<float, 1> to{{256}};
    auto const run = [&](auto kernel) {
        support::run_on_device([&](gpu::backend const& on) { gpu::launch(on, kernel, 1); });
        auto const got = to.host();
        for (int i = 0; i < 256; ++i) { CHECK(got.get(i) == static_cast<float>(i < 128 ? 127 - i : i + 1)); }
    };
    run(copies<16>{from.in(), to.out()});
    run(copies<8>{from.in(), to.out()});
    run(copies<4>{from.in(), to.out()});
}

TEST_CASE_TEMPLATE("a tile of tensor-core products is the product of the matrices", T, mdkv::half, bfloat16)
{
    support::source random{"gpu/tile"};
    tensor<T, 2> a{{16, 16}};
    tensor<T, 2> b{{16, 8}};
    tensor<float, 2> d{{16, 8}};
    for (int i = 0; i < 16; ++i)
    {
        for (int j = 0; j < 16; ++j) { a.set(narrow<T>(static_cast<float>(random.normal())), i, j); }
        for (int j = 0; j < 8; ++j)
        {
            b.set(narrow<T>(static_cast<float>(random.normal())), i, j);
            d.set(static_cast<float>(random.normal()), i, j);
        }
    }
    device_tensor<T, 2> const from_a{a};
    device_tensor<T, 2> const from_b{b};
    device_tensor<float, 2> to{d};
    support::run_on_device([&](gpu::backend const& on) {
        gpu::launch(on, one_tile<T>{from_a.in(), from_b.in(), to.out()}, 1);
    });
    auto const got = to.host();
    for (int i = 0; i < 16; ++i)
    {
        for (int j = 0; j < 8; ++j)
        {
            double sum = static_cast<double>(d.get(i, j));
            for (int k = 0; k < 16; ++k)
            {
                sum += static_cast<double>(widen(a.get(i, k))) * static_cast<double>(widen(b.get(k, j)));
            }
            CHECK(static_cast<double>(got.get(i, j)) == doctest::Approx(sum).epsilon(1e-5));
        }
    }
}

TEST_CASE("tensor cores multiply subnormal halves exactly: codes without a scale")
{
    support::source random{"gpu/subnormal"};
    tensor<mdkv::half, 2> a{{16, 16}};
    tensor<mdkv::half, 2> b{{16, 8}};
    device_tensor<float, 2> to{[] {
        tensor<float, 2> zeros{{16, 8}};
        for (int i = 0; i < 128; ++i) { zeros.set(0.0F, i / 8, i % 8); }
        return zeros;
    }()};
    for (int i = 0; i < 16; ++i)
    {
        for (int j = 0; j < 16; ++j) { a.set(mdkv::half{static_cast<std::uint16_t>(16 * i + j)}, i, j); }
        for (int j = 0; j < 8; ++j)
        {
            b.set(narrow<mdkv::half>(static_cast<float>(std::floor(random.uniform(-300, 300)))), i, j);
        }
    }
    device_tensor<mdkv::half, 2> const from_a{a};
    device_tensor<mdkv::half, 2> const from_b{b};
    support::run_on_device([&](gpu::backend const& on) {
        gpu::launch(on, one_tile<mdkv::half>{from_a.in(), from_b.in(), to.out()}, 1);
    });
    auto const got = to.host();
    for (int i = 0; i < 16; ++i)
    {
        for (int j = 0; j < 8; ++j)
        {
            double sum = 0; // of whole numbers
            for (int k = 0; k < 16; ++k) { sum += (16 * i + k) * static_cast<double>(widen(b.get(k, j))); }
            CHECK(std::ldexp(static_cast<double>(got.get(i, j)), 24) == sum);
        }
    }
}

TEST_CASE("matrices are transposed on their way from shared memory, and between lanes; bytes of words become pairs")
{
    device_tensor<int, 3> to{{7, 32, 2}};
    support::run_on_device([&](gpu::backend const& on) { gpu::launch(on, transposed_matrices{to.out()}, 1); });
    auto const got = to.host();
    for (int lane = 0; lane < 32; ++lane)
    {
        for (int j = 0; j < 2; ++j)
        {
            int const row = lane % 4 * 2 + j;
            for (int i = 0; i < 4; ++i) { CHECK(got.get(i, lane, j) == 100 * (8 * i + row) + lane / 4); }
            CHECK(got.get(4, lane, j) == 100 * (lane / 4) + row);
            CHECK(got.get(5, lane, j) == (j == 0 ? 0xc4 + lane : 0xe2));
            CHECK(got.get(6, lane, j) == (j == 0 ? 0xd3 : 0xf1));
        }
    }
}

TEST_CASE_TEMPLATE("numbers are rounded to pairs, and powers of two are right to a few units", T, mdkv::half, bfloat16)
{
    tensor<float, 1> x{{33}};
    for (int i = 0; i < 33; ++i) { x.set(static_cast<float>(i) * -0.83F + 3.0F, i); }
    device_tensor<float, 1> const from{x};
    device_tensor<float, 2> to{{3, 32}};
    support::run_on_device([&](gpu::backend const& on) {
        gpu::launch(on, numbers_of_lanes<T>{from.in(), to.out()}, 1);
    });
    auto const got = to.host();
    for (int i = 0; i < 32; ++i)
    {
        CHECK(got.get(0, i) == doctest::Approx(std::exp2(x.get(i))).epsilon(1e-6));
        CHECK(got.get(1, i) == widen(narrow<T>(x.get(i))));
        CHECK(got.get(2, i) == widen(narrow<T>(x.get(i + 1))));
    }
}
