// CUDA devices as a class of Python's.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include <nanobind/nanobind.h>

#include "engine.hpp"
#include "interpreter.hpp"
#include "module.hpp"

namespace mdkv_python
{

namespace
{

/// An object of Python's with `number`, stream(), allocate(bytes) and release(address).
class python_source final : public device_source
{
public:
    explicit python_source(nb::handle from)
        : device_source{nb::cast<int>(from.attr("number"))}
        , stream_{from.attr("stream")}
        , allocate_{from.attr("allocate")}
        , release_{from.attr("release")}
    {}
    ~python_source() override
    {
        interpreter_lock const lock;
        for (nb::object* const one : {&stream_, &allocate_, &release_}) { one->reset(); }
    }

    [[nodiscard]] std::uintptr_t stream() override
    {
        interpreter_lock const lock;
        return nb::cast<std::uintptr_t>(called(stream_));
    }
    [[nodiscard]] void* allocate(std::size_t bytes) override
    {
        interpreter_lock const lock;
        return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(called(allocate_, nb::int_(bytes))));
    }
    void release(void* data) noexcept override
    {
        interpreter_lock const lock;
        nb::error_scope const kept; // an exception may be on its way
        try
        {
            static_cast<void>(called(release_, nb::int_(reinterpret_cast<std::uintptr_t>(data))));
        }
        catch (nb::python_error& error)
        {
            error.discard_as_unraisable("mdkv.CudaBackend");
        }
    }

private:
    nb::object stream_, allocate_, release_;
};

} // namespace

void bind_device(nb::module_& m)
{
    nb::class_<device_object>(m, "CudaBackend",
        "A CUDA device, on one stream of which each call is enqueued: prompts made on it take tensors of the device, "
        "which must be ready in the stream's order and stay until it has passed the call.")
        .def(
            "__init__",
            [](device_object* self, std::uintptr_t stream, nb::handle source) {
                std::unique_ptr<device_source> from;
                if (!source.is_none()) { from = std::make_unique<python_source>(source); }
                new (self) device_object{make_device(stream, std::move(from))};
            },
            nb::arg("stream") = 0, nb::arg("source") = nb::none(),
            "stream: the handle of the one stream of all calls, whose memory is CUDA's own pool. source: instead of "
            "both an object with the device's `number`, stream(), which every call asks for its stream, "
            "allocate(bytes) and release(address), as mdkv.device.TorchSource is.")
        .def_prop_ro(
            "scratch_bytes", [](device_object const& x) { return unlocked([&] { return scratch_bytes(*x.of); }); },
            "Bytes of the scratch memory.")
        .def(
            "release_scratch", [](device_object const& x) { unlocked([&] { release_scratch(*x.of); }); },
            "Gives the scratch memory back, see Backend.");
}

} // namespace mdkv_python
