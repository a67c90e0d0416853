/// \file generate.cpp: the files that mdkv_run generate and its neighbours are given
#include "runner/generate.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "runner/file_bytes.hpp"
#include "runner/greedy.hpp"
#include "runner/session.hpp"
#include "support/byte_vocabulary.hpp"
#include "support/message.hpp"
#include "support/scratch_folder.hpp"

using support::message_of;
using support::says;

TEST_CASE("a text is read whole, whatever its size, from files and pipes")
{
    scratch_folder const folder;
    constexpr std::size_t request = std::size_t{1} << 16; // as read_text asks for
    for (std::size_t const size : {std::size_t{0}, std::size_t{1}, request - 1, request, request + 1, 3 * request})
    {
        CAPTURE(size);
        std::string text(size, '\0');
        for (std::size_t i = 0; i < size; ++i) { text[i] = static_cast<char>(i * 131 % 251); }
        bool const same = runner::read_text(folder.write("text", text)) == text;
        CHECK(same);
    }

    std::string const pipe = folder.file("pipe");
    REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
    std::string const sent(5 * request + 7, 'x');
    std::thread writer([&] { std::ofstream{pipe, std::ios::binary} << sent; });
    std::string const got = runner::read_text(pipe);
    writer.join();
    CHECK(got.size() == sent.size());
}

TEST_CASE("a text that cannot be read is refused by its file and the reason")
{
    scratch_folder const folder;
    std::string const absent = folder.file("absent.txt");
    says(message_of([&] { (void)runner::read_text(absent); }), absent + ": cannot be opened: No such file");
    says(message_of([&] { (void)runner::read_text(folder.path()); }), folder.path() + ": is a folder, not a file");
    auto const words = byte_vocabulary();
    says(message_of([&] { (void)runner::first_tokens(words, folder.path(), 1, "for a test"); }),
        folder.path() + ": is a folder, not a file");
    says(message_of([&] { (void)runner::first_tokens(words, folder.write("few.txt", "ab"), 3, "for a test"); }),
        "few.txt has 2 tokens; 3 are needed");
}

TEST_CASE("a prompt without a token to begin with is refused by its file")
{
    scratch_folder const folder;
    auto const words  = byte_vocabulary({}, false, "smollm", {}, 128); // of ASCII alone
    auto const prompt = [&](std::string const& path, bool raw) {
        runner::generate_options options;
        options.prompt_path = path;
        options.raw         = raw;
        return runner::detail::prompt_tokens(words, options);
    };
    std::string const empty   = folder.write("empty.txt", "");
    std::string const foreign = folder.write("foreign.txt", "\xE9\xE8");
    for (bool const raw : {false, true}) // a vocabulary without a chat form is raw in either case
    {
        CAPTURE(raw);
        says(message_of([&] { (void)prompt(empty, raw); }), empty + ": is empty");
        says(message_of([&] { (void)prompt(foreign, raw); }), foreign + ": holds no byte that a token stands for");
        says(message_of([&] { (void)prompt(folder.path(), raw); }), folder.path() + ": is a folder");
        says(message_of([&] { (void)prompt(folder.file("gone"), raw); }), folder.file("gone") + ": cannot be opened");
    }
    CHECK(prompt(folder.write("good.txt", "ab"), true).size() == 2);

    // The token that a model wants before every text is enough to begin with.
    auto const with_bos = byte_vocabulary({}, true);
    runner::generate_options options;
    options.prompt_path = empty;
    CHECK(runner::detail::prompt_tokens(with_bos, options) == std::vector<std::int32_t>{with_bos.bos().value()});
}

TEST_CASE("greedy takes the largest logit, the first of equal ones, and never a NaN")
{
    CHECK(runner::greedy_token(std::vector<float>{1, 3, 2, 3}) == 1);
    CHECK(runner::greedy_token(std::vector<float>{-5}) == 0);
    CHECK(runner::greedy_token(std::vector<float>{NAN, -1, NAN, 2}) == 3);
    CHECK_THROWS_AS((void)runner::greedy_token({}), std::invalid_argument);
    CHECK_THROWS_AS((void)runner::greedy_token(std::vector<float>{NAN, NAN}), std::invalid_argument);
}
