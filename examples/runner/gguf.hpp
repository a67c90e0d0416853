/// \file gguf.hpp: a GGUF model file (version 2 or 3): its metadata and its tensors, all checked when it is opened
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "file_bytes.hpp"
#include "file_error.hpp"
#include "ggml_type.hpp"
#include "gguf_cursor.hpp"
#include "gguf_metadata.hpp"

namespace runner
{

/// One tensor of the file; `name` and `data` point into the file's bytes and live as long as a `gguf_file` of it.
struct tensor_info
{
    std::string_view name;
    ggml_type type = ggml_type::f32;
    std::array<std::int64_t, 4> dims{1, 1, 1, 1}; // fastest first: dims[0] = columns; unused ones are 1
    int n_dims = 0;
    std::span<std::byte const> data;

    [[nodiscard]] std::int64_t elements() const noexcept { return dims[0] * dims[1] * dims[2] * dims[3]; }
};

/// Everything in the file was validated by `open`, so no accessor can leave the file's bytes. Copies share them.
class gguf_file : public gguf_metadata
{
public:
    /// \throws file_error   the file cannot be read, is damaged, passes a limit, holds an unsupported tensor type, or is
    ///                      one piece of a split model
    [[nodiscard]] static gguf_file open(std::string const& path, gguf_limits const& limits = {})
    {
        return gguf_file(path, load_file(path, magic, limits.file_bytes), limits);
    }

    /// The same for bytes that are in memory already; `file` names them in messages.
    [[nodiscard]] static gguf_file parse(std::string file, file_bytes bytes, gguf_limits const& limits = {})
    {
        return gguf_file(std::move(file), std::move(bytes), limits);
    }

    [[nodiscard]] std::uint64_t bytes() const noexcept { return contents().bytes.size(); }

    /// In the order of the file.
    [[nodiscard]] std::span<tensor_info const> tensors() const noexcept { return tensors_; }

    /// Null when there is none of this name.
    [[nodiscard]] tensor_info const* find_tensor(std::string_view wanted) const noexcept
    {
        auto const at = std::lower_bound(by_name_.begin(), by_name_.end(), wanted,
            [this](std::uint32_t i, std::string_view n) { return tensors_[i].name < n; });
        if (at == by_name_.end() || tensors_[*at].name != wanted) { return nullptr; }
        return &tensors_[*at];
    }

    /// \throws file_error   there is none of this name
    [[nodiscard]] tensor_info const& tensor(std::string_view wanted) const
    {
        tensor_info const* const found = find_tensor(wanted);
        if (found == nullptr) { throw file_error(name(), joined("tensor ", quoted(wanted), " is absent")); }
        return *found;
    }

private:
    static constexpr std::string_view magic            = "GGUF";
    static constexpr std::uint64_t longest_tensor_name = 63;

    gguf_file(std::string file, file_bytes whole, gguf_limits const& limits)
        : gguf_metadata(std::move(file), std::move(whole))
    {
        if (bytes() > limits.file_bytes)
        {
            throw file_error(name(), "file is too large", {}, joined(std::to_string(bytes()), " bytes"),
                std::to_string(limits.file_bytes));
        }
        detail::gguf_cursor cursor(name(), contents().bytes, limits);
        read_version(cursor);
        auto const tensor_count = cursor.number<std::uint64_t>("tensor count");
        cursor.at_most("tensor count", 8, tensor_count, limits.tensors);
        auto const pair_count = cursor.number<std::uint64_t>("metadata count");
        read_metadata(cursor, pair_count, limits);
        refuse_piece();
        std::uint64_t const alignment          = read_alignment();
        std::vector<std::uint64_t> const sizes = read_tensor_infos(cursor, tensor_count, alignment);
        place_tensors(cursor, sizes, alignment);
    }

    static void read_version(detail::gguf_cursor& cursor)
    {
        auto const start = reinterpret_cast<char const*>(cursor.skip("the magic number", magic.size()));
        if (std::string_view const found(start, magic.size()); found != magic)
        {
            cursor.fail("does not begin with \"GGUF\"", 0, quoted(found));
        }
        auto const version = cursor.number<std::uint32_t>("version");
        if ((version & 0xFFFFU) == 0 && version != 0)
        {
            cursor.fail("version looks byte-swapped: a big-endian file is not supported", 4, std::to_string(version));
        }
        if (version != 2 && version != 3)
        {
            cursor.fail("version is not supported", 4, std::to_string(version), "2 or 3");
        }
    }

    /// A piece lacks tensors that the other pieces have, and all but the first lack the model's metadata.
    void refuse_piece() const
    {
        std::int64_t const pieces = find_integer("split.count").value_or(1);
        if (pieces <= 1) { return; }
        std::int64_t const number = find_integer("split.no").value_or(-1);
        bool const is_numbered    = number >= 0 && number < pieces;
        std::string const piece   = is_numbered ? joined("piece ", std::to_string(number + 1)) : "one piece";
        throw file_error(name(), joined("is ", piece, " of ", std::to_string(pieces),
                                     " of a split model (metadata key \"split.count\"); join the pieces: "
                                     "llama-gguf-split --merge FIRST-PIECE WHOLE-FILE"));
    }

    [[nodiscard]] std::uint64_t read_alignment() const
    {
        constexpr std::string_view key = "general.alignment";
        if (!has(key)) { return 32; }
        std::uint32_t const alignment = u32(key);
        if (alignment == 0 || (alignment & (alignment - 1)) != 0)
        {
            refuse(key, "is not a power of two", std::to_string(alignment));
        }
        return alignment;
    }

    /// Fills `tensors_` but for `data`; returns each tensor's size in bytes.
    std::vector<std::uint64_t> read_tensor_infos(
        detail::gguf_cursor& cursor, std::uint64_t count, std::uint64_t alignment)
    {
        tensors_.reserve(count);
        std::vector<std::uint64_t> sizes;
        sizes.reserve(count);
        std::uint64_t expected = 0;
        for (std::uint64_t i = 0; i < count; ++i)
        {
            sizes.push_back(read_tensor_info(cursor, expected));
            if (__builtin_add_overflow(expected, sizes.back(), &expected)
                || __builtin_add_overflow(expected, padding(expected, alignment), &expected))
            {
                cursor.fail("sizes of the tensors overflow", cursor.position(), quoted(tensors_.back().name));
            }
        }
        index_tensors(cursor);
        return sizes;
    }

    std::uint64_t read_tensor_info(detail::gguf_cursor& cursor, std::uint64_t expected_offset)
    {
        tensor_info out;
        std::uint64_t const start = cursor.position();
        out.name                  = cursor.text("tensor name", longest_tensor_name);
        if (out.name.empty()) { cursor.fail("tensor name is empty", start); }
        std::uint64_t const shape = cursor.position();
        auto const n_dims         = cursor.number<std::uint32_t>("tensor dimension count");
        if (n_dims < 1 || n_dims > out.dims.size())
        {
            cursor.fail(
                joined("dimension count of tensor ", quoted(out.name)), shape, std::to_string(n_dims), "1 to 4");
        }
        out.n_dims            = static_cast<int>(n_dims);
        std::int64_t elements = 1;
        for (std::uint32_t d = 0; d < n_dims; ++d)
        {
            std::uint64_t const place = cursor.position();
            auto const dim            = cursor.number<std::uint64_t>("tensor dimension");
            if (dim == 0) { cursor.fail(joined("dimension of tensor ", quoted(out.name), " is 0"), place); }
            if (__builtin_mul_overflow(elements, dim, &elements))
            {
                cursor.fail(
                    joined("element count of tensor ", quoted(out.name), " overflows"), place, std::to_string(dim));
            }
            out.dims[d] = static_cast<std::int64_t>(dim);
        }
        std::uint64_t const size  = read_tensor_size(cursor, out, elements);
        std::uint64_t const place = cursor.position();
        auto const offset         = cursor.number<std::uint64_t>("tensor offset");
        if (offset != expected_offset)
        {
            cursor.fail(joined("offset of tensor ", quoted(out.name), " is not where the one before it ends"), place,
                std::to_string(offset), std::to_string(expected_offset));
        }
        tensors_.push_back(out);
        return size;
    }

    static std::uint64_t read_tensor_size(detail::gguf_cursor& cursor, tensor_info& out, std::int64_t elements)
    {
        std::uint64_t const place = cursor.position();
        auto const number         = cursor.number<std::uint32_t>("tensor type");
        auto const layout         = find_block_layout(number);
        if (!layout)
        {
            cursor.fail(
                joined("type of tensor ", quoted(out.name), " is not supported"), place, std::to_string(number));
        }
        out.type = static_cast<ggml_type>(number);
        if (out.dims[0] % layout->elements != 0)
        {
            cursor.fail(
                joined("columns of tensor ", quoted(out.name), " are no multiple of a ", layout->name, " block"), place,
                std::to_string(out.dims[0]), std::to_string(layout->elements));
        }
        std::uint64_t size = 0;
        if (__builtin_mul_overflow(elements / layout->elements, layout->bytes, &size))
        {
            cursor.fail(
                joined("byte size of tensor ", quoted(out.name), " overflows"), place, std::to_string(elements));
        }
        return size;
    }

    void index_tensors(detail::gguf_cursor const& cursor)
    {
        by_name_.resize(tensors_.size());
        for (std::size_t i = 0; i < by_name_.size(); ++i) { by_name_[i] = static_cast<std::uint32_t>(i); }
        auto const less = [this](std::uint32_t a, std::uint32_t b) { return tensors_[a].name < tensors_[b].name; };
        std::sort(by_name_.begin(), by_name_.end(), less);
        for (std::size_t i = 1; i < by_name_.size(); ++i)
        {
            if (!less(by_name_[i - 1], by_name_[i]))
            {
                cursor.fail("tensor name occurs twice", offset_in_file(tensors_[by_name_[i]].name.data()),
                    quoted(tensors_[by_name_[i]].name));
            }
        }
    }

    /// Gives each tensor its bytes. The file may end with or without the padding of its last tensor, nowhere else.
    void place_tensors(detail::gguf_cursor& cursor, std::vector<std::uint64_t> const& sizes, std::uint64_t alignment)
    {
        if (tensors_.empty()) { return; }
        pass_padding(cursor, alignment);
        for (std::size_t i = 0; i < sizes.size(); ++i)
        {
            std::byte const* const data =
                cursor.skip(joined("the data of tensor ", quoted(tensors_[i].name)), sizes[i]);
            tensors_[i].data = {data, static_cast<std::size_t>(sizes[i])};
            if (i + 1 < sizes.size() || cursor.left() != 0) { pass_padding(cursor, alignment); }
        }
        if (cursor.left() != 0)
        {
            cursor.fail(
                "bytes follow the last tensor", cursor.position(), joined(std::to_string(cursor.left()), " bytes"));
        }
    }

    static void pass_padding(detail::gguf_cursor& cursor, std::uint64_t alignment)
    {
        cursor.skip("the padding of a tensor", padding(cursor.position(), alignment));
    }

    [[nodiscard]] static constexpr std::uint64_t padding(std::uint64_t size, std::uint64_t alignment)
    {
        return (alignment - size % alignment) % alignment;
    }

    [[nodiscard]] std::uint64_t offset_in_file(char const* place) const noexcept
    {
        return static_cast<std::uint64_t>(reinterpret_cast<std::byte const*>(place) - contents().bytes.data());
    }

    std::vector<tensor_info> tensors_;   // in the order of the file
    std::vector<std::uint32_t> by_name_; // indexes of tensors_, sorted by name
};

} // namespace runner
