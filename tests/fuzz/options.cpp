/// \file options.cpp: fuzzes the texts of policies, ratio sets and budgets; a text that is read is written and read again
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include <mdkv/core/error.hpp>
#include <mdkv/core/ratios.hpp>

#include "runner/option_texts.hpp"
#include "runner/policies.hpp"

namespace
{

template <class Call>
void refused_or_done(Call const& call)
{
    try
    {
        call();
    }
    catch (mdkv::error const&)
    {}
}

bool equal(mdkv::ratio_set const& a, mdkv::ratio_set const& b)
{
    bool same = a.size() == b.size();
    for (std::size_t r = 0; same && r < a.size(); ++r) { same = a[r] == b[r]; }
    return same;
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size)
{
    std::string const text(reinterpret_cast<char const*>(data), size);
    refused_or_done([&] { static_cast<void>(runner::parse_policy(text)); });
    refused_or_done([&] { static_cast<void>(runner::parse_budget(text)); });
    refused_or_done([&] {
        auto const ratios = runner::parse_ratios(text);
        if (!equal(ratios, runner::parse_ratios(runner::text_of(ratios)))) { std::abort(); }
    });
    return 0;
}
