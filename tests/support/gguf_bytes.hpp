/// \file gguf_bytes.hpp: GGUF files made by hand, right and wrong ones, for the tests of those who read them
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "runner/file_bytes.hpp"
#include "runner/gguf.hpp"

/// A number as it stands in a file.
template <class Number>
[[nodiscard]] std::string field(Number value)
{
    static_assert(std::is_arithmetic_v<Number>);
    std::string out(sizeof value, '\0');
    std::memcpy(out.data(), &value, sizeof value);
    return out;
}

/// A length and as many bytes.
[[nodiscard]] inline std::string text_field(std::string_view text)
{
    return field<std::uint64_t>(text.size()) + std::string(text);
}

/// Type numbers of metadata values.
namespace gguf_type
{
inline constexpr std::uint32_t u8 = 0, i8 = 1, u16 = 2, i16 = 3, u32 = 4, i32 = 5, f32 = 6, boolean = 7, text = 8,
                               array = 9, u64 = 10, i64 = 11, f64 = 12;
}

/// The parts of a file; `bytes` puts them together without asking whether they make sense.
struct gguf_parts
{
    struct tensor
    {
        std::string name;
        std::vector<std::uint64_t> dims;
        std::uint32_t type;
        std::uint64_t offset;
        std::string data; // with the padding that follows it
    };

    std::string magic       = "GGUF";
    std::uint32_t version   = 3;
    std::uint64_t alignment = 32;
    std::vector<std::string> pairs;
    std::vector<tensor> tensors;
    std::uint64_t missing_tensors = 0; // counted in the header, but not there
    std::uint64_t missing_pairs   = 0;

    void pair(std::string_view key, std::uint32_t type, std::string const& value)
    {
        pairs.push_back(text_field(key) + field(type) + value);
    }
    void text(std::string_view key, std::string_view value) { pair(key, gguf_type::text, text_field(value)); }
    void integer(std::string_view key, std::uint32_t value) { pair(key, gguf_type::u32, field(value)); }
    void boolean(std::string_view key, bool value)
    {
        pair(key, gguf_type::boolean, field(static_cast<std::uint8_t>(value)));
    }
    void texts(std::string_view key, std::vector<std::string> const& values)
    {
        std::string all;
        for (std::string const& value : values) { all += text_field(value); }
        pair(key, gguf_type::array, field(gguf_type::text) + field<std::uint64_t>(values.size()) + all);
    }
    void integers(std::string_view key, std::vector<std::int32_t> const& values)
    {
        std::string all;
        for (std::int32_t const value : values) { all += field(value); }
        pair(key, gguf_type::array, field(gguf_type::i32) + field<std::uint64_t>(values.size()) + all);
    }

    /// Behind the tensors there are, padded to the alignment.
    void add_tensor(
        std::string const& name, std::vector<std::uint64_t> const& dims, std::uint32_t type, std::string data)
    {
        std::uint64_t offset = 0;
        for (tensor const& before : tensors) { offset += before.data.size(); }
        data.resize((data.size() + alignment - 1) / alignment * alignment);
        tensors.push_back({name, dims, type, offset, data});
    }

    /// Header, metadata and tensor infos, then the tensors' data behind padding.
    [[nodiscard]] std::string bytes() const
    {
        std::string out = magic + field(version) + field<std::uint64_t>(tensors.size() + missing_tensors)
                          + field<std::uint64_t>(pairs.size() + missing_pairs);
        for (std::string const& one : pairs) { out += one; }
        for (tensor const& one : tensors)
        {
            out += text_field(one.name) + field(static_cast<std::uint32_t>(one.dims.size()));
            for (std::uint64_t const dim : one.dims) { out += field(dim); }
            out += field(one.type) + field(one.offset);
        }
        if (!tensors.empty()) { out.resize((out.size() + alignment - 1) / alignment * alignment); }
        for (tensor const& one : tensors) { out += one.data; }
        return out;
    }
};

/// Opens bytes that lie in an allocation of exactly their size, so that a sanitizer sees the first byte too many.
[[nodiscard]] inline runner::gguf_file parse_gguf(std::string const& bytes, runner::gguf_limits const& limits = {})
{
    auto memory = runner::detail::allocate_bytes(bytes.size());
    if (!bytes.empty()) { std::memcpy(memory.get(), bytes.data(), bytes.size()); }
    std::byte const* const start = memory.get();
    return runner::gguf_file::parse("made.gguf", {std::move(memory), {start, bytes.size()}}, limits);
}
