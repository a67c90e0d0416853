/// \file file_replacement.hpp: a file that is written under another name and then takes the place of an old one at once
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <span>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "file_error.hpp"

namespace runner
{

/// Whatever ends the process, and at whichever byte, the path names the old file or the whole new one. A new file can be read
/// by its owner alone: it holds a conversation.
class file_replacement
{
public:
    /// Makes the temporary file, PATH.XXXXXX, in the same folder.
    /// \throws file_error   it cannot be made
    explicit file_replacement(std::string path)
        : path_{std::move(path)}
        , temporary_{path_ + ".XXXXXX"}
        , descriptor_{::mkostemp(temporary_.data(), O_CLOEXEC)}
    {
        if (descriptor_ < 0) { throw file_error{temporary_, "cannot be made", {}, std::strerror(errno)}; }
    }
    file_replacement(file_replacement const&)            = delete;
    file_replacement& operator=(file_replacement const&) = delete;
    /// Removes the temporary file unless it was committed.
    ~file_replacement()
    {
        if (descriptor_ < 0) { return; }
        ::close(descriptor_);
        ::unlink(temporary_.c_str());
    }

    /// \throws file_error   the disk is full, or it fails otherwise
    void write(std::span<std::byte const> bytes)
    {
        while (!bytes.empty())
        {
            ::ssize_t const done = ::write(descriptor_, bytes.data(), bytes.size());
            if (done < 0 && errno == EINTR) { continue; }
            if (done < 0) { throw file_error{temporary_, "cannot be written", written_, std::strerror(errno)}; }
            bytes = bytes.subspan(static_cast<std::size_t>(done));
            written_ += static_cast<std::size_t>(done);
        }
    }

    /// Waits until the bytes are on the disk, and renames. A committed file takes no more bytes.
    /// \throws file_error   a step fails; before the renaming the old file is still there
    void commit()
    {
        if (::fsync(descriptor_) != 0) { throw file_error{temporary_, "cannot be synced", {}, std::strerror(errno)}; }
        if (::rename(temporary_.c_str(), path_.c_str()) != 0)
        {
            throw file_error{path_, "cannot be replaced", {}, std::strerror(errno)};
        }
        ::close(std::exchange(descriptor_, -1));
        auto const folder = std::filesystem::path{path_}.parent_path();
        int const number  = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (number < 0) { return; } // the name may be lost with the power, the file is whole in either case
        ::fsync(number);
        ::close(number);
    }

private:
    std::string path_;
    std::string temporary_;
    std::size_t written_ = 0;
    int descriptor_;
};

} // namespace runner
