/// \file real.hpp: the numbers that oracles compute in
#pragma once

#include <limits>
#include <type_traits>

namespace support
{

/// long double where the processor has instructions for it; double where it is a library's 113 bits (64-bit Arm), with which
/// an oracle takes minutes in an emulator.
using real = std::conditional_t<std::numeric_limits<long double>::digits == 113, double, long double>;

} // namespace support
