// expect: ratio_set: more rungs than the limit of 16
#include <mdkv/core/ratios.hpp>

using mdkv::part;
constexpr mdkv::ratio_set ratios{mdkv::drop, part(1, 64), part(2, 64), part(3, 64), part(4, 64), part(5, 64), part(6, 64),
    part(7, 64), part(8, 64), part(9, 64), part(10, 64), part(11, 64), part(12, 64), part(13, 64), part(14, 64),
    part(15, 64), mdkv::full};
