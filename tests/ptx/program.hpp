/// \file program.hpp: PTX decoded: instructions and kernels, and the module whose text they come from.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ptx
{

inline constexpr int warp_size = 32;

/// A bit for each lane of a warp.
using lanes                      = std::uint32_t;
inline constexpr lanes all_lanes = 0xffffffffU;

struct warp;
struct instruction;

/// What an instruction does for some lanes of a warp.
using handler = void (*)(warp&, instruction const&, lanes);

/// Where control goes, and whom an instruction waits for.
enum class flow : std::uint8_t
{
    next,
    branch,
    leave,      ///< the lanes end
    members,    ///< waits for the lanes of the mask that is its last operand
    whole_warp, ///< waits for all lanes
    barrier     ///< waits for the block
};

enum class space : std::uint8_t
{
    generic,
    global,
    shared,
    local
};

// Generic addresses: those of device memory are the device's; the other spaces have windows, at whose start their offset is 0.
inline constexpr std::uint64_t shared_window    = std::uint64_t{1} << 40;
inline constexpr std::uint64_t local_window     = std::uint64_t{2} << 40;
inline constexpr std::uint64_t parameter_window = std::uint64_t{3} << 40;
inline constexpr std::uint64_t window_bytes     = std::uint64_t{1} << 32;

inline constexpr std::uint32_t nowhere     = 0xffffffffU;
inline constexpr std::size_t most_operands = 14;

struct instruction
{
    handler run = nullptr;
    /// Operands, results first: places in a warp's frame.
    std::array<std::uint32_t, most_operands> at{};
    std::int64_t offset  = 0;       ///< added to the address
    std::uint32_t guard  = nowhere; ///< the predicate without which a lane leaves the instruction out
    std::uint32_t target = 0;       ///< of a branch
    std::uint32_t text   = 0;       ///< where its statement begins in the module
    std::uint32_t from   = 0;       ///< where in the C++ sources it comes from: a number of the module's
    flow how             = flow::next;
    bool unless          = false; ///< the guard must be false
    bool leader = false; ///< control comes here by other ways than from the instruction before, or may stop here
    std::uint8_t operands = 0;
    // Of loads and stores.
    space where           = space::generic;
    bool wide             = true; ///< the address has 64 bits
    std::uint8_t address  = 0;    ///< which operand it is
    std::uint8_t elements = 1;    ///< of the vector
    std::uint8_t size     = 0;    ///< of an element, in bytes
};

/// Registers that hold something before the first instruction.
enum class special : std::uint8_t
{
    thread_x,
    threads_x,
    block_x,
    blocks_x,
    lane,
    zero
};

struct kernel
{
    std::string name, parameters;   ///< `parameters`: their declarations
    std::size_t begin = 0, end = 0; ///< of the body in the text
    int most_threads = 1024;

    bool decoded = false;
    std::vector<instruction> code;
    std::vector<std::uint64_t> hits; ///< how often a warp came by each
    std::vector<std::byte> frame;    ///< of a warp before it runs: constants are in place
    std::vector<std::pair<std::uint32_t, special>> specials;
    std::vector<std::pair<std::size_t, std::size_t>> arguments; ///< offset and size
    std::size_t local_bytes   = 0;                              ///< of a lane
    std::size_t static_shared = 0;
    std::uint64_t launches = 0, executed = 0;
};

/// A line of C++, and the one where the function that it is in was called if that has become a part of another.
struct source_line
{
    unsigned file = 0, line = 0, caller_file = 0, caller_line = 0;
};

class module
{
public:
    explicit module(std::string text);

    /// The kernel, decoded; null if there is none of that name.
    [[nodiscard]] kernel* find(std::string const& name);
    /// Its text, on one line.
    [[nodiscard]] std::string statement(instruction const& i) const;
    /// "PTX line 12 `add.s32 ...`, file.cuh:34, called at other.cuh:56"
    [[nodiscard]] std::string place(instruction const& i) const;
    /// "file.cuh:34", or nothing.
    [[nodiscard]] std::string source(instruction const& i) const;
    /// Whether a comment at one of those lines, or right above, says so: "// unwritten: ..." for the word unwritten.
    [[nodiscard]] bool explained(instruction const& i, std::string const& word) const;
    [[nodiscard]] std::map<std::string, kernel> const& kernels() const { return functions_; }

private:
    friend class decoder;

    [[nodiscard]] std::string path(unsigned file) const;
    [[nodiscard]] std::size_t line_at(std::size_t place) const;

    std::string text_;
    std::map<std::string, kernel> functions_;
    std::unordered_map<std::string, std::uint64_t> variables_; ///< their addresses, or offsets in shared memory
    std::map<unsigned, std::string> files_;
    std::vector<source_line> lines_;
    std::size_t shared_bytes_ = 0; ///< of the module's variables
};

/// A kernel's name for people.
[[nodiscard]] std::string short_name(std::string const& mangled);

/// How many statements MDKV_PTX_MUTATE has changed.
[[nodiscard]] std::uint64_t mutated();

/// What an instruction's name means.
struct operation
{
    handler run;
    std::vector<std::uint8_t> sizes; ///< of the operands' registers: 4 or 8 bytes a lane, 0 a predicate
    flow how = flow::next;
};
using operations = std::unordered_map<std::string, operation>;
void add_arithmetic(operations& all);
void add_warp_functions(operations& all);

/// Fills in what a load, store, atomic or copy named `name` does, whose registers have `sizes`; false if it is none of them.
[[nodiscard]] bool decode_access(std::string const& name, std::vector<std::uint8_t> const& sizes, instruction& i);

} // namespace ptx
