/// \file ruler_sizing.hpp: how large a haystack may be so that prompt and answer fit into the length that is asked for
#pragma once

#include <mdkv/core/error.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "ruler_tasks.hpp"
#include "runner/file_error.hpp"

namespace runner::ruler
{

/// What the search needs to know of a kind of haystack; sizes are in its own units (sentences, words, documents).
struct size_plan
{
    std::int64_t increment   = 10; // the smallest size tried first, and by how much a sample shrinks that does not fit
    std::int64_t estimate_at = 10; // the size whose tokens tell how many tokens a unit has
    std::int64_t slack       = 3;  // the search begins with so many times the estimated size
    std::int64_t largest     = std::numeric_limits<std::int64_t>::max();
    std::string beyond       = {}; // what is needed for a size above `largest`
};

/// A haystack of some size with its prompt. `minimum` and `make` may depend on the number of the sample.
template <class Haystack>
concept haystack = requires(Haystack hay, std::int64_t size, std::int64_t index) {
    {
        std::as_const(hay).plan()
    } -> std::same_as<size_plan>;
    {
        std::as_const(hay).minimum(index)
    } -> std::same_as<std::int64_t>;
    {
        hay.make(size, index)
    } -> std::same_as<prompt>;
};

struct length_limit
{
    std::string_view task;
    std::int64_t max_length         = 0;
    std::int64_t template_tokens    = 0;
    std::int64_t tokens_to_generate = 0;
    bool close_fit                  = false;

    [[nodiscard]] std::int64_t prompt_tokens() const noexcept
    {
        return max_length - template_tokens - tokens_to_generate;
    }

    [[noreturn]] void fail(std::int64_t least) const
    {
        throw mdkv::invalid_argument{joined("max_length: ", std::to_string(max_length), " is too small for ", task,
            ": its smallest prompt takes ", std::to_string(least), " tokens, ", std::to_string(tokens_to_generate),
            " are kept for the answer and ", std::to_string(template_tokens), " for the model's chat form")};
    }
};

/// The public search for the haystack's size: by bisection between one increment and several times what seems to fit.
/// Two departures: where not even one increment fits, the public generator never ends and this one goes on below it;
/// where everything fits, this one goes on above.
/// \throws mdkv::invalid_argument   not even the smallest prompt fits, or a size that would fit cannot be made
template <haystack Haystack>
[[nodiscard]] std::int64_t largest_size(Haystack& hay, length_limit const& limit, token_counter const& count)
{
    size_plan const plan       = hay.plan();
    std::int64_t const minimum = hay.minimum(0);
    auto const search          = [&](std::int64_t low, std::int64_t high) {
        std::int64_t found = -1;
        while (low <= high)
        {
            std::int64_t const middle = low + (high - low) / 2;
            if (tokens_of(hay.make(middle, 0), count) <= limit.prompt_tokens())
            {
                found = middle;
                low   = middle + 1;
            }
            else { high = middle - 1; }
        }
        return found;
    };
    std::int64_t const probe = std::max(minimum, std::min(plan.estimate_at, plan.largest));
    auto const tokens        = std::max(tokens_of(hay.make(probe, 0), count), std::int64_t{1});
    double const per_unit    = static_cast<double>(tokens) / static_cast<double>(probe);
    double const room        = static_cast<double>(limit.max_length - limit.template_tokens);
    auto const estimate      = static_cast<std::int64_t>(room / per_unit * static_cast<double>(plan.slack));
    std::int64_t upper       = std::max(estimate, plan.increment * 2);
    std::int64_t found       = search(std::max(plan.increment, minimum), std::min(upper, plan.largest));
    while (found == upper && upper < plan.largest) // the estimate was too low
    {
        upper *= 2;
        found = std::max(found, search(found + 1, std::min(upper, plan.largest)));
    }
    if (found < 0) { found = search(minimum, plan.increment - 1); }
    if (found < 0) { limit.fail(tokens_of(hay.make(minimum, 0), count)); }
    if (found == plan.largest && upper > plan.largest)
    {
        throw mdkv::invalid_argument{joined("max_length: ", std::to_string(limit.max_length),
            " has room for more than ", limit.task, " can fill: ", plan.beyond)};
    }
    return found;
}

/// A prompt that fits, with its length in tokens (answer included) and its haystack's size.
struct fitted_prompt
{
    ruler::prompt prompt;
    std::int64_t length = 0;
    std::int64_t size   = 0;
};

/// The sample of that number, smaller by increments until it fits; below one increment by single units, where the
/// public generator draws again for ever.
/// \throws mdkv::invalid_argument   not even the smallest one fits
template <haystack Haystack>
[[nodiscard]] fitted_prompt make_fitting(
    Haystack& hay, std::int64_t size, std::int64_t index, length_limit const& limit, token_counter const& count)
{
    std::int64_t const increment = hay.plan().increment;
    std::int64_t const minimum   = hay.minimum(index);
    size                         = std::max(size, minimum);
    while (true)
    {
        prompt made               = hay.make(size, index);
        std::int64_t const tokens = tokens_of(made, count);
        if (tokens <= limit.prompt_tokens()) { return {std::move(made), tokens + limit.tokens_to_generate, size}; }
        if (size <= minimum) { limit.fail(tokens); }
        std::int64_t const public_step = size > increment ? increment : 1;
        size = std::max(minimum, size - (limit.close_fit ? std::max(size / 50, std::int64_t{1}) : public_step));
    }
}

} // namespace runner::ruler
