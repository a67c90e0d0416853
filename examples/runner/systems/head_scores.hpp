/// \file head_scores.hpp: how important each query head is for retrieval, in the JSON form HeadKV publishes
#pragma once

#include <mdkv/core/error.hpp>

#include <nlohmann/json.hpp>

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
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

/// Parses a head's name: "3-11" is layer 3, head 11; both decimal, from 0, without signs or leading zeros.
[[nodiscard]] inline std::optional<std::int64_t> parse_head_number(std::string_view text)
{
    if (text.empty() || text.size() > 9 || (text.size() > 1 && text[0] == '0')) { return std::nullopt; }
    std::int64_t value        = 0;
    auto const [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (problem != std::errc{} || end != text.data() + text.size() || value < 0) { return std::nullopt; }
    return value;
}

/// Sums the lists up while they are parsed, so that a file of any length takes no memory. A parsed document could not show
/// a key that occurs twice: the parser silently keeps the last occurrence.
class head_scores_reader : public nlohmann::json_sax<nlohmann::json>
{
public:
    head_scores_reader(std::string const& path, std::int64_t layers, std::int64_t heads)
        : path_{path}
        , layers_{layers}
        , heads_{heads}
        , sum_(static_cast<std::size_t>(layers * heads))
        , count_(sum_.size())
        , seen_(sum_.size())
    {}

    bool start_object(std::size_t) override
    {
        if (inside_object_) { refuse_value("an object"); }
        inside_object_ = true;
        return true;
    }
    bool end_object() override { return true; }

    bool key(string_t& name) override
    {
        key_                    = name;
        std::string_view text   = name;
        std::size_t const minus = text.find('-');
        std::optional<std::int64_t> layer, head;
        if (minus != std::string_view::npos)
        {
            layer = parse_head_number(text.substr(0, minus));
            head  = parse_head_number(text.substr(minus + 1));
        }
        if (!layer || !head) { refuse("is no head; keys read LAYER-HEAD, such as \"0-11\""); }
        if (*layer >= layers_ || *head >= heads_)
        {
            refuse(joined("is outside the model, which has layers 0 to ", std::to_string(layers_ - 1),
                " and query heads 0 to ", std::to_string(heads_ - 1)));
        }
        at_ = static_cast<std::size_t>(*layer * heads_ + *head);
        if (seen_[at_]) { refuse("stands there twice"); }
        seen_[at_] = true;
        return true;
    }

    bool start_array(std::size_t) override
    {
        if (!inside_object_ || inside_list_) { refuse_value("a list"); }
        inside_list_ = true;
        return true;
    }
    bool end_array() override
    {
        if (count_[at_] == 0) { refuse("has an empty list"); }
        inside_list_ = false;
        return true;
    }

    bool number_integer(number_integer_t value) override { return add(static_cast<double>(value)); }
    bool number_unsigned(number_unsigned_t value) override { return add(static_cast<double>(value)); }
    bool number_float(number_float_t value, string_t const&) override { return add(value); }

    bool null() override { return refuse_value("null"); }
    bool boolean(bool value) override { return refuse_value(value ? "true" : "false"); }
    bool string(string_t& value) override { return refuse_value(runner::quoted(value)); }
    bool binary(binary_t&) override { return refuse_value("bytes"); }

    bool parse_error(std::size_t position, std::string const&, nlohmann::json::exception const& problem) override
    {
        // A number too large for a double is the only valid JSON that is reported here.
        bool const too_large = dynamic_cast<nlohmann::json::out_of_range const*>(&problem) != nullptr;
        std::string what     = too_large ? "has a value that is not finite" : "is no JSON that could be read";
        if (!key_.empty()) { what += joined(too_large ? ", under key " : ", after key ", runner::quoted(key_)); }
        throw file_error{path_, what, position};
    }

    [[nodiscard]] head_scores take() const
    {
        head_scores scores{layers_, heads_, std::vector<double>(sum_.size()), count_};
        for (std::size_t i = 0; i < sum_.size(); ++i)
        {
            std::string const name = joined(std::to_string(i / static_cast<std::size_t>(heads_)), "-",
                std::to_string(i % static_cast<std::size_t>(heads_)));
            if (!seen_[i])
            {
                throw file_error{
                    path_, joined("key ", runner::quoted(name), " is missing; there must be one for each of ",
                               std::to_string(layers_), " layers of ", std::to_string(heads_), " query heads")};
            }
            scores.mean[i] = sum_[i] / static_cast<double>(count_[i]);
            if (!std::isfinite(scores.mean[i]))
            {
                throw file_error{path_, joined("key ", runner::quoted(name), " has values whose sum is not finite")};
            }
        }
        return scores;
    }

private:
    [[noreturn]] void refuse(std::string const& problem) const
    {
        throw file_error{path_, joined("key ", runner::quoted(key_), " ", problem)};
    }
    [[noreturn]] bool refuse_value(std::string const& what) const
    {
        if (!inside_object_) { throw file_error{path_, joined("is ", what, ", not an object of lists")}; }
        refuse(
            joined(inside_list_ ? "has in its list " : "has ", what, inside_list_ ? ", not a number" : ", not a list"));
    }

    bool add(double value)
    {
        if (!inside_list_) { refuse_value("a number"); }
        if (!std::isfinite(value)) { refuse("has a value that is not finite"); }
        if (value < 0) { refuse(joined("has the negative value ", std::to_string(value))); }
        sum_[at_] += value;
        ++count_[at_];
        return true;
    }

    std::string path_;
    std::int64_t layers_, heads_;
    std::vector<double> sum_;
    std::vector<std::int64_t> count_;
    std::vector<bool> seen_;
    std::string key_;
    std::size_t at_     = 0;
    bool inside_object_ = false;
    bool inside_list_   = false;
};

} // namespace detail

/// Reads HeadKV's form: an object whose keys are "layer-head" in any order and whose values list one number per sample.
/// \param layers, heads   numbers of the model; there must be exactly one list for each of its query heads
/// \throws file_error   the file cannot be read, is larger than 256 MiB, is no JSON or not of that form; naming the key
[[nodiscard]] inline head_scores read_head_scores(std::string const& path, std::int64_t layers, std::int64_t heads)
{
    mdkv::expects(layers >= 1 && layers <= 1 << 16, "read_head_scores: layers is ", layers, ", not in 1 to 65536");
    mdkv::expects(heads >= 1 && heads <= 1 << 16, "read_head_scores: heads is ", heads, ", not in 1 to 65536");
    constexpr std::uint64_t most_bytes = std::uint64_t{256} << 20U;
    file_bytes const file              = load_file(path, "", most_bytes, file_access::read);
    detail::head_scores_reader reader{path, layers, heads};
    auto const* const text = reinterpret_cast<char const*>(file.bytes.data());
    static_cast<void>(nlohmann::json::sax_parse(text, text + file.bytes.size(), &reader));
    return reader.take();
}

} // namespace runner
