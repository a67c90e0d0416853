/// \file gguf_writer.hpp: small GGUF files in memory, for tests that need a model of a certain shape
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runner/file_bytes.hpp"
#include "runner/ggml_type.hpp"
#include "runner/gguf.hpp"

namespace support
{

/// Collects metadata and tensors; `file` lays them out as a version 3 file.
class gguf_writer
{
public:
    void text(std::string_view key, std::string_view value)
    {
        begin_pair(key, 8);
        put_text(metadata_, value);
    }
    void u32(std::string_view key, std::uint32_t value)
    {
        begin_pair(key, 4);
        put(metadata_, value);
    }
    void u64(std::string_view key, std::uint64_t value)
    {
        begin_pair(key, 10);
        put(metadata_, value);
    }
    void f32(std::string_view key, float value)
    {
        begin_pair(key, 6);
        put(metadata_, value);
    }
    void boolean(std::string_view key, bool value)
    {
        begin_pair(key, 7);
        put(metadata_, static_cast<std::uint8_t>(value ? 1 : 0));
    }
    void texts(std::string_view key, std::span<std::string const> values)
    {
        begin_pair(key, 9);
        put(metadata_, std::uint32_t{8});
        put(metadata_, static_cast<std::uint64_t>(values.size()));
        for (std::string const& value : values) { put_text(metadata_, value); }
    }

    /// \param dims   fastest first, as the file has them: columns, rows
    void tensor(std::string_view name, std::vector<std::uint64_t> const& dims, runner::ggml_type type,
        std::span<std::byte const> bytes)
    {
        put_text(infos_, name);
        put(infos_, static_cast<std::uint32_t>(dims.size()));
        for (std::uint64_t const dim : dims) { put(infos_, dim); }
        put(infos_, static_cast<std::uint32_t>(type));
        put(infos_, static_cast<std::uint64_t>(data_.size()));
        data_.insert(data_.end(), bytes.begin(), bytes.end());
        pad(data_);
        ++tensors_;
    }
    void tensor(std::string_view name, std::vector<std::uint64_t> const& dims, std::vector<float> const& values)
    {
        tensor(name, dims, runner::ggml_type::f32, std::as_bytes(std::span(values)));
    }

    [[nodiscard]] std::vector<std::byte> bytes() const
    {
        std::vector<std::byte> out;
        for (char const c : std::string_view("GGUF")) { out.push_back(static_cast<std::byte>(c)); }
        put(out, std::uint32_t{3});
        put(out, tensors_);
        put(out, pairs_);
        out.insert(out.end(), metadata_.begin(), metadata_.end());
        out.insert(out.end(), infos_.begin(), infos_.end());
        pad(out);
        out.insert(out.end(), data_.begin(), data_.end());
        return out;
    }

    [[nodiscard]] runner::gguf_file file() const
    {
        auto const owner = std::make_shared<std::vector<std::byte> const>(bytes());
        return runner::gguf_file::parse("synthetic.gguf", runner::file_bytes{owner, std::span(*owner)});
    }

private:
    template <class Number>
    static void put(std::vector<std::byte>& out, Number value)
    {
        auto const* const first = reinterpret_cast<std::byte const*>(&value);
        out.insert(out.end(), first, first + sizeof value);
    }
    static void put_text(std::vector<std::byte>& out, std::string_view value)
    {
        put(out, static_cast<std::uint64_t>(value.size()));
        for (char const c : value) { out.push_back(static_cast<std::byte>(c)); }
    }
    static void pad(std::vector<std::byte>& out) { out.resize((out.size() + 31) / 32 * 32); }

    void begin_pair(std::string_view key, std::uint32_t type)
    {
        put_text(metadata_, key);
        put(metadata_, type);
        ++pairs_;
    }

    std::uint64_t tensors_ = 0;
    std::uint64_t pairs_   = 0;
    std::vector<std::byte> metadata_, infos_, data_;
};

} // namespace support
