/// \file file_replacement.cpp: faults of files that are replaced: cut writes, a full disk, several writers, readers meanwhile
#include "runner/file_replacement.hpp"

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <fcntl.h>
#include <filesystem>
#include <optional>
#include <span>
#include <stdlib.h>
#include <string>
#include <string_view>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
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

template <class Bytes>
void replace(std::string const& path, Bytes const& bytes)
{
    runner::file_replacement file{path};
    file.write(bytes);
    file.commit();
}

/// All bytes that come from a descriptor until its other end is closed; closes it.
std::string drained(int descriptor)
{
    std::string all;
    char some[4096];
    for (::ssize_t got = 0; (got = ::read(descriptor, some, sizeof some)) > 0;)
    {
        all.append(some, static_cast<std::size_t>(got));
    }
    ::close(descriptor);
    return all;
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

TEST_CASE("a symbolic link stays, and the file at its end is replaced, beside which the temporary file lies")
{
    scratch_folder const links;
    scratch_folder const folder;
    std::string const target = folder.write("caches", "old");
    namespace fs             = std::filesystem;
    fs::create_symlink(target, links.file("whole"));
    fs::create_symlink("whole", links.file("relative"));
    fs::create_directory_symlink(folder.path(), links.file("folder"));
    fs::create_directory(folder.file("inner"));
    fs::create_symlink("../caches", folder.file("inner/up"));
    fs::create_symlink("folder/inner/up", links.file("chain"));
    fs::create_symlink(folder.file("none yet"), links.file("dangling"));
    for (char const* const name : {"whole", "relative", "chain", "folder/inner/up", "folder/caches"})
    {
        CAPTURE(name);
        runner::file_replacement file{links.file(name)};
        CHECK(files_in(links) == 5);
        CHECK(files_in(folder) == 3); // caches, inner, the temporary file
        file.write(std::string_view{name});
        CHECK(folder.read("caches") != name);
        file.commit();
        CHECK(folder.read("caches") == name);
        CHECK(files_in(folder) == 2);
    }
    replace(links.file("dangling"), std::string_view{"made"});
    CHECK(folder.read("none yet") == "made");
    for (char const* const name : {"whole", "relative", "chain", "dangling"})
    {
        CHECK(fs::is_symlink(links.file(name)));
    }
    fs::create_symlink("b", links.file("a"));
    fs::create_symlink("a", links.file("b"));
    fs::create_symlink("no folder/x", links.file("c"));
    says(message_of([&] { replace(links.file("a"), std::string_view{}); }), "/a: cannot be made: Too many levels");
    says(
        message_of([&] { replace(links.file("c"), std::string_view{}); }), "no folder/x: cannot be made: No such file");
}

TEST_CASE("a pipe and a terminal stay, and take the bytes; what takes none is refused by name")
{
    scratch_folder const folder;
    std::string const pipe = folder.file("pipe");
    std::string const text(200'000, 'x'); // more than a pipe holds
    REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
    std::filesystem::create_symlink("pipe", folder.file("link"));
    says(message_of([&] { replace(pipe, std::string_view{text}); }), "/pipe: no process reads this pipe");
    for (char const* const name : {"pipe", "link"})
    {
        std::string got;
        int const reader = ::open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
        REQUIRE(reader >= 0);
        ::fcntl(reader, F_SETFL, 0);
        std::optional<runner::file_replacement> file{folder.file(name)};
        std::thread other{[&] { got = drained(reader); }};
        file->write(text);
        file->commit();
        file.reset();
        other.join();
        CHECK(got == text);
    }
    CHECK(std::filesystem::is_fifo(pipe));
    CHECK(std::filesystem::is_symlink(folder.file("link")));

    int const terminal = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    REQUIRE(terminal >= 0);
    REQUIRE((::grantpt(terminal) == 0 && ::unlockpt(terminal) == 0));
    std::string const device = ::ptsname(terminal);
    replace(device, std::string_view{"caches"});
    CHECK(std::filesystem::is_character_file(device));
    CHECK(drained(terminal) == "caches");

    ::sockaddr_un name{};
    name.sun_family = AF_UNIX;
    folder.file("socket").copy(name.sun_path, sizeof name.sun_path - 1);
    int const bound = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(::bind(bound, reinterpret_cast<::sockaddr const*>(&name), sizeof name) == 0);
    ::close(bound);
    says(message_of([&] { replace(folder.file("socket"), std::string_view{}); }), "/socket: is a socket, not a file");
    says(message_of([&] { replace(folder.path(), std::string_view{}); }), ": is a folder, not a file");
    says(message_of([&] { replace(folder.path() + "/", std::string_view{}); }), "/: is a folder, not a file");
    says(message_of([&] { replace("", std::string_view{}); }), "cannot be made: No such file");
    CHECK(files_in(folder) == 3);
}

TEST_CASE("every name that a folder takes can be replaced, and a longer one is refused before anything is written")
{
    scratch_folder const folder;
    for (std::size_t length = 240; length <= 255; ++length)
    {
        std::string const name(length, 'n');
        for (char const* const text : {"old", "new"}) { replace(folder.file(name), std::string_view{text}); }
        CHECK(folder.read(name) == "new");
    }
    says(message_of([&] { runner::file_replacement const file{folder.file(std::string(256, 'n'))}; }),
        "cannot be made: File name too long");
    std::string const bytes = "\xE9\xFF\x01 \n";
    replace(folder.file(bytes), std::string_view{"any bytes"});
    CHECK(folder.read(bytes) == "any bytes");
    CHECK(files_in(folder) == 17);
}

TEST_CASE(
    "a folder that cannot be written is an error, and the file in it stays; a text has the permissions of any new file")
{
    scratch_folder const folder;
    std::string const path = folder.write("caches", "old");
    auto const mode_of     = [&] { return std::filesystem::status(path).permissions(); };
    auto const mask        = ::umask(027);
    runner::replace_file(path, "table");
    ::umask(mask);
    CHECK(folder.read("caches") == "table");
    CHECK(mode_of() == std::filesystem::perms{0640});
    std::filesystem::permissions(folder.path(), std::filesystem::perms{0555});
    int const status = status_of_process([&] {
        if (::geteuid() == 0 && ::setuid(65534) != 0) { ::_exit(2); } // root writes into any folder
        std::string const text = message_of([&] { replace(path, std::string_view{"new"}); });
        ::_exit(text == path + ": cannot be made: Permission denied" ? 0 : 1);
    });
    std::filesystem::permissions(folder.path(), std::filesystem::perms{0755});
    CHECK(status == 0);
    CHECK(folder.read("caches") == "table");
    CHECK(files_in(folder) == 1);
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
