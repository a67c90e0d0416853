// A broken contract: with exceptions it is caught, without them the program ends with the message.
#include <mdkv/mdkv.hpp>

#include <cstdio>
#include <vector>

int main()
{
    std::vector<float> output(8), lse(2);
    mdkv::workspace scratch{mdkv::cpu::host_memory{}};
    mdkv::cpu::backend const on{&scratch};
    auto const attend = [&] {
        mdkv::merge_attention(on, mdkv::in(on, output.data(), 1, 8), mdkv::in(on, lse.data(), 1), mdkv::in(on, output.data(), 1, 8),
            mdkv::in(on, lse.data(), 1), mdkv::out(on, output.data(), 2, 4), mdkv::out(on, lse.data(), 1));
    };
#if defined(__cpp_exceptions)
    try
    {
        attend();
    }
    catch (mdkv::invalid_argument const& error)
    {
        std::printf("mdkv: %s\n", error.what());
        return 0;
    }
    return 1;
#else
    attend();
#endif
}
