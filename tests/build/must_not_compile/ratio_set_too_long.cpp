// expect: ratio_set: more rungs than the limit of 16
#include <mdkv/core/ratios.hpp>

using mdkv::fraction;
constexpr mdkv::ratio_set ratios{mdkv::drop, fraction(1, 64), fraction(2, 64), fraction(3, 64), fraction(4, 64),
    fraction(5, 64), fraction(6, 64), fraction(7, 64), fraction(8, 64), fraction(9, 64), fraction(10, 64),
    fraction(11, 64), fraction(12, 64), fraction(13, 64), fraction(14, 64), fraction(15, 64), mdkv::full};
