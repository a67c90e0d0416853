/// \file dlpack_tensor.hpp: the members of DLTensor, as every version of DLPack's header has them
#pragma once

#include <cstdint>

namespace support
{

struct dlpack_tensor
{
    void* data;
    struct
    {
        std::int32_t device_type;
        std::int32_t device_id;
    } device;
    std::int32_t ndim;
    struct
    {
        std::uint8_t code;
        std::uint8_t bits;
        std::uint16_t lanes;
    } dtype;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
};

} // namespace support
