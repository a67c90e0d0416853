/// \file reference_model.hpp: the model file for tests that need a real one
#pragma once

#include <cstdlib>
#include <iostream>
#include <string>

/// Path of the reference model, from the environment variable MDKV_REFERENCE_MODEL; empty when there is none.
[[nodiscard]] inline std::string reference_model_path()
{
    char const* const path = std::getenv("MDKV_REFERENCE_MODEL");
    return path == nullptr ? std::string() : std::string(path);
}

/// Path of the second model (Qwen2.5-Coder-0.5B-Instruct), from MDKV_SECOND_MODEL; empty when there is none.
[[nodiscard]] inline std::string second_model_path()
{
    char const* const path = std::getenv("MDKV_SECOND_MODEL");
    return path == nullptr ? std::string() : std::string(path);
}

/// True when there is no reference model. The line it then writes is what the test script counts as a skipped test.
[[nodiscard]] inline bool skipped_without_reference_model(std::string const& test_name)
{
    if (!reference_model_path().empty()) { return false; }
    std::cout << "SKIPPED: " << test_name << ": no reference model" << std::endl;
    return true;
}

/// The same of the second model.
[[nodiscard]] inline bool skipped_without_second_model(std::string const& test_name)
{
    if (!second_model_path().empty()) { return false; }
    std::cout << "SKIPPED: " << test_name << ": no second model (bash examples/setup.sh second-model fetches it)"
              << std::endl;
    return true;
}
