/// \file random.hpp: random choices that are the same on every machine
#pragma once

#include <mdkv/core/error.hpp>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace runner
{

/// The distributions of the standard library differ from one implementation to the next; these are fixed, as the engine
/// below them is. They are not the numbers of Python's `random`: a generator written with it draws other samples from
/// the same distribution.
class portable_random
{
public:
    explicit portable_random(std::uint64_t seed)
        : engine_{seed}
    {}

    /// 64 random bits.
    [[nodiscard]] std::uint64_t bits() { return engine_(); }

    /// Every integer from `low` to `high`, both included, is equally likely.
    /// \throws mdkv::invalid_argument   there is none
    [[nodiscard]] std::int64_t between(std::int64_t low, std::int64_t high)
    {
        if (low > high)
        {
            throw mdkv::invalid_argument{"portable_random: no integer is at least " + std::to_string(low)
                                         + " and at most " + std::to_string(high)};
        }
        std::uint64_t const count = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low) + 1;
        if (count == 0) { return static_cast<std::int64_t>(engine_()); } // all 2^64
        std::uint64_t const biased = (UINT64_MAX % count + 1) % count;   // so many values too many for equal shares
        std::uint64_t value        = engine_();
        while (value > UINT64_MAX - biased) { value = engine_(); }
        return static_cast<std::int64_t>(static_cast<std::uint64_t>(low) + value % count);
    }

    template <class Value>
    [[nodiscard]] Value const& choice(std::vector<Value> const& values)
    {
        return values[static_cast<std::size_t>(between(0, std::ssize(values) - 1))];
    }

    template <class Value>
    void shuffle(std::vector<Value>& values)
    {
        for (std::size_t i = values.size(); i > 1; --i)
        {
            auto const j = static_cast<std::size_t>(between(0, static_cast<std::int64_t>(i) - 1));
            if (j != i - 1) { std::swap(values[i - 1], values[j]); }
        }
    }

    /// `wanted` different integers of 0 .. count - 1, in random order.
    /// \throws mdkv::invalid_argument   there are not so many
    [[nodiscard]] std::vector<std::int64_t> sample(std::int64_t count, std::int64_t wanted)
    {
        if (wanted < 0 || wanted > count)
        {
            throw mdkv::invalid_argument{"portable_random: " + std::to_string(wanted)
                                         + " different values are wanted, there are " + std::to_string(count)};
        }
        std::vector<std::int64_t> all(static_cast<std::size_t>(count));
        std::iota(all.begin(), all.end(), std::int64_t{0});
        for (std::int64_t i = 0; i < wanted; ++i)
        {
            std::swap(all[static_cast<std::size_t>(i)], all[static_cast<std::size_t>(between(i, count - 1))]);
        }
        all.resize(static_cast<std::size_t>(wanted));
        return all;
    }

private:
    std::mt19937_64 engine_;
};

} // namespace runner
