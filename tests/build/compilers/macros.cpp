// Macros of other headers, after the standard's headers and before mdkv's. No header of mdkv may use their names: each stands for
// a token that is an error wherever it is used.
#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cmath>
#include <concepts>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>
#if defined(__SSE2__)
#include <immintrin.h>
#endif
#if defined(__CUDACC__)
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

// Qt
#define slots @
#define signals @
#define emit @
#define foreach @
#define forever @
// windows.h
#define near @
#define far @
#define small @
#define hyper @
#define interface @
#define pascal @
#define cdecl @
#define IN @
#define OUT @
#define OPTIONAL @
#define NEAR @
#define FAR @
#define CONST @
#define VOID @
#define TRUE @
#define FALSE @
#define ERROR @
#define DELETE @
#define STRICT @
#define IGNORE @
#define INFINITE @
#define ABSOLUTE @
#define RELATIVE @
#define TRANSPARENT @
#define OPAQUE @
#define DOMAIN @
#define THIS @
#define PURE @
#define min(a, b) @
#define max(a, b) @
#define RGB(r, g, b) @
// X11
#define None @
#define Status @
#define Bool @
#define True @
#define False @
#define Success @
#define Always @
#define Above @
#define Below @
#define Unsorted @
#define Complex @
#define Expose @
// systems and their C libraries: complex.h, sys/sysmacros.h, sys/param.h, termios.h, curses.h, BSD's and Apple's headers, old compilers
#define I @
#define complex @
#define unix @
#define linux @
#define ECHO @
#define B0 @
#define PAGE_SIZE @
#define MIN(a, b) @
#define MAX(a, b) @
#define major(device) @
#define minor(device) @
#define makedev(major, minor) @
#define howmany(x, y) @
#define roundup(x, y) @
#define border(...) @
#define timeout(...) @
#define check(...) @
#define verify(...) @
#define require(...) @
// engines and boards: Unreal, Arduino, Linux's and Perl's sources
#define ensure(...) @
#define PI @
#define HIGH @
#define LOW @
#define INPUT @
#define OUTPUT @
#define F(text) @
#define abs(x) @
#define round(x) @
#define sq(x) @
#define constrain(x, low, high) @
#define likely(x) @
#define unlikely(x) @
#define Copy(...) @
#define Move(...) @
#define Zero(...) @
#define New(...) @

#if defined(__CUDACC__)
#include <mdkv/mdkv.cuh>
#else
#include <mdkv/mdkv.hpp>
#endif

int main() {}
