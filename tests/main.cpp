// The one place that compiles doctest's own code. `--seed=<n>` or MDKV_TEST_SEED changes the random inputs of every test.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "support/random.hpp"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

int main(int argc, char** argv)
{
    for (int i = 1; i < argc; ++i)
    {
        std::string_view const argument{argv[i]};
        if (argument.starts_with("--seed="))
        {
            setenv("MDKV_TEST_SEED", argv[i] + std::string_view{"--seed="}.size(), 1);
        }
    }
    std::string const seed = std::to_string(support::seed());
    std::printf("random inputs: MDKV_TEST_SEED=%s\n", seed.c_str());
    std::fflush(stdout);
    return doctest::Context{argc, argv}.run();
}
