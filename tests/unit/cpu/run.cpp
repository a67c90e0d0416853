#include <mdkv/cpu/backend.hpp>

#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "support/counting_job.hpp"

#include <algorithm>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace mdkv;
using support::byte_counts;
using support::count_bytes;

} // namespace

TEST_CASE("a job gives what plain loops give, for any number of threads")
{
    auto const bytes = support::some_bytes();
    for (int threads : {1, 2, 5})
    {
        workspace scratch{cpu::host_memory{}};
        cpu::thread_pool pool{threads};
        byte_counts got;
        run(cpu::backend{&scratch, pool},
            count_bytes{bytes.data(), got.counts, got.odd, got.largest, got.before, &got.first_large}, 4);
        CHECK(got == support::count_plainly(bytes.data()));
        CHECK(scratch.peak() == std::min(threads, 4) * 128); // for each thread that has an item
    }
}

TEST_CASE("fill sets every object, over several items")
{
    workspace scratch{cpu::host_memory{}};
    std::vector<int> values(200'000, 1);
    mdkv::detail::fill<int> const job{values.data(), 7, 199'999};
    run(cpu::backend{&scratch}, job, job.items());
    CHECK(std::count(values.begin(), values.end(), 7) == 199'999);
    CHECK(values.back() == 1);
}
