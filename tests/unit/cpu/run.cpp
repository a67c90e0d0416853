#include <mdkv/cpu/backend.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "support/counting_job.hpp"
#include "support/message.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using support::byte_counts;
using support::count_bytes;
using support::message_of;

} // namespace

TEST_CASE("a job gives what plain loops give, for any number of threads")
{
    auto const bytes = support::some_bytes();
    alignas(workspace::alignment) std::array<std::byte, 1024> memory{};
    for (int threads : {1, 2, 5})
    {
        workspace scratch{memory};
        cpu::thread_pool pool{threads};
        byte_counts got;
        run(cpu::backend{&scratch, pool},
            count_bytes{bytes.data(), got.counts, got.odd, got.largest, got.before, &got.first_large}, 4);
        CHECK(got == support::count_plainly(bytes.data()));
    }
}

TEST_CASE("a dry run of a job counts its scratch memory and does nothing")
{
    workspace counting;
    run(cpu::backend{&counting}, count_bytes{}, 4);
    CHECK(counting.bytes() == 128);
    alignas(workspace::alignment) std::array<std::byte, 64> memory{};
    workspace small{memory};
    CHECK(message_of([&] { run(cpu::backend{&small}, count_bytes{}, 4); })
          == "count_bytes: the workspace holds 64 bytes, 128 are needed");
}

TEST_CASE("fill sets every object, over several items")
{
    alignas(workspace::alignment) std::array<std::byte, 64> memory{};
    workspace scratch{memory};
    std::vector<int> values(200'000, 1);
    mdkv::detail::fill<int> const job{values.data(), 7, 199'999};
    run(cpu::backend{&scratch}, job, job.items());
    CHECK(std::count(values.begin(), values.end(), 7) == 199'999);
    CHECK(values.back() == 1);
}
