// expect: no matching function for call to
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/engine/finite.hpp>

void wrong_rank(mdkv::cpu::backend const& on, float const* keys)
{
    mdkv::expects_finite(on, "keys", mdkv::in(on, keys, 8, 64));
}
