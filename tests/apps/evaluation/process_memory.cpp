#include "evaluation/process_memory.hpp"

#include <doctest/doctest.h>

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <unistd.h>

#include <mdkv/core/error.hpp>

#include "support/host.hpp"

namespace
{

constexpr std::int64_t mebi = 1024 * 1024;

/// Writes to every page of so many bytes.
void touch(std::int64_t bytes)
{
    std::vector<char> memory(static_cast<std::size_t>(bytes), 1);
    for (std::size_t i = 0; i < memory.size(); i += 4096) { static_cast<char volatile*>(memory.data())[i] = 2; }
}

/// How far a child's peak rises above what it began with.
std::int64_t growth_of(std::int64_t bytes)
{
    return std::stoll(runner::in_child_process([&] {
        auto const before = runner::memory_of_this_process();
        touch(bytes);
        return std::to_string(runner::memory_of_this_process().peak - before.anonymous - before.file);
    }));
}

} // namespace

TEST_CASE("a child's peak rises by what it touches, whatever was measured before it")
{
    // Not to the byte: the kernel keeps its counters in batches, and a sanitizer has memory of its own.
    auto const before = growth_of(0);
    CHECK(growth_of(64 * mebi) >= 60 * mebi);
    auto const after = growth_of(0);
    CHECK(before < 32 * mebi);
    CHECK(after < 32 * mebi);
}

TEST_CASE("a child returns what its body returns, of any length and content")
{
    std::string text(1 << 20, 'x');
    text += std::string{"\0\n", 2};
    CHECK(runner::in_child_process([&] { return text; }) == text);
    CHECK(runner::in_child_process([] { return std::string{}; }).empty());
}

TEST_CASE("what a child throws is thrown in the parent")
{
    auto const failing = [] {
        static_cast<void>(runner::in_child_process([]() -> std::string { throw std::runtime_error{"no such thing"}; }));
    };
    CHECK(support::error_text<mdkv::error>(failing) == "no such thing");
    CHECK_THROWS_AS(static_cast<void>(runner::in_child_process([]() -> std::string { throw runner::interrupted{}; })),
        runner::interrupted);
}

TEST_CASE("a child that is killed is told from one that fails")
{
    auto const killed = [] {
        static_cast<void>(runner::in_child_process([]() -> std::string {
            std::raise(SIGKILL);
            return "not reached";
        }));
    };
    CHECK(support::error_text<runner::child_ended>(killed).find("signal 9") != std::string::npos);
    auto const left = [] { static_cast<void>(runner::in_child_process([]() -> std::string { ::_exit(0); })); };
    CHECK(support::error_text<runner::child_ended>(left).find("without a result") != std::string::npos);
}
