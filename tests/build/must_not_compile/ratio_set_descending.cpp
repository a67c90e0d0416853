// expect: ratio_set: rungs must ascend
#include <mdkv/core/ratios.hpp>

constexpr mdkv::ratio_set descending{mdkv::full, mdkv::part(1, 4), mdkv::drop};
