#include <mdkv/engine/gather.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/gpu/backend.cuh>

#include "gpu/support/device.hpp"
#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using mdkv::half; // CUDA has a type of that name in the global namespace
using support::device_tensor;
using support::index_t;
using support::tensor;

TEST_CASE_TEMPLATE("rows out of pages are on the GPU those of the CPU, bit for bit, pages that are not there included",
    T, float, half, bfloat16)
{
    support::source random{"gpu/gather"};
    for (index_t const page_tokens : {1, 4, 16})
    {
        for (index_t const dim : {7, 40, 128})
        {
            tensor<T, 4> memory{{12, page_tokens, 2, dim}, {.slack = 3}};
            std::vector<T> numbers;
            for (index_t i = 0; i < memory.count(); ++i)
            {
                numbers.push_back(narrow<T>(static_cast<float>(random.normal())));
            }
            memory.assign(numbers);
            index_t const tokens = 5 * page_tokens + page_tokens / 2;
            tensor<std::int32_t, 1> order{{(tokens + page_tokens - 1) / page_tokens}};
            std::vector<std::int32_t> const entries{4, 0, -1, 12, 11, 3};
            order.assign(entries);
            tensor<T, 3> want{{2, tokens, dim}};
            support::run([&](cpu::backend const& on) { gather_pages(on, memory.in(), order.in(), want.out()); });
            device_tensor<T, 4> const stored{memory};
            device_tensor<std::int32_t, 1> const table{order};
            device_tensor<T, 3> rows{{2, tokens, dim}, {.swapped = true, .slack = 3}};
            support::run_on_device(
                [&](gpu::backend const& on) { gather_pages(on, stored.in(), table.in(), rows.out()); });
            CAPTURE(page_tokens);
            CAPTURE(dim);
            CHECK(support::same_bits(rows.elements(), want.elements()));
        }
    }
}

} // namespace
