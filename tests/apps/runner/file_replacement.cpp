/// \file file_replacement.cpp: faults of files that are replaced: cut writes, a full disk, several writers, readers meanwhile
#include "runner/file_replacement.hpp"

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <doctest/doctest.h>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/engine/stored.hpp>

#include "runner/file_bytes.hpp"
#include "runner/file_error.hpp"
#include "support/message.hpp"
#include "support/packed.hpp"
#include "support/scratch_folder.hpp"
#include "support/stored.hpp"

using support::message_of;
using support::says;

namespace
{

std::vector<std::byte> file_of(mdkv::index_t tokens)
{
    support::layers_to_store<mdkv::half> all;
    all.caches.push_back(support::packed_layer<mdkv::half>{{.tokens = tokens}}.packed());
    all.tokens.resize(static_cast<std::size_t>(tokens) + 600); // no fewer than a head holds
    return all.written();
}

std::size_t files_in(scratch_folder const& folder)
{
    return static_cast<std::size_t>(
        std::distance(std::filesystem::directory_iterator{folder.path()}, std::filesystem::directory_iterator{}));
}

void replace(std::string const& path, std::span<std::byte const> bytes)
{
    runner::file_replacement file{path};
    file.write(bytes);
    file.commit();
}

/// Whether a file holds caches, all checks made; a file that is missing or refused does not.
bool holds_caches(std::string const& path)
{
    try
    {
        auto const file = runner::load_file(path, "mdkv", 1 << 30, runner::file_access::map);
        return mdkv::read<mdkv::half>(file.bytes, support::some_identity).layers() == 1;
    }
    catch (std::exception const&)
    {
        return false;
    }
}

/// What becomes of a process that runs the body, if the body returns: its exit status is 0.
template <class Body>
int status_of_process(Body const& body)
{
    ::pid_t const process = ::fork();
    if (process == 0)
    {
        for (int const number : {SIGBUS, SIGSEGV, SIGXFSZ}) { std::signal(number, SIG_DFL); }
        ::rlimit const none{0, 0};
        ::setrlimit(RLIMIT_CORE, &none);
        body();
        ::_exit(0);
    }
    int status = -1;
    ::waitpid(process, &status, 0);
    return status;
}

} // namespace

TEST_CASE("a file that is replaced is private, whole and alone in its folder")
{
    scratch_folder const folder;
    std::string const path = folder.write("caches", "old");
    auto const bytes       = file_of(40);
    replace(path, bytes);
    CHECK(holds_caches(path));
    CHECK(files_in(folder) == 1);
    struct ::stat of = {};
    REQUIRE(::stat(path.c_str(), &of) == 0);
    CHECK((of.st_mode & 0777U) == 0600U);
    says(message_of([&] { replace(folder.file("no/folder"), bytes); }), "cannot be made: No such file");
}

TEST_CASE("a process that ends at any byte leaves the old file, and beside it one that is refused")
{
    scratch_folder const folder;
    std::string const path = folder.file("caches");
    auto const old         = file_of(10);
    auto const bytes       = file_of(40);
    replace(path, old);
    std::vector<std::size_t> cuts{0, 1, 215, 216, 4096, bytes.size() - 1, bytes.size()};
    for (std::size_t at = 1000; at < bytes.size(); at += bytes.size() / 10) { cuts.push_back(at); }
    for (std::size_t const cut : cuts)
    {
        CAPTURE(cut);
        { // an exception on the way: nothing is left
            runner::file_replacement file{path};
            file.write(std::span{bytes}.first(cut));
        }
        CHECK(files_in(folder) == 1);
        int const status = status_of_process([&] {
            runner::file_replacement file{path};
            file.write(std::span{bytes}.first(cut));
            ::_exit(7);
        });
        CHECK(status == 7 << 8);
        CHECK(folder.read("caches").size() == old.size());
        CHECK(holds_caches(path));
        REQUIRE(files_in(folder) == 2);
        for (auto const& entry : std::filesystem::directory_iterator{folder.path()})
        {
            if (entry.path().filename() == "caches") { continue; }
            CHECK(holds_caches(entry.path().string()) == (cut == bytes.size()));
            std::filesystem::remove(entry.path());
        }
    }
}

TEST_CASE("a full disk is an error that names file, byte and reason; the old file stays and no other is left")
{
    scratch_folder const folder;
    std::string const path = folder.file("caches");
    auto const old         = file_of(10);
    auto const bytes       = file_of(40);
    replace(path, old);
    int const status = status_of_process([&] {
        std::signal(SIGXFSZ, SIG_IGN);
        ::rlimit const few{5000, 5000}; // writes beyond it fail as on a full disk, after a part
        ::setrlimit(RLIMIT_FSIZE, &few);
        std::string const text = message_of([&] { replace(path, bytes); });
        ::_exit(text.find("cannot be written at byte 5000: File too large") != std::string::npos ? 0 : 1);
    });
    CHECK(status == 0);
    CHECK(holds_caches(path));
    CHECK(folder.read("caches").size() == old.size());
    CHECK(files_in(folder) == 1);
}

TEST_CASE("of several writers one wins, and a reader sees one of the files, whole")
{
    scratch_folder const folder;
    std::string const path = folder.file("caches");
    std::vector<std::vector<std::byte>> const files{file_of(10), file_of(40), file_of(90)};
    replace(path, files[0]);
    std::vector<std::thread> writers;
    for (auto const& bytes : files)
    {
        writers.emplace_back([&] {
            for (int i = 0; i < 20; ++i) { replace(path, bytes); }
        });
    }
    int whole = 0;
    for (int i = 0; i < 60; ++i) { whole += holds_caches(path) ? 1 : 0; }
    for (std::thread& writer : writers) { writer.join(); }
    CHECK(whole == 60);
    CHECK(holds_caches(path));
    CHECK(files_in(folder) == 1);
}

TEST_CASE("a reader keeps the file that it has mapped while another takes its place")
{
    scratch_folder const folder;
    std::string const path = folder.file("caches");
    auto const old         = file_of(10);
    replace(path, old);
    auto const file   = runner::load_file(path, "mdkv", 1 << 30, runner::file_access::map);
    auto const caches = mdkv::read<mdkv::half>(file.bytes, support::some_identity);
    replace(path, file_of(40));
    std::filesystem::remove(path);
    CHECK(std::equal(old.begin(), old.end(), file.bytes.begin()));
    CHECK(caches.layer(0).heads[0] == mdkv::read<mdkv::half>(file.bytes, support::some_identity).layer(0).heads[0]);
}

TEST_CASE(
    "a file that is cut while it is mapped ends the process at the lost page, and is refused when it is opened again")
{
    scratch_folder const folder;
    std::string const path = folder.file("caches");
    auto const bytes       = file_of(4000);
    replace(path, bytes);
    int const status = status_of_process([&] {
        auto const file = runner::load_file(path, "mdkv", 1 << 30, runner::file_access::map);
        if (::truncate(path.c_str(), 8192) != 0) { ::_exit(0); }
        std::byte volatile const* const begin = file.bytes.data();
        static_cast<void>(begin[bytes.size() - 1]);
        ::_exit(0);
    });
    CHECK(status != 0); // SIGBUS, or a sanitizer's report of it
    CHECK(!holds_caches(path));
}
