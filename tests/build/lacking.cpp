// A program that says it was compiled for everything there is, which no processor has: it must end before main.
#include <cstdio>

#include "runner/compiled_for.hpp"

#define MDKV_TEST_YES(name, macro) true,

bool const runner::compiled_for[] = {MDKV_RUNNER_FEATURES(MDKV_TEST_YES)};

int main()
{
    std::puts("main was reached");
}
