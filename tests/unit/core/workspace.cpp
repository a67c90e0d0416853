#include <mdkv/core/workspace.hpp>

#include "support/host.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <doctest/doctest.h>
#include <new>
#include <optional>
#include <type_traits>

namespace
{

using namespace mdkv;

/// What a stage does with its workspace, in small: two arrays, of 10 floats and of 3 doubles.
bool stage(workspace& scratch)
{
    workspace::frame frame{scratch};
    auto* const a = frame.take<float>(10);
    auto* const b = frame.take<double>(3);
    for (int i = 0; i < 10; ++i) { a[i] = 1.0F; }
    for (int i = 0; i < 3; ++i) { b[i] = 2.0; }
    return a[9] == 1.0F;
}

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
    workspace::frame frame{scratch};
    auto* const all = frame.take<std::byte>(static_cast<index_t>(bytes));
    std::memset(all, 1, bytes);
}

} // namespace

TEST_CASE("a workspace cannot be copied: two would hand out the same memory")
{
    CHECK(!std::is_copy_constructible_v<workspace>);
    CHECK(!std::is_copy_assignable_v<workspace>);
}

TEST_CASE("what a frame takes is aligned and lies apart, in whole cache lines, and nothing is null")
{
    counted_memory::counts all;
    workspace scratch{counted_memory{&all}};
    for (int round = 0; round < 2; ++round) // of several blocks, then of one
    {
        workspace::frame frame{scratch};
        auto* const a = frame.take<char>(1);
        auto* const b = frame.take<double>(1);
        auto* const c = frame.take<float>(17);
        for (void* const p : {static_cast<void*>(a), static_cast<void*>(b), static_cast<void*>(c)})
        {
            CHECK(reinterpret_cast<std::uintptr_t>(p) % workspace::alignment == 0);
        }
        CHECK(std::abs(reinterpret_cast<std::byte*>(b) - reinterpret_cast<std::byte*>(a)) >= 64);
        CHECK(std::abs(reinterpret_cast<std::byte*>(c) - reinterpret_cast<std::byte*>(b)) >= 64);
        CHECK(frame.take<double>(0) != nullptr);
        CHECK(frame.take<double>(-1) != nullptr);
    }
    CHECK(scratch.peak() == 64 + 64 + 128);
    CHECK(scratch.held() == 64 + 64 + 128);
}

TEST_CASE("a frame gives its memory back, and the peak is what nested frames held together")
{
    counted_memory::counts all;
    workspace count{counted_memory{&all}};
    CHECK(count.peak() == 0);
    {
        workspace::frame outer{count};
        static_cast<void>(outer.take<std::byte>(64));
        use(count, 128);
        use(count, 64);
    }
    use(count, 64);
    CHECK(count.peak() == 192);
    CHECK(count.held() == 192);
}

TEST_CASE("a count whose bytes leave 64 bits is refused, and counts near their end never wrap to a small need")
{
    counted_memory::counts all;
    workspace scratch{counted_memory{&all}};
    workspace::frame frame{scratch};
    static_cast<void>(frame.take<std::byte>(64));
    all.refuses = true;
    CHECK_THROWS_AS(static_cast<void>(frame.take<double>(INT64_MAX / 4)), size_overflow);
    CHECK_THROWS_AS(static_cast<void>(frame.take<std::byte>(INT64_MAX)), size_overflow);
    CHECK_THROWS_AS(static_cast<void>(frame.take<std::byte>(INT64_MAX - 100)), std::bad_alloc);
    CHECK(scratch.peak() == 64);
}

TEST_CASE("a workspace takes what a call lacks, keeps it, and gives it all back at its end")
{
    counted_memory::counts all;
    {
        workspace scratch{counted_memory{&all}};
        CHECK(scratch.held() == 0);
        CHECK(stage(scratch));
        CHECK(scratch.peak() == 128);
        use(scratch, 6400);
        CHECK(all.held == 6400); // one block
        int const before = all.taken;
        for (int i = 0; i < 5; ++i)
        {
            use(scratch, 6400);
            CHECK(stage(scratch));
        }
        CHECK(all.taken == before);
        CHECK(scratch.held() == 6400);
    }
    CHECK(all.held == 0);
}

TEST_CASE("memory in use stays where it is while a workspace grows, and free blocks become one")
{
    counted_memory::counts all;
    workspace scratch{counted_memory{&all}};
    {
        workspace::frame state{scratch};
        auto* const kept = state.take<std::byte>(1000);
        std::memset(kept, 7, 1000);
        for (std::size_t const bytes : {640U, 64U, 64000U, 6400U}) { use(scratch, bytes); }
        for (int i = 0; i < 1000; ++i) { REQUIRE(kept[i] == std::byte{7}); }
        CHECK(all.most == 1024 + 64000); // smaller scratch went before larger came
    }
    CHECK(scratch.held() == 1024 + 64000);
    int const before = all.taken;
    use(scratch, 64);
    use(scratch, 1024 + 64000);
    {
        workspace::frame state{scratch};
        static_cast<void>(state.take<std::byte>(1000));
        use(scratch, 64000);
    }
    CHECK(all.taken == before);
}

TEST_CASE("any calls that were made before need no memory when they are made again, in frames that end in any order")
{
    counted_memory::counts all;
    for (int round = 0; round < 100; ++round)
    {
        CAPTURE(round);
        workspace scratch{counted_memory{&all}};
        int taken_before = 0;
        for (int turn = 0; turn < 2; ++turn)
        {
            support::source random{"frames in any order", round};
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
                frames[i].emplace(scratch);
                taken[i] = frames[i]->take<std::byte>(size);
                std::fill_n(taken[i], size, std::byte(i + 1));
            }
            for (auto& frame : frames) { frame.reset(); }
            CHECK(scratch.held() >= scratch.peak());
            CHECK(scratch.held() <= scratch.peak() / 8 * 9);
            CHECK((turn == 0 || all.taken == taken_before));
            taken_before = all.taken;
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
    all.refuses = false;
    CHECK(stage(scratch));
    use(scratch, 6400);
    all.refuses = true;
    use(scratch, 6400); // had its room before
    CHECK(stage(scratch));
}

TEST_CASE(
    "free blocks for whose one block there is no memory are given back; what calls needed can be held before another")
{
    counted_memory::counts all;
    workspace scratch{counted_memory{&all}};
    {
        workspace::frame frame{scratch};
        static_cast<void>(frame.take<std::byte>(64));
        static_cast<void>(frame.take<std::byte>(640));
        all.refuses = true;
    }
    CHECK(all.held == 0);
    CHECK_THROWS_AS(scratch.hold_peak(), std::bad_alloc);
    all.refuses = false;
    scratch.hold_peak();
    CHECK(scratch.held() == 704);
    all.refuses = true;
    use(scratch, 704);
}
