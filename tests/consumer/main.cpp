// What another project does with the library: include it and call it. Shared by the three consumer projects.
#include <mdkv/mdkv.hpp>

#include <iostream>

int main()
{
    std::cout << "mdkv " << MDKV_VERSION_MAJOR << '.' << MDKV_VERSION_MINOR << '.' << MDKV_VERSION_PATCH << '\n';
    return mdkv::widen(mdkv::narrow<mdkv::half>(0.5F)) == 0.5F ? 0 : 1;
}
