// expect: no matching
#include <mdkv/core/types.hpp>

mdkv::half one_half()
{
    return mdkv::half(0.5F);
}
