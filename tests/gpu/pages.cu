#include <mdkv/gpu/pages.cuh>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include "gpu/support/device.hpp"
#include "support/host.hpp"

#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_tensor;
using support::tensor;

constexpr index_t H = 2, N = 11, D = 40, pages = 5, page_tokens = 4;

TEST_CASE("rows in pages are brought together whatever the order inside a page, and a page that is not there is zeros")
{
    tensor<float, 1> memory{{pages * page_tokens * H * 2 * D}};
    for (index_t i = 0; i < memory.count(); ++i) { memory.set(static_cast<float>(i), i); }
    device_tensor<float, 1> const stored{memory};
    tensor<std::int32_t, 1> order{{3}};
    order.assign(std::vector<std::int32_t>{4, 0, 7});
    device_tensor<std::int32_t, 1> const table{order};
    index_t const page_stride = page_tokens * H * 2 * D;
    for (bool const heads_first : {false, true}) // [page, token, H, 2 D] and [page, H, token, 2 D]: values beside keys
    {
        index_t const token_stride = heads_first ? 2 * D : H * 2 * D;
        index_t const head_stride  = heads_first ? page_tokens * 2 * D : 2 * D;
        device_tensor<float, 3> rows{{H, N, D}, {.swapped = heads_first, .slack = 3}};
        support::run_on_device([&](gpu::backend const& on) {
            gpu::gather_pages(on,
                gpu::paged_rows<float>{stored.data_handle() + D, table.data_handle(), pages, page_tokens, page_stride,
                    token_stride, head_stride},
                rows.out());
        });
        auto const got = rows.host();
        int different  = 0;
        for (index_t h = 0; h < H; ++h)
        {
            for (index_t t = 0; t < N; ++t)
            {
                index_t const page = t < 4 ? 4 : 0;
                index_t const at   = page * page_stride + t % 4 * token_stride + h * head_stride + D;
                for (index_t d = 0; d < D; ++d)
                {
                    different += got.get(h, t, d) == (t < 8 ? memory.get(at + d) : 0.0F) ? 0 : 1;
                }
            }
        }
        CHECK(different == 0);
    }
}

TEST_CASE("pages that cannot be are refused by name")
{
    device_tensor<half, 3> rows{{1, 2, 4}};
    auto const refused = [&](gpu::paged_rows<half> const& from) {
        return support::error_text<invalid_argument>(
            [&] { support::run_on_device([&](gpu::backend const& on) { gpu::gather_pages(on, from, rows.out()); }); });
    };
    CHECK(refused({}).find("page_tokens is 0") != std::string::npos);
    CHECK(refused({.pages = 1, .page_tokens = 1, .token_stride = -4}).find("-4") != std::string::npos);
    CHECK(refused({.pages = 1, .page_tokens = 1}).find("null") != std::string::npos);
    alignas(4) char bytes[8]{};
    auto const* const numbers = reinterpret_cast<half const*>(bytes);
    auto const* const odd     = reinterpret_cast<half const*>(bytes + 1);
    auto const* const table   = reinterpret_cast<std::int32_t const*>(bytes);
    auto const* const between = reinterpret_cast<std::int32_t const*>(bytes + 2);
    CHECK(refused({.data = odd, .table = table, .page_tokens = 1}).find("data is not aligned") != std::string::npos);
    CHECK(refused({.data = numbers, .table = between, .page_tokens = 1}).find("table is not") != std::string::npos);
}

} // namespace
