/// \file mpi.cpp: allocate over MPI's ranks beside one rank, bit for bit; and that a prompt's rank with another limit, a rank whose arguments
/// are refused and a rank that ends are errors of all.
///
///   mpiexec -n 3 mdkv_mpi_tests same|limit|refused|ends
#include <mdkv/core/error.hpp>
#include <mdkv/core/ranks.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/detail/ranks.hpp>
#include <mdkv/stages/allocate.hpp>

#include "examples/mpi.hpp"
#include "support/allocation.hpp"
#include "support/host.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace
{

using namespace support;

outcome allocated(layer const& in, index_t first, index_t heads, index_t limit, mdkv::ranks const* ranks)
{
    outcome result{std::vector<std::uint8_t>(at(heads * in.tokens)), std::vector<allocation>(1)};
    support::run([&](mdkv::cpu::backend const& on) {
        float const* const begin = in.loss.data() + first * in.rungs() * in.tokens;
        mdkv::allocate(on,
            {mdkv::in(on, begin, heads, in.rungs(), in.tokens), mdkv::out(on, result.rung.data(), heads, in.tokens)},
            in.costs(), mdkv::in(on, &limit, 1), {.ranks = ranks}, mdkv::out(on, result.report.data(), 1));
    });
    return result;
}

/// Returns an error's text, or nothing.
std::string checked(std::string const& mode, int rank, int size)
{
    MPI_Comm comm = MPI_COMM_WORLD;
    source random{"mpi"}; // the same on every rank
    for (int round = 0; round < 20; ++round)
    {
        index_t const heads = 1 + random.below(6);
        layer const in      = with_projections(random, heads, 1 + random.below(4000), 1 + random.below(5));
        index_t const limit = some_limit(random, in);
        std::vector<index_t> cuts{0, heads};
        for (int i = 1; i < size; ++i) { cuts.push_back(random.below(heads + 1)); }
        std::sort(cuts.begin(), cuts.end());
        index_t const first = cuts[at(rank)];
        index_t const count = cuts[at(rank + 1)] - first;
        mdkv::ranks const all{first, heads, sum_over_mpi, &comm};
        bool const other = rank == 1 && mode != "same";
        if (other && mode == "ends") { std::_Exit(3); }
        {
            mdkv::detail::agreement agreed{&all};
            mdkv::expects(!other || mode != "refused", "refused");
            agreed.settle("call", {&all, 1, count}, mdkv::detail::hash_of(other ? limit + 1 : limit));
        }
        outcome const part = allocated(in, first, count, limit, &all);
        outcome const one  = allocated(in, 0, heads, limit, nullptr);
        if (!same(part.one(), one.one())) { return "another report"; }
        if (!std::equal(part.rung.begin(), part.rung.end(), one.rung.begin() + first * in.tokens))
        {
            return "other rungs";
        }
    }
    return "";
}

} // namespace

int main(int count, char** arguments)
{
    MPI_Init(&count, &arguments);
    std::string const mode = count > 1 ? arguments[1] : "same";
    int rank = 0, size = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (rank == 0) { std::printf("random inputs: MDKV_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed())); }
    std::string text;
    try
    {
        text = checked(mode, rank, size);
    }
    catch (mdkv::error const& error)
    {
        text = error.what();
    }
    char const* const wanted = mode == "limit"                  ? "call: ranks differ in"
                               : mode == "refused" && rank == 1 ? "refused"
                               : mode == "refused"              ? "call: another rank refuses its arguments"
                                                                : "";
    bool const good          = *wanted == '\0' ? text.empty() : text.find(wanted) != std::string::npos;
    if (!good) { std::printf("rank %d, %s: \"%s\" instead of \"%s\"\n", rank, mode.c_str(), text.c_str(), wanted); }
    MPI_Finalize();
    return good ? 0 : 1;
}
