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
            float const* const values = stored.data_handle() + D;
            gpu::gather_pages(on,
                in(on, values, {pages, page_tokens, H, D}, {page_stride, token_stride, head_stride, 1}), table.in(),
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
    auto const refused = [&](half const* data, index_t page_tokens, std::int32_t const* table, index_t entries) {
        return support::error_text<invalid_argument>([&] {
            support::run_on_device([&](gpu::backend const& on) {
                gpu::gather_pages(on, in(on, data, 1, page_tokens, 1, 4), in(on, table, entries), rows.out());
            });
        });
    };
    alignas(4) char bytes[32]{};
    auto const* const numbers = reinterpret_cast<half const*>(bytes);
    auto const* const odd     = reinterpret_cast<half const*>(bytes + 1);
    auto const* const table   = reinterpret_cast<std::int32_t const*>(bytes + 16);
    auto const* const between = reinterpret_cast<std::int32_t const*>(bytes + 18);
    CHECK(refused(numbers, 0, table, 2).find("page_tokens = 0") != std::string::npos);
    CHECK(refused(numbers, 1, table, 1).find("table must be") != std::string::npos);
    CHECK(refused(nullptr, 1, table, 2).find("pages is null") != std::string::npos);
    CHECK(refused(odd, 1, table, 2).find("pages is not aligned") != std::string::npos);
    CHECK(refused(numbers, 1, between, 2).find("table is not aligned") != std::string::npos);
}

} // namespace
