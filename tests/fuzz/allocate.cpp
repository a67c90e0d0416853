/// \file allocate.cpp: fuzzes allocate with any bits as losses, against all choices of some tokens
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include <fuzzer/FuzzedDataProvider.h>

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/stages/allocate.hpp>

#include "support/allocation.hpp"

namespace
{

using namespace support;
using mdkv::allocation_status;

void expect(bool what)
{
    if (!what) { std::abort(); }
}

outcome solve(layer const& given, index_t limit)
{
    outcome result{std::vector<std::uint8_t>(at(given.heads * given.tokens), 0xAA), std::vector<allocation>(1)};
    auto const call = [&](mdkv::cpu::backend const& on) {
        mdkv::allocate(on,
            {mdkv::in(on, given.loss.data(), given.heads, given.rungs(), given.tokens),
                mdkv::out(on, result.rung.data(), given.heads, given.tokens)},
            given.costs(), mdkv::in(on, &limit, 1), {}, mdkv::out(on, result.report.data(), 1));
    };
    mdkv::workspace scratch{mdkv::cpu::host_memory{}};
    call(mdkv::cpu::backend{&scratch});
    return result;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size)
{
    FuzzedDataProvider any{data, size};
    auto const rungs = any.ConsumeIntegralInRange<index_t>(1, 5);
    std::vector<index_t> costs{any.ConsumeIntegralInRange<index_t>(0, 3)};
    for (index_t r = 1; r < rungs; ++r) { costs.push_back(costs.back() + any.ConsumeIntegralInRange<index_t>(1, 600)); }
    layer given{any.ConsumeIntegralInRange<index_t>(1, 2), any.ConsumeIntegralInRange<index_t>(0, 40), costs};
    auto const limit = any.ConsumeIntegralInRange<index_t>(0, given.most() + 2);
    bool finite      = true;
    for (float& x : given.loss)
    {
        auto const bits = any.ConsumeIntegral<std::uint32_t>();
        x               = __builtin_bit_cast(float, bits);
        finite          = finite && std::isfinite(x);
    }
    outcome const got   = solve(given, limit);
    allocation const& a = got.one();
    expect(same(got, solve(given, limit)));
    if (a.status == allocation_status::over_limit || a.status == allocation_status::non_finite_loss) { return 0; }
    expect(finite || given.tokens == 0 || a.status != allocation_status::optimal || rungs == 1);
    index_t bytes = 0;
    for (std::uint8_t const r : got.rung)
    {
        expect(r < rungs);
        bytes += costs[r];
    }
    expect(bytes <= limit && bytes == a.token_bytes);
    index_t choices = 1;
    for (std::size_t i = 0; i < got.rung.size() && choices <= 4096; ++i) { choices *= rungs; }
    bool moderate = finite; // sums of such losses are exact enough to compare
    for (float const x : given.loss) { moderate = moderate && std::fabs(x) < 1e30F; }
    if (choices > 4096 || !moderate || got.rung.empty()) { return 0; }
    account const own = count(given, got.rung);
    real best         = own.loss;
    std::vector<std::uint8_t> every(got.rung.size(), 0);
    for (bool more = true; more;)
    {
        account const other = count(given, every);
        if (other.bytes <= own.bytes) { best = std::min(best, other.loss); }
        std::size_t digit = 0;
        while (digit < every.size() && every[digit] + 1 == rungs) { every[digit++] = 0; }
        more = digit < every.size();
        if (more) { ++every[digit]; }
    }
    real magnitude = 0;
    for (float const x : given.loss) { magnitude += std::fabs(real{x}); }
    expect(own.loss <= best + 1e-5 * magnitude + 1e-30);
    return 0;
}
