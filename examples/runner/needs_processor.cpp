// Linked into a program that is compiled for some instructions: ends it, saying why, before anything of it runs where the
// processor lacks them. Itself compiled for any processor.
#include <cstddef>
#include <cstdio>

#include <unistd.h>

#include "compiled_for.hpp"

namespace
{

#if defined(__x86_64__)

struct feature
{
    char const* name;
    bool there;
};

[[gnu::constructor(101)]] void end_without_processor() // before the constructors of other globals
{
    __builtin_cpu_init();
#    define MDKV_RUNNER_THERE(name, macro) {name, __builtin_cpu_supports(name) != 0},
    feature const features[] = {MDKV_RUNNER_FEATURES(MDKV_RUNNER_THERE)};
    std::size_t lacking      = 0;
    for (std::size_t i = 0; i < sizeof(features) / sizeof(features[0]); ++i)
    {
        if (!runner::compiled_for[i] || features[i].there) { continue; }
        if (lacking++ == 0)
        {
            std::fputs("this program is compiled for instructions that this processor lacks:", stderr);
        }
        std::fprintf(stderr, " %s", features[i].name);
    }
    if (lacking == 0) { return; }
    std::fputs("\nCompile it for this one (-DMDKV_ARCH=native).\n", stderr);
    _exit(77);
}

#endif

} // namespace
