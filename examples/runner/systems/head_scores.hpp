/// \file head_scores.hpp: how important each query head is for retrieval, in the JSON form HeadKV publishes
#pragma once

#include <mdkv/core/error.hpp>

#include <nlohmann/json.hpp>

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "runner/file_bytes.hpp"
#include "runner/file_error.hpp"

namespace runner
{

/// One number per query head: the mean over the samples of a detection run.
struct head_scores
{
    std::int64_t layers = 0, heads = 0; // heads are query heads
    std::vector<double> mean;           // [layers, heads]
    std::vector<std::int64_t> samples;  // [layers, heads] number of values in each mean
};

namespace detail
{

/// A head's name: "3-11" is layer 3, head 11; both decimal, from 0, without signs or leading zeros.
[[nodiscard]] inline std::optional<std::int64_t> parse_head_number(std::string_view text)
{
    if (text.empty() || text.size() > 9 || (text.size() > 1 && text[0] == '0')) { return std::nullopt; }
    std::int64_t value        = 0;
    auto const [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (problem != std::errc{} || end != text.data() + text.size() || value < 0) { return std::nullopt; }
    return value;
}

/// The mean of one head's list.
[[nodiscard]] inline double mean_of(nlohmann::json const& list, std::string const& path, std::string const& key)
{
    auto const refuse = [&](std::string const& why) { throw file_error{path, joined("key ", key, " ", why)}; };
    if (!list.is_array() || list.empty()) { refuse("has no list of numbers"); }
    double sum = 0;
    for (auto const& value : list)
    {
        if (!value.is_number() || !(value.get<double>() >= 0)) { refuse("has in its list no number of at least 0"); }
        sum += value.get<double>();
    }
    if (!std::isfinite(sum)) { refuse("has values whose sum is not finite"); }
    return sum / static_cast<double>(list.size());
}

} // namespace detail

/// Reads HeadKV's form: an object whose keys are "layer-head" in any order and whose values list one number per sample.
/// \param layers, heads   numbers of the model; there must be exactly one list for each of its query heads
/// \throws file_error   the file cannot be read, is larger than 256 MiB, is no JSON or not of that form; naming the key
[[nodiscard]] inline head_scores read_head_scores(std::string const& path, std::int64_t layers, std::int64_t heads)
{
    mdkv::expects(layers >= 1 && layers <= 1 << 16, "read_head_scores: layers is ", layers, ", not in 1 to 65536");
    mdkv::expects(heads >= 1 && heads <= 1 << 16, "read_head_scores: heads is ", heads, ", not in 1 to 65536");
    file_bytes const file  = load_file(path, "", std::uint64_t{256} << 20U);
    auto const* const text = reinterpret_cast<char const*>(file.bytes.data());
    std::set<std::string> keys; // the parser keeps the last of two that are equal, and says nothing
    auto const each = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
        if (event == nlohmann::json::parse_event_t::key && !keys.insert(value.get<std::string>()).second)
        {
            throw file_error{path, joined("key ", runner::quoted(value.get<std::string>()), " stands there twice")};
        }
        if (depth > 2) { throw file_error{path, "has lists in its lists"}; }
        return true;
    };
    nlohmann::json all;
    try
    {
        all = nlohmann::json::parse(text, text + file.bytes.size(), each);
    }
    catch (nlohmann::json::exception const& problem)
    {
        throw file_error{path, "is no JSON that could be read", {}, problem.what()};
    }
    if (!all.is_object()) { throw file_error{path, "is no object of lists"}; }
    head_scores scores{layers, heads, std::vector<double>(static_cast<std::size_t>(layers * heads)), {}};
    scores.samples.resize(scores.mean.size());
    for (auto const& [name, list] : all.items())
    {
        std::size_t const minus = name.find('-');
        auto const layer        = detail::parse_head_number(std::string_view{name}.substr(0, minus));
        auto const head         = minus == std::string::npos
                                      ? std::nullopt
                                      : detail::parse_head_number(std::string_view{name}.substr(minus + 1));
        std::string const key   = runner::quoted(name);
        if (!layer || !head)
        {
            throw file_error{path, joined("key ", key, " is no head; keys read LAYER-HEAD, such as \"0-11\"")};
        }
        if (*layer >= layers || *head >= heads)
        {
            throw file_error{
                path, joined("key ", key, " is outside the model, which has layers 0 to ", std::to_string(layers - 1),
                          " and query heads 0 to ", std::to_string(heads - 1))};
        }
        auto const at      = static_cast<std::size_t>(*layer * heads + *head);
        scores.mean[at]    = detail::mean_of(list, path, key);
        scores.samples[at] = std::ssize(list);
    }
    for (std::int64_t i = 0; i < layers * heads; ++i)
    {
        if (scores.samples[static_cast<std::size_t>(i)] > 0) { continue; }
        throw file_error{path, joined("key \"", std::to_string(i / heads), "-", std::to_string(i % heads),
                                   "\" is missing; there must be one for each of ", std::to_string(layers),
                                   " layers of ", std::to_string(heads), " query heads")};
    }
    return scores;
}

} // namespace runner
