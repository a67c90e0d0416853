#include <mdkv/gpu/backend.cuh>

#include <mdkv/core/types.hpp>

#include "gpu/support/device.hpp"
#include "support/counting_job.hpp"
#include "support/host.hpp"

#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using support::count_bytes;
using support::device_tensor;
using support::tensor;

template <class T>
tensor<T, 1> filled(index_t n, T value)
{
    tensor<T, 1> all{{n}};
    all.assign(std::vector<T>(static_cast<std::size_t>(n), value));
    return all;
}

} // namespace

TEST_CASE("a job on the GPU gives what plain loops give")
{
    auto const bytes = support::some_bytes();
    auto const want  = support::count_plainly(bytes.data());
    tensor<std::uint8_t, 1> given{{count_bytes::all}};
    given.assign({bytes.begin(), bytes.end()});
    device_tensor<std::uint8_t, 1> const from{given};
    device_tensor<std::int64_t, 1> counts{filled<std::int64_t>(16, 0)};
    device_tensor<index_t, 1> odd{filled<index_t>(4, 0)};
    device_tensor<std::int32_t, 1> largest{filled<std::int32_t>(4, 0)};
    device_tensor<std::int32_t, 1> before{filled<std::int32_t>(count_bytes::all, 0)};
    device_tensor<index_t, 1> first{filled<index_t>(1, count_bytes::all)};
    support::run_on_device_now([&](gpu::backend const& on) {
        count_bytes const job{from.data_handle(), counts.data_handle(), odd.data_handle(), largest.data_handle(),
            before.data_handle(), first.data_handle()};
        run(on, job, 4);
    });
    CHECK(counts.elements() == std::vector<std::int64_t>(want.counts, want.counts + 16));
    CHECK(odd.elements() == std::vector<index_t>(want.odd, want.odd + 4));
    CHECK(largest.elements() == std::vector<std::int32_t>(want.largest, want.largest + 4));
    CHECK(before.elements() == std::vector<std::int32_t>(want.before, want.before + count_bytes::all));
    CHECK(first.elements() == std::vector<index_t>{want.first_large});
}

TEST_CASE("fill sets every object of device memory")
{
    device_tensor<int, 1> to{filled<int>(70'000, 1)};
    support::run_on_device([&](gpu::backend const& on) {
        mdkv::detail::fill<int> const job{to.data_handle(), 7, 69'999};
        run(on, job, job.items());
    });
    auto const got = to.elements();
    CHECK(std::count(got.begin(), got.end(), 7) == 69'999);
    CHECK(got.back() == 1);
}
