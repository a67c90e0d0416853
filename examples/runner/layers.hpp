/// \file layers.hpp: the element-wise layers of the architectures: RMS norm, biases, rotary positions, gated activation
#pragma once

#include <mdkv/replay/replay.hpp>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

#include "eigen.hpp"

namespace runner
{

/// out = x / rms(x) * weight.
inline void rms_norm(float const* x, float const* weight, std::int64_t count, float epsilon, float* out)
{
    const_row_view const input(x, count);
    float const mean_square = input.square().sum() / static_cast<float>(count);
    row_view(out, count)    = input * (1.0F / std::sqrt(mean_square + epsilon)) * const_row_view(weight, count);
}

/// row += bias, where there is one.
inline void add_bias(std::vector<float> const& bias, float* row)
{
    if (!bias.empty()) { row_view(row, std::ssize(bias)) += const_row_view(bias.data(), std::ssize(bias)); }
}

/// gate = silu(gate) * up.
inline void gated_silu(float* gate, float const* up, std::int64_t count)
{
    row_view value(gate, count);
    value = value / (1.0F + (-value).exp()) * const_row_view(up, count);
}

/// Rotary position encoding: pair i of coordinates turns by position * frequency(i).
class rotary
{
public:
    rotary() = default;

    /// \param coordinates   how many leading coordinates of a head turn; even
    /// \param factors       divide the frequencies, one per pair; empty means 1
    /// \param pairs         which coordinates make a pair; llama's files have their query and key rows permuted for
    ///                      neighbours
    rotary(std::int64_t coordinates, double base, std::span<float const> factors,
        mdkv::rotary_pairs pairs = mdkv::rotary_pairs::neighbours)
        : pairs_{pairs}
    {
        for (std::int64_t i = 0; i < coordinates / 2; ++i)
        {
            double const divisor = factors.empty() ? 1.0 : double{factors[static_cast<std::size_t>(i)]};
            frequencies_.push_back(
                std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(coordinates)) / divisor);
        }
    }

    /// Floats that `angles` fills for one position.
    [[nodiscard]] std::int64_t table_size() const noexcept { return 2 * std::ssize(frequencies_); }

    /// Radians that each pair turns in one position: [coordinates / 2].
    [[nodiscard]] std::span<double const> frequencies() const noexcept { return frequencies_; }

    [[nodiscard]] mdkv::rotary_pairs pairs() const noexcept { return pairs_; }

    /// The coordinates of a pair.
    [[nodiscard]] std::array<std::int64_t, 2> coordinates(std::int64_t pair) const noexcept
    {
        if (pairs_ == mdkv::rotary_pairs::neighbours) { return {2 * pair, 2 * pair + 1}; }
        return {pair, pair + std::ssize(frequencies_)};
    }

    /// Cosine and sine of each pair. The angle is taken in double: at position 8,000 a float angle is off by 5e-4.
    void angles(std::int64_t position, float* table) const noexcept
    {
        for (double const frequency : frequencies_)
        {
            double const angle = static_cast<double>(position) * frequency;
            *table++           = static_cast<float>(std::cos(angle));
            *table++           = static_cast<float>(std::sin(angle));
        }
    }

    /// Turns one head's vector by a table of `angles`.
    void turn(float* vector, float const* table) const noexcept
    {
        for (std::int64_t i = 0; i < std::ssize(frequencies_); ++i, table += 2)
        {
            auto const [first, second] = coordinates(i);
            float const x              = vector[first];
            float const y              = vector[second];
            vector[first]              = x * table[0] - y * table[1];
            vector[second]             = x * table[1] + y * table[0];
        }
    }

private:
    std::vector<double> frequencies_; // [coordinates / 2]
    mdkv::rotary_pairs pairs_{};
};

} // namespace runner
