// mdkv_run of a build for several processors: becomes the program beside it that is compiled for most of what this processor
// has. Itself compiled for any of them.
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <unistd.h>

namespace
{

struct variant
{
    char const* name; // behind "mdkv_run-"
    bool runs;
};

/// The folder of this program, with a slash; empty if the kernel does not tell.
std::string own_folder()
{
    char path[PATH_MAX];
    ssize_t const length = ::readlink("/proc/self/exe", path, sizeof path);
    if (length <= 0) { return {}; }
    std::string const all{path, static_cast<std::size_t>(length)};
    return all.substr(0, all.rfind('/') + 1);
}

} // namespace

int main(int, char** arguments)
{
    __builtin_cpu_init();
    bool const v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi")
                    && __builtin_cpu_supports("bmi2");
    bool const v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
                    && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq")
                    && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    variant const best_first[]{{"x86-64-v4-vnni", v4}, {"x86-64-v3", v3}, {"x86-64", true}};

    std::string const folder = own_folder();
    char const* const wanted = std::getenv("MDKV_RUN_INSTRUCTIONS");
    for (auto const& [name, runs] : best_first)
    {
        if (wanted == nullptr ? !runs : std::strcmp(wanted, name) != 0) { continue; }
        ::execv((folder + "mdkv_run-" + name).c_str(), arguments);
        if (errno == ENOENT && wanted == nullptr) { continue; }
        std::fprintf(stderr, "mdkv_run: %smdkv_run-%s cannot be run: %s\n", folder.c_str(), name, std::strerror(errno));
        return 1;
    }
    if (wanted != nullptr)
    {
        std::fprintf(
            stderr, "mdkv_run: MDKV_RUN_INSTRUCTIONS is %s; there are x86-64-v4-vnni, x86-64-v3 and x86-64\n", wanted);
    }
    else { std::fprintf(stderr, "mdkv_run: none of the programs mdkv_run-x86-64... lies in %s\n", folder.c_str()); }
    return 1;
}
