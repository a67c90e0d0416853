/// \file budget.hpp: the limit on one layer's memory, in common units, converted exactly to bytes.
#pragma once

#include <mdkv/core/ground.hpp>
#include <mdkv/core/ratios.hpp>

namespace MDKV_NAMESPACE
{

/// The sizes of one layer of one sequence.
struct layer_shape
{
    index_t heads  = 0; ///< H, KV heads
    index_t group  = 1; ///< G, query heads per KV head
    index_t tokens = 0; ///< N, prompt tokens that may be compressed (the window excluded)
    index_t window = 0; ///< W, prompt tokens kept uncompressed
    head_dims dims;     ///< D, Dv
    index_t element_bytes = 0;

    /// Bytes of one token of one head, keys and values, uncompressed.
    [[nodiscard]] constexpr index_t token_bytes() const { return (dims.keys + dims.values) * element_bytes; }

    /// Bytes of n tokens of every head, uncompressed.
    [[nodiscard]] MDKV_OUTLINE constexpr index_t bytes_of(index_t n) const
    {
        return checked_multiply(checked_multiply(heads, n), token_bytes());
    }

    /// Bytes of the whole uncompressed cache.
    [[nodiscard]] constexpr index_t full_bytes() const { return bytes_of(checked_add(tokens, window)); }

    /// Bytes of the window, which every budget must hold.
    [[nodiscard]] constexpr index_t window_bytes() const { return bytes_of(window); }

    /// \throws invalid_argument   a size is negative, or a dimension is zero
    MDKV_OUTLINE constexpr void expects_valid(char const* caller) const
    {
        expects(heads >= 0, caller, ": heads is ", heads, "; it must not be negative");
        expects(group >= 1, caller, ": group is ", group, "; it must be at least 1");
        expects(tokens >= 0, caller, ": tokens is ", tokens, "; it must not be negative");
        expects(window >= 0, caller, ": window is ", window, "; it must not be negative");
        expects(dims.keys >= 1 && dims.values >= 1, caller, ": head dimensions are ", dims.keys, " and ", dims.values,
            "; they must be at least 1");
        expects(element_bytes >= 1, caller, ": element_bytes is ", element_bytes, "; it must be at least 1");
        constexpr index_t most_tokens = INT32_MAX; // kept positions are 32-bit
        expects<size_overflow>(tokens <= most_tokens && window <= most_tokens, caller, ": ", tokens, " + ", window,
            " tokens are more than the limit of ", most_tokens);
        static_cast<void>(full_bytes());
    }
};

/// Limit of one layer: window, kept tokens, stand-ins, projections and channels together, without the tail of decoded tokens.
class budget
{
public:
    [[nodiscard]] static constexpr budget bytes(index_t n) { return {unit::byte, n, 1}; }

    /// T uncompressed tokens per KV head. (G * T if a cache that repeats KV heads would count T per query head.)
    [[nodiscard]] static constexpr budget kv_size(index_t tokens) { return {unit::token, tokens, 1}; }

    /// num/den of the uncompressed cache, rounded down to a byte.
    [[nodiscard]] static constexpr budget fraction(index_t num, index_t den) { return {unit::layer, num, den}; }

    /// The budget of one layer, in bytes.
    /// \throws size_overflow   the budget leaves 64 bits
    [[nodiscard]] MDKV_OUTLINE constexpr index_t in_bytes(layer_shape const& shape) const
    {
        index_t const one = unit_ == unit::byte ? 1 : unit_ == unit::token ? shape.bytes_of(1) : shape.full_bytes();
        // one * num / den, without an intermediate result beyond 64 bits
        return checked_add(checked_multiply(one / den_, num_), checked_multiply(one % den_, num_) / den_);
    }

private:
    enum class unit : std::uint8_t
    {
        byte,
        token, ///< a token of every KV head
        layer
    };

    constexpr budget(unit u, index_t num, index_t den)
        : num_{num}
        , den_{den}
        , unit_{u}
    {
        expects(num >= 0, "budget: ", num, " is negative");
        expects(den >= 1, "budget: the denominator is ", den, "; it must be at least 1");
    }

    index_t num_;
    index_t den_;
    unit unit_;
};

/// Bytes of one head's projections if r is its widest projected rung in use: the leading columns of its two bases, as
/// many as that rung has coordinates. 0 for a rung without projections.
[[nodiscard]] constexpr index_t projection_bytes(
    ratio_set const& ratios, std::size_t r, head_dims dims, index_t element_bytes)
{
    if (!ratios[r].projected()) { return 0; }
    return (dims.keys * ratios.coordinates(r, dims.keys) + dims.values * ratios.coordinates(r, dims.values))
           * element_bytes;
}

} // namespace MDKV_NAMESPACE
