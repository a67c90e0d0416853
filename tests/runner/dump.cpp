/// \file dump.cpp: what the runner makes of a GGUF file, for comparison with other programs (see tests/tools)
#include <cstddef>
#include <exception>
#include <fstream>
#include <ios>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "runner/chat.hpp"
#include "runner/dequantise.hpp"
#include "runner/gguf.hpp"
#include "runner/tokenizer.hpp"

namespace
{

/// Every tensor: a line `NAME ELEMENTS`, then its values as little-endian floats; in the order of the file.
void dump_tensors(std::string const& model, std::string const& to)
{
    auto const file = runner::gguf_file::open(model);
    std::ofstream out(to, std::ios::binary);
    for (runner::tensor_info const& tensor : file.tensors())
    {
        std::vector<float> values(static_cast<std::size_t>(tensor.elements()));
        runner::dequantise(tensor.type, tensor.data.data(), tensor.elements(), values.data());
        out << tensor.name << ' ' << values.size() << '\n';
        out.write(
            reinterpret_cast<char const*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(float)));
    }
    if (!out.flush()) { throw std::runtime_error(to + ": cannot be written"); }
}

/// A JSON array to a JSON array of arrays of ids, on standard output. `encode(words, entry)` makes the ids.
template <class Encode>
void encode_entries(std::string const& model, std::string const& from, Encode const& encode)
{
    runner::tokenizer const words(runner::gguf_file::open(model));
    std::ifstream in(from);
    if (!in) { throw std::runtime_error(from + ": cannot be opened"); }
    nlohmann::json out = nlohmann::json::array();
    for (nlohmann::json const& entry : nlohmann::json::parse(in)) { out.push_back(encode(words, entry)); }
    std::cout << out.dump() << '\n';
}

void encode_texts(std::string const& model, std::string const& from, bool parse_special)
{
    encode_entries(model, from, [&](runner::tokenizer const& words, nlohmann::json const& text) {
        return words.encode(text.get<std::string>(), parse_special);
    });
}

/// Every entry is a system text or null, and a question.
void encode_chats(std::string const& model, std::string const& from)
{
    encode_entries(model, from, [](runner::tokenizer const& words, nlohmann::json const& pair) {
        std::string const system = pair.at(0).is_null() ? std::string() : pair.at(0).get<std::string>();
        auto const first         = pair.at(0).is_null() ? std::nullopt : std::optional<std::string_view>(system);
        return runner::encode_chat(words, first, pair.at(1).get<std::string>());
    });
}

} // namespace

int main(int argc, char** argv)
{
    std::vector<std::string> const arguments(argv + 1, argv + argc);
    std::string const command = arguments.size() == 3 ? arguments[0] : "";
    try
    {
        if (command == "dequantise") { dump_tensors(arguments[1], arguments[2]); }
        else if (command == "encode" || command == "encode-special")
        {
            encode_texts(arguments[1], arguments[2], command == "encode-special");
        }
        else if (command == "chat") { encode_chats(arguments[1], arguments[2]); }
        else
        {
            std::cerr << "usage: dump dequantise MODEL OUT | dump encode MODEL JSON | dump encode-special MODEL JSON | "
                         "dump chat MODEL JSON\n";
            return 2;
        }
    }
    catch (std::exception const& error)
    {
        std::cerr << "dump: " << error.what() << '\n';
        return 1;
    }
    return 0;
}
