/// \file partial_scores.hpp: the samples of an unfinished head-score detection, a line each: what is finished survives a killed run
#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "runner/file_error.hpp"
#include "json_lines.hpp"

namespace runner
{

/// The file's first line says what the samples depend on, the others are samples in their order.
class partial_scores
{
public:
    struct entry
    {
        double f1   = 0;
        bool counts = false;
        std::vector<double> scores; // [layers * heads], empty where it does not count
    };

    /// \param setting   what the samples depend on
    /// \throws file_error    the file is of other settings, or a line is no sample; it is then as it was
    /// \throws mdkv::error   it cannot be used, or another run has it
    partial_scores(std::string path, nlohmann::json const& setting, std::size_t heads)
        : lines_{
            std::move(path), {"{", "sample of this run"}, [&](json_line const& line) { take(line, setting, heads); }}
    {
        if (!begun_) { lines_.append(setting.dump() + "\n"); }
    }

    [[nodiscard]] std::vector<entry> const& entries() const noexcept { return entries_; }

    void add(entry one, nlohmann::json line)
    {
        line["f1"]     = one.f1;
        line["counts"] = one.counts;
        line["scores"] = one.scores;
        lines_.append(line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
        entries_.push_back(std::move(one));
    }

    void remove()
    {
        std::error_code ignored;
        std::filesystem::remove(lines_.path(), ignored);
    }

private:
    void take(json_line const& line, nlohmann::json const& setting, std::size_t heads)
    {
        auto const parsed = nlohmann::json::parse(line.text, nullptr, false);
        if (line.number == 1)
        {
            if (!(parsed == setting))
            {
                throw file_error{
                    line.file, "is an unfinished run with other settings; remove it, or give another --out"};
            }
            begun_ = true;
            return;
        }
        std::optional<entry> one = entry_of(parsed, heads);
        if (!one) // one line alone cannot go: the samples are counted
        {
            throw file_error{line.file, joined("line ", std::to_string(line.number),
                                            " is no sample of this run; remove the file to begin anew")};
        }
        entries_.push_back(std::move(*one));
    }

    [[nodiscard]] static std::optional<entry> entry_of(nlohmann::json const& line, std::size_t heads)
    {
        if (!line.is_object() || !line.contains("f1") || !line["f1"].is_number() || !line.contains("counts")
            || !line["counts"].is_boolean() || !line.contains("scores") || !line["scores"].is_array())
        {
            return std::nullopt;
        }
        entry one{line["f1"], line["counts"], {}};
        for (auto const& value : line["scores"])
        {
            if (!value.is_number() || !(value.get<double>() >= 0)) { return std::nullopt; }
            one.scores.push_back(value);
        }
        if (one.scores.size() != (one.counts ? heads : 0)) { return std::nullopt; }
        return one;
    }

    std::vector<entry> entries_;
    bool begun_ = false;
    json_lines lines_; // last: reading it fills the others
};

} // namespace runner
