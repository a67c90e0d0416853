#include <mdkv/core/workspace.hpp>

#include "support/host.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <doctest/doctest.h>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

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

namespace
{

/// Memory whose blocks are counted, and which may refuse.
struct counted_memory
{
    static constexpr std::size_t alignment = workspace::alignment;

    struct counts
    {
        std::size_t held = 0;
        std::size_t most = 0;
        int taken        = 0;
        bool refuses     = false;
    };
    counts* to;

    [[nodiscard]] void* allocate(std::size_t bytes) const
    {
        if (to->refuses) { throw std::bad_alloc{}; }
        ++to->taken;
        to->held += bytes;
        to->most = std::max(to->most, to->held);
        return ::operator new(bytes, std::align_val_t{alignment});
    }
    void release(void* data, std::size_t bytes) const noexcept
    {
        to->held -= bytes;
        ::operator delete(data, std::align_val_t{alignment});
    }
};

/// A call that takes `bytes` at once and writes all of them.
void use(workspace& scratch, std::size_t bytes)
{
    workspace::frame frame{scratch, "use"};
    auto* const all = frame.take<std::byte>(static_cast<index_t>(bytes));
    REQUIRE(frame.ready());
    std::memset(all, 1, bytes);
}

} // namespace

TEST_CASE("a workspace that grows takes what a call lacks, keeps it, and gives it all back at its end")
{
    counted_memory::counts all;
    {
        workspace scratch{counted_memory{&all}};
        CHECK(!scratch.counting());
        CHECK(scratch.size() == 0);
        CHECK(stage(scratch));
        CHECK(scratch.bytes() == 128);
        use(scratch, 6400);
        CHECK(all.held >= 6400); // one block
        CHECK(all.held <= 6400 + 6400 / 8);
        int const before = all.taken;
        for (int i = 0; i < 5; ++i)
        {
            use(scratch, 6400);
            CHECK(stage(scratch));
        }
        CHECK(all.taken == before);
        CHECK(scratch.size() == all.held);
    }
    CHECK(all.held == 0);
}

TEST_CASE("memory in use stays where it is while a workspace grows, and blocks become one when nothing is in use")
{
    counted_memory::counts all;
    workspace scratch{counted_memory{&all}};
    {
        workspace::frame state{scratch, "state"};
        auto* const kept = state.take<std::byte>(1000);
        REQUIRE(state.ready());
        std::memset(kept, 7, 1000);
        for (std::size_t const bytes : {640U, 64U, 64000U, 6400U}) { use(scratch, bytes); }
        for (int i = 0; i < 1000; ++i) { REQUIRE(kept[i] == std::byte{7}); }
        CHECK(all.most <= 1024 + 64000 + 64000 / 8); // smaller scratch went before larger came
    }
    use(scratch, 64);
    use(scratch, 1024 + 64000);
    int const before = all.taken;
    {
        workspace::frame state{scratch, "state"};
        static_cast<void>(state.take<std::byte>(1000));
        use(scratch, 64000);
    }
    CHECK(all.taken == before);
}

TEST_CASE("frames of a workspace that grows may end in any order")
{
    counted_memory::counts all;
    for (int round = 0; round < 100; ++round)
    {
        CAPTURE(round);
        support::source random{"frames in any order", round};
        workspace scratch{counted_memory{&all}};
        std::array<std::optional<workspace::frame>, 5> frames;
        std::array<std::byte*, 5> taken{};
        std::array<index_t, 5> sizes{};
        for (int step = 0; step < round; ++step)
        {
            auto const i       = static_cast<std::size_t>(random.below(5));
            index_t const size = random.below(3000);
            if (frames[i])
            {
                for (index_t b = 0; b < sizes[i]; ++b) { REQUIRE(taken[i][b] == std::byte(i + 1)); }
                frames[i].reset();
                continue;
            }
            sizes[i] = size;
            frames[i].emplace(scratch, "stage");
            taken[i] = frames[i]->take<std::byte>(size);
            REQUIRE(frames[i]->ready());
            std::fill_n(taken[i], size, std::byte(i + 1));
        }
    }
    CHECK(all.held == 0);
}

TEST_CASE("a workspace for which there is no memory throws, and serves smaller calls and later ones")
{
    counted_memory::counts all;
    workspace scratch{counted_memory{&all}};
    CHECK(stage(scratch));
    all.refuses = true;
    CHECK_THROWS_AS(use(scratch, 6400), std::bad_alloc);
    CHECK_THROWS_AS(scratch.expects_room("stage", 6400), std::bad_alloc);
    all.refuses = false;
    CHECK(stage(scratch));
    scratch.expects_room("stage", 6400);
    all.refuses = true;
    use(scratch, 6400); // had its room before
}

TEST_CASE("blocks become one before a call begins, so that no take of it can fail")
{
    counted_memory::counts all;
    workspace scratch{counted_memory{&all}};
    {
        workspace::frame state{scratch, "state"};
        static_cast<void>(state.take<std::byte>(1000));
        use(scratch, 6400);
    }
    scratch.expects_room("stage", 64);
    all.refuses = true;
    use(scratch, 64);
    use(scratch, 6400);
}
