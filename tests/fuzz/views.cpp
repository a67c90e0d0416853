/// \file views.cpp: fuzzes views of DLPack tensors with any numbers: refused, or all of their elements lie in the memory that
/// their numbers name
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include <fuzzer/FuzzedDataProvider.h>

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/engine/finite.hpp>

#include "python/module/dlpack.hpp"
#include "support/dlpack_tensor.hpp"

namespace
{

/// Small numbers, and now and then any.
std::int64_t number(FuzzedDataProvider& any)
{
    return any.ConsumeIntegralInRange(0, 7) == 0 ? any.ConsumeIntegral<std::int64_t>()
                                                 : any.ConsumeIntegralInRange<std::int64_t>(-1, 40);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size)
{
    FuzzedDataProvider any{data, size};
    std::int64_t shape[3]{number(any), number(any), number(any)};
    std::int64_t strides[3]{number(any), number(any), any.ConsumeBool() ? 1 : number(any)};
    std::vector<mdkv::half> memory(4096);
    bool const null = any.ConsumeIntegralInRange(0, 15) == 0;
    support::dlpack_tensor const given{null ? nullptr : memory.data(),
        {any.ConsumeBool() ? 1 : any.ConsumeIntegral<int>(), 0},
        any.ConsumeBool() ? 3 : any.ConsumeIntegral<std::int32_t>(),
        {static_cast<std::uint8_t>(any.ConsumeBool() ? 2 : any.ConsumeIntegral<int>()),
            static_cast<std::uint8_t>(any.ConsumeBool() ? 16 : any.ConsumeIntegral<int>()),
            static_cast<std::uint16_t>(any.ConsumeBool() ? 1 : any.ConsumeIntegral<int>())},
        shape, any.ConsumeBool() ? strides : nullptr, any.ConsumeIntegralInRange<std::uint64_t>(0, 64)};
    mdkv::workspace none{mdkv::cpu::host_memory{}};
    mdkv::cpu::backend const on{&none};
    try
    {
        auto const view = mdkv_python::in<mdkv::half, 3>(on, given);
        auto const span = view.required_span_size(); // in 64 bits, or the view is refused
        if (span < 0) { std::abort(); }
        auto const first = static_cast<std::int64_t>(given.byte_offset);
        if (!view.empty() && span > (8192 - first) / 2) { return 0; } // the memory's true size cannot be known
        mdkv::index_t elements = 1; // of rows that are one in memory there may be so many that they are read for hours
        for (std::size_t i = 0; i < 3; ++i)
        {
            if (__builtin_mul_overflow(elements, view.extent(i), &elements) || elements > 1 << 22) { return 0; }
        }
        mdkv::expects_finite(on, "view", view);
        auto const some = mdkv::slice<1>(view, number(any), number(any));
        mdkv::expects_finite(on, "slice", some);
    }
    catch (mdkv::invalid_argument const&)
    {}
    return 0;
}
