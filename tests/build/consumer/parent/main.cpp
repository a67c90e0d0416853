#include "layers.hpp"

#include <cstdio>
#include <vector>

int main()
{
    // All keys and values are alike, so attention gives a value.
    layers::sizes const s;
    std::vector<mdkv::half> const keys(static_cast<std::size_t>(s.heads * s.tokens * s.dim), mdkv::narrow<mdkv::half>(0.5F));
    auto cache        = layers::compressed(s, keys);
    float const value = layers::attended(s, cache);
    std::printf("%g\n", double{value});
    return value > 0.49F && value < 0.51F ? 0 : 1;
}
