#include <mdkv/core/machine.hpp>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>

#include <doctest/doctest.h>

#include <string_view>
#include <type_traits>

namespace
{

#define MDKV_TEST_TEXT_OF(name) #name
#define MDKV_TEST_TEXT(name) MDKV_TEST_TEXT_OF(name)

constexpr std::string_view name = MDKV_TEST_TEXT(MDKV_MACHINE);

/// Whether the name holds the word exactly where the compiler may use the instructions.
[[maybe_unused]] bool named_if(bool used, std::string_view word)
{
    return (name.find(word) != std::string_view::npos) == used;
}

} // namespace

// cmake/machines.py compares the symbols of whole objects.
TEST_CASE("the inline namespace is named after the instructions that the compiler may use, and holds all of mdkv")
{
    static_assert(std::is_same_v<mdkv::MDKV_MACHINE::half, mdkv::half>);
    static_assert(std::is_same_v<mdkv::MDKV_MACHINE::cpu::backend, mdkv::cpu::backend>);
    CAPTURE(name);
#if defined(__x86_64__)
    CHECK(name.starts_with("x86"));
#    if defined(__AVX512F__) && defined(__AVX512VNNI__)
    CHECK(named_if(true, "_vnni") != named_if(true, "_icelake"));
#    endif
#    if defined(__AVX2__)
    CHECK(named_if(true, "_avx2"));
#    else
    CHECK(named_if(false, "avx2"));
#    endif
#elif defined(__aarch64__)
    CHECK(name.starts_with("arm64"));
#    if defined(__ARM_FEATURE_DOTPROD)
    CHECK(named_if(true, "_dotprod"));
#    else
    CHECK(named_if(false, "_dotprod"));
#    endif
#else
    CHECK(name == "portable");
#endif
}
