// The version as the preprocessor sees it. That the installed package, the pkg-config file and CHANGELOG.md say the same is
// checked by the projects in tests/build/consumer and by tests/build/packaging/release.py.
#include <mdkv/core/version.hpp>

#include <doctest/doctest.h>

#if !(MDKV_VERSION >= 200) || MDKV_VERSION >= 1000000
#    error "MDKV_VERSION cannot be compared by the preprocessor"
#endif

TEST_CASE("version: the number holds major, minor and patch, two digits each")
{
    CHECK(MDKV_VERSION / 10000 == MDKV_VERSION_MAJOR);
    CHECK(MDKV_VERSION / 100 % 100 == MDKV_VERSION_MINOR);
    CHECK(MDKV_VERSION % 100 == MDKV_VERSION_PATCH);
}
