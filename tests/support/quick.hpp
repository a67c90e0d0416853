/// \file quick.hpp: a case of several element types is compiled for half alone, where half is among them (MDKV_TEST_HALF, MDKV_TEST_QUICK)
#pragma once

#include <doctest/doctest.h>

#include <mdkv/core/types.hpp>

#include <concepts>
#include <tuple>
#include <type_traits>

namespace support
{

template <class... T>
using quick_types = std::conditional_t<(std::same_as<T, mdkv::half> || ...), std::tuple<mdkv::half>, std::tuple<T...>>;

} // namespace support

#undef TEST_CASE_TEMPLATE
#define TEST_CASE_TEMPLATE(name, T, ...)                                                                               \
    MDKV_QUICK_TEST_CASE(name, T, DOCTEST_ANONYMOUS(DOCTEST_ANON_TMP_), __VA_ARGS__)
#define MDKV_QUICK_TEST_CASE(name, T, function, ...)                                                                   \
    DOCTEST_TEST_CASE_TEMPLATE_DEFINE_IMPL(name, T, DOCTEST_CAT(function, ITERATOR), function);                        \
    DOCTEST_TEST_CASE_TEMPLATE_INSTANTIATE_IMPL(function, function, support::quick_types<__VA_ARGS__>)                 \
    template <typename T>                                                                                              \
    static void function()
