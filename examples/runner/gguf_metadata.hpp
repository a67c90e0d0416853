/// \file gguf_metadata.hpp: the metadata of a GGUF file: typed values by key
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "file_bytes.hpp"
#include "file_error.hpp"
#include "gguf_cursor.hpp"

namespace runner
{

/// The values by key of one file, checked when they were read. The base of `gguf_file`, never made alone.
class gguf_metadata
{
public:
    [[nodiscard]] std::string const& name() const noexcept { return name_; }

    // find_…: empty when the key is absent. The others throw then. Both throw file_error for a value of another type.

    [[nodiscard]] bool has(std::string_view key) const noexcept { return find_entry(key) != nullptr; }

    [[nodiscard]] std::optional<std::int64_t> find_integer(std::string_view key) const
    {
        entry const* const found = find_entry(key);
        if (found == nullptr) { return std::nullopt; }
        return integer_at(*found, found->type, found->offset);
    }
    [[nodiscard]] std::int64_t integer(std::string_view key) const { return present(key, find_integer(key)); }

    /// A float of either width; an integer too, since writers differ.
    [[nodiscard]] std::optional<double> find_number(std::string_view key) const
    {
        entry const* const found = find_entry(key);
        if (found == nullptr) { return std::nullopt; }
        if (found->type == detail::gguf_value::f32) { return double{field<float>(found->offset)}; }
        if (found->type == detail::gguf_value::f64) { return field<double>(found->offset); }
        return static_cast<double>(integer_at(*found, found->type, found->offset));
    }
    [[nodiscard]] double number(std::string_view key) const { return present(key, find_number(key)); }

    [[nodiscard]] std::optional<bool> find_boolean(std::string_view key) const
    {
        entry const* const found = find_entry(key);
        if (found == nullptr) { return std::nullopt; }
        expect_type(*found, found->type, detail::gguf_value::boolean);
        return field<std::uint8_t>(found->offset) != 0;
    }
    [[nodiscard]] bool boolean(std::string_view key) const { return present(key, find_boolean(key)); }

    [[nodiscard]] std::optional<std::string_view> find_text(std::string_view key) const
    {
        entry const* const found = find_entry(key);
        if (found == nullptr) { return std::nullopt; }
        expect_type(*found, found->type, detail::gguf_value::text);
        return text_at(found->offset);
    }
    [[nodiscard]] std::string_view text(std::string_view key) const { return present(key, find_text(key)); }

    /// An array of strings.
    [[nodiscard]] std::vector<std::string_view> texts(std::string_view key) const
    {
        entry const& found = array_entry(key);
        expect_type(found, found.element, detail::gguf_value::text);
        std::vector<std::string_view> out;
        out.reserve(found.count);
        std::uint64_t offset = found.offset;
        for (std::uint64_t i = 0; i < found.count; ++i)
        {
            out.push_back(text_at(offset));
            offset += sizeof(std::uint64_t) + out.back().size();
        }
        return out;
    }

    /// An array of integers of any width and sign.
    [[nodiscard]] std::vector<std::int64_t> integers(std::string_view key) const
    {
        entry const& found = array_entry(key);
        std::vector<std::int64_t> out;
        out.reserve(found.count);
        for (std::uint64_t i = 0; i < found.count; ++i)
        {
            std::uint64_t const offset = found.offset + i * detail::fixed_bytes(found.element);
            out.push_back(integer_at(found, found.element, offset));
        }
        return out;
    }

    /// An array of single-precision floats.
    [[nodiscard]] std::vector<float> floats(std::string_view key) const
    {
        entry const& found = array_entry(key);
        expect_type(found, found.element, detail::gguf_value::f32);
        std::vector<float> out(found.count);
        if (!out.empty())
        {
            std::memcpy(out.data(), contents_.bytes.data() + found.offset, out.size() * sizeof(float));
        }
        return out;
    }

    /// How many elements an array has.
    [[nodiscard]] std::uint64_t array_length(std::string_view key) const { return array_entry(key).count; }

    /// All keys that begin with `prefix`, sorted.
    [[nodiscard]] std::vector<std::string_view> keys_below(std::string_view prefix) const
    {
        std::vector<std::string_view> out;
        for (entry const& one : entries_)
        {
            if (one.key.starts_with(prefix)) { out.push_back(one.key); }
        }
        return out;
    }

    /// A value of any type, for a message: numbers with all their digits, texts as `printable`, arrays by their length.
    [[nodiscard]] std::string value_text(std::string_view key) const
    {
        entry const* const found = find_entry(key);
        if (found == nullptr) { refuse(key, "is absent"); }
        switch (found->type)
        {
            case detail::gguf_value::text:
                return printable(text_at(found->offset));
            case detail::gguf_value::boolean:
                return field<std::uint8_t>(found->offset) != 0 ? "true" : "false";
            case detail::gguf_value::array:
                return joined("array of ", std::to_string(found->count));
            case detail::gguf_value::f32:
                return shortest(field<float>(found->offset));
            case detail::gguf_value::f64:
                return shortest(field<double>(found->offset));
            case detail::gguf_value::u64:
                return std::to_string(field<std::uint64_t>(found->offset));
            default:
                return std::to_string(integer_at(*found, found->type, found->offset));
        }
    }

    /// For what only the user of a value can tell about it: throws a file_error that names the key and its place.
    [[noreturn]] void refuse(
        std::string_view key, std::string_view problem, std::string_view value = {}, std::string_view limit = {}) const
    {
        entry const* const found = find_entry(key);
        throw file_error(name_, joined("metadata key ", quoted(key), " ", problem),
            found == nullptr ? std::nullopt : std::optional(found->offset), value, limit);
    }

protected:
    gguf_metadata(std::string file, file_bytes contents)
        : name_(std::move(file))
        , contents_(std::move(contents))
    {}

    void read_metadata(detail::gguf_cursor& cursor, std::uint64_t count, gguf_limits const& limits)
    {
        constexpr std::uint64_t smallest_pair = sizeof(std::uint64_t) + 1 + sizeof(std::uint32_t) + 1;
        cursor.at_most("metadata count for the bytes left", 16, count, cursor.left() / smallest_pair);
        cursor.at_most("metadata count", 16, count, limits.metadata_bytes / smallest_pair);
        entries_.reserve(count);
        std::uint64_t const start = cursor.position();
        for (std::uint64_t i = 0; i < count; ++i)
        {
            entries_.push_back(read_entry(cursor, limits));
            cursor.at_most("metadata size in bytes", start, cursor.position() - start, limits.metadata_bytes);
        }
        std::sort(entries_.begin(), entries_.end(), [](entry const& a, entry const& b) { return a.key < b.key; });
        auto const twice = std::adjacent_find(
            entries_.begin(), entries_.end(), [](entry const& a, entry const& b) { return a.key == b.key; });
        if (twice != entries_.end())
        {
            cursor.fail("metadata key occurs twice", std::max(twice[0].offset, twice[1].offset), quoted(twice->key));
        }
    }

    /// Of this type and no other, where the format asks for it.
    [[nodiscard]] std::uint32_t u32(std::string_view key) const
    {
        entry const* const found = find_entry(key);
        if (found == nullptr) { refuse(key, "is absent"); }
        expect_type(*found, found->type, detail::gguf_value::u32);
        return field<std::uint32_t>(found->offset);
    }

    [[nodiscard]] file_bytes const& contents() const noexcept { return contents_; }

private:
    static constexpr std::uint64_t longest_key = 65535;

    /// One metadata pair. For an array, `element` and `count` say what stands at `offset`.
    struct entry
    {
        std::string_view key;
        detail::gguf_value type    = detail::gguf_value::u8;
        detail::gguf_value element = detail::gguf_value::u8;
        std::uint64_t count        = 0;
        std::uint64_t offset       = 0;
    };

    static entry read_entry(detail::gguf_cursor& cursor, gguf_limits const& limits)
    {
        entry out;
        std::uint64_t const start = cursor.position();
        out.key                   = cursor.text("metadata key", longest_key);
        if (out.key.empty()) { cursor.fail("metadata key is empty", start); }
        out.type = cursor.value_type("metadata value type");
        if (out.type != detail::gguf_value::array)
        {
            out.offset = cursor.position();
            cursor.pass_value(out.type);
            return out;
        }
        std::uint64_t const array = cursor.position();
        out.element               = cursor.value_type("array element type");
        if (out.element == detail::gguf_value::array) { cursor.fail("array of arrays is not supported", array); }
        out.count = cursor.number<std::uint64_t>("array length");
        cursor.at_most("array length", array, out.count, limits.array_elements);
        bool const is_text           = out.element == detail::gguf_value::text;
        std::uint64_t const smallest = is_text ? sizeof(std::uint64_t) : detail::fixed_bytes(out.element);
        cursor.at_most("array length for the bytes left", array, out.count, cursor.left() / smallest);
        out.offset = cursor.position();
        for (std::uint64_t i = 0; i < out.count; ++i) { cursor.pass_value(out.element); }
        return out;
    }

    [[nodiscard]] entry const* find_entry(std::string_view key) const noexcept
    {
        auto const at = std::lower_bound(
            entries_.begin(), entries_.end(), key, [](entry const& e, std::string_view k) { return e.key < k; });
        return at != entries_.end() && at->key == key ? &*at : nullptr;
    }

    [[nodiscard]] entry const& array_entry(std::string_view key) const
    {
        entry const* const found = find_entry(key);
        if (found == nullptr) { refuse(key, "is absent"); }
        expect_type(*found, found->type, detail::gguf_value::array);
        return *found;
    }

    /// The fewest digits that read back as this number.
    template <class Number>
    [[nodiscard]] static std::string shortest(Number value)
    {
        char digits[32];
        return {digits, std::to_chars(digits, digits + sizeof digits, value).ptr};
    }

    template <class T>
    [[nodiscard]] T present(std::string_view key, std::optional<T> const& value) const
    {
        if (!value) { refuse(key, "is absent"); }
        return *value;
    }

    void expect_type(entry const& e, detail::gguf_value actual, detail::gguf_value wanted) const
    {
        if (actual != wanted) { refuse(e.key, "has another type", detail::name_of(actual), detail::name_of(wanted)); }
    }

    template <class Number>
    [[nodiscard]] Number field(std::uint64_t offset) const noexcept
    {
        Number value;
        std::memcpy(&value, contents_.bytes.data() + offset, sizeof(Number));
        return value;
    }

    [[nodiscard]] std::string_view text_at(std::uint64_t offset) const noexcept
    {
        auto const start = reinterpret_cast<char const*>(contents_.bytes.data() + offset + sizeof(std::uint64_t));
        return {start, static_cast<std::size_t>(field<std::uint64_t>(offset))};
    }

    [[nodiscard]] std::int64_t integer_at(entry const& e, detail::gguf_value type, std::uint64_t offset) const
    {
        switch (type)
        {
            case detail::gguf_value::u8:
                return field<std::uint8_t>(offset);
            case detail::gguf_value::i8:
                return field<std::int8_t>(offset);
            case detail::gguf_value::u16:
                return field<std::uint16_t>(offset);
            case detail::gguf_value::i16:
                return field<std::int16_t>(offset);
            case detail::gguf_value::u32:
                return field<std::uint32_t>(offset);
            case detail::gguf_value::i32:
                return field<std::int32_t>(offset);
            case detail::gguf_value::i64:
                return field<std::int64_t>(offset);
            case detail::gguf_value::u64:
            {
                constexpr auto most = std::numeric_limits<std::int64_t>::max();
                auto const value    = field<std::uint64_t>(offset);
                if (value > static_cast<std::uint64_t>(most))
                {
                    refuse(e.key, "is too large", std::to_string(value), std::to_string(most));
                }
                return static_cast<std::int64_t>(value);
            }
            default:
                refuse(e.key, "has another type", detail::name_of(type), "an integer");
        }
    }

    std::string name_;
    file_bytes contents_;
    std::vector<entry> entries_; // sorted by key
};

} // namespace runner
