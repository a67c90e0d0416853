#include <mdkv/comm/functions.hpp>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ranks.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/stages/allocate.hpp>

#include "support/allocation.hpp"
#include "support/host.hpp"
#include "support/message.hpp"
#include "support/random.hpp"
#include "support/ranks.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace
{

using namespace support;
using functions = mdkv::communicator_of_functions<mdkv::space::host>;

/// The C functions of a rank that is a thread.
functions functions_of(thread_rank const& of)
{
    functions made;
    made.context = const_cast<thread_rank*>(&of);
    made.number  = of.rank();
    made.count   = of.size();
    made.sum_of  = [](void* context, std::int64_t* x, std::int64_t n) {
        static_cast<thread_rank const*>(context)->sum(x, n);
        return 0;
    };
    made.least_of = [](void* context, std::uint64_t* x, std::int64_t n) {
        static_cast<thread_rank const*>(context)->least(x, n);
        return 0;
    };
    return made;
}

allocation allocated(layer const& in, index_t first, index_t heads, functions const* transport)
{
    allocation report;
    std::vector<std::uint8_t> rung(at(heads * in.tokens));
    functions const alone;
    support::run([&](mdkv::cpu::backend on) {
        mdkv::ranks const all{transport == nullptr ? alone : *transport, {first, in.heads}};
        on.ranks              = &all;
        index_t const limit   = 4000;
        float const* const at = in.loss.data() + first * in.rungs() * in.tokens;
        mdkv::allocate(on,
            {mdkv::in(on, at, heads, in.rungs(), in.tokens), mdkv::out(on, rung.data(), heads, in.tokens)}, in.costs(),
            mdkv::in(on, &limit, 1), {}, mdkv::out(on, &report, 1));
    });
    return report;
}

} // namespace

TEST_CASE("C functions are a transport, one rank calls none, and their errors are thrown")
{
    source random{"functions"};
    layer const in       = heavy_tailed(random, 3, 400, {0, 8, 64});
    allocation const one = allocated(in, 0, 3, nullptr);
    rank_team team{3};
    std::vector<allocation> reports(3);
    auto const errors = on_ranks(team, [&](thread_rank const& rank) {
        functions const transport = functions_of(rank);
        reports[at(rank.number)]  = allocated(in, rank.number, 1, &transport);
    });
    for (std::string const& error : errors) { CHECK(error == ""); }
    for (allocation const& report : reports) { CHECK(same(report, one)); }

    functions broken;
    std::int64_t number = 0;
    says(message_of([&] { broken.sum(&number, 1); }), "communicator_of_functions: sum_of is null");
    broken.sum_of = [](void*, std::int64_t*, std::int64_t) { return 7; };
    says(message_of([&] { broken.sum(&number, 1); }), "communicator_of_functions: sum_of returned 7");
}
