/// \file error.hpp: the library's exceptions, and the function that checks a contract.
#pragma once

#include <mdkv/core/types.hpp>

#include <charconv>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace mdkv
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

/// The workspace or a destination is smaller than the call needs; nothing was changed.
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

// Messages are put together out of line: a check costs its caller a comparison and a call. Pieces are passed by value, so
// that texts of any length have one type and like checks share a function.

MDKV_OUTLINE inline void append_text(std::string& text, std::string_view piece)
{
    text += piece;
}

template <class Number>
    requires std::is_arithmetic_v<Number>
MDKV_OUTLINE void append_text(std::string& text, Number value)
{
    char digits[32];
    text.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

template <class Exception = invalid_argument, class... Pieces>
[[noreturn, gnu::cold, gnu::noinline]] void fail(Pieces... pieces)
{
    std::string text;
    (append_text(text, pieces), ...);
    throw Exception{text};
}

} // namespace detail

/// Throws `Exception` with the concatenated pieces (texts and numbers) unless the condition holds.
/// \throws Exception   the condition is false
template <class Exception = invalid_argument, class... Pieces>
constexpr void expects(bool condition, Pieces... pieces)
{
    if (!condition) [[unlikely]] { detail::fail<Exception>(pieces...); }
}

/// Product and sum of sizes, checked.
/// \throws size_overflow   the result leaves 64 bits
[[nodiscard]] constexpr index_t checked_multiply(index_t a, index_t b)
{
    index_t result = 0;
    expects<size_overflow>(!__builtin_mul_overflow(a, b, &result), "size ", a, " * ", b, " is beyond 64 bits");
    return result;
}

[[nodiscard]] constexpr index_t checked_add(index_t a, index_t b)
{
    index_t result = 0;
    expects<size_overflow>(!__builtin_add_overflow(a, b, &result), "size ", a, " + ", b, " is beyond 64 bits");
    return result;
}

} // namespace mdkv
