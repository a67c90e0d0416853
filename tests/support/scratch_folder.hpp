/// \file scratch_folder.hpp: a folder that is gone at the end of the test
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>

#include <stdlib.h>

class scratch_folder
{
public:
    scratch_folder()
    {
        std::string name = (std::filesystem::temp_directory_path() / "mdkv-test-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) { throw std::runtime_error{name + ": cannot be made"}; }
        path_ = name;
    }
    ~scratch_folder() { std::filesystem::remove_all(path_); }
    scratch_folder(scratch_folder const&)            = delete;
    scratch_folder& operator=(scratch_folder const&) = delete;

    [[nodiscard]] std::string path() const { return path_.string(); }
    [[nodiscard]] std::string file(std::string const& name) const { return (path_ / name).string(); }

    /// \return the file's path
    std::string write(std::string const& name, std::string_view content) const
    {
        std::ofstream{file(name), std::ios::binary} << content;
        return file(name);
    }

    [[nodiscard]] std::string read(std::string const& name) const
    {
        std::ifstream in{file(name), std::ios::binary};
        return {std::istreambuf_iterator<char>{in}, std::istreambuf_iterator<char>{}};
    }

private:
    std::filesystem::path path_;
};
