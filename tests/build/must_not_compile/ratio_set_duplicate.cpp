// expect: ratio_set: rungs must ascend
#include <mdkv/core/ratios.hpp>

constexpr mdkv::ratio_set duplicate{mdkv::drop, mdkv::fraction(1, 4), mdkv::fraction(2, 8)};
