/// \file partial_scores.hpp: the samples of an unfinished head-score detection, a line each: what is finished survives a killed run
#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <ios>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "../runner/file_error.hpp"

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
    /// \throws file_error   the file is of other settings, or cannot be written
    partial_scores(std::string path, nlohmann::json const& setting, std::size_t heads)
        : path_{std::move(path)}
    {
        std::uintmax_t const whole = read(setting, heads);
        std::error_code problem;
        // What a killed run left half-written goes.
        if (std::filesystem::exists(path_, problem)) { std::filesystem::resize_file(path_, whole, problem); }
        if (problem) { throw file_error{path_, joined("cannot be written: ", problem.message())}; }
        file_.open(path_, std::ios::binary | std::ios::app);
        write(whole == 0 ? setting.dump() + "\n" : "");
    }

    [[nodiscard]] std::vector<entry> const& entries() const noexcept { return entries_; }

    void add(entry one, nlohmann::json line)
    {
        line["f1"]     = one.f1;
        line["counts"] = one.counts;
        line["scores"] = one.scores;
        write(line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
        entries_.push_back(std::move(one));
    }

    void remove()
    {
        file_.close();
        std::error_code ignored;
        std::filesystem::remove(path_, ignored);
    }

private:
    /// How many bytes at the beginning of the file are whole lines.
    [[nodiscard]] std::uintmax_t read(nlohmann::json const& setting, std::size_t heads)
    {
        std::ifstream file{path_, std::ios::binary};
        std::uintmax_t whole = 0;
        std::string line;
        for (std::int64_t number = 1; std::getline(file, line) && !file.eof(); ++number)
        {
            auto const parsed = nlohmann::json::parse(line, nullptr, false);
            if (number == 1 && !(parsed == setting))
            {
                throw file_error{path_, "is an unfinished run with other settings; remove it, or give another --out"};
            }
            if (number > 1)
            {
                std::optional<entry> one = entry_of(parsed, heads);
                if (!one)
                {
                    throw file_error{path_, joined("line ", std::to_string(number),
                                                " is no sample of this run; remove the file to begin anew")};
                }
                entries_.push_back(std::move(*one));
            }
            whole += line.size() + 1;
        }
        return whole;
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

    void write(std::string const& text)
    {
        file_ << text;
        if (!file_.flush()) { throw file_error{path_, "cannot be written"}; }
    }

    std::string path_;
    std::ofstream file_;
    std::vector<entry> entries_;
};

} // namespace runner
