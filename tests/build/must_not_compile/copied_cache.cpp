// expect: delete
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/cache.hpp>

mdkv::cpu::cache<float> copied_cache(mdkv::cpu::cache<float> const& one)
{
    return one;
}
