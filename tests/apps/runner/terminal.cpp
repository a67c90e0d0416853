#include "runner/terminal.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <string>

TEST_CASE("a table's columns are as wide as their widest cell; the first is set to the left, the others to the right")
{
    runner::table t{{"policy", "KL"}};
    t.add({"a", "0.25"});
    t.add({"longer one", "1"});
    CHECK(t.text()
          == "policy        KL\n"
             "----------------\n"
             "a           0.25\n"
             "longer one     1\n");
}

TEST_CASE("sizes read as people say them")
{
    CHECK(runner::size_text(900) == "900 B");
    CHECK(runner::size_text(20 * 1024) == "20 KiB");
    CHECK(runner::size_text(std::int64_t{45} * 1024 * 1024) == "45.0 MiB");
    CHECK(runner::fixed(0.12345, 3) == "0.123");
}
