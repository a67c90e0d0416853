/// \file file_bytes.hpp: opening files named by the user: whole ones as bytes, and texts
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "file_error.hpp"

namespace runner
{

/// Read-only bytes together with what keeps them alive; copies share them.
struct file_bytes
{
    std::shared_ptr<void const> owner;
    std::span<std::byte const> bytes;
};

namespace detail
{

class file_descriptor
{
public:
    explicit file_descriptor(int number) noexcept
        : number_(number)
    {}
    file_descriptor(file_descriptor const&)            = delete;
    file_descriptor& operator=(file_descriptor const&) = delete;
    ~file_descriptor()
    {
        if (number_ >= 0) { ::close(number_); }
    }
    [[nodiscard]] int number() const noexcept { return number_; }

private:
    int number_;
};

/// A file opened for reading, and its status.
/// \throws file_error   it cannot be opened, or is a folder
class input_file
{
public:
    explicit input_file(std::string const& path, int more_flags = 0)
        : descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | more_flags))
    {
        if (number() < 0) { throw file_error(path, "cannot be opened", {}, std::strerror(errno)); }
        if (::fstat(number(), &status_) != 0) { throw file_error(path, "has no status", {}, std::strerror(errno)); }
        if (S_ISDIR(status_.st_mode)) { throw file_error(path, "is a folder, not a file"); }
    }

    [[nodiscard]] int number() const noexcept { return descriptor_.number(); }
    [[nodiscard]] bool is_regular() const noexcept { return S_ISREG(status_.st_mode); }
    [[nodiscard]] std::uint64_t size() const noexcept { return static_cast<std::uint64_t>(status_.st_size); }

private:
    file_descriptor descriptor_;
    struct ::stat status_
    {};
};

/// Reads up to `wanted.size()` bytes from the descriptor's place on; fewer only when the file ends there.
/// \param place   of the descriptor in the file, for messages
inline std::size_t read_fully(
    int descriptor, std::span<std::byte> wanted, std::string const& path, std::uint64_t place = 0)
{
    constexpr std::size_t largest_request = std::size_t{1} << 30; // Linux moves at most 2 GiB in one call
    std::size_t done                      = 0;
    while (done < wanted.size())
    {
        std::size_t const request = wanted.size() - done < largest_request ? wanted.size() - done : largest_request;
        ::ssize_t const got       = ::read(descriptor, wanted.data() + done, request);
        if (got < 0 && errno == EINTR) { continue; }
        if (got < 0) { throw file_error(path, "cannot be read", place + done, std::strerror(errno)); }
        if (got == 0) { break; }
        done += static_cast<std::size_t>(got);
    }
    return done;
}

/// Memory for file contents: not cleared first, and aligned for the widest vector loads.
[[nodiscard]] inline std::shared_ptr<std::byte> allocate_bytes(std::size_t size)
{
    constexpr auto alignment = std::align_val_t{64};
    auto* const start        = static_cast<std::byte*>(::operator new(size, alignment));
    return {start, [](std::byte* p) { ::operator delete(p, alignment); }};
}

inline file_bytes read_descriptor(int descriptor, std::size_t size, std::string const& path)
{
    auto memory = allocate_bytes(size);
    std::span<std::byte> const whole(memory.get(), size);
    std::size_t const got = read_fully(descriptor, whole, path);
    if (got != size)
    {
        throw file_error(
            path, "file shrank while it was read", got, joined(std::to_string(got), " bytes"), std::to_string(size));
    }
    return {std::move(memory), whole};
}

} // namespace detail

/// The bytes of a regular file of at most `most_bytes` bytes. Before anything is allocated the file must
/// begin with `magic`, so that a wrong file is refused at once however large it is.
/// \throws file_error   it cannot be opened, is no regular file, is larger than the limit, begins otherwise
[[nodiscard]] inline file_bytes load_file(std::string const& path, std::string_view magic, std::uint64_t most_bytes)
{
    // O_NONBLOCK: opening a pipe nobody writes to must be refused below, not wait for ever.
    detail::input_file const file(path, O_NONBLOCK);
    if (!file.is_regular()) { throw file_error(path, "is not a regular file"); }
    std::uint64_t const size = file.size();
    if (size > most_bytes || size > SIZE_MAX)
    {
        throw file_error(
            path, "file is too large", {}, joined(std::to_string(size), " bytes"), std::to_string(most_bytes));
    }

    std::string beginning(magic.size(), '\0');
    std::size_t const got = detail::read_fully(file.number(), std::as_writable_bytes(std::span(beginning)), path);
    if (std::string_view(beginning).substr(0, got) != magic)
    {
        throw file_error(
            path, joined("does not begin with ", quoted(magic)), 0, quoted(std::string_view(beginning).substr(0, got)));
    }
    if (::lseek(file.number(), 0, SEEK_SET) != 0)
    {
        throw file_error(path, "cannot be read from its start", {}, std::strerror(errno));
    }
    return detail::read_descriptor(file.number(), static_cast<std::size_t>(size), path);
}

/// The text of a file, or of a pipe to its end.
/// \throws file_error   it cannot be opened or read, or is a folder
[[nodiscard]] inline std::string read_text(std::string const& path)
{
    constexpr std::size_t request = std::size_t{1} << 16;
    detail::input_file const file(path);
    std::string text;
    for (std::size_t done = 0;; done = text.size())
    {
        text.resize(done + request);
        auto const wanted     = std::as_writable_bytes(std::span(text).subspan(done));
        std::size_t const got = detail::read_fully(file.number(), wanted, path, done);
        if (got < request)
        {
            text.resize(done + got);
            return text;
        }
    }
}

} // namespace runner
