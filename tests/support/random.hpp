/// \file random.hpp: random inputs that are the same everywhere for the same seed, with the structure real caches have
#pragma once

#include <mdkv/core/types.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <numbers>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace support
{

using mdkv::index_t;

/// Seed of every random test: MDKV_TEST_SEED, or a fixed number.
[[nodiscard]] inline std::uint64_t seed()
{
    char const* const given = std::getenv("MDKV_TEST_SEED");
    return given == nullptr ? 260320616 : std::strtoull(given, nullptr, 10);
}

/// splitmix64: short, and unlike the distributions of <random> the same in every standard library.
class source
{
public:
    /// One stream of numbers per test and case: `source{"score grid", d}`.
    explicit source(char const* name, std::int64_t salt = 0)
        : state_{seed() + 0x9e3779b97f4a7c15U * static_cast<std::uint64_t>(salt)}
    {
        for (; *name != '\0'; ++name) { state_ = (state_ ^ static_cast<std::uint64_t>(*name)) * 0x100000001b3U; }
    }

    std::uint64_t bits()
    {
        state_ += 0x9e3779b97f4a7c15U;
        std::uint64_t z = state_;
        z               = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9U;
        z               = (z ^ (z >> 27U)) * 0x94d049bb133111ebU;
        return z ^ (z >> 31U);
    }

    /// In [0, 1).
    double uniform() { return static_cast<double>(bits() >> 11U) * 0x1p-53; }
    double uniform(double low, double high) { return low + (high - low) * uniform(); }

    double normal()
    {
        double const radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
        return radius * std::cos(2.0 * std::numbers::pi * uniform());
    }

    /// In [0, count).
    index_t below(index_t count) { return static_cast<index_t>(bits() % static_cast<std::uint64_t>(count)); }

    [[nodiscard]] std::vector<index_t> permutation(index_t count)
    {
        std::vector<index_t> order(static_cast<std::size_t>(count));
        std::iota(order.begin(), order.end(), index_t{0});
        for (std::size_t i = order.size(); i > 1; --i)
        {
            std::swap(order[i - 1], order[static_cast<std::size_t>(below(static_cast<index_t>(i)))]);
        }
        return order;
    }

private:
    std::uint64_t state_;
};

/// As many random bytes.
[[nodiscard]] inline std::string some_text(char const* name, std::int64_t salt, int bytes)
{
    source random{name, salt};
    std::string text;
    for (int i = 0; i < bytes; ++i) { text += static_cast<char>(random.below(256)); }
    return text;
}

/// An orthogonal map of D dimensions, as a product of reflections: exact in theory and cheap to apply.
class rotation
{
public:
    rotation(source& random, index_t dim, int reflections = 4)
        : dim_{static_cast<std::size_t>(dim)}
        , mirrors_(static_cast<std::size_t>(reflections), std::vector<double>(dim_))
    {
        for (auto& mirror : mirrors_)
        {
            double square = 0;
            for (double& x : mirror)
            {
                x = random.normal();
                square += x * x;
            }
            for (double& x : mirror) { x /= std::sqrt(square); }
        }
    }

    void apply(std::vector<double>& v) const
    {
        for (auto const& mirror : mirrors_)
        {
            double along = 0;
            for (std::size_t d = 0; d < dim_; ++d) { along += mirror[d] * v[d]; }
            for (std::size_t d = 0; d < dim_; ++d) { v[d] -= 2.0 * along * mirror[d]; }
        }
    }

    /// Row i is what the map makes of unit vector i: a dense orthonormal basis.
    [[nodiscard]] std::vector<double> row(index_t i) const
    {
        std::vector<double> unit(dim_, 0.0);
        unit[static_cast<std::size_t>(i)] = 1.0;
        apply(unit);
        return unit;
    }

private:
    std::size_t dim_;
    std::vector<std::vector<double>> mirrors_;
};

/// Vectors whose variance falls geometrically along hidden directions, as keys and values have it: after `rank`
/// directions nothing is left.
class spectrum
{
public:
    spectrum(source& random, index_t dim, double decay, index_t rank)
        : turn_{random, dim}
        , scale_(static_cast<std::size_t>(dim), 0.0)
    {
        double s = 1.0;
        for (index_t d = 0; d < dim && d < rank; ++d, s *= decay) { scale_[static_cast<std::size_t>(d)] = s; }
    }

    /// The i-th strongest direction.
    [[nodiscard]] std::vector<double> direction(index_t i) const { return turn_.row(i); }

    /// Root of the sum of the variances' squares: how large the product of two such vectors typically is.
    [[nodiscard]] double typical_product() const
    {
        double sum = 0;
        for (double const s : scale_) { sum += s * s * s * s; }
        return std::sqrt(sum);
    }

    [[nodiscard]] std::vector<double> draw(source& random, double size = 1.0) const
    {
        std::vector<double> v(scale_.size());
        for (std::size_t d = 0; d < v.size(); ++d) { v[d] = size * scale_[d] * random.normal(); }
        turn_.apply(v);
        return v;
    }

private:
    rotation turn_;
    std::vector<double> scale_;
};

} // namespace support
