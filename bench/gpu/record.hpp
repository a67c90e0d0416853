/// \file record.hpp: what a GPU benchmark measured: a table on the standard output and a list in JSON
#pragma once

#include <mdkv/core/error.hpp>

#include <array>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace bench
{

using fields = std::vector<std::pair<std::string, double>>;

struct measurement
{
    std::string name;
    fields shape;
    double median_us = 0;
    double bytes     = 0; ///< that have to be moved; 0 where bytes are not the matter
    fields ratios;

    [[nodiscard]] double gb_per_s() const { return bytes / median_us / 1e3; }
};

/// Prints measurements as they come, and keeps them for a JSON list of objects.
class record
{
public:
    void add(measurement one)
    {
        std::string about;
        for (auto const& [name, value] : one.shape) { about += name + "=" + number(value) + " "; }
        std::printf("%-24s %-44s %12.2f us", one.name.c_str(), about.c_str(), one.median_us);
        if (one.bytes > 0) { std::printf(" %8.1f GB/s", one.gb_per_s()); }
        for (auto const& [name, value] : one.ratios) { std::printf("  %s=%.4g", name.c_str(), value); }
        std::printf("\n");
        std::fflush(stdout);
        all_.push_back(std::move(one));
    }

    /// \throws mdkv::error   the file cannot be written
    void write(std::string const& path) const
    {
        std::string text = "[";
        for (measurement const& one : all_)
        {
            text += (text.size() > 1 ? ",\n {" : "\n {") + quoted("name") + ": " + quoted(one.name);
            for (auto const& [name, value] : one.shape) { text += member(name, value); }
            text += member("median_us", one.median_us);
            if (one.bytes > 0) { text += member("bytes", one.bytes) + member("gb_per_s", one.gb_per_s()); }
            for (auto const& [name, value] : one.ratios) { text += member(name, value); }
            text += "}";
        }
        text += "\n]\n";
        std::unique_ptr<std::FILE, int (*)(std::FILE*)> const file{std::fopen(path.c_str(), "w"), std::fclose};
        bool const written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file.get()) == text.size()
                             && std::fflush(file.get()) == 0;
        mdkv::expects<mdkv::error>(written, path, " cannot be written");
    }

private:
    [[nodiscard]] static std::string number(double value)
    {
        if (!std::isfinite(value)) { return "null"; }
        std::array<char, 32> text{};
        bool const whole = value == std::floor(value) && std::fabs(value) < 1e15;
        std::snprintf(text.data(), text.size(), whole ? "%.0f" : "%.6g", value);
        return text.data();
    }
    /// Names are the benchmarks' own: nothing in them needs escaping.
    [[nodiscard]] static std::string quoted(std::string const& name) { return "\"" + name + "\""; }
    [[nodiscard]] static std::string member(std::string const& name, double value)
    {
        return ", " + quoted(name) + ": " + number(value);
    }

    std::vector<measurement> all_;
};

} // namespace bench
