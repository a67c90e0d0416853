/// \file hidden_statements.hpp: made-up facts to be hidden in prose and asked for, each with a look-alike that is not asked for
#pragma once

#include <mdkv/core/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "random.hpp"

namespace runner
{

/// `statement` answers `question`; `decoy` says the like of somebody or something else.
struct hidden_statement
{
    std::string statement, decoy, question;
};

namespace detail
{

/// $0, $1 ... become the values.
[[nodiscard]] inline std::string filled(std::string_view form, std::vector<std::string> const& values)
{
    std::string out;
    for (std::size_t i = 0; i < form.size(); ++i)
    {
        if (form[i] != '$') { out += form[i]; }
        else { out += values[static_cast<std::size_t>(form[++i] - '0')]; }
    }
    return out;
}

/// Two different ones, in random order.
[[nodiscard]] inline std::pair<std::string, std::string> two_of(
    portable_random& random, std::vector<std::string> const& values)
{
    auto const chosen = random.sample(std::ssize(values), 2);
    return {values[static_cast<std::size_t>(chosen[0])], values[static_cast<std::size_t>(chosen[1])]};
}

} // namespace detail

/// $0 is what the question names; $1 and $2 are the answer.
[[nodiscard]] inline hidden_statement make_hidden_statement(portable_random& random)
{
    struct form
    {
        char const* statement;
        char const* question;
        std::vector<std::string> keys, first, second;
    };
    static std::vector<std::string> const people = {
        "Mary", "John", "Olivia", "Peter", "Amelia", "Victor", "Clara", "Samuel", "Irene", "Oscar"};
    static std::vector<std::string> const cities = {
        "Lisbon", "Montreal", "Kyoto", "Vienna", "Nairobi", "Seattle", "Prague", "Dublin", "Helsinki", "Lima"};
    static std::vector<std::string> const pursuits = {"play chess with strangers", "walk along the river",
        "listen to old jazz records", "paint the harbour", "read poems under a tree",
        "ride a bicycle through the hills", "feed the ducks on the lake", "sing in the garden"};
    static std::vector<std::string> const treats   = {"drink a cup of green tea", "eat a slice of lemon cake",
          "buy a bag of roasted chestnuts", "have a bowl of tomato soup", "share a plate of dumplings",
          "order a glass of apple juice"};
    static std::vector<std::string> const things   = {"silver violin", "blue suitcase", "golden compass",
          "wooden chessboard", "red umbrella", "old camera", "brass telescope", "green lantern"};
    static std::vector<std::string> const rooms    = {"in the attic of the bakery", "in the cellar of the museum",
           "on the top floor of the library", "in the kitchen of the castle", "in the garage of the hospital"};
    static std::vector<std::string> const spots    = {"behind a pile of newspapers", "under a broken piano",
           "inside a barrel of apples", "next to a stuffed bear", "below a map of Africa"};
    static std::vector<form> const forms           = {
        {"$0's favorite thing is to $1 and $2 in the evening.", "What is $0's favorite thing?", people, pursuits,
                      treats},
        {"The best thing to do in $0 is to $1 and $2 on a sunny day.", "What is the best thing to do in $0?", cities,
                      pursuits, treats},
        {"The $0 is hidden $1, $2.", "Where is the $0 hidden?", things, rooms, spots},
    };
    form const& chosen          = random.choice(forms);
    auto const [key, other]     = detail::two_of(random, chosen.keys);
    auto const [first, third]   = detail::two_of(random, chosen.first);
    auto const [second, fourth] = detail::two_of(random, chosen.second);
    return {detail::filled(chosen.statement, {key, first, second}),
        detail::filled(chosen.statement, {other, third, fourth}), detail::filled(chosen.question, {key})};
}

/// The place nearest to this byte, the earlier of two, where a sentence begins: behind ". " or a line's end, or at either
/// end of the text.
[[nodiscard]] inline std::size_t sentence_break(std::string_view text, std::size_t near)
{
    auto const breaks = [&](std::size_t at) {
        return at == 0 || at == text.size() || text[at - 1] == '\n'
               || (at >= 2 && text[at - 1] == ' ' && text[at - 2] == '.');
    };
    near = std::min(near, text.size());
    for (std::size_t distance = 0;; ++distance)
    {
        if (distance <= near && breaks(near - distance)) { return near - distance; }
        if (near + distance <= text.size() && breaks(near + distance)) { return near + distance; }
    }
}

/// The prose with both sentences at sentence breaks, each as a line's worth of prose.
/// \param depth         percent of the prose that stand before the statement
/// \param decoy_depth   and before the decoy
[[nodiscard]] inline std::string hide(
    std::string_view prose, hidden_statement const& hidden, double depth, double decoy_depth)
{
    auto const place = [&](double percent) {
        return sentence_break(prose, static_cast<std::size_t>(static_cast<double>(prose.size()) * percent / 100));
    };
    std::size_t const at    = place(depth);
    std::size_t const decoy = place(decoy_depth);
    auto const sentence     = [&](std::size_t where, std::string const& text) {
        bool const open = where > 0 && prose[where - 1] != '\n' && prose[where - 1] != ' ';
        return (open ? " " : "") + text + (where == prose.size() ? "" : " ");
    };
    std::string out{prose.substr(0, std::min(at, decoy))};
    out += at <= decoy ? sentence(at, hidden.statement) : sentence(decoy, hidden.decoy);
    out += prose.substr(std::min(at, decoy), std::max(at, decoy) - std::min(at, decoy));
    out += at <= decoy ? sentence(decoy, hidden.decoy) : sentence(at, hidden.statement);
    out += prose.substr(std::max(at, decoy));
    return out;
}

} // namespace runner
