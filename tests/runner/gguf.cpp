/// \file gguf.cpp: reading GGUF files: what is in them, and that no file does harm
#include "runner/gguf.hpp"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <sys/stat.h>
#include <vector>

#include <doctest/doctest.h>

#include "runner/file_bytes.hpp"
#include "runner/file_error.hpp"
#include "runner/ggml_type.hpp"
#include "support/gguf_bytes.hpp"
#include "support/reference_model.hpp"
#include "support/scratch_folder.hpp"

namespace
{

/// A small file with values of every type and three tensors.
gguf_parts good_parts()
{
    gguf_parts parts;
    parts.text("general.architecture", "llama");
    parts.pair("a.u8", gguf_type::u8, field<std::uint8_t>(200));
    parts.pair("a.i8", gguf_type::i8, field<std::int8_t>(-100));
    parts.pair("a.u16", gguf_type::u16, field<std::uint16_t>(60000));
    parts.pair("a.i16", gguf_type::i16, field<std::int16_t>(-30000));
    parts.pair("a.u32", gguf_type::u32, field<std::uint32_t>(4000000000U));
    parts.pair("a.i32", gguf_type::i32, field<std::int32_t>(-2000000000));
    parts.pair("a.u64", gguf_type::u64, field<std::uint64_t>(std::uint64_t{1} << 40));
    parts.pair("a.i64", gguf_type::i64, field<std::int64_t>(-(std::int64_t{1} << 40)));
    parts.pair("a.huge", gguf_type::u64, field<std::uint64_t>(std::uint64_t{1} << 63));
    parts.pair("a.f32", gguf_type::f32, field(0.5F));
    parts.pair("a.f64", gguf_type::f64, field(0.1));
    parts.boolean("a.yes", true);
    parts.boolean("a.no", false);
    parts.texts("list.texts", {"one", "", "three"});
    parts.integers("list.integers", {-1, 0, 7});
    parts.pair("list.bytes", gguf_type::array,
        field(gguf_type::u8) + field<std::uint64_t>(2) + field<std::uint8_t>(1) + field<std::uint8_t>(255));
    parts.texts("list.empty", {});
    parts.add_tensor("vector", {3}, 0, field(1.0F) + field(2.0F) + field(3.0F));
    parts.add_tensor("matrix", {32, 2}, 3, std::string(40, '\x11'));
    parts.add_tensor("cube", {2, 2, 2}, 1, std::string(16, '\x22'));
    return parts;
}

/// Uses everything a file offers, so that a sanitizer sees every byte it leads to.
std::uint64_t touch_all(runner::gguf_file const& file)
{
    std::uint64_t sum = 0;
    for (std::string_view const key :
        {"general.architecture", "a.u8", "a.i8", "a.u16", "a.i16", "a.u32", "a.i32", "a.u64", "a.i64", "a.huge",
            "a.f32", "a.f64", "a.yes", "a.no", "list.texts", "list.integers", "list.bytes", "list.empty"})
    {
        for (std::function<void()> const& use :
            std::vector<std::function<void()>>{[&] { sum += static_cast<std::uint64_t>(file.integer(key)); },
                [&] { sum += file.number(key) > 0 ? 1 : 0; }, [&] { sum += file.boolean(key) ? 1 : 0; },
                [&] {
                    for (char const c : file.text(key)) { sum += static_cast<unsigned char>(c); }
                },
                [&] {
                    for (auto const t : file.texts(key))
                    {
                        sum += t.empty() ? 0 : static_cast<unsigned char>(t.back());
                    }
                },
                [&] {
                    for (auto const i : file.integers(key)) { sum += static_cast<std::uint64_t>(i); }
                }})
        {
            try
            {
                use();
            }
            catch (runner::file_error const&)
            {
                ++sum;
            }
        }
    }
    for (runner::tensor_info const& tensor : file.tensors())
    {
        CHECK(file.find_tensor(tensor.name) == &tensor);
        for (std::byte const b : tensor.data) { sum += static_cast<std::uint64_t>(b); }
    }
    return sum;
}

/// The message a file is refused with; fails the test when it is accepted.
std::string refusal(std::string const& bytes, runner::gguf_limits const& limits = {})
{
    try
    {
        static_cast<void>(parse_gguf(bytes, limits));
    }
    catch (runner::file_error const& error)
    {
        return error.what();
    }
    FAIL_CHECK("a file was accepted that should be refused");
    return {};
}

std::string refusal(std::function<void(gguf_parts&)> const& spoil)
{
    gguf_parts parts = good_parts();
    spoil(parts);
    return refusal(parts.bytes());
}

bool has(std::string const& message, std::string_view phrase)
{
    CAPTURE(message);
    CAPTURE(phrase);
    bool const found = message.find(phrase) != std::string::npos;
    CHECK(found);
    return found;
}

std::string open_refusal(std::string const& path, runner::gguf_limits const& options = {})
{
    try
    {
        static_cast<void>(runner::gguf_file::open(path, options));
    }
    catch (runner::file_error const& error)
    {
        return error.what();
    }
    FAIL_CHECK("a file was opened that should be refused");
    return {};
}

} // namespace

TEST_CASE("gguf: every metadata type is read back")
{
    auto const file = parse_gguf(good_parts().bytes());
    CHECK(file.text("general.architecture") == "llama");
    CHECK(file.integer("a.u8") == 200);
    CHECK(file.integer("a.i8") == -100);
    CHECK(file.integer("a.u16") == 60000);
    CHECK(file.integer("a.i16") == -30000);
    CHECK(file.integer("a.u32") == 4000000000);
    CHECK(file.integer("a.i32") == -2000000000);
    CHECK(file.integer("a.u64") == std::int64_t{1} << 40);
    CHECK(file.integer("a.i64") == -(std::int64_t{1} << 40));
    CHECK(file.number("a.f32") == 0.5);
    CHECK(file.number("a.f64") == 0.1);
    CHECK(file.number("a.i8") == -100.0);
    CHECK(file.boolean("a.yes"));
    CHECK_FALSE(file.boolean("a.no"));
    CHECK(file.texts("list.texts") == std::vector<std::string_view>{"one", "", "three"});
    CHECK(file.integers("list.integers") == std::vector<std::int64_t>{-1, 0, 7});
    CHECK(file.integers("list.bytes") == std::vector<std::int64_t>{1, 255});
    CHECK(file.texts("list.empty").empty());
}

TEST_CASE("gguf: an absent key is told apart from a value of another type")
{
    auto const file = parse_gguf(good_parts().bytes());
    CHECK_FALSE(file.has("a.none"));
    CHECK_FALSE(file.find_integer("a.none").has_value());
    CHECK_FALSE(file.find_text("a.none").has_value());
    CHECK_THROWS_WITH_AS(
        static_cast<void>(file.integer("a.none")), "made.gguf: metadata key \"a.none\" is absent", runner::file_error);
    CHECK_THROWS_AS(static_cast<void>(file.texts("a.none")), runner::file_error);
    auto const message = [&](auto const& use) {
        try
        {
            use();
        }
        catch (runner::file_error const& error)
        {
            CHECK(error.offset().has_value());
            return std::string(error.what());
        }
        return std::string();
    };
    has(message([&] { static_cast<void>(file.integer("general.architecture")); }), "another type");
    has(message([&] { static_cast<void>(file.text("a.u8")); }), "u8 (limit string)");
    has(message([&] { static_cast<void>(file.find_boolean("a.u8")); }), "u8 (limit boolean)");
    has(message([&] { static_cast<void>(file.find_number("a.yes")); }), "boolean (limit an integer)");
    has(message([&] { static_cast<void>(file.texts("list.integers")); }), "i32 (limit string)");
    has(message([&] { static_cast<void>(file.integers("list.texts")); }), "string (limit an integer)");
    has(message([&] { static_cast<void>(file.integers("a.u8")); }), "u8 (limit array)");
    has(message([&] { static_cast<void>(file.integer("a.huge")); }), "is too large");
}

TEST_CASE("gguf: keys are listed by their beginning, and values of every type are told in messages")
{
    gguf_parts parts = good_parts();
    parts.pair("a.almost", gguf_type::f32, field(std::nextafter(1.0F, 2.0F)));
    parts.pair("a.one", gguf_type::f64, field(1.0));
    parts.text("a.text", "tab\there");
    auto const file = parse_gguf(parts.bytes());
    CHECK(file.keys_below("list.")
          == std::vector<std::string_view>{"list.bytes", "list.empty", "list.integers", "list.texts"});
    CHECK(file.keys_below("a.f") == std::vector<std::string_view>{"a.f32", "a.f64"});
    CHECK(file.keys_below("a.f32.").empty());
    CHECK(file.keys_below("").size() == parts.pairs.size());

    std::map<std::string_view, std::string> const told = {{"general.architecture", "llama"}, {"a.u8", "200"},
        {"a.i8", "-100"}, {"a.u16", "60000"}, {"a.i16", "-30000"}, {"a.u32", "4000000000"}, {"a.i32", "-2000000000"},
        {"a.u64", "1099511627776"}, {"a.i64", "-1099511627776"}, {"a.huge", "9223372036854775808"}, {"a.f32", "0.5"},
        {"a.f64", "0.1"}, {"a.yes", "true"}, {"a.no", "false"}, {"list.texts", "array of 3"},
        {"list.empty", "array of 0"}, {"a.almost", "1.0000001"}, {"a.one", "1"}, {"a.text", "tab\\x09here"}};
    for (auto const& one : told)
    {
        CAPTURE(one.first);
        CHECK(file.value_text(one.first) == one.second);
    }
    CHECK(file.array_length("list.texts") == 3);
    CHECK(file.array_length("list.empty") == 0);
    CHECK_THROWS_AS(static_cast<void>(file.array_length("a.u8")), runner::file_error);
    CHECK_THROWS_AS(static_cast<void>(file.value_text("a.none")), runner::file_error);
}

TEST_CASE("gguf: a piece of a split model is refused as that, with the way to join the pieces; a whole one is read")
{
    auto const piece = [](std::uint16_t count, std::uint32_t number_type, std::string const& number) {
        return refusal([&](gguf_parts& p) {
            p.pair("split.count", gguf_type::u16, field(count));
            p.pair("split.no", number_type, number);
        });
    };
    for (std::string const& message :
        {piece(2, gguf_type::u16, field<std::uint16_t>(0)), piece(2, gguf_type::i64, field<std::int64_t>(0))})
    {
        has(message, "made.gguf: is piece 1 of 2 of a split model");
        has(message, "split.count");
        has(message, "llama-gguf-split --merge");
    }
    has(piece(13, gguf_type::u16, field<std::uint16_t>(12)), "is piece 13 of 13 of a split model");
    for (std::int64_t const senseless : {std::int64_t{-1}, std::int64_t{7}, std::numeric_limits<std::int64_t>::max()})
    {
        has(piece(7, gguf_type::i64, field(senseless)), "is one piece of 7 of a split model");
    }
    has(refusal([](gguf_parts& p) { p.integer("split.count", 3); }), "is one piece of 3 of a split model");
    has(refusal([](gguf_parts& p) { p.text("split.count", "3"); }), "has another type");
    for (std::uint32_t const whole : {0U, 1U}) // 0: as the pieces' tool writes it when it joins them
    {
        gguf_parts parts = good_parts();
        parts.integer("split.count", whole);
        CHECK(parse_gguf(parts.bytes()).tensors().size() == 3);
    }
}

TEST_CASE("gguf: tensors have their names, shapes and bytes")
{
    auto const file = parse_gguf(good_parts().bytes());
    REQUIRE(file.tensors().size() == 3);
    CHECK(file.tensors()[0].name == "vector");
    runner::tensor_info const& matrix = file.tensor("matrix");
    CHECK(matrix.type == runner::ggml_type::q4_1);
    CHECK(matrix.n_dims == 2);
    CHECK(matrix.dims == std::array<std::int64_t, 4>{32, 2, 1, 1});
    CHECK(matrix.elements() == 64);
    REQUIRE(matrix.data.size() == 40);
    CHECK(matrix.data.front() == std::byte{0x11});
    CHECK(matrix.data.back() == std::byte{0x11});
    CHECK(file.tensor("cube").data.size() == 16);
    CHECK(file.find_tensor("none") == nullptr);
    CHECK_THROWS_WITH_AS(
        static_cast<void>(file.tensor("none")), "made.gguf: tensor \"none\" is absent", runner::file_error);
}

TEST_CASE("gguf: a file outlives the object it was opened by, in its copies")
{
    runner::gguf_file copy = [] {
        auto const file = parse_gguf(good_parts().bytes());
        return file;
    }();
    CHECK(copy.tensor("matrix").data[0] == std::byte{0x11});
    CHECK(touch_all(copy) > 0);
}

TEST_CASE("gguf: versions 2 and 3 are read and no others")
{
    for (std::uint32_t const version : {2U, 3U})
    {
        gguf_parts parts = good_parts();
        parts.version    = version;
        CHECK(parse_gguf(parts.bytes()).tensors().size() == 3);
    }
    for (std::uint32_t const version : {0U, 1U, 4U, 0xFFFFFFFFU})
    {
        CAPTURE(version);
        has(refusal([&](gguf_parts& p) { p.version = version; }), "version is not supported");
    }
    has(refusal([](gguf_parts& p) { p.version = 0x03000000; }), "big-endian");
    has(refusal([](gguf_parts& p) { p.magic = "GGML"; }), "does not begin with \"GGUF\" at byte 0: \"GGML\"");
}

TEST_CASE("gguf: an alignment other than 32 is followed")
{
    for (std::uint32_t const alignment : {1U, 8U, 64U, 4096U})
    {
        CAPTURE(alignment);
        gguf_parts parts;
        parts.alignment = alignment;
        parts.integer("general.alignment", alignment);
        parts.add_tensor("a", {1}, 0, field(1.0F));
        parts.add_tensor("b", {2}, 0, field(2.0F) + field(3.0F));
        auto const file = parse_gguf(parts.bytes());
        CHECK(file.tensor("b").data[3] == std::byte{0x40}); // 2.0F
    }
    for (std::uint32_t const alignment : {0U, 3U, 48U})
    {
        CAPTURE(alignment);
        has(refusal([&](gguf_parts& p) { p.integer("general.alignment", alignment); }), "is not a power of two");
    }
    has(refusal([](gguf_parts& p) { p.text("general.alignment", "32"); }), "has another type");
}

TEST_CASE("gguf: a file without tensors is read, with or without metadata")
{
    CHECK(parse_gguf(gguf_parts{}.bytes()).tensors().empty());
    gguf_parts parts;
    parts.text("tokenizer.ggml.model", "gpt2");
    CHECK(parse_gguf(parts.bytes()).text("tokenizer.ggml.model") == "gpt2");
}

TEST_CASE("gguf: the padding of the last tensor may be missing, but nothing may follow it")
{
    std::string const whole = good_parts().bytes();
    CHECK(parse_gguf(whole.substr(0, whole.size() - 16)).tensor("cube").data.size() == 16);
    has(refusal(whole.substr(0, whole.size() - 15)), "file ends inside the padding");
    has(refusal(whole + "x"), "bytes follow the last tensor");
    has(refusal(whole + std::string(32, '\0')), "32 bytes");
}

TEST_CASE("gguf: a file cut short at any byte is refused")
{
    std::string const whole = good_parts().bytes();
    for (std::size_t size = 0; size < whole.size(); ++size)
    {
        if (size == whole.size() - 16) { continue; } // complete but for the last padding
        CAPTURE(size);
        CHECK_THROWS_AS(static_cast<void>(parse_gguf(whole.substr(0, size))), runner::file_error);
    }
}

TEST_CASE("gguf: a file with any bit of it flipped is refused or can be used")
{
    std::string const whole = good_parts().bytes();
    std::size_t refused     = 0;
    for (std::size_t i = 0; i < 8 * whole.size(); ++i)
    {
        std::string spoilt = whole;
        spoilt[i / 8]      = static_cast<char>(spoilt[i / 8] ^ (1 << (i % 8)));
        try
        {
            auto const file = parse_gguf(spoilt);
            CHECK(touch_all(file) > 0);
        }
        catch (runner::file_error const&)
        {
            ++refused;
        }
    }
    CHECK(refused > 0);
    CHECK(refused < 8 * whole.size());
}

TEST_CASE("gguf: spoilt tensor descriptions are refused by name and place")
{
    constexpr auto huge = std::numeric_limits<std::uint64_t>::max();
    using tensor        = gguf_parts::tensor;
    auto const spoilt   = [](std::function<void(std::vector<tensor>&)> const& spoil) {
        return refusal([&](gguf_parts& p) { spoil(p.tensors); });
    };
    has(spoilt([](auto& t) { t[1].dims = {}; }), "dimension count of tensor \"matrix\"");
    has(spoilt([](auto& t) { t[1].dims = {32, 2, 1, 1, 1}; }), "(limit 1 to 4)");
    has(spoilt([](auto& t) { t[0].dims = {0}; }), "dimension of tensor \"vector\" is 0");
    has(spoilt([](auto& t) { t[2].dims = {2, 0, 2}; }), "dimension of tensor \"cube\" is 0");
    has(spoilt([](auto& t) { t[0].dims = {huge}; }), "element count of tensor \"vector\" overflows");
    has(spoilt([](auto& t) { t[2].dims = {1ULL << 32, 1ULL << 31}; }), "element count of tensor \"cube\" overflows");
    has(spoilt([](auto& t) {
        t[2].dims = {1ULL << 60, 1};
        t[2].type = 0;
    }),
        "the data of tensor \"cube\"");
    has(spoilt([](auto& t) { t[0].dims = {1ULL << 62}; }), "byte size of tensor \"vector\" overflows");
    has(spoilt([](auto& t) { t[0].dims = {1ULL << 40}; }), "offset of tensor \"matrix\"");
    has(spoilt([](auto& t) { t[1].type = 4; }), "type of tensor \"matrix\" is not supported");
    has(spoilt([](auto& t) { t[1].type = 0xFFFFFFFF; }), ": 4294967295");
    has(spoilt([](auto& t) { t[1].dims = {33, 2}; }), "columns of tensor \"matrix\" are no multiple of a Q4_1 block");
    has(spoilt([](auto& t) {
        t[1].dims = {32, 2};
        t[1].type = 12;
    }),
        "Q4_K");
    has(spoilt([](auto& t) { t[1].offset = 0; }), "offset of tensor \"matrix\" is not where the one before it ends");
    has(spoilt([](auto& t) { t[1].offset = 33; }), "33 (limit 32)");
    has(spoilt([](auto& t) { t[1].offset = huge; }), "18446744073709551615 (limit 32)");
    has(spoilt([](auto& t) { t[0].offset = 32; }), "offset of tensor \"vector\"");
    has(spoilt([](auto& t) { t[1].name = "vector"; }), "tensor name occurs twice");
    has(spoilt([](auto& t) { t[1].name = ""; }), "tensor name is empty");
    has(spoilt([](auto& t) { t[1].name = std::string(64, 'n'); }), "tensor name length in bytes");
    has(spoilt([](auto& t) {
        t[1].name = "\x1B[31m";
        t[1].type = 99;
    }),
        "\"\\x1b[31m\"");
    has(refusal([](gguf_parts& p) { p.missing_tensors = 1; }), "tensor name is empty");
    has(refusal([](gguf_parts& p) { p.missing_tensors = huge - 3; }), "tensor count at byte 8");
}

TEST_CASE("gguf: sizes that only overflow as a sum are refused")
{
    gguf_parts parts;
    std::uint64_t offset = 0;
    for (int i = 0; i < 5; ++i)
    { // 2^62 bytes each
        parts.tensors.push_back({runner::joined("t", std::to_string(i)), {std::uint64_t{1} << 60}, 0, offset, ""});
        offset += std::uint64_t{1} << 62;
    }
    has(refusal(parts.bytes()), "sizes of the tensors overflow");
}

TEST_CASE("gguf: spoilt metadata is refused by name and place")
{
    constexpr auto huge = std::numeric_limits<std::uint64_t>::max();
    auto const array    = [](std::uint32_t element, std::uint64_t count) { return field(element) + field(count); };
    auto const spoilt   = [](std::uint32_t type, std::string const& value) {
        return refusal([&](gguf_parts& p) { p.pair("bad.key", type, value); });
    };
    has(spoilt(13, ""), "metadata value type is unknown");
    has(spoilt(gguf_type::boolean, field<std::uint8_t>(2)), "boolean value is neither 0 nor 1");
    has(spoilt(gguf_type::text, field(huge)), "string value length in bytes");
    has(spoilt(gguf_type::text, field<std::uint64_t>(1 << 20)), "file ends inside string value");
    has(spoilt(gguf_type::text, field<std::uint64_t>((1 << 20) + 1)), "1048577 (limit 1048576)");
    has(spoilt(gguf_type::array, array(gguf_type::array, 1)), "array of arrays is not supported");
    has(spoilt(gguf_type::array, array(99, 1)), "array element type is unknown");
    has(spoilt(gguf_type::array, array(gguf_type::u8, huge)), "array length");
    has(spoilt(gguf_type::array, array(gguf_type::f64, 1 << 20)), "array length for the bytes left");
    has(spoilt(gguf_type::array, array(gguf_type::text, 1 << 20)), "array length for the bytes left");
    has(spoilt(gguf_type::array, array(gguf_type::text, 1) + field(huge)), "string value length");
    has(refusal([](gguf_parts& p) { p.integer("", 1); }), "metadata key is empty");
    has(refusal([](gguf_parts& p) { p.integer("a.u8", 1); }), "metadata key occurs twice");
    has(refusal([](gguf_parts& p) { p.integer(std::string(65536, 'k'), 1); }), "metadata key length in bytes");
    has(refusal([](gguf_parts& p) { p.missing_pairs = huge - 30; }), "metadata count");
    has(refusal([](gguf_parts& p) { p.missing_pairs = 1; }), "made.gguf: ");
}

TEST_CASE("gguf: every limit is kept, and the value just within it accepted")
{
    gguf_parts const parts  = good_parts();
    std::string const bytes = parts.bytes();
    auto const check = [&](std::uint64_t runner::gguf_limits::*limit, std::uint64_t needed, std::string_view phrase) {
        runner::gguf_limits limits;
        limits.*limit = needed;
        CHECK_NOTHROW(static_cast<void>(parse_gguf(bytes, limits)));
        limits.*limit = needed - 1;
        has(refusal(bytes, limits), phrase);
    };
    std::uint64_t metadata = 0;
    for (std::string const& pair : parts.pairs) { metadata += pair.size(); }
    check(&runner::gguf_limits::file_bytes, bytes.size(), "file is too large");
    check(&runner::gguf_limits::metadata_bytes, metadata, "metadata size in bytes");
    check(&runner::gguf_limits::string_bytes, 5, "string value length in bytes");
    check(&runner::gguf_limits::array_elements, 3, "array length");
    check(&runner::gguf_limits::tensors, 3, "tensor count");
}

TEST_CASE("gguf: what is no file of the right kind is refused before it is read")
{
    scratch_folder const folder;
    has(open_refusal(folder.file("absent")), "cannot be opened");
    has(open_refusal(folder.path()), folder.path() + ": is a folder, not a file");
    has(open_refusal(folder.write("empty", "")), "does not begin with \"GGUF\" at byte 0: \"\"");
    has(open_refusal(folder.write("one", "G")), "\"G\"");
    has(open_refusal(folder.write("text", "hello\n")), "\"hell\"");
    has(open_refusal(folder.write("short", "GGUF")), "file ends inside version");
    auto const good = runner::gguf_file::open(folder.write("good.gguf", good_parts().bytes()));
    CHECK(good.name() == folder.file("good.gguf"));
    CHECK(touch_all(good) > 0);
    runner::gguf_limits small;
    small.file_bytes = 100;
    has(open_refusal(folder.write("large", good_parts().bytes()), small), "file is too large");
    REQUIRE(::mkfifo(folder.file("pipe").c_str(), 0600) == 0);
    has(open_refusal(folder.file("pipe")), "is not a regular file");
}

TEST_CASE("gguf: the reference model has the tensors and values it should have")
{
    if (skipped_without_reference_model("gguf: the reference model")) { return; }
    auto const file = runner::gguf_file::open(reference_model_path());
    CHECK(file.bytes() == 98362432);
    CHECK(file.integer("llama.block_count") == 30);
    CHECK(file.integer("llama.embedding_length") == 576);
    CHECK(file.number("llama.rope.freq_base") == 100000.0);
    CHECK(file.texts("tokenizer.ggml.tokens").size() == 49152);
    std::map<std::string_view, int> histogram;
    for (runner::tensor_info const& tensor : file.tensors()) { ++histogram[runner::name_of(tensor.type)]; }
    CHECK(histogram == std::map<std::string_view, int>{{"F32", 61}, {"Q4_1", 210}, {"Q8_0", 1}});
    CHECK(file.tensor("token_embd.weight").dims == std::array<std::int64_t, 4>{576, 49152, 1, 1});
    CHECK(file.tensor("blk.29.ffn_down.weight").dims == std::array<std::int64_t, 4>{1536, 576, 1, 1});
}
