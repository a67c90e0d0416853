/// \file standard_error.hpp: what a call writes to standard error, which is no terminal meanwhile
#pragma once

#include <cstdio>
#include <string>

#include <fcntl.h>
#include <unistd.h>

#include "support/scratch_folder.hpp"

namespace support
{

template <class Call>
[[nodiscard]] std::string standard_error_of(Call const& call)
{
    scratch_folder const folder;
    int const kept = ::dup(STDERR_FILENO);
    int const file = ::open(folder.file("stderr").c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600);
    ::dup2(file, STDERR_FILENO);
    call();
    std::fflush(stderr);
    ::dup2(kept, STDERR_FILENO);
    ::close(file);
    ::close(kept);
    return folder.read("stderr");
}

} // namespace support
