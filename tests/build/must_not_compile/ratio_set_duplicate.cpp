// expect: ratio_set: rungs must ascend
#include <mdkv/core/ratios.hpp>

constexpr mdkv::ratio_set duplicate{mdkv::drop, mdkv::part(1, 4), mdkv::part(2, 8)};
