/// \file compare.hpp: how far two results are apart: relative to a stated magnitude, in units of the last place, in bits
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <ostream>
#include <vector>

namespace support
{

/// Distance in representable floats; huge when one is NaN.
[[nodiscard]] inline std::int64_t ulps(float a, float b)
{
    if (std::isnan(a) || std::isnan(b)) { return std::numeric_limits<std::int64_t>::max(); }
    auto const place = [](float x) {
        std::int32_t bits = 0;
        std::memcpy(&bits, &x, sizeof bits);
        return bits < 0 ? std::int64_t{std::numeric_limits<std::int32_t>::min()} - bits : std::int64_t{bits};
    };
    std::int64_t const distance = place(a) - place(b);
    return distance < 0 ? -distance : distance;
}

/// Bit for bit, NaNs included.
template <class T>
[[nodiscard]] bool same_bits(std::vector<T> const& a, std::vector<T> const& b)
{
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// The largest error of many comparisons and where it was, so that a test makes one assertion about all of them.
class worst_error
{
public:
    /// |got - want| in units of `magnitude`. A NaN counts as infinitely far; 0 of magnitude 0 is exact.
    void add(long double got, long double want, long double magnitude, std::int64_t place = 0)
    {
        long double const difference = std::fabs(got - want);
        long double error            = magnitude > 0 ? difference / magnitude : difference == 0 ? 0 : infinite;
        if (std::isnan(error)) { error = infinite; }
        ++compared_;
        if (error <= error_ && compared_ > 1) { return; }
        error_ = error;
        got_   = got;
        want_  = want;
        place_ = place;
    }

    [[nodiscard]] double value() const { return static_cast<double>(error_); }
    [[nodiscard]] std::int64_t compared() const { return compared_; }

    /// Something was compared, and nothing was further apart.
    [[nodiscard]] bool within(double tolerance) const { return compared_ > 0 && error_ <= tolerance; }

    friend std::ostream& operator<<(std::ostream& text, worst_error const& e)
    {
        return text << "largest error " << e.error_ << " at " << e.place_ << ": got " << e.got_ << ", expected "
                    << e.want_ << " (" << e.compared_ << " compared)";
    }

private:
    static constexpr long double infinite = std::numeric_limits<long double>::infinity();

    long double error_     = 0;
    long double got_       = 0;
    long double want_      = 0;
    std::int64_t place_    = 0;
    std::int64_t compared_ = 0;
};

} // namespace support
