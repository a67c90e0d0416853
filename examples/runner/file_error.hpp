/// \file file_error.hpp: what is thrown for a file that cannot be used, and how its bytes are quoted in the message
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace runner
{

/// One text of several. (g++ 12 at -O3 warns falsely of overlapping memory where a literal is added to a temporary.)
template <class... Parts>
[[nodiscard]] std::string joined(Parts const&... parts)
{
    std::string out;
    (out.append(std::string_view(parts)), ...);
    return out;
}

/// Text from an untrusted file, made fit for a terminal: control and non-ASCII bytes as \xHH, long text cut.
[[nodiscard]] inline std::string printable(std::string_view text, std::size_t longest = 80)
{
    constexpr char digits[] = "0123456789abcdef";
    std::string out;
    for (char const c : text.substr(0, longest))
    {
        auto const byte = static_cast<unsigned char>(c);
        if (byte >= 0x20 && byte < 0x7F && c != '\\') { out += c; }
        else
        {
            out += "\\x";
            out += digits[byte >> 4];
            out += digits[byte & 15];
        }
    }
    if (text.size() > longest) { out += joined("... (", std::to_string(text.size()), " bytes)"); }
    return out;
}

/// `printable` between quotation marks.
[[nodiscard]] inline std::string quoted(std::string_view text)
{
    return joined("\"", printable(text), "\"");
}

/// A file is missing, damaged, hostile, or holds something this program does not support.
/// The message reads `FILE: WHAT at byte OFFSET: VALUE (limit LIMIT)`, without the parts that do not apply.
class file_error : public std::runtime_error
{
public:
    file_error(std::string_view file, std::string_view what, std::optional<std::uint64_t> offset = {},
        std::string_view value = {}, std::string_view limit = {})
        : std::runtime_error(compose(file, what, offset, value, limit))
        , offset_(offset)
    {}

    /// Where in the file the trouble is; empty when it concerns no single place.
    [[nodiscard]] std::optional<std::uint64_t> offset() const noexcept { return offset_; }

private:
    static std::string compose(std::string_view file, std::string_view what, std::optional<std::uint64_t> offset,
        std::string_view value, std::string_view limit)
    {
        std::string out = joined(file, ": ", what);
        if (offset) { out += joined(" at byte ", std::to_string(*offset)); }
        if (!value.empty()) { out += joined(": ", value); }
        if (!limit.empty()) { out += joined(" (limit ", limit, ")"); }
        return out;
    }

    std::optional<std::uint64_t> offset_;
};

} // namespace runner
