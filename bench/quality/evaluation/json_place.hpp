/// \file json_place.hpp: a value in a JSON file that knows where it stands, for errors that name its key
#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "runner/file_error.hpp"

namespace runner
{

/// Where a document of JSON came from, and what to do where it is not what it should be.
struct json_source
{
    std::string file;
    std::string remedy;
    std::optional<std::size_t> line; // where every line is a document

    [[noreturn]] void fail(std::string_view what) const
    {
        std::string const where = line ? joined("line ", std::to_string(*line), ": ") : std::string();
        throw file_error(file, joined(where, what, "; ", remedy));
    }

    /// \throws file_error   the text is no JSON
    [[nodiscard]] nlohmann::json parse(std::string_view text) const
    {
        try
        {
            return nlohmann::json::parse(text.begin(), text.end());
        }
        catch (nlohmann::json::parse_error const& error)
        {
            // The library counts bytes from 1 and, where the text ends too early, names the place behind it.
            std::size_t const at = error.byte > 0 ? error.byte - 1 : 0;
            if (at >= text.size())
            {
                fail(joined("is cut short: no JSON value ends at byte ", std::to_string(text.size())));
            }
            fail(joined("is no JSON at byte ", std::to_string(at), ": ", runner::quoted(text.substr(at, 20))));
        }
        catch (nlohmann::json::out_of_range const&)
        {
            fail(joined("holds a number that is beyond a double's range: ", runner::quoted(text.substr(0, 20))));
        }
    }
};

/// A value of a document. The path to it is only written out when something is wrong. What it was reached from must
/// live on.
class json_place
{
public:
    json_place(json_source const& source, nlohmann::json const& value)
        : source_{&source}
        , value_{&value}
    {}

    [[nodiscard]] bool has(char const* key) const
    {
        expect(value_->is_object(), "an object");
        return value_->contains(key);
    }

    [[nodiscard]] json_place at(char const* key) const
    {
        if (!has(key)) { source_->fail(joined(path(), "has no key ", runner::quoted(key))); }
        return {*this, (*value_)[key], key, 0};
    }

    [[nodiscard]] std::size_t size() const
    {
        expect(value_->is_array(), "an array");
        return value_->size();
    }

    /// \pre   `i` is less than `size()`
    [[nodiscard]] json_place at(std::size_t i) const { return {*this, (*value_)[i], nullptr, i}; }

    [[nodiscard]] std::string const& text() const
    {
        expect(value_->is_string(), "a string");
        return value_->get_ref<std::string const&>();
    }

    [[nodiscard]] bool boolean() const
    {
        expect(value_->is_boolean(), "true or false");
        return value_->get<bool>();
    }

    [[noreturn]] void fail(std::string_view what) const { source_->fail(joined(path(), what)); }

    [[nodiscard]] nlohmann::json const& value() const noexcept { return *value_; }

private:
    json_place(json_place const& parent, nlohmann::json const& value, char const* key, std::size_t index)
        : source_{parent.source_}
        , value_{&value}
        , parent_{&parent}
        , key_{key}
        , index_{index}
    {}

    void expect(bool holds, std::string_view what) const
    {
        if (!holds) { fail(joined("is ", value_->is_null() ? "null" : value_->type_name(), ", it must be ", what)); }
    }

    [[nodiscard]] std::string name() const
    {
        if (parent_ == nullptr) { return {}; }
        std::string const own = key_ != nullptr ? joined(".", key_) : joined("[", std::to_string(index_), "]");
        return parent_->name() + own;
    }

    /// The path as the beginning of a message.
    [[nodiscard]] std::string path() const
    {
        std::string const own = name();
        return own.empty() ? std::string("the whole value ") : joined(own.substr(own.front() == '.' ? 1 : 0), " ");
    }

    json_source const* source_;
    nlohmann::json const* value_;
    json_place const* parent_ = nullptr;
    char const* key_          = nullptr;
    std::size_t index_        = 0;
};

} // namespace runner
