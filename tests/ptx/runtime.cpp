// The functions of the CUDA runtime that nvcc's objects and the tests call, in the place of libcudart: kernels and copies are
// done at once, or recorded where a stream is being captured. The device is like one of compute capability 9.0.
#include "machine.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include <cuda_runtime_api.h>

namespace
{

constexpr int most_shared   = 232448;
constexpr int always_shared = 48 * 1024;

/// A source file's device code; its text is looked at when one of its kernels is asked for.
struct image
{
    std::string text;
    std::unique_ptr<ptx::module> code;
};

struct entry
{
    image* from = nullptr;
    std::string name;
    int granted = always_shared; // shared memory
};

using work = std::function<cudaError_t()>;

struct stream
{
    bool capturing = false, relaxed = false, spoilt = false;
    std::vector<work> recorded;
};
struct graph
{
    std::vector<work> nodes;
};

/// All that host threads share, and the lock that each call holds while it uses it.
struct context
{
    std::recursive_mutex lock;
    std::deque<image> images;
    std::map<void const*, entry> entries; // by the address of their host functions
    std::set<stream*> streams;
    cudaError_t broken = cudaSuccess; // after a kernel that could not end
};
context& all()
{
    static auto* const one = new context; // what ends last still uses it
    return *one;
}
using guard = std::lock_guard<std::recursive_mutex>;

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t said(cudaError_t code)
{
    if (code != cudaSuccess) { last_error = code; }
    return code;
}

// --- what is said at the end --------------------------------------------------------------------------------------------

struct figures
{
    std::uint64_t launches = 0, executed = 0;
    std::vector<bool> reached;
};

void finish()
{
    std::map<std::string, figures> kernels; // several sources may have the same
    std::map<std::string, bool> lines;      // of C++: whether some instantiation came by
    std::uint64_t launches = 0, executed = 0, reached = 0, instructions = 0;
    char const* const path = std::getenv("MDKV_PTX_STATS");
    std::FILE* const table = path != nullptr && *path != '\0' ? std::fopen(path, "w") : nullptr;
    for (image const& one : all().images)
    {
        if (!one.code) { continue; }
        for (auto const& [name, k] : one.code->kernels())
        {
            if (k.launches == 0) { continue; }
            figures& f = kernels[ptx::short_name(name)];
            f.launches += k.launches;
            f.reached.resize(std::max(f.reached.size(), k.hits.size()));
            for (std::size_t i = 0; i < k.hits.size(); ++i)
            {
                f.executed += k.hits[i];
                f.reached[i] = f.reached[i] || k.hits[i] != 0;
                if (table != nullptr) { lines[one.code->source(k.code[i])] |= k.hits[i] != 0; }
            }
        }
    }
    if (table != nullptr) { std::fprintf(table, "launches\texecuted\treached\tinstructions\tkernel\n"); }
    for (auto const& [name, f] : kernels)
    {
        auto const here = static_cast<std::uint64_t>(std::count(f.reached.begin(), f.reached.end(), true));
        launches += f.launches;
        executed += f.executed;
        reached += here;
        instructions += f.reached.size();
        if (table == nullptr) { continue; }
        std::fprintf(table, "%llu\t%llu\t%llu\t%zu\t%s\n", static_cast<unsigned long long>(f.launches),
            static_cast<unsigned long long>(f.executed), static_cast<unsigned long long>(here), f.reached.size(),
            name.c_str());
    }
    for (auto const& [line, came_by] : lines)
    {
        std::fprintf(table, "%s\t%s\n", came_by ? "line" : "no way to", line.c_str());
    }
    if (table != nullptr) { std::fclose(table); }
    std::printf(
        "PTX: %zu kernels, %llu launches, %llu instructions of warps; %llu of %llu of the code reached; %llu faults\n",
        kernels.size(), static_cast<unsigned long long>(launches), static_cast<unsigned long long>(executed),
        static_cast<unsigned long long>(reached), static_cast<unsigned long long>(instructions),
        static_cast<unsigned long long>(ptx::faults()));
    if (ptx::mutated() != 0)
    {
        std::printf("PTX: %llu statements mutated\n", static_cast<unsigned long long>(ptx::mutated()));
    }
    std::fflush(nullptr);
    if (ptx::faults() != 0) { std::_Exit(1); }
}

/// Faults of the host's calls, by the name of the call.
void host_fault(char const* call, std::string const& what)
{
    ptx::report(call, nullptr, what);
}

// --- streams --------------------------------------------------------------------------------------------------------------

/// Does it now, or records it where the stream is being captured.
cudaError_t enqueue(cudaStream_t on, work what)
{
    auto* const to = reinterpret_cast<stream*>(on);
    if (to == nullptr || !to->capturing) { return said(all().broken != cudaSuccess ? all().broken : what()); }
    to->recorded.push_back(std::move(what));
    return cudaSuccess;
}

/// What must not be called while some stream is being captured, but in relaxed mode: it spoils the capture.
cudaError_t forbidden_in_capture()
{
    cudaError_t code = cudaSuccess;
    for (stream* const one : all().streams)
    {
        if (!one->capturing || one->relaxed) { continue; }
        one->spoilt = true;
        code        = cudaErrorStreamCaptureUnsupported;
    }
    return said(code);
}

/// Whether a call about a stream, which must not be captured, has spoilt its capture.
bool spoils_capture(stream* one)
{
    if (one == nullptr || !one->capturing) { return false; }
    one->spoilt = true;
    return true;
}

// --- memory ----------------------------------------------------------------------------------------------------------------

cudaError_t copy(void* to, void const* from, std::size_t bytes)
{
    if (bytes == 0) { return cudaSuccess; }
    ptx::device& gpu  = ptx::the_device();
    auto const target = reinterpret_cast<std::uint64_t>(to);
    auto const source = reinterpret_cast<std::uint64_t>(from);
    bool const to_gpu = gpu.has(target), from_gpu = gpu.has(source);
    if ((to_gpu && !gpu.owns(target, bytes)) || (from_gpu && !gpu.owns(source, bytes)))
    {
        host_fault("cudaMemcpy", "beyond what is allocated");
        return cudaErrorInvalidValue;
    }
    std::memmove(gpu.at(target), gpu.at(source), bytes);
    if (!to_gpu) { return cudaSuccess; }
    std::uint8_t* const state = gpu.state + (target - gpu.base);
    if (from_gpu) { std::memmove(state, gpu.state + (source - gpu.base), bytes); }
    else { std::memset(state, ptx::allocated | ptx::written, bytes); }
    return cudaSuccess;
}

// --- kernels ---------------------------------------------------------------------------------------------------------------

ptx::kernel* kernel_of(void const* function, entry** found)
{
    auto const at = all().entries.find(function);
    if (at == all().entries.end()) { return nullptr; }
    image& from = *at->second.from;
    if (!from.code) { from.code = std::make_unique<ptx::module>(std::move(from.text)); }
    *found = &at->second;
    return from.code->find(at->second.name);
}

cudaError_t start(
    void const* function, dim3 blocks, dim3 threads, void** arguments, std::size_t shared, cudaStream_t on)
{
    guard const held{all().lock};
    entry* which         = nullptr;
    ptx::kernel* const k = kernel_of(function, &which);
    if (k == nullptr) { return said(cudaErrorInvalidDeviceFunction); }
    if (blocks.x == 0 || blocks.y != 1 || blocks.z != 1 || threads.x == 0 || threads.y != 1 || threads.z != 1
        || threads.x % ptx::warp_size != 0 || static_cast<int>(threads.x) > k->most_threads)
    {
        return said(cudaErrorInvalidConfiguration);
    }
    if (shared + k->static_shared > static_cast<std::size_t>(std::max(which->granted, always_shared)))
    {
        return said(cudaErrorInvalidValue);
    }
    std::vector<std::byte> parameters;
    for (std::size_t n = 0; n < k->arguments.size(); ++n)
    {
        auto const [offset, bytes] = k->arguments[n];
        parameters.resize(offset + bytes);
        std::memcpy(parameters.data() + offset, arguments[n], bytes);
    }
    ptx::launch const what{which->from->code.get(), k, blocks.x, threads.x, shared, std::move(parameters)};
    return enqueue(on, [what] {
        try
        {
            ptx::run(what);
        }
        catch (std::exception const& error)
        {
            std::fprintf(stderr, "ptx: %s: %s\n", ptx::short_name(what.what->name).c_str(), error.what());
            all().broken = cudaErrorLaunchFailure;
        }
        return all().broken;
    });
}

template <class T>
T read(char const* from)
{
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

} // namespace

extern "C" {

// --- what nvcc's objects call ------------------------------------------------------------------------------------------------

void** __cudaRegisterFatBinary(void* wrapper)
{
    guard const held{all().lock};
    if (all().images.empty()) { std::atexit(finish); }
    image& made = all().images.emplace_back();
    // A wrapper: magic and version, then the data's address. Data: a head whose size is at 6 and the rest's at 8; then parts,
    // whose kind is at 0 (1: PTX), the size of whose head is at 4, and the size of what follows at 8.
    char const* at        = read<char const*>(static_cast<char const*>(wrapper) + 8);
    char const* const end = at + read<std::uint16_t>(at + 6) + read<std::uint64_t>(at + 8);
    for (at += read<std::uint16_t>(at + 6); at < end; at += read<std::uint32_t>(at + 4) + read<std::uint64_t>(at + 8))
    {
        if (read<std::uint16_t>(at) != 1) { continue; }
        made.text.assign(at + read<std::uint32_t>(at + 4), read<std::uint64_t>(at + 8));
        if (made.text.find(".version") == made.text.npos)
        {
            std::fprintf(stderr, "ptx: the PTX is compressed; nvcc leaves it as it is with --compress-mode=none\n");
            std::_Exit(2);
        }
        made.text.resize(std::strlen(made.text.c_str()));
    }
    return reinterpret_cast<void**>(&made);
}
void __cudaRegisterFatBinaryEnd(void**)
{}
void __cudaUnregisterFatBinary(void**)
{}
void __cudaRegisterVar(void**, char*, char*, char const*, int, std::size_t, int, int)
{}
void __cudaRegisterFunction(
    void** handle, char const* function, char*, char const* name, int, uint3*, uint3*, dim3*, dim3*, int*)
{
    guard const held{all().lock};
    all().entries[function] = {reinterpret_cast<image*>(handle), name};
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, void const* function)
{
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 blocks, dim3 threads, void** arguments, std::size_t shared, cudaStream_t on)
{
    return start(reinterpret_cast<void const*>(kernel), blocks, threads, arguments, shared, on);
}
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, std::size_t*, void*)
{
    return cudaErrorMissingConfiguration; // <<<>>>, which nothing here uses, would have pushed one
}

// --- what programs call -----------------------------------------------------------------------------------------------------

cudaError_t cudaLaunchKernel(
    void const* function, dim3 blocks, dim3 threads, void** arguments, std::size_t shared, cudaStream_t on)
{
    return start(function, blocks, threads, arguments, shared, on);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* to, void const* function)
{
    guard const held{all().lock};
    entry* which         = nullptr;
    ptx::kernel* const k = kernel_of(function, &which);
    if (k == nullptr) { return said(cudaErrorInvalidDeviceFunction); }
    *to                           = {};
    to->sharedSizeBytes           = k->static_shared;
    to->maxThreadsPerBlock        = k->most_threads;
    to->maxDynamicSharedSizeBytes = which->granted - static_cast<int>(k->static_shared);
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(void const* function, cudaFuncAttribute what, int value)
{
    guard const held{all().lock};
    entry* which         = nullptr;
    ptx::kernel* const k = kernel_of(function, &which);
    if (k == nullptr) { return said(cudaErrorInvalidDeviceFunction); }
    int const bytes = value + static_cast<int>(k->static_shared);
    if (what != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || bytes > most_shared)
    {
        return said(cudaErrorInvalidValue);
    }
    which->granted = bytes;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void** to, std::size_t bytes)
{
    guard const held{all().lock};
    if (cudaError_t const code = forbidden_in_capture()) { return code; }
    std::uint64_t const at = bytes == 0 ? 0 : ptx::the_device().allocate(bytes);
    *to                    = reinterpret_cast<void*>(at);
    return said(bytes != 0 && at == 0 ? cudaErrorMemoryAllocation : cudaSuccess);
}
cudaError_t cudaFree(void* memory)
{
    guard const held{all().lock};
    if (memory == nullptr) { return cudaSuccess; }
    if (cudaError_t const code = forbidden_in_capture()) { return code; }
    if (ptx::the_device().release(reinterpret_cast<std::uint64_t>(memory))) { return cudaSuccess; }
    host_fault("cudaFree", "of what was not allocated");
    return said(cudaErrorInvalidValue);
}
cudaError_t cudaMallocAsync(void** to, std::size_t bytes, cudaStream_t)
{
    return cudaMalloc(to, bytes);
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t)
{
    return cudaFree(memory);
}
cudaError_t cudaMemcpy(void* to, void const* from, std::size_t bytes, cudaMemcpyKind)
{
    guard const held{all().lock};
    cudaError_t const code = forbidden_in_capture();
    return code != cudaSuccess ? code : said(copy(to, from, bytes));
}
cudaError_t cudaMemcpyAsync(void* to, void const* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t on)
{
    guard const held{all().lock};
    return enqueue(on, [=] { return copy(to, from, bytes); });
}

cudaError_t cudaGetDeviceCount(int* count)
{
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device)
{
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device)
{
    return said(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int)
{
    switch (what)
    {
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = most_shared;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlock:
            *value = always_shared;
            break;
        case cudaDevAttrMultiProcessorCount:
            *value = 132;
            break;
        case cudaDevAttrComputeCapabilityMajor:
            *value = 9;
            break;
        case cudaDevAttrComputeCapabilityMinor:
            *value = 0;
            break;
        default:
            return said(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize()
{
    guard const held{all().lock};
    cudaError_t const code = forbidden_in_capture();
    return code != cudaSuccess ? code : said(all().broken);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* to, unsigned)
{
    guard const held{all().lock};
    auto* const made = new stream;
    all().streams.insert(made);
    *to = reinterpret_cast<cudaStream_t>(made);
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t which)
{
    guard const held{all().lock};
    auto* const one = reinterpret_cast<stream*>(which);
    if (all().streams.erase(one) == 0) { return said(cudaErrorInvalidResourceHandle); }
    delete one;
    return cudaSuccess;
}
/// A driver (580.159) ends a capture when the stream is asked for its device, in every mode of capture.
cudaError_t cudaStreamGetDevice(cudaStream_t which, int* device)
{
    guard const held{all().lock};
    auto* const one = reinterpret_cast<stream*>(which);
    if (one != nullptr && !all().streams.contains(one)) { return said(cudaErrorInvalidResourceHandle); }
    if (spoils_capture(one)) { return said(cudaErrorStreamCaptureUnsupported); }
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t which, cudaStreamCaptureStatus* status)
{
    guard const held{all().lock};
    auto* const one = reinterpret_cast<stream*>(which);
    *status         = one == nullptr || !one->capturing ? cudaStreamCaptureStatusNone
                      : one->spoilt                     ? cudaStreamCaptureStatusInvalidated
                                                        : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t which)
{
    guard const held{all().lock};
    auto* const one = reinterpret_cast<stream*>(which);
    if (one == nullptr) { return cudaDeviceSynchronize(); }
    return said(spoils_capture(one) ? cudaErrorStreamCaptureUnsupported : all().broken);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t which, cudaStreamCaptureMode mode)
{
    guard const held{all().lock};
    auto* const one = reinterpret_cast<stream*>(which);
    if (one == nullptr || one->capturing) { return said(cudaErrorStreamCaptureUnsupported); }
    one->capturing = true;
    one->relaxed   = mode == cudaStreamCaptureModeRelaxed;
    one->spoilt    = false;
    one->recorded.clear();
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t which, cudaGraph_t* to)
{
    guard const held{all().lock};
    auto* const one = reinterpret_cast<stream*>(which);
    *to             = nullptr;
    if (one == nullptr || !one->capturing) { return said(cudaErrorIllegalState); }
    one->capturing = false;
    if (one->spoilt) { return said(cudaErrorStreamCaptureInvalidated); }
    *to = reinterpret_cast<cudaGraph_t>(new graph{std::move(one->recorded)});
    one->recorded.clear();
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t which, cudaGraphNode_t*, std::size_t* count)
{
    *count = reinterpret_cast<graph*>(which)->nodes.size();
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* to, cudaGraph_t from, unsigned long long)
{
    *to = reinterpret_cast<cudaGraphExec_t>(new graph{*reinterpret_cast<graph*>(from)});
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t which, cudaStream_t on)
{
    guard const held{all().lock};
    for (work const& node : reinterpret_cast<graph*>(which)->nodes)
    {
        if (cudaError_t const code = enqueue(on, node)) { return code; }
    }
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t which)
{
    delete reinterpret_cast<graph*>(which);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t which)
{
    delete reinterpret_cast<graph*>(which);
    return cudaSuccess;
}

cudaError_t cudaGetLastError()
{
    return std::exchange(last_error, cudaSuccess);
}
char const* cudaGetErrorString(cudaError_t code)
{
    switch (code)
    {
        case cudaSuccess:
            return "no error";
        case cudaErrorInvalidValue:
            return "invalid argument";
        case cudaErrorMemoryAllocation:
            return "out of memory";
        case cudaErrorInvalidConfiguration:
            return "invalid configuration argument";
        case cudaErrorInvalidDeviceFunction:
            return "invalid device function";
        case cudaErrorInvalidResourceHandle:
            return "invalid resource handle";
        case cudaErrorLaunchFailure:
            return "unspecified launch failure";
        case cudaErrorStreamCaptureUnsupported:
            return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated:
            return "operation failed due to a previous error during capture";
        default:
            return "an error of the executor of PTX";
    }
}
} // extern "C"
