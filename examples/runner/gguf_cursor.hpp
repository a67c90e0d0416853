/// \file gguf_cursor.hpp: reading the fields of a GGUF file one after another, never past the end
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "file_error.hpp"

namespace runner
{

/// What a GGUF file may ask of its reader. Nothing is allocated from a number in the file before that number was
/// compared with these and with the bytes really present.
struct gguf_limits
{
    /// Larger than the 4 GiB that suit a file from a stranger: the 4-bit file of an 8B model has about 5 GB, and
    /// what is allocated here is never more than what lies on the disk. Lower it for files nobody vouches for.
    std::uint64_t file_bytes     = std::uint64_t{16} << 30;
    std::uint64_t metadata_bytes = std::uint64_t{64} << 20;
    std::uint64_t string_bytes   = std::uint64_t{1} << 20;
    std::uint64_t array_elements = std::uint64_t{1} << 20;
    std::uint64_t tensors        = 4096;
};

namespace detail
{

static_assert(std::endian::native == std::endian::little, "gguf: the reader copies little-endian fields as they are");

/// Type numbers of metadata values.
enum class gguf_value : std::uint32_t
{
    u8,
    i8,
    u16,
    i16,
    u32,
    i32,
    f32,
    boolean,
    text,
    array,
    u64,
    i64,
    f64
};

inline constexpr std::uint32_t gguf_value_kinds = 13;

[[nodiscard]] constexpr std::string_view name_of(gguf_value type)
{
    constexpr std::string_view names[] = {
        "u8", "i8", "u16", "i16", "u32", "i32", "f32", "boolean", "string", "array", "u64", "i64", "f64"};
    return names[static_cast<std::uint32_t>(type)];
}

/// Bytes of one value of a fixed-size type; 0 for strings and arrays, whose size stands in the file.
[[nodiscard]] constexpr std::uint64_t fixed_bytes(gguf_value type)
{
    constexpr std::uint8_t bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return bytes[static_cast<std::uint32_t>(type)];
}

/// A place in the file that only moves forward and never past the end.
class gguf_cursor
{
public:
    gguf_cursor(std::string_view file, std::span<std::byte const> bytes, gguf_limits const& limits)
        : file_(file)
        , bytes_(bytes)
        , limits_(limits)
    {}

    [[nodiscard]] std::uint64_t position() const noexcept { return position_; }
    [[nodiscard]] std::uint64_t left() const noexcept { return bytes_.size() - position_; }

    [[noreturn]] void fail(
        std::string_view what, std::uint64_t offset, std::string_view value = {}, std::string_view limit = {}) const
    {
        throw file_error(file_, what, offset, value, limit);
    }

    /// Fails unless `value <= limit`; both are named in the message.
    void at_most(std::string_view what, std::uint64_t offset, std::uint64_t value, std::uint64_t limit) const
    {
        if (value > limit) { fail(what, offset, std::to_string(value), std::to_string(limit)); }
    }

    template <class Number>
    [[nodiscard]] Number number(std::string_view what)
    {
        static_assert(std::is_arithmetic_v<Number>);
        Number value;
        std::memcpy(&value, skip(what, sizeof(Number)), sizeof(Number));
        return value;
    }

    /// u64 length, then as many bytes.
    [[nodiscard]] std::string_view text(std::string_view what, std::uint64_t most_bytes)
    {
        std::uint64_t const start = position_;
        auto const length         = number<std::uint64_t>(what);
        if (length > most_bytes) { at_most(joined(what, " length in bytes"), start, length, most_bytes); }
        return {reinterpret_cast<char const*>(skip(what, length)), static_cast<std::size_t>(length)};
    }
    [[nodiscard]] std::string_view text(std::string_view what) { return text(what, limits_.string_bytes); }

    [[nodiscard]] gguf_value value_type(std::string_view what)
    {
        std::uint64_t const start = position_;
        auto const type           = number<std::uint32_t>(what);
        if (type >= gguf_value_kinds)
        {
            fail(joined(what, " is unknown"), start, std::to_string(type), std::to_string(gguf_value_kinds - 1));
        }
        return static_cast<gguf_value>(type);
    }

    /// Passes over one value that is no array, checking it.
    void pass_value(gguf_value type)
    {
        if (type == gguf_value::text) { static_cast<void>(text("string value")); }
        else if (type == gguf_value::boolean)
        {
            std::uint64_t const start = position_;
            auto const value          = number<std::uint8_t>("boolean value");
            if (value > 1) { fail("boolean value is neither 0 nor 1", start, std::to_string(value), "1"); }
        }
        else { skip("metadata value", fixed_bytes(type)); }
    }

    /// Moves on by `count` bytes and returns where they begin.
    std::byte const* skip(std::string_view what, std::uint64_t count)
    {
        if (count > left())
        {
            fail(joined("file ends inside ", what), position_, joined(std::to_string(count), " bytes needed"),
                std::to_string(left()));
        }
        std::byte const* const start = bytes_.data() + position_;
        position_ += count;
        return start;
    }

private:
    std::string_view file_;
    std::span<std::byte const> bytes_;
    gguf_limits const& limits_;
    std::uint64_t position_ = 0;
};

} // namespace detail
} // namespace runner
