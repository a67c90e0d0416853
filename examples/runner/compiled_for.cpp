// Compiled as the program is that it belongs to.
#include "compiled_for.hpp"

#define MDKV_RUNNER_TEXT(macro) #macro // "1", or the macro's name where it is not defined
#define MDKV_RUNNER_HAS(name, macro) sizeof(MDKV_RUNNER_TEXT(macro)) == sizeof("1"),

constinit bool const runner::compiled_for[] = {MDKV_RUNNER_FEATURES(MDKV_RUNNER_HAS)};
