#include <mdkv/core/progress.hpp>

#include "support/host.hpp"

#include <doctest/doctest.h>

#include <stdexcept>
#include <string>

using namespace mdkv;

TEST_CASE("without a callback nothing ever stops")
{
    CHECK(progress_ref{}("score", 1, 6));
}

TEST_CASE("a callback hears stage, pieces done and pieces in all, and its answer is passed on")
{
    std::string heard;
    auto callback = [&](char const* stage, index_t done, index_t total) {
        heard += std::string{stage} + " " + std::to_string(done) + "/" + std::to_string(total) + ";";
        return done < 2;
    };
    progress_ref const progress{callback};
    progress_ref const copy = progress;
    CHECK(progress("score", 1, 6));
    CHECK_FALSE(copy("pool", 2, 6));
    CHECK(heard == "score 1/6;pool 2/6;");
}

TEST_CASE("a callback's exception passes through")
{
    auto callback = [](char const*, index_t, index_t) -> bool { throw std::runtime_error{"enough"}; };
    CHECK(support::error_text<std::runtime_error>([&] { static_cast<void>(progress_ref{callback}("score", 0, 1)); })
          == "enough");
}
