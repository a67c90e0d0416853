/// \file scratch_folder.hpp: a folder that is gone at the end of the test
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include <unistd.h>

class scratch_folder
{
public:
    scratch_folder()
    {
        static int count = 0;
        path_            = std::filesystem::temp_directory_path()
                / ("mdkv_evaluation_" + std::to_string(::getpid()) + "_" + std::to_string(count++));
        std::filesystem::create_directory(path_);
    }
    ~scratch_folder() { std::filesystem::remove_all(path_); }
    scratch_folder(scratch_folder const&)            = delete;
    scratch_folder& operator=(scratch_folder const&) = delete;

    [[nodiscard]] std::string file(std::string const& name) const { return (path_ / name).string(); }

    void write(std::string const& name, std::string const& content) const
    {
        std::ofstream{file(name), std::ios::binary} << content;
    }

    [[nodiscard]] std::string read(std::string const& name) const
    {
        std::ifstream in{file(name), std::ios::binary};
        return {std::istreambuf_iterator<char>{in}, std::istreambuf_iterator<char>{}};
    }

private:
    std::filesystem::path path_;
};
