// From the text of PTX, as nvcc writes it, to instructions.
#include "memory.hpp"
#include "program.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <regex>
#include <unordered_map>
#include <unordered_set>

#include <cxxabi.h>

namespace ptx
{

namespace
{

constexpr std::uint64_t dynamic_shared = ~std::uint64_t{0}; // a variable's address that depends on the kernel

[[noreturn]] void fail(std::string const& what)
{
    std::fprintf(stderr, "ptx: %s\n", what.c_str());
    std::fflush(nullptr);
    std::_Exit(3);
}

[[nodiscard]] bool is_space(char c)
{
    return std::isspace(static_cast<unsigned char>(c)) != 0;
}
[[nodiscard]] bool is_digit(char c)
{
    return std::isdigit(static_cast<unsigned char>(c)) != 0;
}
[[nodiscard]] bool in_name(char c)
{
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '%';
}

[[nodiscard]] std::string_view trimmed(std::string_view text)
{
    while (!text.empty() && is_space(text.front())) { text.remove_prefix(1); }
    while (!text.empty() && is_space(text.back())) { text.remove_suffix(1); }
    return text;
}

/// The parts between separators, without those in brackets.
[[nodiscard]] std::vector<std::string_view> split(std::string_view text, char separator)
{
    std::vector<std::string_view> parts;
    int depth         = 0;
    std::size_t begin = 0;
    for (std::size_t k = 0; k <= text.size(); ++k)
    {
        if (k < text.size())
        {
            char const c = text[k];
            depth += (c == '{' || c == '(' || c == '[') ? 1 : (c == '}' || c == ')' || c == ']') ? -1 : 0;
            if (c != separator || depth != 0) { continue; }
        }
        parts.push_back(trimmed(text.substr(begin, k - begin)));
        begin = k + 1;
    }
    if (parts.size() == 1 && parts.front().empty()) { parts.clear(); }
    return parts;
}

/// Where the brace at `open` closes.
[[nodiscard]] std::size_t closing_brace(std::string_view text, std::size_t open)
{
    int depth      = 1;
    std::size_t at = open + 1;
    for (; at < text.size(); ++at)
    {
        depth += text[at] == '{' ? 1 : text[at] == '}' ? -1 : 0;
        if (depth == 0) { break; }
    }
    return at;
}

/// The words of a declaration: names, numbers, and signs by themselves.
[[nodiscard]] std::vector<std::string_view> words_of(std::string_view text)
{
    std::vector<std::string_view> found;
    for (std::size_t k = 0; k < text.size();)
    {
        if (is_space(text[k]))
        {
            ++k;
            continue;
        }
        std::size_t end = k;
        while (end < text.size() && (in_name(text[end]) || text[end] == '.')) { ++end; }
        end = std::max(end, k + 1);
        found.push_back(text.substr(k, end - k));
        k = end;
    }
    return found;
}

[[nodiscard]] unsigned number(std::string_view text)
{
    unsigned value = 0;
    std::from_chars(text.data(), text.data() + text.size(), value);
    return value;
}

/// Bytes of a type such as ".b32"; 0 of predicates and other words.
[[nodiscard]] std::size_t type_bytes(std::string_view type)
{
    std::size_t const digit = type.find_first_of("0123456789");
    return digit == type.npos ? 0 : number(type.substr(digit)) / 8;
}

[[nodiscard]] std::size_t rounded_up(std::size_t n, std::size_t to)
{
    return (n + to - 1) / to * to;
}

/// ".shared .align 8 .b8 name[80]": a variable or parameter.
struct declaration
{
    std::string name;
    std::size_t bytes = 0, align = 1;

    explicit declaration(std::string_view text)
    {
        auto const words     = words_of(text);
        std::size_t elements = 1, element = 1, said = 0;
        for (std::size_t k = 0; k < words.size(); ++k)
        {
            if (words[k] == ".align") { said = number(words[++k]); }
            else if (words[k].front() == '.') { element = std::max(element, type_bytes(words[k])); }
            else if (words[k] == "[") { elements *= number(words[k + 1]), k += 2; }
            else if (words[k] == "=") { break; }
            else { name = words[k]; }
        }
        bytes = elements * element;
        align = said != 0 ? said : element;
    }
};

operations const& known_operations()
{
    static operations const all = [] {
        operations made;
        add_arithmetic(made);
        add_warp_functions(made);
        return made;
    }();
    return all;
}

/// MDKV_PTX_MUTATE of the environment, "regular expression=>replacement": a fault put into every statement that it matches.
struct mutation
{
    std::regex from;
    std::string to;
    std::uint64_t made = 0;
};
std::optional<mutation>& the_mutation()
{
    static auto* const one = [] { // it is asked at exit, after static objects' ends
        auto* const found = new std::optional<mutation>;
        if (char const* const text = std::getenv("MDKV_PTX_MUTATE"))
        {
            std::string const all{text};
            std::size_t const arrow = all.find("=>");
            if (arrow == all.npos) { fail("MDKV_PTX_MUTATE has no =>"); }
            *found = mutation{std::regex{all.substr(0, arrow)}, all.substr(arrow + 2)};
        }
        return found;
    }();
    return *one;
}

} // namespace

std::string short_name(std::string const& mangled)
{
    int status       = 0;
    char* const text = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
    std::string name{status == 0 ? text : mangled.c_str()};
    std::free(text);
    // Of "void mdkv::gpu::kernels::entry<K>(K)" K, without namespaces.
    if (std::size_t const open = name.find("entry<"); open != name.npos)
    {
        std::size_t const close = name.find(">(", open);
        name                    = name.substr(open + 6, close - open - 6);
    }
    std::string const unnamed = "(anonymous namespace)::";
    while (name.find(unnamed) != name.npos) { name.erase(name.find(unnamed), unnamed.size()); }
    std::string shorter;
    for (std::size_t k = 0; k < name.size(); ++k)
    {
        if (name[k] == ':' && k + 1 < name.size() && name[k + 1] == ':')
        {
            while (!shorter.empty()
                   && (std::isalnum(static_cast<unsigned char>(shorter.back())) != 0 || shorter.back() == '_'))
            {
                shorter.pop_back();
            }
            ++k;
        }
        else { shorter += name[k]; }
    }
    return shorter;
}

std::uint64_t mutated()
{
    return the_mutation() ? the_mutation()->made : 0;
}

module::module(std::string text) :text_{std::move(text)}, lines_(1)
{
    std::string_view const all{text_};
    for (std::size_t at = 0; at < all.size();)
    {
        std::size_t const line_end  = std::min(all.find('\n', at), all.size());
        std::string_view const line = all.substr(at, line_end - at);
        std::size_t next            = line_end + 1;
        bool const entry            = line.find(".entry ") != line.npos;
        if (line.substr(0, 2) != "//" && (entry || line.find(".func ") != line.npos))
        {
            // Its name, parameters and directives; then a body in braces at the beginnings of lines, or a semicolon.
            std::size_t const open  = std::min(all.find("\n{", at), all.size());
            std::string_view header = all.substr(at, open - at);
            if (std::size_t const semicolon = header.find(';'); semicolon != header.npos) { next = at + semicolon + 1; }
            else
            {
                header.remove_prefix(header.find(entry ? ".entry" : ".func") + (entry ? 6 : 5));
                kernel made;
                if (trimmed(header).front() == '(') // of what it returns
                {
                    std::size_t const close = header.find(')');
                    made.parameters         = std::string{trimmed(header.substr(0, close)).substr(1)} + ",";
                    header.remove_prefix(close + 1);
                }
                std::size_t const open_list = std::min(header.find('('), header.size());
                made.name                   = trimmed(header.substr(0, open_list));
                std::size_t const close     = header.find(')', open_list);
                made.parameters += header.substr(open_list + 1, close == header.npos ? 0 : close - open_list - 1);
                if (std::size_t const most = header.find(".maxntid"); most != header.npos)
                {
                    made.most_threads = static_cast<int>(number(trimmed(header.substr(most + 8))));
                }
                made.begin = open + 2;
                made.end   = closing_brace(all, open + 1);
                next       = made.end + 1;
                functions_.insert_or_assign(made.name, made);
            }
        }
        else if (line.substr(0, 8) == ".shared ")
        {
            declaration const made{line.substr(0, line.find(';'))};
            shared_bytes_         = rounded_up(shared_bytes_, made.align);
            variables_[made.name] = shared_bytes_;
            shared_bytes_ += made.bytes;
        }
        else if (line.substr(0, 15) == ".extern .shared")
        {
            variables_[declaration{line.substr(7, line.find(';') - 7)}.name] = dynamic_shared;
        }
        else if (line.substr(0, 8) == ".global " && line.find("= {") != line.npos) // a table of bytes
        {
            std::size_t const first = all.find('{', at);
            std::vector<std::uint8_t> bytes;
            for (std::string_view const value : split(all.substr(first + 1, all.find('}', at) - first - 1), ','))
            {
                bytes.push_back(static_cast<std::uint8_t>(number(value)));
            }
            declaration const made{line};
            if (bytes.size() > made.bytes || line.find(".b8 ") == line.npos)
            {
                fail("no table of bytes: " + made.name);
            }
            bytes.resize(made.bytes); // zeros at its end are left out
            device& gpu                 = the_device();
            std::uint64_t const address = gpu.allocate(bytes.size());
            std::memcpy(gpu.memory + (address - gpu.base), bytes.data(), bytes.size());
            std::memset(gpu.state + (address - gpu.base), allocated | written, bytes.size());
            variables_[made.name] = address;
        }
        else if (std::size_t const file = line.find(".file"); file != line.npos && file < 2)
        {
            std::size_t const quote = line.find('"');
            files_[static_cast<unsigned>(number(trimmed(line.substr(file + 5))))] =
                line.substr(quote + 1, line.rfind('"') - quote - 1);
        }
        at = next;
    }
}

std::string module::path(unsigned file) const
{
    auto const found = files_.find(file);
    return found == files_.end() ? "" : found->second;
}

std::size_t module::line_at(std::size_t place) const
{
    return static_cast<std::size_t>(std::count(text_.begin(), text_.begin() + static_cast<std::ptrdiff_t>(place), '\n'))
           + 1;
}

std::string module::statement(instruction const& i) const
{
    std::size_t const end = std::min(text_.find(';', i.text), text_.size());
    std::string made      = text_.substr(i.text, end - i.text);
    std::replace_if(made.begin(), made.end(), is_space, ' ');
    return made;
}

std::string module::place(instruction const& i) const
{
    std::string result = "PTX line " + std::to_string(line_at(i.text)) + " `" + statement(i) + "`";
    auto const add     = [&](char const* before, unsigned file, unsigned line) {
        std::string const name = path(file);
        if (!name.empty()) { result += before + name.substr(name.rfind('/') + 1) + ":" + std::to_string(line); }
    };
    add(", ", lines_[i.from].file, lines_[i.from].line);
    add(", called at ", lines_[i.from].caller_file, lines_[i.from].caller_line);
    return result;
}

std::string module::source(instruction const& i) const
{
    std::string const name = path(lines_[i.from].file);
    return name.empty() ? "" : name.substr(name.rfind('/') + 1) + ":" + std::to_string(lines_[i.from].line);
}

bool module::explained(instruction const& i, std::string const& word) const
{
    auto const says = [&](unsigned file, unsigned number_of) {
        std::ifstream source{path(file)};
        std::string text, above;
        for (unsigned k = 0; k < number_of && source; ++k)
        {
            above = text;
            std::getline(source, text);
        }
        std::string const comment = "// " + word + ": ";
        return text.find(comment) != text.npos || trimmed(above).substr(0, comment.size()) == comment;
    };
    source_line const& from = lines_[i.from];
    return says(from.file, from.line) || says(from.caller_file, from.caller_line);
}

/// One kernel's body, with the functions it calls in the places of the calls.
class decoder
{
public:
    decoder(module& from, kernel& to)
        : module_{from}
        , kernel_{to}
        , shared_{from.shared_bytes_}
    {}

    void decode()
    {
        scopes_.emplace_back();
        std::size_t offset = 0;
        for (std::string_view const text : split(kernel_.parameters, ','))
        {
            declaration const parameter{text};
            offset                         = rounded_up(offset, parameter.align);
            scopes_.back()[parameter.name] = {.address = parameter_window + offset};
            kernel_.arguments.emplace_back(offset, parameter.bytes);
            offset += parameter.bytes;
        }
        count_static_shared();
        function(kernel_);
        kernel_.code.push_back({.text = static_cast<std::uint32_t>(kernel_.end), .how = flow::leave});
        for (auto const& [from, label] : jumps_)
        {
            if (!labels_.contains(label)) { wrong("no label " + label); }
            kernel_.code[from].target = labels_.at(label);
        }
        find_leaders();
        fill_frame();
        kernel_.hits.resize(kernel_.code.size());
        kernel_.local_bytes = rounded_up(local_, 16);
        kernel_.decoded     = true;
    }

private:
    struct symbol
    {
        std::uint32_t place   = nowhere; // of a register
        std::uint64_t address = 0;       // of a variable or parameter
    };

    module& module_;
    kernel& kernel_;
    std::size_t shared_ = 0, local_ = 0;
    std::unordered_map<std::string, symbol> called_shared_; // static variables by name
    std::vector<std::unordered_map<std::string, symbol>> scopes_;
    std::size_t function_scope_ = 1;
    std::vector<std::unordered_map<std::string, std::uint8_t>> families_; // "%r" of .reg .b32 %r<10>: its size
    std::uint32_t frame_bytes_ = 0;
    std::map<std::uint32_t, std::uint8_t> sizes_; // of registers and constants: 4 or 8 bytes a lane; 0: a predicate
    std::map<std::pair<std::uint64_t, std::uint8_t>, std::uint32_t> constants_; // places, by value and size
    std::map<special, std::uint32_t> specials_;
    std::map<std::string, std::uint32_t> labels_;
    std::vector<std::pair<std::size_t, std::string>> jumps_;
    std::string prefix_;    // of labels, of the call whose body it is
    std::string return_to_; // the label behind it
    int calls_           = 0;
    std::size_t at_text_ = 0; // where the statement begins
    std::string statement_;

    [[noreturn]] void wrong(std::string const& what) const
    {
        fail(short_name(kernel_.name) + ", PTX line " + std::to_string(module_.line_at(at_text_)) + " `" + statement_
             + "`: " + what);
    }

    // --- operands ------------------------------------------------------------------------------------------------------

    std::uint32_t new_place(std::uint8_t size)
    {
        std::uint32_t const place = frame_bytes_;
        sizes_[place]             = size;
        frame_bytes_ += size == 0 ? 32 : size * static_cast<std::uint32_t>(warp_size);
        return place;
    }
    std::uint32_t constant(std::uint64_t value, std::uint8_t size)
    {
        if (size != 8) { value = size == 4 ? value & 0xffffffff : value != 0 ? all_lanes : 0; }
        auto const [found, is_new] = constants_.insert({{value, size}, 0});
        if (is_new) { found->second = new_place(size); }
        return found->second;
    }

    /// A register or variable; null if there is none of that name.
    symbol const* named(std::string const& name)
    {
        static std::map<std::string_view, special> const known{{"%tid.x", special::thread_x},
            {"%ntid.x", special::threads_x}, {"%ctaid.x", special::block_x}, {"%nctaid.x", special::blocks_x},
            {"%laneid", special::lane}, {"%tid.y", special::zero}, {"%tid.z", special::zero}};
        for (std::size_t k = scopes_.size(); k-- > function_scope_ - 1;) // parameters are in the scope before
        {
            if (auto const found = scopes_[k].find(name); found != scopes_[k].end()) { return &found->second; }
        }
        symbol made;
        if (auto const found = known.find(name); found != known.end())
        {
            made.place =
                specials_.contains(found->second) ? specials_[found->second] : specials_[found->second] = new_place(4);
        }
        else if (auto const family = families_.back().find(name.substr(0, name.find_last_not_of("0123456789") + 1));
                 family != families_.back().end())
        {
            made.place = new_place(family->second);
        }
        else if (auto const variable = module_.variables_.find(name); variable != module_.variables_.end())
        {
            made.address = variable->second == dynamic_shared ? kernel_.static_shared : variable->second;
        }
        else { return nullptr; }
        return &(scopes_[function_scope_][name] = made);
    }

    /// The place of a register, or of a constant of a size.
    std::uint32_t operand(std::string_view text, std::uint8_t size)
    {
        std::string const name{text};
        if (name == "_") { return new_place(size); }
        if (name.starts_with("0f") || name.starts_with("0d"))
        {
            return constant(std::strtoull(name.c_str() + 2, nullptr, 16), size);
        }
        if (name.front() == '-')
        {
            return constant(static_cast<std::uint64_t>(std::strtoll(name.c_str(), nullptr, 0)), size);
        }
        if (is_digit(name.front())) { return constant(std::strtoull(name.c_str(), nullptr, 0), size); }
        symbol const* const found = named(name);
        if (found == nullptr) { wrong("no operand " + name); }
        return found->place != nowhere ? found->place : constant(found->address, size);
    }

    /// "[%rd1+8]"
    std::uint32_t address(std::string_view text, instruction& i)
    {
        text                   = trimmed(text.substr(1, text.size() - 2));
        std::size_t const plus = text.find('+');
        if (plus != text.npos) { i.offset = std::strtoll(std::string{text.substr(plus + 1)}.c_str(), nullptr, 0); }
        return operand(trimmed(text.substr(0, plus)), 8);
    }

    // --- statements ----------------------------------------------------------------------------------------------------

    void function(kernel const& body)
    {
        std::size_t const scope_before = std::exchange(function_scope_, scopes_.size());
        families_.emplace_back();
        scopes_.emplace_back();
        statements(body.begin, body.end);
        scopes_.resize(function_scope_);
        function_scope_ = scope_before;
        families_.pop_back();
    }

    void statements(std::size_t at, std::size_t end)
    {
        std::string const& text = module_.text_;
        while (at < end)
        {
            char const c = text[at];
            if (is_space(c) || c == ';') { ++at; }
            else if (c == '{') { scopes_.emplace_back(), ++at; }
            else if (c == '}') { scopes_.pop_back(), ++at; }
            else if (text.compare(at, 2, "//") == 0) { at = text.find('\n', at); }
            else if (text.compare(at, 4, ".loc") == 0 && is_space(text[at + 4]))
            {
                std::size_t const end_of_line = text.find('\n', at);
                locate(std::string_view{text}.substr(at + 4, end_of_line - at - 4));
                at = end_of_line;
            }
            else
            {
                std::size_t name_end = at;
                while (in_name(text[name_end])) { ++name_end; }
                if (name_end > at && text[name_end] == ':')
                {
                    labels_[prefix_ + text.substr(at, name_end - at)] = static_cast<std::uint32_t>(kernel_.code.size());
                    at                                                = name_end + 1;
                    continue;
                }
                at_text_   = at;
                statement_ = text.substr(at, text.find(';', at) - at);
                at += statement_.size() + 1;
                if (statement_.front() == '.') { directive(); }
                else { instruct(); }
            }
        }
    }

    /// "2 53 34, function_name name, inlined_at 1 32 5"
    void locate(std::string_view text)
    {
        auto const words = words_of(text);
        source_line here{number(words.at(0)), number(words.at(1))};
        for (std::size_t k = 2; k + 2 < words.size(); ++k)
        {
            if (words[k] == "inlined_at")
            {
                here.caller_file = number(words[k + 1]), here.caller_line = number(words[k + 2]);
            }
        }
        if (here.line != 0) { module_.lines_.push_back(here); } // 0: of no line
    }

    /// Dynamic shared memory lies behind the static variables of the body and of all functions that it calls.
    void count_static_shared()
    {
        std::size_t bytes = shared_;
        std::unordered_set<std::string> seen;
        std::vector<std::string_view> bodies{{module_.text_.data() + kernel_.begin, kernel_.end - kernel_.begin}};
        for (std::size_t k = 0; k < bodies.size(); ++k)
        {
            std::string_view const body = bodies[k];
            for (std::size_t at = body.find(".shared .align"); at != body.npos;
                 at             = body.find(".shared .align", at + 1))
            {
                declaration const made{body.substr(at, body.find(';', at) - at)};
                bytes = rounded_up(bytes, made.align) + made.bytes;
            }
            for (std::size_t at = body.find("call.uni"); at != body.npos; at = body.find("call.uni", at + 1))
            {
                for (std::string_view const part : split(body.substr(at + 8, body.find(';', at) - at - 8), ','))
                {
                    auto const called = module_.functions_.find(std::string{trimmed(part)});
                    if (called == module_.functions_.end() || !seen.insert(called->first).second) { continue; }
                    bodies.emplace_back(
                        module_.text_.data() + called->second.begin, called->second.end - called->second.begin);
                }
            }
        }
        kernel_.static_shared = rounded_up(bytes, 16);
    }

    void directive()
    {
        auto const words            = words_of(statement_);
        std::string_view const what = words.front();
        if (what == ".pragma") { return; }
        if (what == ".reg")
        {
            auto const size = static_cast<std::uint8_t>(words[1] == ".pred" ? 0 : type_bytes(words[1]) == 8 ? 8 : 4);
            for (std::size_t k = 2; k < words.size(); ++k)
            {
                std::string const name{words[k]};
                if (name == ",") { continue; }
                if (k + 1 < words.size() && words[k + 1] == "<") { families_.back()[name] = size, k += 3; }
                else { scopes_.back()[name] = {.place = new_place(size)}; }
            }
            return;
        }
        if (what != ".shared" && what != ".local" && what != ".param") { wrong("unknown directive"); }
        declaration const made{statement_};
        if (auto const known = called_shared_.find(made.name); what == ".shared" && known != called_shared_.end())
        {
            scopes_.back()[made.name] = known->second; // every call of a function has the same
            return;
        }
        std::size_t& at           = what == ".shared" ? shared_ : local_;
        at                        = rounded_up(at, std::max<std::size_t>(made.align, 4));
        scopes_.back()[made.name] = {
            .address = at + (what == ".param" ? local_window : 0)}; // a call's parameters are local memory
        at += made.bytes;
        if (what == ".shared") { called_shared_[made.name] = scopes_.back()[made.name]; }
    }

    /// (results), name, (arguments)
    void call(std::vector<std::string_view> const& parts)
    {
        std::vector<std::string_view> given;
        std::string name;
        for (std::string_view const part : parts)
        {
            if (part.front() != '(') { name = part; }
            else
            {
                for (std::string_view const one : split(part.substr(1, part.size() - 2), ',')) { given.push_back(one); }
            }
        }
        auto const called = module_.functions_.find(name);
        if (called == module_.functions_.end()) { wrong("no function " + name); }
        std::unordered_map<std::string, symbol> parameters;
        for (std::string_view const text : split(called->second.parameters, ','))
        {
            parameters[declaration{text}.name] = *named(std::string{given.at(parameters.size())});
        }
        auto const prefix_before = std::exchange(prefix_, std::to_string(++calls_) + ":");
        auto const return_before = std::exchange(return_to_, prefix_ + "end");
        scopes_.push_back(parameters);
        function(called->second);
        scopes_.pop_back();
        labels_[return_to_] = static_cast<std::uint32_t>(kernel_.code.size());
        prefix_             = prefix_before;
        return_to_          = return_before;
    }

    void instruct()
    {
        if (auto& mutation = the_mutation(); mutation && std::regex_search(statement_, mutation->from))
        {
            statement_ = std::regex_replace(statement_, mutation->from, mutation->to);
            ++mutation->made;
            if (trimmed(statement_).empty()) { return; }
        }
        std::string_view text = trimmed(statement_);
        instruction i;
        i.text = static_cast<std::uint32_t>(at_text_);
        i.from = static_cast<std::uint32_t>(module_.lines_.size() - 1);
        if (text.front() == '@')
        {
            std::size_t const end = text.find_first_of(" \t");
            i.unless              = text[1] == '!';
            i.guard               = operand(text.substr(i.unless ? 2 : 1, end - (i.unless ? 2 : 1)), 0);
            text                  = trimmed(text.substr(end));
        }
        std::size_t const end = std::min(text.find_first_of(" \t\n"), text.size());
        std::string const name{text.substr(0, end)};
        auto const parts = split(trimmed(text.substr(end)), ',');
        if (name.starts_with("call")) { return call(parts); }
        if (name.starts_with("bra") || (name == "ret" && !return_to_.empty()))
        {
            i.how = flow::branch;
            jumps_.emplace_back(kernel_.code.size(), name == "ret" ? return_to_ : prefix_ + std::string{parts.at(0)});
        }
        else if (name == "ret" || name == "exit") { i.how = flow::leave; }
        else if (name == "bar.sync" && parts.size() == 1 && parts.front() == "0") { i.how = flow::barrier; }
        else { compute(i, name, parts); }
        kernel_.code.push_back(i);
    }

    /// Any other instruction: its operands, and what it does.
    void compute(instruction& i, std::string name, std::vector<std::string_view> const& parts)
    {
        std::vector<std::string_view> operands; // those in braces one by one
        std::string shape;
        for (std::string_view const part : parts)
        {
            bool const braces = part.front() == '{';
            auto const inner  = braces ? split(part.substr(1, part.size() - 2), ',') : split(part, '|');
            if (braces) { shape = (operands.empty() ? ".split" : ".join") + std::to_string(inner.size()); }
            operands.insert(operands.end(), inner.begin(), inner.end());
        }
        if (name.starts_with("mov.")) { name += shape; }
        if (name.starts_with("shfl.") && operands.size() == 5) { operands.insert(operands.begin() + 1, "_"); }
        if (name.find(".cc") != name.npos || name.starts_with("addc") || name.starts_with("subc")
            || name.starts_with("madc"))
        {
            families_.back()["%carry"] = 0;
            operands.insert(operands.begin() + 1, "%carry");
        }
        if (operands.size() > most_operands) { wrong("too many operands"); }

        auto const known = known_operations().find(name);
        bool const found = known != known_operations().end();
        std::vector<std::uint8_t> sizes;
        for (std::size_t k = 0; k < operands.size(); ++k)
        {
            auto const size = static_cast<std::uint8_t>(found && k < known->second.sizes.size() ? known->second.sizes[k]
                                                        : name.ends_with("64")                  ? 8
                                                                                                : 4);
            bool const is_address = operands[k].front() == '[';
            if (is_address) { i.address = static_cast<std::uint8_t>(k); }
            i.at[k] = is_address ? address(operands[k], i) : operand(operands[k], size);
            sizes.push_back(sizes_.at(i.at[k]));
        }
        i.operands = static_cast<std::uint8_t>(sizes.size());
        if (!found)
        {
            if (!decode_access(name, sizes, i)) { wrong("unknown instruction " + name); }
            return;
        }
        if (name.starts_with("cvt.") && sizes.back() == 8
            && known->second.sizes.back() == 4) // of a wider register the low half
        {
            instruction low{.run = known_operations().at("cvt.u32.u64").run, .text = i.text, .from = i.from};
            low.at       = {new_place(4), i.at[1]};
            low.operands = 2;
            i.at[1]      = low.at[0];
            sizes[1]     = 4;
            kernel_.code.push_back(low);
        }
        i.run = known->second.run;
        i.how = known->second.how;
        if (!std::equal(sizes.begin(), sizes.end(), known->second.sizes.begin(),
                known->second.sizes.begin()
                    + static_cast<std::ptrdiff_t>(std::min(sizes.size(), known->second.sizes.size()))))
        {
            wrong("an operand's size is unknown");
        }
    }

    // --- the whole ------------------------------------------------------------------------------------------------------

    void find_leaders()
    {
        auto& code = kernel_.code;
        for (auto const& [name, at] : labels_) { code[at].leader = true; }
        for (std::size_t k = 0; k < code.size(); ++k)
        {
            if (code[k].how == flow::next) { continue; }
            bool const jumps = code[k].how == flow::branch || code[k].how == flow::leave;
            if (!jumps) { code[k].leader = true; }
            else if (k + 1 < code.size()) { code[k + 1].leader = true; }
        }
    }

    void fill_frame()
    {
        kernel_.frame.resize(frame_bytes_);
        for (auto const& [constant, place] : constants_)
        {
            auto const& [value, size] = constant;
            for (std::size_t l = 0; l < (size == 0 ? 1 : warp_size); ++l)
            {
                std::memcpy(kernel_.frame.data() + place + l * size, &value, size == 0 ? 4 : size);
            }
        }
        for (auto const& [which, place] : specials_) { kernel_.specials.emplace_back(place, which); }
    }
};

kernel* module::find(std::string const& name)
{
    auto const found = functions_.find(name);
    if (found == functions_.end()) { return nullptr; }
    if (!found->second.decoded) { decoder{*this, found->second}.decode(); }
    return &found->second;
}

} // namespace ptx
