#include "layers.hpp"

#include <vector>

namespace layers
{

mdkv::cpu::cache<mdkv::half> compressed(sizes const& s, std::vector<mdkv::half> const& keys)
{
    mdkv::cpu::cache<mdkv::half> cache;
    mdkv::workspace scratch{mdkv::cpu::host_memory{}};
    mdkv::cpu::backend const on{&scratch};
    auto const rows = mdkv::in(on, keys.data(), s.heads, s.tokens, s.dim);
    mdkv::prompt_rows<mdkv::cpu::backend, mdkv::half> const all{rows, rows, rows};
    mdkv::compress(on, all, mdkv::presets::by_window, mdkv::budget::fraction(1, 2), cache);
    return cache;
}

} // namespace layers
