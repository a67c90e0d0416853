// Linked into a benchmark that is compiled for an instruction set of its own: leaves before anything of it runs where the
// processor lacks that. Itself compiled for any processor.
#include <cstdio>
#include <cstring>

#include <unistd.h>

namespace
{

[[gnu::constructor(101)]] void leave_without_processor() // before the constructors of other globals
{
    __builtin_cpu_init();
    bool const v4    = std::strcmp(MDKV_BENCH_ARCH, "x86-64-v4") == 0;
    bool const v3    = v4 || std::strcmp(MDKV_BENCH_ARCH, "x86-64-v3") == 0;
    bool const lacks = (v3 && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")))
                       || (v4
                           && !(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
                                && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")));
    if (!lacks) { return; }
    std::puts("SKIPPED: this benchmark is compiled for " MDKV_BENCH_ARCH ", which this processor lacks");
    std::fflush(stdout);
    _exit(77);
}

} // namespace
