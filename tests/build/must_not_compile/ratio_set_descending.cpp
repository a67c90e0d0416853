// expect: ratio_set: rungs must ascend
#include <mdkv/core/ratios.hpp>

constexpr mdkv::ratio_set descending{mdkv::full, mdkv::fraction(1, 4), mdkv::drop};
