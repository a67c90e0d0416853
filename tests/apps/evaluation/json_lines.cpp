/// \file json_lines.cpp: lines outlive a killed run, a torn one is cut off, and somebody else's file stays as it is
#include "evaluation/json_lines.hpp"

#include <mdkv/core/error.hpp>

#include <csignal>
#include <cstddef>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include <sys/resource.h>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "support/message.hpp"
#include "support/scratch_folder.hpp"

namespace
{

constexpr runner::json_line_kind kind{R"({"n":)", "number of the test"};

/// The file open, and the numbers its lines had.
class numbers
{
public:
    explicit numbers(std::string const& path)
        : file{path, kind, [this](runner::json_line const& line) {
                   CHECK(line.number == read.size() + 1);
                   read.push_back(nlohmann::json::parse(line.text).at("n").get<int>());
               }}
    {}

    std::vector<int> read;
    runner::json_lines file;
};

std::string const first = "{\"n\":1}\n", second = "{\"n\":22}\n";

/// What is said of a file with this content, less its name; it must be as it was.
std::string refusal(std::string const& content)
{
    scratch_folder const folder;
    std::string const path = folder.write("lines.jsonl", content);
    std::string message    = support::message_of([&] { numbers const opened{path}; });
    CHECK(folder.read("lines.jsonl") == content);
    REQUIRE(message.starts_with(path));
    return message.substr(path.size());
}

/// No file of this process can grow beyond so many bytes while this lives: a full disk.
class full_disk
{
public:
    explicit full_disk(rlim_t bytes)
        : handler_{std::signal(SIGXFSZ, SIG_IGN)}
    {
        if (::getrlimit(RLIMIT_FSIZE, &before_) != 0) { throw std::runtime_error{"no limit of file sizes"}; }
        rlimit const small{bytes, before_.rlim_max};
        if (::setrlimit(RLIMIT_FSIZE, &small) != 0) { throw std::runtime_error{"no limit of file sizes"}; }
    }
    ~full_disk()
    {
        ::setrlimit(RLIMIT_FSIZE, &before_);
        std::signal(SIGXFSZ, handler_);
    }
    full_disk(full_disk const&)            = delete;
    full_disk& operator=(full_disk const&) = delete;

private:
    void (*handler_)(int);
    rlimit before_{};
};

} // namespace

TEST_CASE("lines that were appended are read again in their order")
{
    scratch_folder const folder;
    std::string const path = folder.file("lines.jsonl");
    {
        numbers opened{path}; // makes the file
        CHECK(opened.read.empty());
        CHECK(opened.file.path() == path);
        CHECK(folder.read("lines.jsonl").empty());
        opened.file.append(first);
        CHECK(folder.read("lines.jsonl") == first);
        opened.file.append(second + first);
    }
    numbers const again{path};
    CHECK(again.read == std::vector<int>{1, 22, 1});
    CHECK(again.file.cut() == 0);
    CHECK(folder.read("lines.jsonl") == first + second + first);
}

TEST_CASE("an empty file is a file without lines")
{
    scratch_folder const folder;
    numbers const opened{folder.write("lines.jsonl", "")};
    CHECK(opened.read.empty());
    CHECK(opened.file.cut() == 0);
}

TEST_CASE("a torn last line is cut off at whatever byte it ends, and lines go on behind the whole ones")
{
    for (std::string const& whole : {std::string{}, first})
    {
        for (std::size_t bytes = 1; bytes + 1 < second.size(); ++bytes)
        {
            CAPTURE(bytes);
            scratch_folder const folder;
            numbers opened{folder.write("lines.jsonl", whole + second.substr(0, bytes))};
            CHECK(opened.file.cut() == bytes);
            CHECK(opened.read.size() == (whole.empty() ? 0 : 1));
            CHECK(folder.read("lines.jsonl") == whole);
            opened.file.append(second);
            CHECK(folder.read("lines.jsonl") == whole + second);
        }
    }
}

TEST_CASE("a last line that lacks its end alone is whole, and gets it")
{
    scratch_folder const folder;
    numbers opened{folder.write("lines.jsonl", first + second.substr(0, second.size() - 1))};
    CHECK(opened.read == std::vector<int>{1, 22});
    CHECK(opened.file.cut() == 0);
    opened.file.append(first);
    CHECK(folder.read("lines.jsonl") == first + second + first);
}

TEST_CASE("any other bad line is refused with file, line and remedy, and the file stays as it was")
{
    std::string const message = refusal(first + "garbage\n" + second);
    support::says(message, ":2: is no number of the test (");
    CHECK(message.ends_with("): \"garbage\"; remove the line, or give another --out"));
    CHECK(refusal(first + second.substr(0, 4) + "\n").starts_with(":2: is no number of the test (")); // not the last
    CHECK(refusal(first + "\n").starts_with(":2: is no number of the test ("));
    CHECK(refusal(first + "{\"m\":3}\n").starts_with(":2: is no number of the test ("));
    CHECK(refusal(first + "{\"n\":\"3\"}").starts_with(":2: is no number of the test ("));
    CHECK(refusal("somebody's text, without a line end").starts_with(":1: is no number of the test ("));
    CHECK(refusal(std::string(3, '\0')).starts_with(":1: is no number of the test ("));
}

TEST_CASE("what a reader refuses itself, or throws, comes through, and the file can be opened again")
{
    scratch_folder const folder;
    std::string const path = folder.write("lines.jsonl", first);
    auto const refused     = [&](auto const& take) {
        return support::message_of([&] { runner::json_lines const opened{path, kind, take}; });
    };
    CHECK(refused([](runner::json_line const& line) { line.refuse("is too small"); })
          == path + R"(:1: is too small: "{"n":1}"; remove the line, or give another --out)");
    CHECK(refused([](runner::json_line const&) { throw std::runtime_error{"enough"}; }) == "enough");
    CHECK(numbers{path}.read == std::vector<int>{1});
}

TEST_CASE("a second opener is refused as long as the first one lives")
{
    scratch_folder const folder;
    std::string const path = folder.write("lines.jsonl", first);
    {
        numbers const opened{path};
        CHECK(support::message_of([&] { numbers const again{path}; })
              == path + ": another run is writing it; wait for its end or give another --out");
    }
    CHECK(numbers{path}.read == std::vector<int>{1});
}

TEST_CASE("a folder that is not there, or that is given as the file, is named")
{
    scratch_folder const folder;
    for (std::string const& path : {folder.file("none/lines.jsonl"), folder.path()})
    {
        CAPTURE(path);
        CHECK_THROWS_AS(numbers{path}, mdkv::error);
        CHECK(support::message_of([&] { numbers const opened{path}; }).starts_with(path + ": cannot be written: "));
    }
    CHECK_FALSE(std::filesystem::exists(folder.file("none")));
}

TEST_CASE("a line that cannot be written is an error, and what was there before is read again")
{
    scratch_folder const folder;
    std::string const path = folder.write("lines.jsonl", first);
    std::string message;
    {
        numbers opened{path};
        full_disk const limit{first.size() + 3};
        message = support::message_of([&] { opened.file.append(second); });
    }
    CHECK(message.starts_with(path + ": cannot be written: "));
    CHECK(folder.read("lines.jsonl") == first + second.substr(0, 3));
    numbers const again{path};
    CHECK(again.read == std::vector<int>{1});
    CHECK(again.file.cut() == 3);
}
