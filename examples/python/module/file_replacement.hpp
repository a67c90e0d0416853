/// \file file_replacement.hpp: a file that is written under another name and then takes the place of an old one at once
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace mdkv_python
{

/// A file that cannot be written: its path, the reason, and how many bytes were written before.
struct file_error : std::runtime_error
{
    file_error(std::string const& path, char const* what, std::optional<std::size_t> written = {},
        char const* reason = nullptr)
        : std::runtime_error{path + ": " + what + (written ? " at byte " + std::to_string(*written) : "")
                             + (reason != nullptr ? std::string{": "} + reason : "")}
    {}
};

/// Whatever ends the process, and at whichever byte, the path names the old file or the whole new one. Symbolic links stay: the
/// file at their end is replaced, or made if there is none. A device, a pipe or a terminal stays, too, and takes the bytes as
/// they come.
class file_replacement
{
public:
    /// Makes the temporary file, mdkv-PROCESS-NUMBER, in the folder of the file that is replaced.
    /// \param mode   permissions of the new file, without those that the umask takes away: by default its owner's alone,
    ///               because a cache holds a conversation
    /// \throws file_error   the path names a folder or a socket, or a pipe that no process reads; the file cannot be made
    explicit file_replacement(std::string const& path, ::mode_t mode = S_IRUSR | S_IWUSR)
        : path_{path}
    {
        struct ::stat old = {};
        bool const there  = ::stat(path.c_str(), &old) == 0;
        if (!there && (errno != ENOENT || path.empty())) { fails("cannot be made"); }
        if (S_ISDIR(old.st_mode)) { throw file_error{path_, "is a folder, not a file"}; }
        if (there && !S_ISREG(old.st_mode)) { pass_on(old.st_mode); }
        else { make_beside(mode); }
    }
    file_replacement(file_replacement const&)            = delete;
    file_replacement& operator=(file_replacement const&) = delete;
    /// Removes the temporary file unless it was committed.
    ~file_replacement()
    {
        if (descriptor_ < 0) { return; }
        ::close(descriptor_);
        if (!temporary_.empty()) { ::unlink(temporary_.c_str()); }
    }

    /// \throws file_error   the disk is full, or it fails otherwise
    void write(std::span<std::byte const> bytes)
    {
        while (!bytes.empty())
        {
            ::ssize_t const done = ::write(descriptor_, bytes.data(), bytes.size());
            if (done < 0 && errno == EINTR) { continue; }
            if (done < 0) { throw file_error{path_, "cannot be written", written_, std::strerror(errno)}; }
            bytes = bytes.subspan(static_cast<std::size_t>(done));
            written_ += static_cast<std::size_t>(done);
        }
    }

    /// Waits until the bytes are on the disk, and renames. A committed file takes no more bytes.
    /// \throws file_error   a step fails; before the renaming the old file is still there
    void commit()
    {
        if (::fsync(descriptor_) != 0 && errno != EINVAL) { fails("cannot be synced"); } // pipes have nothing to sync
        if (!temporary_.empty() && ::rename(temporary_.c_str(), path_.c_str()) != 0) { fails("cannot be replaced"); }
        ::close(std::exchange(descriptor_, -1));
        if (temporary_.empty()) { return; }
        int const number = ::open(folder().empty() ? "." : folder().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (number < 0) { return; } // the name may be lost with the power, the file is whole in either case
        ::fsync(number);
        ::close(number);
    }

private:
    [[noreturn]] void fails(char const* what) const { throw file_error{path_, what, {}, std::strerror(errno)}; }
    [[nodiscard]] std::filesystem::path folder() const { return std::filesystem::path{path_}.parent_path(); }

    /// Follows the links and makes the temporary file.
    void make_beside(::mode_t mode)
    {
        for (std::error_code ended; !ended;)
        {
            auto const target = std::filesystem::read_symlink(path_, ended);
            if (!ended) { path_ = (folder() / target).string(); }
        }
        for (int number = 0; descriptor_ < 0; ++number)
        {
            auto const name = "mdkv-" + std::to_string(::getpid()) + "-" + std::to_string(number);
            temporary_      = (folder() / name).string(); // a longer name than the file's own may be too long
            descriptor_     = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
            if (descriptor_ < 0 && errno != EEXIST) { fails("cannot be made"); }
        }
    }

    /// Opens what is no regular file. Opening a pipe that no process reads would wait for ever but for O_NONBLOCK.
    void pass_on(::mode_t kind)
    {
        if (S_ISSOCK(kind)) { throw file_error{path_, "is a socket, not a file"}; }
        descriptor_ = ::open(path_.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        if (descriptor_ < 0 && errno == ENXIO && S_ISFIFO(kind))
        {
            throw file_error{path_, "no process reads this pipe"};
        }
        if (descriptor_ < 0 || ::fcntl(descriptor_, F_SETFL, 0) != 0) { fails("cannot be opened"); }
    }

    std::string path_; // the file at the end of links
    std::string temporary_;
    std::size_t written_ = 0;
    int descriptor_      = -1;
};

} // namespace mdkv_python
