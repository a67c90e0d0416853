/// \file process_memory.hpp: what a piece of work takes at its peak, measured in a process of its own
#pragma once

#include <mdkv/core/error.hpp>

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>

#include <sys/wait.h>
#include <unistd.h>
#ifdef __GLIBC__
#    include <malloc.h>
#endif

#include "runner/terminal.hpp"

namespace runner
{

/// Resident bytes of this process as the kernel counts them.
struct process_memory
{
    std::int64_t peak      = 0; // since the process began
    std::int64_t anonymous = 0; // now, of the heap and the stacks
    std::int64_t file      = 0; // now, of the program and of files mapped into memory
};

/// \throws mdkv::error   the kernel does not tell
[[nodiscard]] inline process_memory memory_of_this_process()
{
    std::string const path = "/proc/self/status";
    std::ifstream status{path};
    process_memory found;
    int fields = 0;
    for (std::string line; std::getline(status, line);)
    {
        std::size_t const colon = line.find(':');
        std::string const key   = line.substr(0, colon);
        std::int64_t* const to  = key == "VmHWM"     ? &found.peak
                                  : key == "RssAnon" ? &found.anonymous
                                  : key == "RssFile" ? &found.file
                                                     : nullptr;
        if (to == nullptr) { continue; }
        std::size_t const digits = line.find_first_of("0123456789", colon);
        std::int64_t kibibytes   = 0;
        bool const read =
            digits != std::string::npos
            && std::from_chars(line.data() + digits, line.data() + line.size(), kibibytes).ec == std::errc{};
        fields += read ? 1 : 0;
        *to = 1024 * kibibytes;
    }
    if (fields != 3) { throw mdkv::error{path + ": the kernel does not tell VmHWM, RssAnon and RssFile"}; }
    return found;
}

/// The process that did the work came to an end of its own, as when the kernel runs out of memory.
struct child_ended : mdkv::error
{
    using error::error;
};

namespace detail
{

inline constexpr char child_result  = 'r';
inline constexpr char child_failure = 'f';
inline constexpr char child_stopped = 's';

inline void write_all(int file, std::string_view text) noexcept
{
    while (!text.empty())
    {
        ssize_t const written = ::write(file, text.data(), text.size());
        if (written < 0 && errno != EINTR) { return; }
        if (written > 0) { text.remove_prefix(static_cast<std::size_t>(written)); }
    }
}

[[nodiscard]] inline std::string read_all(int file)
{
    std::string text;
    char piece[1 << 12];
    while (true)
    {
        ssize_t const got = ::read(file, piece, sizeof piece);
        if (got < 0 && errno == EINTR) { continue; }
        if (got <= 0) { return text; }
        text.append(piece, static_cast<std::size_t>(got));
    }
}

/// The child's part: the result, or what was thrown, then the end without any of the parent's cleaning up.
template <class Body>
[[noreturn]] void run_child(Body const& body, int to)
{
    std::string text;
    try
    {
        text = child_result + body();
    }
    catch (interrupted const&)
    {
        text = child_stopped;
    }
    catch (std::exception const& problem)
    {
        text = std::string{child_failure} + problem.what();
    }
    write_all(to, text);
    ::close(to);
    std::fflush(stderr);
    ::_exit(0);
}

} // namespace detail

/// The text that `body()` returns, called in a copy of this process. A process's peak never falls, but that of a copy
/// begins at what the copy holds, so that one measurement does not see the one before it. The copy has the calling thread
/// alone: body must not use a thread pool that was made outside of it.
///
/// \throws interrupted   body threw it
/// \throws mdkv::error   with the message of whatever else body threw; child_ended if the copy was killed
template <class Body>
[[nodiscard]] std::string in_child_process(Body const& body)
{
#ifdef __GLIBC__
    ::malloc_trim(0); // freed pages of earlier work would count as the copy's
#endif
    int ends[2];
    if (::pipe(ends) != 0) { throw mdkv::error{std::string{"a pipe cannot be made: "} + std::strerror(errno)}; }
    std::fflush(nullptr); // or the copy would write it again
    pid_t const child = ::fork();
    if (child < 0)
    {
        ::close(ends[0]);
        ::close(ends[1]);
        throw mdkv::error{std::string{"the process cannot be copied: "} + std::strerror(errno)};
    }
    if (child == 0)
    {
        ::close(ends[0]);
        detail::run_child(body, ends[1]);
    }
    ::close(ends[1]);
    std::string text = detail::read_all(ends[0]);
    ::close(ends[0]);
    int status = 0;
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    if (WIFSIGNALED(status))
    {
        int const signal = WTERMSIG(status);
        throw child_ended{"the measuring process was ended by signal " + std::to_string(signal) + " ("
                          + ::strsignal(signal) + "); for lack of memory, perhaps"};
    }
    if (text.empty()) { throw child_ended{"the measuring process ended without a result"}; }
    char const kind = text.front();
    text.erase(0, 1);
    if (kind == detail::child_stopped) { throw interrupted{}; }
    if (kind == detail::child_failure) { throw mdkv::error{text}; }
    return text;
}

} // namespace runner
