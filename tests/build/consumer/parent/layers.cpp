#include "layers.hpp"

#include <span>
#include <vector>

namespace layers
{

mdkv::cpu::cache<mdkv::half> compressed(sizes const& s, std::vector<mdkv::half> const& keys)
{
    mdkv::cpu::cache<mdkv::half> cache;
    std::vector<std::byte> memory;
    for (bool const dry : {true, false})
    {
        mdkv::workspace scratch = dry ? mdkv::workspace{} : mdkv::workspace{std::span{memory}};
        mdkv::cpu::backend const on{&scratch};
        auto const rows = mdkv::in(on, keys.data(), s.heads, s.tokens, s.dim);
        mdkv::prompt_rows<mdkv::cpu::backend, mdkv::half> const all{rows, rows, rows};
        mdkv::compress(on, all, mdkv::presets::by_window, mdkv::budget::fraction(1, 2), cache);
        if (dry) { memory.resize(scratch.bytes()); }
    }
    return cache;
}

} // namespace layers
