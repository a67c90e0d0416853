/// \file profile_log.hpp: the file of all measurements, a line each: what is measured survives a killed run
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "json_lines.hpp"
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
    {
        lines_.emplace(std::move(path), profile_line, [this](json_line const& line) {
            profile_record one = profile_record_of(line.text);
            records_.insert_or_assign(one.key, std::move(one));
        });
    }

    [[nodiscard]] bool has(profile_key const& key) const { return records_.contains(key); }
    [[nodiscard]] profile_record const& at(profile_key const& key) const { return records_.at(key); }
    [[nodiscard]] std::size_t size() const noexcept { return records_.size(); }

    /// When it returns, the operating system has the line.
    /// \throws mdkv::error   it cannot be written
    void add(profile_record const& one)
    {
        if (lines_) { lines_->append(line_of(one) + "\n"); }
        records_.insert_or_assign(one.key, one);
    }

private:
    std::map<profile_key, profile_record> records_;
    std::optional<json_lines> lines_;
};

} // namespace runner
