/// \file terminal.hpp: what a person sees of a running command: a progress bar, a table, and a clean end on Ctrl-C
#pragma once

#include <mdkv/core/error.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

namespace runner
{

/// The user asked for an end with Ctrl-C.
struct interrupted : mdkv::error
{
    interrupted()
        : error{"interrupted"}
    {}
};

namespace detail
{
inline volatile std::sig_atomic_t interrupt_seen = 0;
}

/// From here on the first Ctrl-C asks for an end, and a second one ends the process as usual.
inline void catch_interrupts()
{
    struct sigaction action = {};
    action.sa_handler       = [](int) { detail::interrupt_seen = 1; };
    action.sa_flags         = static_cast<int>(SA_RESETHAND);
    sigaction(SIGINT, &action, nullptr);
}

[[nodiscard]] inline bool interrupt_requested() noexcept
{
    return detail::interrupt_seen != 0;
}

/// One line on standard error that is drawn again and again. Where standard error is no terminal: a plain line a minute,
/// whichever of the process's bars is shown then.
class progress_bar
{
public:
    static inline std::chrono::milliseconds plain_every{60'000}; // shorter in tests

    explicit progress_bar(std::string what)
        : what_{std::move(what)}
        , terminal_{isatty(STDERR_FILENO) != 0}
    {}
    ~progress_bar() { clear(); }
    progress_bar(progress_bar const&)            = delete;
    progress_bar& operator=(progress_bar const&) = delete;

    void rename(std::string what) { what_ = std::move(what); }

    void show(std::int64_t done, std::int64_t total)
    {
        if (total <= 0) { return; }
        done_  = done;
        total_ = total;
        if (!terminal_) { return show_plainly(done, total); }
        auto const now = std::chrono::steady_clock::now();
        if (done < total && drawn_ && now - last_ < std::chrono::milliseconds{100}) { return; }
        last_                        = now;
        drawn_                       = true;
        constexpr std::int64_t width = 40;
        std::int64_t const filled    = width * done / total;
        std::string const bar        = std::string(static_cast<std::size_t>(filled), '#')
                                + std::string(static_cast<std::size_t>(width - filled), '.');
        std::fprintf(stderr, "\r%s [%s] %3d %%  %s left \033[K", what_.c_str(), bar.c_str(),
            static_cast<int>(100 * done / total), time_left(done, total).c_str());
        std::fflush(stderr);
    }

    /// Shows the same again, in the middle of a long step.
    void again() { show(done_, total_); }

    void clear()
    {
        if (drawn_) { std::fputs("\r\033[K", stderr); }
        drawn_ = false;
    }

private:
    void show_plainly(std::int64_t done, std::int64_t total)
    {
        auto const now = std::chrono::steady_clock::now();
        if (now - last_plain_ < plain_every) { return; }
        last_plain_ = now;
        std::fprintf(stderr, "%s: %d %%, %s left\n", what_.c_str(), static_cast<int>(100 * done / total),
            time_left(done, total).c_str());
    }

    [[nodiscard]] std::string time_left(std::int64_t done, std::int64_t total) const
    {
        double const seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
        double const left    = done > 0 ? seconds * static_cast<double>(total - done) / static_cast<double>(done) : 0.0;
        auto const whole     = static_cast<std::int64_t>(left + 0.5);
        if (whole < 600) { return std::to_string(whole) + " s"; }
        return whole < 36000 ? std::to_string(whole / 60) + " min" : std::to_string(whole / 3600) + " h";
    }

    std::string what_;
    bool terminal_;
    bool drawn_         = false;
    std::int64_t done_  = 0;
    std::int64_t total_ = 0;
    std::chrono::steady_clock::time_point start_{std::chrono::steady_clock::now()};
    std::chrono::steady_clock::time_point last_{};
    static inline std::chrono::steady_clock::time_point last_plain_{std::chrono::steady_clock::now()};
};

/// Rows of text under headings; numbers to the right, the first column to the left.
class table
{
public:
    explicit table(std::vector<std::string> headings) { rows_.push_back(std::move(headings)); }
    void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

    [[nodiscard]] std::string text() const
    {
        std::vector<std::size_t> widths(rows_[0].size());
        for (auto const& row : rows_)
        {
            for (std::size_t c = 0; c < row.size(); ++c) { widths[c] = std::max(widths[c], row[c].size()); }
        }
        std::string all;
        for (std::size_t r = 0; r < rows_.size(); ++r)
        {
            std::string line;
            for (std::size_t c = 0; c < rows_[r].size(); ++c)
            {
                std::string const padding(widths[c] - rows_[r][c].size(), ' ');
                line += (c == 0 ? "" : "  ") + (c == 0 ? rows_[r][c] + padding : padding + rows_[r][c]);
            }
            all += line + "\n";
            if (r == 0) { all += std::string(line.size(), '-') + "\n"; }
        }
        return all;
    }

private:
    std::vector<std::vector<std::string>> rows_;
};

/// A number with so many digits behind the point.
[[nodiscard]] inline std::string fixed(double value, int digits)
{
    char text[64];
    std::snprintf(text, sizeof text, "%.*f", digits, value);
    return text;
}

/// Bytes as people read them.
[[nodiscard]] inline std::string size_text(std::int64_t bytes)
{
    if (bytes < 10 * 1024) { return std::to_string(bytes) + " B"; }
    if (bytes < 1024 * 1024) { return fixed(static_cast<double>(bytes) / 1024, 0) + " KiB"; }
    return fixed(static_cast<double>(bytes) / (1024 * 1024), 1) + " MiB";
}

} // namespace runner
