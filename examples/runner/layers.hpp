/// \file layers.hpp: the element-wise layers of the llama architecture: RMS norm, rotary positions, gated activation
#pragma once

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

/// gate = silu(gate) * up.
inline void gated_silu(float* gate, float const* up, std::int64_t count)
{
    row_view value(gate, count);
    value = value / (1.0F + (-value).exp()) * const_row_view(up, count);
}

/// Rotary position encoding of interleaved pairs: coordinates (2i, 2i + 1) turn by position * frequency(i). That is
/// the order of llama files, whose query and key rows were permuted for it; other runtimes rotate (i, i + D/2).
class rotary
{
public:
    rotary() = default;

    /// \param coordinates   how many leading coordinates of a head turn; even
    /// \param factors       divide the frequencies, one per pair; empty means 1
    rotary(std::int64_t coordinates, double base, std::span<float const> factors)
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
        for (std::int64_t i = 0; i < table_size(); i += 2)
        {
            float const x = vector[i];
            float const y = vector[i + 1];
            vector[i]     = x * table[i] - y * table[i + 1];
            vector[i + 1] = x * table[i + 1] + y * table[i];
        }
    }

private:
    std::vector<double> frequencies_; // [coordinates / 2]
};

} // namespace runner
