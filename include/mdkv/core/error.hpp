/// \file error.hpp: the library's exceptions, and the function that checks a contract. With -fno-exceptions a broken contract ends
/// the program.
#pragma once

#include <mdkv/core/types.hpp>

#include <charconv>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#if !defined(__cpp_exceptions)
#    include <cstdio>
#    include <cstdlib>
#endif

namespace MDKV_NAMESPACE
{

/// Base of the library's exceptions. (A failed allocation stays std::bad_alloc.)
struct error : std::runtime_error
{
    using std::runtime_error::runtime_error;
};

/// An argument broke the contract; nothing was changed.
struct invalid_argument : error
{
    using error::error;
};

/// A product of extents, strides and element size exceeds 64 bits.
struct size_overflow : invalid_argument
{
    using invalid_argument::invalid_argument;
};

/// A cache's arena or tail is smaller than the call needs; nothing was changed.
struct insufficient_workspace : invalid_argument
{
    using invalid_argument::invalid_argument;
};

/// Keys, values or queries hold a NaN or an infinity; nothing was changed.
struct non_finite_input : invalid_argument
{
    using invalid_argument::invalid_argument;
};

/// A cache and the arguments of a call on it do not belong together.
struct mismatch : invalid_argument
{
    using invalid_argument::invalid_argument;
};

namespace detail
{

// Messages are put together out of line, from arguments of any types: a check costs its caller a comparison and a call. It is
// no std::string, which every file that includes this would compile anew.

/// A message that is being put together. Text beyond its end is left out.
struct message
{
    char text[1024]; // [size], then 0; the rest is not written, because attend makes a message on every call
    std::size_t size = 0;

    message() noexcept { text[0] = '\0'; }
    [[gnu::cold]] MDKV_OUTLINE void add(char const* from) noexcept
    {
        for (; *from != '\0' && size + 1 < sizeof text; ++from) { text[size++] = *from; }
        text[size] = '\0';
    }
    [[gnu::cold]] MDKV_OUTLINE void add_number(float number) noexcept
    {
        char digits[32]{};
        std::to_chars(digits, digits + sizeof digits - 1, number);
        add(digits);
    }
    // Does not use to_chars, which for whole numbers is a template: its code would have one name for all processors.
    [[gnu::cold]] MDKV_OUTLINE void add_number(std::uint64_t number) noexcept
    {
        char digits[21]{};
        std::size_t first = sizeof digits - 1;
        do {
            digits[--first] = static_cast<char>('0' + number % 10);
            number /= 10;
        } while (number > 0);
        add(digits + first);
    }
    [[gnu::cold]] MDKV_OUTLINE void add_number(std::int64_t number) noexcept
    {
        if (number < 0) { add("-"); }
        auto const magnitude = static_cast<std::uint64_t>(number);
        add_number(number < 0 ? 0 - magnitude : magnitude);
    }
};

/// A letter for the type of each argument: real, unsigned or signed number, text.
template <class... P>
inline constexpr char kinds[]{std::is_floating_point_v<P> ? 'f'
                              : std::is_unsigned_v<P>     ? 'u'
                              : std::is_integral_v<P>     ? 'i'
                                                          : 't' ...,
    '\0'};

/// An argument in the type that a variadic function takes: double, a number of 64 bits, or a text that ends with 0.
template <class Argument>
[[nodiscard]] constexpr auto argument(Argument const& given)
{
    if constexpr (std::is_class_v<Argument>) { return given.c_str(); }
    else if constexpr (std::is_unsigned_v<Argument>) { return static_cast<unsigned long long>(given); }
    else if constexpr (std::is_integral_v<Argument>) { return static_cast<long long>(given); }
    else { return given; }
}

/// Adds all arguments, of the kinds named by letters.
[[gnu::cold]] MDKV_OUTLINE inline void add_arguments(message& all, char const* kind, std::va_list arguments) noexcept
{
    for (; *kind != '\0'; ++kind)
    {
        if (*kind == 'f') { all.add_number(static_cast<float>(va_arg(arguments, double))); }
        else if (*kind == 'u') { all.add_number(static_cast<std::uint64_t>(va_arg(arguments, unsigned long long))); }
        else if (*kind == 'i') { all.add_number(static_cast<std::int64_t>(va_arg(arguments, long long))); }
        else { all.add(va_arg(arguments, char const*)); }
    }
}

/// Throws; with -fno-exceptions prints the message and ends the program, as assert does.
[[noreturn]] void raise(auto const& error)
{
#if defined(__cpp_exceptions)
    throw error;
#else
    std::fprintf(stderr, "mdkv: %s\n", error.what());
    std::abort();
#endif
}

/// Raises an exception whose message has these arguments.
template <class Exception>
[[noreturn, gnu::cold, gnu::noinline]] void fail(char const* kind, ...)
{
    std::va_list arguments;
    message all;
    va_start(arguments, kind);
    add_arguments(all, kind, arguments);
    va_end(arguments);
    raise(Exception{all.text});
}

/// Calls f, of whose exceptions nobody learns.
void call_without_errors(auto const& f) noexcept
{
#if defined(__cpp_exceptions)
    try
    {
        f();
    }
    catch (...)
    {}
#else
    f();
#endif
}

} // namespace detail

/// Throws `Exception` with the concatenated arguments (texts, std::strings and numbers) unless the condition holds.
/// \throws Exception   the condition is false
template <class Exception = invalid_argument, class... Arguments>
constexpr void expects(bool condition, Arguments... arguments)
{
    if (!condition) [[unlikely]]
    {
        detail::fail<Exception>(detail::kinds<Arguments...>, detail::argument(arguments)...);
    }
}

/// Product of sizes, checked.
/// \throws size_overflow   the result leaves 64 bits
[[nodiscard]] constexpr index_t checked_multiply(index_t a, index_t b)
{
    index_t result = 0;
    expects<size_overflow>(!__builtin_mul_overflow(a, b, &result), "size ", a, " * ", b, " is beyond 64 bits");
    return result;
}

/// Sum of sizes, checked.
/// \throws size_overflow   the result leaves 64 bits
[[nodiscard]] constexpr index_t checked_add(index_t a, index_t b)
{
    index_t result = 0;
    expects<size_overflow>(!__builtin_add_overflow(a, b, &result), "size ", a, " + ", b, " is beyond 64 bits");
    return result;
}

} // namespace MDKV_NAMESPACE
