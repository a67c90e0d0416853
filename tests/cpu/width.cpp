#include <mdkv/cpu/width.hpp>

#include <mdkv/cpu/backend.hpp>

#include <doctest/doctest.h>

#include <string_view>
#include <type_traits>

namespace
{

#define MDKV_TEST_TEXT_OF(name) #name
#define MDKV_TEST_TEXT(name) MDKV_TEST_TEXT_OF(name)

} // namespace

TEST_CASE("the inline namespace is named after the floats of a vector, and holds the backend")
{
    using namespace std::string_view_literals;
    constexpr std::string_view name = MDKV_TEST_TEXT(MDKV_CPU_WIDTH);
    CHECK(name == (mdkv::cpu::vector_lanes == 16 ? "wide16"sv : mdkv::cpu::vector_lanes == 8 ? "wide8"sv : "wide4"sv));
    static_assert(std::is_same_v<mdkv::cpu::MDKV_CPU_WIDTH::backend, mdkv::cpu::backend>);
}
