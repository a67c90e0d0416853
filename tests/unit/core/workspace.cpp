#include <mdkv/core/workspace.hpp>

#include "support/host.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>

namespace
{

using namespace mdkv;
using support::error_text;

/// What a stage does with its workspace, in small: two arrays, of 10 floats and of 3 doubles.
bool stage(workspace& scratch)
{
    workspace::frame frame{scratch, "stage"};
    auto* const a = frame.take<float>(10);
    auto* const b = frame.take<double>(3);
    if (!frame.ready()) { return false; }
    for (int i = 0; i < 10; ++i) { a[i] = 1.0F; }
    for (int i = 0; i < 3; ++i) { b[i] = 2.0; }
    return a[9] == 1.0F;
}

} // namespace

TEST_CASE("a workspace cannot be copied: two would hand out the same memory")
{
    CHECK(!std::is_copy_constructible_v<workspace>);
    CHECK(!std::is_copy_assignable_v<workspace>);
}

TEST_CASE("a dry run counts whole cache lines and does no work")
{
    workspace count;
    CHECK(count.counting());
    CHECK_FALSE(stage(count));
    CHECK(count.bytes() == 64 + 64);
}

TEST_CASE("the size of the dry run is enough, and one byte less is an error that names both sizes")
{
    workspace count;
    stage(count);
    alignas(workspace::alignment) std::array<std::byte, 256> memory{};
    workspace exact{std::span{memory}.first(count.bytes())};
    CHECK(stage(exact));
    workspace small{std::span{memory}.first(count.bytes() - 1)};
    CHECK(error_text<insufficient_workspace>([&] { stage(small); })
          == "stage: the workspace holds 127 bytes, 128 are needed");
    workspace none{std::span<std::byte>{}};
    CHECK(error_text<insufficient_workspace>([&] { stage(none); })
          == "stage: the workspace holds 0 bytes, 128 are needed");
}

TEST_CASE("what a frame takes is aligned and lies apart")
{
    alignas(workspace::alignment) std::array<std::byte, 512> memory{};
    workspace scratch{memory};
    workspace::frame frame{scratch, "stage"};
    auto* const a = frame.take<char>(1);
    auto* const b = frame.take<double>(1);
    auto* const c = frame.take<float>(17);
    REQUIRE(frame.ready());
    for (void* const p : {static_cast<void*>(a), static_cast<void*>(b), static_cast<void*>(c)})
    {
        CHECK(reinterpret_cast<std::uintptr_t>(p) % workspace::alignment == 0);
    }
    CHECK(reinterpret_cast<std::byte*>(b) - reinterpret_cast<std::byte*>(a) == 64);
    CHECK(reinterpret_cast<std::byte*>(c) - reinterpret_cast<std::byte*>(b) == 64);
}

TEST_CASE("a frame gives its memory back, and nested frames add up")
{
    workspace count;
    {
        workspace::frame outer{count, "outer"};
        static_cast<void>(outer.take<std::byte>(64));
        {
            workspace::frame inner{count, "inner"};
            static_cast<void>(inner.take<std::byte>(128));
        }
        {
            workspace::frame inner{count, "inner"};
            static_cast<void>(inner.take<std::byte>(64));
        }
    }
    {
        workspace::frame later{count, "later"};
        static_cast<void>(later.take<std::byte>(64));
    }
    CHECK(count.bytes() == 192);
    alignas(workspace::alignment) std::array<std::byte, 128> memory{};
    workspace scratch{memory};
    for (int i = 0; i < 3; ++i) { CHECK(stage(scratch)); }
}

TEST_CASE("frames may end in any order: memory in use is never given twice, and all of it comes back")
{
    alignas(workspace::alignment) std::array<std::byte, 512> memory{};
    for (int order = 0; order < 6; ++order)
    {
        CAPTURE(order);
        int const last   = order % 3;
        int const first  = order < 3 ? (last + 1) % 3 : (last + 2) % 3;
        int const middle = 3 - first - last;
        workspace scratch{memory};
        std::array<std::optional<workspace::frame>, 4> frames;
        std::array<std::byte*, 4> taken{};
        auto const begin = [&](std::size_t i) {
            frames[i].emplace(scratch, "stage");
            taken[i] = frames[i]->take<std::byte>(64);
            REQUIRE(frames[i]->ready());
        };
        for (std::size_t i = 0; i < 3; ++i) { begin(i); }
        for (int const ends : {first, middle})
        {
            frames[static_cast<std::size_t>(ends)].reset();
            begin(3);
            for (std::size_t i = 0; i < 3; ++i) { CHECK((!frames[i] || taken[i] != taken[3])); }
            frames[3].reset();
        }
        frames[static_cast<std::size_t>(last)].reset();
        CHECK(scratch.free_memory().size() == memory.size());
    }
}

TEST_CASE("a workspace that was too small can be used again for a smaller call")
{
    alignas(workspace::alignment) std::array<std::byte, 128> memory{};
    workspace scratch{memory};
    auto const too_large = [&] {
        workspace::frame frame{scratch, "stage"};
        static_cast<void>(frame.take<std::byte>(1000));
        static_cast<void>(frame.ready());
    };
    CHECK_THROWS_AS(too_large(), insufficient_workspace);
    CHECK(stage(scratch));
}

TEST_CASE("misaligned memory is refused, with the offset")
{
    alignas(workspace::alignment) std::array<std::byte, 256> memory{};
    CHECK(error_text<invalid_argument>([&] { workspace{std::span{memory}.subspan(8)}; })
          == "workspace: memory must be aligned to 64 bytes; it is off by 8");
}

TEST_CASE("a count whose bytes leave 64 bits is refused")
{
    workspace count;
    workspace::frame frame{count, "stage"};
    CHECK_THROWS_AS(static_cast<void>(frame.take<double>(INT64_MAX / 4)), size_overflow);
}

TEST_CASE("counts near the end of 64 bits never wrap to a small need")
{
    alignas(workspace::alignment) std::array<std::byte, 128> memory{};
    workspace scratch{memory};
    workspace::frame frame{scratch, "stage"};
    auto const outcome = error_text<invalid_argument>([&] {
        for (int i = 0; i < 3; ++i) { static_cast<void>(frame.take<std::byte>(INT64_MAX - 100)); }
        static_cast<void>(frame.ready());
    });
    CAPTURE(outcome);
    CHECK(outcome != "threw nothing");
}
