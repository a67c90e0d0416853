#include "runner/terminal.hpp"

#include <doctest/doctest.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "support/standard_error.hpp"

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

TEST_CASE("where there is no terminal a bar is a line a minute, however many bars there are")
{
    auto const shown = [](std::chrono::milliseconds every) {
        auto const kept                   = runner::progress_bar::plain_every;
        runner::progress_bar::plain_every = every;
        auto const text                   = support::standard_error_of([] {
            for (int i = 1; i <= 3; ++i)
            {
                runner::progress_bar bar{"text " + std::to_string(i)};
                bar.show(i, 4);
            }
        });
        runner::progress_bar::plain_every = kept;
        return text;
    };
    CHECK(shown(std::chrono::milliseconds{0})
          == "text 1: 25 %, 0 s left\ntext 2: 50 %, 0 s left\ntext 3: 75 %, 0 s left\n");
    CHECK(shown(std::chrono::hours{1}).empty());
    CHECK(runner::progress_bar::plain_every == std::chrono::minutes{1});
}

TEST_CASE("sizes read as people say them")
{
    CHECK(runner::size_text(900) == "900 B");
    CHECK(runner::size_text(20 * 1024) == "20 KiB");
    CHECK(runner::size_text(2880 * 1024) == "2.8 MiB");
    CHECK(runner::size_text(std::int64_t{45} * 1024 * 1024) == "45.0 MiB");
    CHECK(runner::fixed(0.12345, 3) == "0.123");
}
