// What another project does with the library: include it and call it. Shared by the consumer projects. The argument is the
// version that this project expects.
#include <mdkv/mdkv.hpp>

#include <iostream>
#include <string>

int main(int count, char** arguments)
{
    std::string const version = std::to_string(MDKV_VERSION_MAJOR) + '.' + std::to_string(MDKV_VERSION_MINOR) + '.'
                                + std::to_string(MDKV_VERSION_PATCH);
    std::cout << "mdkv " << version << '\n';
    if (count != 2 || arguments[1] != version)
    {
        std::cout << "expected: mdkv " << (count == 2 ? arguments[1] : "of the version given as the argument") << '\n';
        return 1;
    }
    return mdkv::widen(mdkv::narrow<mdkv::half>(0.5F)) == 0.5F ? 0 : 1;
}
