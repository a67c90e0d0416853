#include <mdkv/engine/gather.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/thread_pool.hpp>

#include "support/compare.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <vector>

namespace
{

using namespace mdkv;
using support::index_t;
using support::placement;
using support::tensor;

using page_table = tensor<std::int32_t, 1>;

page_table table_of(std::vector<std::int32_t> const& entries)
{
    page_table table{{static_cast<index_t>(entries.size())}};
    table.assign(entries);
    return table;
}

template <class T, std::size_t Rank>
tensor<T, Rank> random_tensor(char const* name, std::array<index_t, Rank> extents, placement how = {})
{
    support::source random{name};
    tensor<T, Rank> made{extents, how};
    std::vector<T> all;
    for (index_t i = 0; i < made.count(); ++i) { all.push_back(narrow<T>(static_cast<float>(random.normal()))); }
    made.assign(all);
    return made;
}

template <class T>
tensor<T, 3> gathered(tensor<T, 4> const& pages, page_table const& table, index_t tokens, placement how = {},
    cpu::executor_ref threads = {})
{
    tensor<T, 3> to{{pages.extent(2), tokens, pages.extent(3)}, how};
    support::run([&](cpu::backend const& on) { gather_pages(on, pages.in(), table.in(), to.out()); }, threads);
    return to;
}

} // namespace

TEST_CASE_TEMPLATE(
    "a token is the row of its page that the table names, whatever the page's length", T, float, half, bfloat16)
{
    cpu::thread_pool pool{3};
    for (index_t const page_tokens : {1, 3, 16})
    {
        for (index_t const tokens : {0, 1, 15, 16, 17, 47})
        {
            index_t const pages = 60;
            auto const stored = random_tensor<T, 4>("pages", {pages, page_tokens, 2, 24}, {.slack = 1, .misalign = 1});
            support::source random{"table"};
            std::vector<std::int32_t> entries;
            for (index_t i = 0; i < (tokens + page_tokens - 1) / page_tokens; ++i)
            {
                entries.push_back(static_cast<std::int32_t>(random.uniform(0.0, 59.9)));
            }
            auto const got = gathered(stored, table_of(entries), tokens, {.swapped = true, .slack = 3}, pool);
            int different  = 0;
            for (index_t h = 0; h < 2; ++h)
            {
                for (index_t t = 0; t < tokens; ++t)
                {
                    for (index_t d = 0; d < 24; ++d)
                    {
                        T const want =
                            stored.get(entries[static_cast<std::size_t>(t / page_tokens)], t % page_tokens, h, d);
                        different += widen(got.get(h, t, d)) == widen(want) ? 0 : 1;
                    }
                }
            }
            CAPTURE(page_tokens);
            CAPTURE(tokens);
            CHECK(different == 0);
        }
    }
}

TEST_CASE("a list of slots is a table of pages of one token: a permuted pool is read back in order")
{
    constexpr index_t H = 3, N = 50, D = 16, slots = 90;
    auto const tokens = random_tensor<half, 3>("tokens", {H, N, D});
    tensor<half, 3> pool{{slots, H, D}}; // as SGLang has it; slots in no list are NaN
    std::vector<std::int32_t> list;
    for (index_t t = 0; t < N; ++t)
    {
        index_t const slot = (t * 37 + 11) % slots; // 37 and 90 have no common factor
        list.push_back(static_cast<std::int32_t>(slot));
        for (index_t h = 0; h < H; ++h)
        {
            for (index_t d = 0; d < D; ++d) { pool.set(tokens.get(h, t, d), slot, h, d); }
        }
    }
    auto const table = table_of(list);
    tensor<half, 3> to{{H, N, D}};
    support::run(
        [&](cpu::backend const& on) { gather_pages(on, in(on, pool.data(), slots, 1, H, D), table.in(), to.out()); });
    CHECK(support::same_bits(to.elements(), tokens.elements()));
}

TEST_CASE("keys and values may share a page or a row, tokens or heads first")
{
    constexpr index_t H = 2, N = 11, D = 8, pages = 5, page_tokens = 4;
    auto const memory         = random_tensor<float, 1>("pages", {pages * page_tokens * H * 2 * D});
    auto const table          = table_of({4, 0, 2});
    index_t const page_stride = page_tokens * H * 2 * D;
    for (bool const heads_first : {false, true}) // [page, token, H, 2 D] and [page, H, token, 2 D]
    {
        index_t const token_stride = heads_first ? 2 * D : H * 2 * D;
        index_t const head_stride  = heads_first ? page_tokens * 2 * D : 2 * D;
        tensor<float, 3> to{{H, N, D}};
        support::run([&](cpu::backend const& on) {
            float const* const values = memory.data() + D; // behind the keys of their row
            gather_pages(on, in(on, values, {pages, page_tokens, H, D}, {page_stride, token_stride, head_stride, 1}),
                table.in(), to.out());
        });
        int different = 0;
        for (index_t h = 0; h < H; ++h)
        {
            for (index_t t = 0; t < N; ++t)
            {
                index_t const at = table.get(t / 4) * page_stride + t % 4 * token_stride + h * head_stride + D;
                for (index_t d = 0; d < D; ++d) { different += to.get(h, t, d) == memory.get(at + d) ? 0 : 1; }
            }
        }
        CHECK(different == 0);
    }
}

TEST_CASE("an entry that names no page gives rows of zeros")
{
    auto const stored = random_tensor<half, 4>("pages", {3, 2, 2, 8});
    auto const got    = gathered(stored, table_of({-1, 1, 3, 2147483647, 0}), 9);
    for (index_t t = 0; t < 9; ++t)
    {
        bool const there = t / 2 == 1 || t / 2 == 4;
        for (index_t d = 0; d < 8; ++d)
        {
            float const want = there ? widen(stored.get(t / 2 == 1 ? 1 : 0, t % 2, 1, d)) : 0.0F;
            CHECK(widen(got.get(1, t, d)) == want);
        }
    }
}
