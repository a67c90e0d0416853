// expect: ; it must lie in [0, 1]
#include <mdkv/core/ratios.hpp>

constexpr mdkv::ratio_set above_one{mdkv::drop, mdkv::fraction(9, 8)};
