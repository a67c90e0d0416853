/// \file json_lines.hpp: a file of JSON lines that only grows: what is in it survives a killed run
#pragma once

#include <mdkv/core/error.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "runner/file_error.hpp"

namespace runner
{

/// What every line of a file is.
struct json_line_kind
{
    std::string_view begin; // its first bytes: by them a line that was cut short is told from another file's text
    std::string_view name;  // such as "answer of an evaluation"
};

/// A line as it is read, without its end.
struct json_line
{
    std::string const& file;
    std::size_t number; // from 1
    std::string_view text;

    /// \throws mdkv::error   always
    [[noreturn]] void refuse(std::string_view why) const
    {
        throw mdkv::error{joined(file, ":", std::to_string(number), ": ", why, ": ", quoted(text),
            "; remove the line, or give another --out")};
    }
};

/// The file, open for as long as this lives; one run at a time may have it. A line that was being written when a run was
/// killed is cut off.
class json_lines
{
public:
    /// Makes the file where there is none, and reads what it has.
    /// \param take   void(json_line const&), for each line in its order. A nlohmann::json::exception means that the line is
    ///               not of this kind; whatever else it throws goes to the caller.
    /// \throws mdkv::error   the file cannot be used, another run has it, or a line is not of this kind; it is then as it was
    template <class Take>
    json_lines(std::string path, json_line_kind const& kind, Take const& take)
        : json_lines{std::move(path)}
    {
        if (::flock(file_, LOCK_EX | LOCK_NB) != 0)
        {
            throw mdkv::error{path_ + ": another run is writing it; wait for its end or give another --out"};
        }
        read_all(kind, take);
    }
    ~json_lines() { ::close(file_); }
    json_lines(json_lines const&)            = delete;
    json_lines& operator=(json_lines const&) = delete;

    [[nodiscard]] std::string const& path() const noexcept { return path_; }

    /// Bytes of an unfinished line that were cut off when the file was opened.
    [[nodiscard]] std::size_t cut() const noexcept { return cut_; }

    /// When it returns, the operating system has the lines, whatever becomes of this process.
    /// \param lines   each with its end
    /// \throws mdkv::error   they cannot be written
    void append(std::string_view lines)
    {
        while (!lines.empty())
        {
            ssize_t const written = ::write(file_, lines.data(), lines.size());
            if (written < 0 && errno == EINTR) { continue; }
            if (written < 0) { fail("cannot be written"); }
            lines.remove_prefix(static_cast<std::size_t>(written));
        }
    }

private:
    explicit json_lines(std::string path)
        : path_{std::move(path)}
        , file_{::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644)}
    {
        if (file_ < 0) { fail("cannot be written"); }
    }

    [[noreturn]] void fail(std::string_view what) const
    {
        throw mdkv::error{joined(path_, ": ", what, ": ", std::strerror(errno))};
    }

    template <class Take>
    void read_all(json_line_kind const& kind, Take const& take)
    {
        std::string const text = contents();
        std::string_view rest  = text;
        for (std::size_t number = 1; !rest.empty(); ++number)
        {
            std::size_t const end = rest.find('\n');
            json_line const line{path_, number, rest.substr(0, end)};
            if (end == std::string_view::npos && cut_short(line.text, kind)) { return cut_off(line.text.size(), text); }
            read_line(line, kind, take);
            if (end == std::string_view::npos) { return append("\n"); } // somebody's editor took the last line end
            rest.remove_prefix(end + 1);
        }
    }

    [[nodiscard]] std::string contents() const
    {
        std::string text;
        char piece[1 << 16];
        while (true)
        {
            ssize_t const got = ::read(file_, piece, sizeof piece);
            if (got < 0 && errno == EINTR) { continue; }
            if (got < 0) { fail("cannot be read"); }
            if (got == 0) { return text; }
            text.append(piece, static_cast<std::size_t>(got));
        }
    }

    /// Only what can be the beginning of such a line: another file given by mistake stays as it is.
    [[nodiscard]] static bool cut_short(std::string_view line, json_line_kind const& kind)
    {
        std::size_t const common = std::min(line.size(), kind.begin.size());
        return line.substr(0, common) == kind.begin.substr(0, common) && !nlohmann::json::accept(line);
    }

    void cut_off(std::size_t bytes, std::string_view text)
    {
        if (::ftruncate(file_, static_cast<off_t>(text.size() - bytes)) != 0) { fail("cannot be shortened"); }
        cut_ = bytes;
    }

    template <class Take>
    static void read_line(json_line const& line, json_line_kind const& kind, Take const& take)
    {
        try
        {
            take(line);
        }
        catch (nlohmann::json::exception const& problem)
        {
            line.refuse(joined("is no ", kind.name, " (", printable(problem.what(), 200), ")"));
        }
    }

    std::string path_;
    int file_;
    std::size_t cut_ = 0;
};

} // namespace runner
