/// \file samples.cpp: fuzzes files of LongBench and RULER; the first byte chooses the task
#include <cstddef>
#include <cstdint>
#include <string>

#include <mdkv/core/error.hpp>

#include <sys/mman.h>
#include <unistd.h>

#include "evaluation/longbench_file.hpp"
#include "evaluation/longbench_tasks.hpp"
#include "evaluation/ruler_file.hpp"
#include "evaluation/ruler_tasks.hpp"
#include "runner/file_error.hpp"

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size)
{
    static int const file         = ::memfd_create("sample", 0);
    static std::string const path = "/proc/self/fd/" + std::to_string(file);
    if (size < 1 || file < 0) { return 0; }
    if (::ftruncate(file, 0) != 0 || ::pwrite(file, data + 1, size - 1, 0) != static_cast<::ssize_t>(size - 1))
    {
        return 0;
    }
    try
    {
        auto const tasks = runner::longbench_tasks();
        if (data[0] < 128) { static_cast<void>(runner::read_longbench(path, tasks[data[0] % tasks.size()])); }
        else
        {
            auto const names = runner::ruler_task_names();
            static_cast<void>(runner::read_ruler_file(path, names[data[0] % names.size()]));
        }
    }
    catch (runner::file_error const&)
    {}
    return 0;
}
