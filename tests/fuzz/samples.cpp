/// \file samples.cpp: fuzzes files of samples
#include <cstddef>
#include <cstdint>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

#include "evaluation/sample_file.hpp"
#include "runner/file_error.hpp"

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size)
{
    static int const file         = ::memfd_create("sample", 0);
    static std::string const path = "/proc/self/fd/" + std::to_string(file);
    if (file < 0) { return 0; }
    if (::ftruncate(file, 0) != 0 || ::pwrite(file, data, size, 0) != static_cast<::ssize_t>(size)) { return 0; }
    try
    {
        static_cast<void>(runner::read_sample_file(path, false));
    }
    catch (runner::file_error const&)
    {}
    return 0;
}
