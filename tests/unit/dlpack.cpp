#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>

#include "examples/python/module/dlpack.hpp"
#include "support/dlpack_tensor.hpp"
#include "support/host.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace
{

using namespace mdkv;
using mdkv_python::in;
using mdkv_python::out;
using support::dlpack_tensor;
using support::error_text;
using host = cpu::backend;

struct numbers
{
    std::vector<float> data{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    std::int64_t shape[2]   = {3, 4};
    std::int64_t strides[2] = {1, 1};
    dlpack_tensor given{data.data(), {1, 0}, 2, {2, 32, 1}, shape, nullptr, 0};
};

std::string refused(dlpack_tensor const& given)
{
    return error_text<invalid_argument>([&] { static_cast<void>(in<float, 2>(host{}, given)); });
}

} // namespace

TEST_CASE("a DLPack tensor without strides is contiguous rows, from its byte offset on")
{
    numbers x;
    CHECK(in<float, 2>(host{}, x.given)(2, 3) == 11.0F);
    x.given.byte_offset = sizeof(float);
    CHECK(in<float, 2>(host{}, x.given)(2, 3) == 12.0F);
    out<float, 2>(host{}, x.given)(0, 0) = -1.0F;
    CHECK(x.data[1] == -1.0F);
}

TEST_CASE("strides are in elements, and a stride of zero shows one row as many")
{
    numbers x;
    x.given.strides = x.strides;
    x.strides[0]    = 0;
    CHECK(in<float, 2>(host{}, x.given)(2, 3) == 3.0F);
    x.strides[0] = -4;
    CHECK(refused(x.given) == "view: stride 0 is -4; negative strides are not supported");
}

TEST_CASE("half, bfloat16 and integers have codes of their own")
{
    std::uint16_t bits[4] = {0x3c00, 0, 0, 0};
    std::int64_t shape[1] = {4};
    dlpack_tensor given{bits, {1, 0}, 1, {2, 16, 1}, shape, nullptr, 0};
    CHECK(widen(in<half, 1>(host{}, given)(0)) == 1.0F);
    CHECK_THROWS_AS(static_cast<void>(in<bfloat16, 1>(host{}, given)), invalid_argument);
    given.dtype.code = 4;
    bits[0]          = 0x3f80;
    CHECK(widen(in<bfloat16, 1>(host{}, given)(0)) == 1.0F);
    given.dtype = {1, 8, 1};
    CHECK(in<std::uint8_t, 1>(host{}, given)(0) == 0x80);
}

TEST_CASE("a tensor of another rank, type or device, or without data, is refused by name")
{
    numbers x;
    x.given.ndim = 3;
    CHECK(refused(x.given) == "dlpack: the tensor has 3 dimensions; 2 are needed");
    x.given.ndim  = 2;
    x.given.dtype = {2, 64, 1};
    CHECK(refused(x.given) == "dlpack: the element type is float64; float32 is needed");
    x.given.dtype = {99, 32, 1};
    CHECK(refused(x.given) == "dlpack: the element type is unknown32; float32 is needed");
    x.given.dtype = {2, 32, 4};
    CHECK(refused(x.given) == "dlpack: an element has 4 lanes; 1 is needed");
    x.given.dtype              = {2, 32, 1};
    x.given.device.device_type = 2;
    CHECK(refused(x.given) == "dlpack: the device type is 2; the backend needs host (1 or 3) or managed (13) memory");
    x.given.device.device_type = 13;
    CHECK_NOTHROW(static_cast<void>(in<float, 2>(host{}, x.given)));
    x.given.data = nullptr;
    CHECK(refused(x.given) == "dlpack: the tensor is null but not empty");
    x.shape[0] = 0;
    CHECK(in<float, 2>(host{}, x.given).empty());
    x.shape[0] = -1;
    CHECK(refused(x.given) == "view: extent 0 is -1; it must not be negative");
}
