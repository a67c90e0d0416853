/// \file gguf.cpp: fuzzes GGUF files: metadata, tensors and models are read or refused
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "runner/file_error.hpp"
#include "runner/gguf.hpp"
#include "runner/language_model.hpp"
#include "support/gguf_bytes.hpp"

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size)
{
    try
    {
        auto const file = parse_gguf(std::string(reinterpret_cast<char const*>(data), size));
        auto const model = runner::language_model::load(file);
        auto const& some = model.layer(0).attention_output;
        std::vector<float> row(static_cast<std::size_t>(some.columns()));
        for (std::int64_t i = 0; i < std::min<std::int64_t>(some.rows(), 8); ++i)
        {
            some.dequantise_rows(i, 1, row.data());
        }
    }
    catch (std::exception const&)
    {}
    return 0;
}
