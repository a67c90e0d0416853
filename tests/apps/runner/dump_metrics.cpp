/// \file dump_metrics.cpp: the value of every metric case on standard input, a JSON line each (see tests/tools)
#include <exception>
#include <iostream>
#include <string>

#include <nlohmann/json.hpp>

#include "support/metric_case.hpp"

int main()
{
    try
    {
        for (std::string line; std::getline(std::cin, line);)
        {
            std::cout << support::metric_value(nlohmann::json::parse(line)).dump() << '\n';
        }
    }
    catch (std::exception const& error)
    {
        std::cerr << "dump_metrics: " << error.what() << '\n';
        return 1;
    }
    return 0;
}
