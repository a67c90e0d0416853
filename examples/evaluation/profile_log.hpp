/// \file profile_log.hpp: the file of all measurements, a line each: what is measured survives a killed run
#pragma once

#include <mdkv/core/error.hpp>

#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "../runner/file_error.hpp"
#include "process_memory.hpp"
#include "profile_record.hpp"

namespace runner
{

/// Kept in memory alone, or also in a file, which is open for as long as this lives and which one run at a time may have.
/// A line that was being written when a run was killed is cut off.
class profile_log
{
public:
    profile_log() = default; // in memory alone

    /// \throws mdkv::error   the file cannot be used, another run has it, or a line is no measurement; it is then as it was
    explicit profile_log(std::string path)
        : path_{std::move(path)}
        , file_{::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644)}
    {
        if (file_ < 0) { throw mdkv::error{path_ + ": cannot be opened: " + std::strerror(errno)}; }
        try
        {
            if (::flock(file_, LOCK_EX | LOCK_NB) != 0)
            {
                throw mdkv::error{path_ + ": another run is writing it; wait for its end or give another --out"};
            }
            take_lines(detail::read_all(file_));
        }
        catch (...)
        {
            ::close(file_);
            throw;
        }
    }
    ~profile_log()
    {
        if (file_ >= 0) { ::close(file_); }
    }
    profile_log(profile_log const&)            = delete;
    profile_log& operator=(profile_log const&) = delete;

    [[nodiscard]] bool has(profile_key const& key) const { return records_.contains(key); }
    [[nodiscard]] profile_record const& at(profile_key const& key) const { return records_.at(key); }
    [[nodiscard]] std::size_t size() const noexcept { return records_.size(); }

    /// When it returns, the operating system has the line.
    /// \throws mdkv::error   it cannot be written
    void add(profile_record const& one)
    {
        if (file_ >= 0)
        {
            std::string const line = line_of(one) + "\n";
            if (::write(file_, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
            {
                throw mdkv::error{path_ + ": cannot be written: " + std::strerror(errno)};
            }
        }
        records_.insert_or_assign(one.key, one);
    }

private:
    void take_lines(std::string_view text)
    {
        std::size_t const whole = text.size();
        for (std::size_t number = 1; !text.empty(); ++number)
        {
            std::size_t const end       = text.find('\n');
            std::string_view const line = text.substr(0, end);
            if (end == std::string_view::npos && cut_short(line))
            {
                if (::ftruncate(file_, static_cast<off_t>(whole - line.size())) != 0)
                {
                    throw mdkv::error{path_ + ": cannot be shortened: " + std::strerror(errno)};
                }
                return;
            }
            take_line(line, number);
            if (end == std::string_view::npos) { return detail::write_all(file_, "\n"); }
            text.remove_prefix(end + 1);
        }
    }

    /// Only the beginning of a measurement: another file given by mistake stays as it is.
    [[nodiscard]] static bool cut_short(std::string_view line)
    {
        std::string_view const begin = profile_line_begin;
        return !nlohmann::json::accept(line) && (line.starts_with(begin) || begin.starts_with(line));
    }

    void take_line(std::string_view line, std::size_t number)
    {
        try
        {
            profile_record one = profile_record_of(std::string{line});
            records_.insert_or_assign(one.key, std::move(one));
        }
        catch (nlohmann::json::exception const& problem)
        {
            throw mdkv::error{path_ + ":" + std::to_string(number) + ": is no measurement of mdkv_run profile ("
                              + printable(problem.what(), 200) + "): " + quoted(line)
                              + "; remove the line, or give another --out"};
        }
    }

    std::string path_;
    int file_ = -1;
    std::map<profile_key, profile_record> records_;
};

} // namespace runner
