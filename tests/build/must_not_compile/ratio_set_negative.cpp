// expect: ; it must lie in [0, 1]
#include <mdkv/core/ratios.hpp>

constexpr mdkv::ratio_set negative{mdkv::fraction(-1, 8), mdkv::full};
