// What each instruction computes from registers alone: a line each, a function of one lane's operands.
#include "machine.hpp"

#include <bit>
#include <cmath>
#include <limits>
#include <tuple>

namespace ptx
{

namespace
{

using u8                = std::uint8_t;
using u16               = std::uint16_t;
using u32               = std::uint32_t;
using u64               = std::uint64_t;
using s16               = std::int16_t;
using s32               = std::int32_t;
using s64               = std::int64_t;
__extension__ using f16 = _Float16;

/// Writes f(lane) for some lanes. (All are computed: a loop of one shape, which compilers make vectors of.)
template <class D, class F>
inline void write_lanes(warp& w, std::uint32_t at, lanes who, F const& f)
{
    if constexpr (std::is_same_v<D, bool>)
    {
        lanes result = 0;
        for (unsigned l = 0; l < warp_size; ++l) { result |= static_cast<lanes>(f(l)) << l; }
        lanes& to = bits(w, at);
        to        = (to & ~who) | (result & who);
    }
    else
    {
        std::array<lane_word<D>, warp_size> result; // first all of it: the register may be one that f reads
        for (unsigned l = 0; l < warp_size; ++l) { result[l] = word_of<D>(f(l)); }
        auto* const to = words<lane_word<D>>(w, at);
        if (who == all_lanes) { std::memcpy(to, result.data(), sizeof result); }
        else
        {
            for (unsigned l = 0; l < warp_size; ++l) { to[l] = (who >> l & 1) != 0 ? result[l] : to[l]; }
        }
    }
}

/// A register as a function of the lane.
template <class T>
[[nodiscard]] inline auto reader(warp& w, std::uint32_t at)
{
    if constexpr (std::is_same_v<T, bool>)
    {
        return [mask = bits(w, at)](unsigned l) { return (mask >> l & 1) != 0; };
    }
    else
    {
        return [from = words<lane_word<T>>(w, at)](unsigned l) { return as<T>(from[l]); };
    }
}

template <auto F, class D, class... A>
struct lane_function
{
    template <std::size_t... K>
    static void apply(warp& w, instruction const& i, lanes who, std::index_sequence<K...>)
    {
        std::tuple const from{reader<A>(w, i.at[K + 1])...};
        write_lanes<D>(w, i.at[0], who, [&](unsigned l) { return F(std::get<K>(from)(l)...); });
    }
    static void run(warp& w, instruction const& i, lanes who)
    {
        apply(w, i, who, std::make_index_sequence<sizeof...(A)>{});
    }
    template <class T>
    static constexpr std::uint8_t size = std::is_same_v<T, bool> ? 0
                                         : sizeof(T) == 8        ? 8
                                                                 : 4;
    static operation made() { return {run, {size<D>, size<A>...}}; }
};
template <auto F, class D, class... A>
constexpr lane_function<F, D, A...> of_signature(D (*)(A...));

/// The operation that is F for each lane; a bool is a predicate.
template <auto F>
[[nodiscard]] operation each()
{
    return decltype(of_signature<F>(+F))::made();
}

/// For sums of several words: F(a, b, c, carry), whose bit 32 becomes the carry.
template <auto F, bool Carries>
[[nodiscard]] operation carried()
{
    auto const run = [](warp& w, instruction const& i, lanes who) {
        std::array<u64, warp_size> sums;
        for (unsigned l = 0; l < warp_size; ++l)
        {
            auto const word = [&](std::size_t k) { return u64{words<u32>(w, i.at[k])[l]}; };
            sums[l]         = F(word(2), word(3), i.operands > 4 ? word(4) : 0, bits(w, i.at[1]) >> l & 1);
        }
        write_lanes<u32>(w, i.at[0], who, [&](unsigned l) { return static_cast<u32>(sums[l]); });
        if (Carries)
        {
            write_lanes<bool>(w, i.at[1], who, [&](unsigned l) { return (sums[l] >> 32 & 1) != 0; });
        }
    };
    return {run, {4, 0, 4, 4, 4}};
}

template <class T>
[[nodiscard]] T canonical(T x) // of all NaNs the GPU's own
{
    constexpr auto nan = std::bit_cast<T>(
        std::conditional_t<sizeof(T) == 8, u64, u32>(sizeof(T) == 8 ? 0x7fffffffffffffff : 0x7fffffff));
    return x == x ? x : nan;
}
template <class T>
[[nodiscard]] T smaller(T a, T b)
{
    if (a != a) { return canonical(b); }
    if (b != b) { return a; }
    return a < b || (a == b && std::signbit(a)) ? a : b;
}
template <class T>
[[nodiscard]] T larger(T a, T b)
{
    if (a != a) { return canonical(b); }
    if (b != b) { return a; }
    return a > b || (a == b && !std::signbit(a)) ? a : b;
}
[[nodiscard]] float flushed(float x)
{
    return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0F, x) : x;
}

/// a b + c, rounded down.
[[nodiscard]] float fused_down(float a, float b, float c)
{
    double const product = static_cast<double>(a) * b; // exact
    double const sum     = product + c;
    double const part    = sum - product;
    double const lost    = (product - (sum - part)) + (c - part);
    auto const near      = static_cast<float>(sum);
    double const above   = (static_cast<double>(near) - sum) - lost;
    return above > 0 ? std::nextafterf(near, -std::numeric_limits<float>::infinity()) : near;
}

/// To the nearest integer of D toward zero; what is too large becomes the largest, NaN 0.
template <class D, class F>
[[nodiscard]] D integer_of(F x)
{
    if (x != x) { return 0; }
    F const low  = static_cast<F>(std::numeric_limits<D>::min());
    F const high = static_cast<F>(std::numeric_limits<D>::max()) + (sizeof(D) >= sizeof(F) ? F{0} : F{1});
    if (x <= low) { return std::numeric_limits<D>::min(); }
    if (x >= high) { return std::numeric_limits<D>::max(); }
    return static_cast<D>(x);
}

[[nodiscard]] u32 half_bits(float x)
{
    return x == x ? std::bit_cast<u16>(static_cast<f16>(x)) : u32{0x7fff};
}
[[nodiscard]] u32 bfloat_bits(float x)
{
    auto const word = std::bit_cast<u32>(x);
    return x == x ? (word + 0x7fff + (word >> 16 & 1)) >> 16 : u32{0x7fff};
}

/// Bytes of b:a, each chosen by four bits of which the last means: its sign.
[[nodiscard]] u32 chosen_bytes(u32 a, u32 b, u32 choice)
{
    u64 const both = u64{b} << 32 | a;
    u32 result     = 0;
    for (unsigned k = 0; k < 4; ++k)
    {
        u32 const which = choice >> (4 * k) & 15;
        auto const byte = static_cast<u32>(both >> (8 * (which & 7)) & 255);
        u32 const sign  = (byte >> 7) * 255;
        result |= (which & 8 ? sign : byte) << (8 * k);
    }
    return result;
}

template <class T>
[[nodiscard]] T inserted(T a, T b, u32 at, u32 count)
{
    at &= 255;
    count &= 255;
    if (at >= 8 * sizeof(T)) { return b; }
    T const mask = static_cast<T>((count >= 8 * sizeof(T) ? T{0} : static_cast<T>(T{1} << count)) - 1) << at;
    return (b & ~mask) | (a << at & mask);
}

template <class T> // shifts by the width or more leave nothing, or the sign
void add_bits(operations& all, std::string const& width)
{
    using s              = std::make_signed_t<T>;
    constexpr u32 most   = 8 * sizeof(T);
    all["and.b" + width] = each<[](T a, T b) { return static_cast<T>(a & b); }>();
    all["or.b" + width]  = each<[](T a, T b) { return static_cast<T>(a | b); }>();
    all["xor.b" + width] = each<[](T a, T b) { return static_cast<T>(a ^ b); }>();
    all["not.b" + width] = each<[](T a) { return static_cast<T>(~a); }>();
    all["shl.b" + width] = each<[](T a, u32 n) { return n < most ? static_cast<T>(a << (n & (most - 1))) : T{0}; }>();
    all["shr.u" + width] = each<[](T a, u32 n) { return n < most ? static_cast<T>(a >> (n & (most - 1))) : T{0}; }>();
    all["shr.s" + width] = each<[](s a, u32 n) { return static_cast<s>(a >> (n < most ? n : most - 1)); }>();
    all["setp.eq.b" + width] = each<[](T a, T b) { return a == b; }>();
    all["setp.ne.b" + width] = each<[](T a, T b) { return a != b; }>();
}

template <class T>
void add_integers(operations& all, std::string const& type)
{
    using u               = std::make_unsigned_t<T>;
    using wide            = std::conditional_t<sizeof(T) == 8, u64, std::conditional_t<std::is_signed_v<T>, s64, u64>>;
    all["add." + type]    = each<[](u a, u b) { return static_cast<u>(a + b); }>();
    all["sub." + type]    = each<[](u a, u b) { return static_cast<u>(a - b); }>();
    all["neg." + type]    = each<[](u a) { return static_cast<u>(0 - a); }>();
    all["min." + type]    = each<[](T a, T b) { return a < b ? a : b; }>();
    all["max." + type]    = each<[](T a, T b) { return a < b ? b : a; }>();
    all["mul.lo." + type] = each<[](u a, u b) { return static_cast<u>(wide(a) * wide(b)); }>();
    all["mad.lo." + type] = each<[](u a, u b, u c) { return static_cast<u>(wide(a) * wide(b) + wide(c)); }>();
    // By zero the GPU gives some number.
    all["div." + type]     = each<[](T a, T b) {
        if (b == 0) { return static_cast<T>(-1); }
        return std::is_signed_v<T> && b == static_cast<T>(-1) ? static_cast<T>(u{0} - static_cast<u>(a))
                                                                  : static_cast<T>(a / b);
    }>();
    all["rem." + type]     = each<[](T a, T b) {
        if (b == 0) { return a; }
        return std::is_signed_v<T> && b == static_cast<T>(-1) ? T{0} : static_cast<T>(a % b);
    }>();
    all["setp.eq." + type] = each<[](T a, T b) { return a == b; }>();
    all["setp.ne." + type] = each<[](T a, T b) { return a != b; }>();
    all["setp.lt." + type] = each<[](T a, T b) { return a < b; }>();
    all["setp.le." + type] = each<[](T a, T b) { return a <= b; }>();
    all["setp.gt." + type] = each<[](T a, T b) { return b < a; }>();
    all["setp.ge." + type] = each<[](T a, T b) { return a >= b; }>();
    if constexpr (sizeof(T) == 4)
    {
        all["mul.hi." + type]   = each<[](T a, T b) { return static_cast<T>(wide{a} * wide{b} >> 32); }>();
        all["mul.wide." + type] = each<[](T a, T b) { return static_cast<wide>(wide{a} * wide{b}); }>();
    }
    if constexpr (sizeof(T) == 2)
    {
        using twice             = std::conditional_t<std::is_signed_v<T>, s32, u32>;
        all["mul.wide." + type] = each<[](T a, T b) { return static_cast<twice>(twice{a} * twice{b}); }>();
    }
}

template <class T>
void add_moves(operations& all, std::string const& type)
{
    all["mov." + type]  = each<[](T a) { return a; }>();
    all["selp." + type] = each<[](T a, T b, bool p) { return p ? a : b; }>();
}

template <class T>
void add_floats(operations& all, std::string const& type)
{
    // (add, sub and mul round to nearest whether they say .rn or not; only fused products need that word.)
    for (std::string const& name : {type, "rn." + type})
    {
        all["add." + name] = each<[](T a, T b) { return canonical(a + b); }>();
        all["sub." + name] = each<[](T a, T b) { return canonical(a - b); }>();
        all["mul." + name] = each<[](T a, T b) { return canonical(a * b); }>();
    }
    all["fma.rn." + type]   = each<[](T a, T b, T c) { return canonical(std::fma(a, b, c)); }>();
    all["div.rn." + type]   = each<[](T a, T b) { return canonical(a / b); }>();
    all["rcp.rn." + type]   = each<[](T a) { return canonical(1 / a); }>();
    all["sqrt.rn." + type]  = each<[](T a) { return canonical(std::sqrt(a)); }>();
    all["neg." + type]      = each<[](T a) { return -a; }>();
    all["abs." + type]      = each<[](T a) { return std::abs(a); }>();
    all["min." + type]      = each<[](T a, T b) { return smaller(a, b); }>();
    all["max." + type]      = each<[](T a, T b) { return larger(a, b); }>();
    all["setp.eq." + type]  = each<[](T a, T b) { return a == b; }>();
    all["setp.ne." + type]  = each<[](T a, T b) { return a < b || b < a; }>();
    all["setp.lt." + type]  = each<[](T a, T b) { return a < b; }>();
    all["setp.le." + type]  = each<[](T a, T b) { return a <= b; }>();
    all["setp.gt." + type]  = each<[](T a, T b) { return b < a; }>();
    all["setp.ge." + type]  = each<[](T a, T b) { return a >= b; }>();
    all["setp.equ." + type] = each<[](T a, T b) { return !(a < b || b < a); }>();
    all["setp.neu." + type] = each<[](T a, T b) { return a != b; }>();
    all["setp.ltu." + type] = each<[](T a, T b) { return !(a >= b); }>();
    all["setp.leu." + type] = each<[](T a, T b) { return !(b < a); }>();
    all["setp.gtu." + type] = each<[](T a, T b) { return !(a <= b); }>();
    all["setp.geu." + type] = each<[](T a, T b) { return !(a < b); }>();
    all["setp.nan." + type] = each<[](T a, T b) { return a != a || b != b; }>();
}

/// A register that is parts of another: mov with braces.
template <class Part, class Whole>
void add_parts(operations& all, std::string const& type, std::string const& count)
{
    constexpr std::size_t parts = sizeof(Whole) / sizeof(Part);
    constexpr u8 part_size      = sizeof(Part) == 8 ? 8 : 4;
    constexpr u8 size           = sizeof(Whole) == 8 ? 8 : 4;
    std::vector<u8> join(parts + 1, part_size), split(parts + 1, part_size);
    join.front()        = size;
    split.back()        = size;
    auto const run_join = [](warp& w, instruction const& i, lanes who) {
        write_lanes<Whole>(w, i.at[0], who, [&](unsigned l) {
            Whole all_parts = 0;
            for (std::size_t k = parts; k-- > 0;)
            {
                all_parts =
                    static_cast<Whole>(all_parts << (8 * sizeof(Part))) | as<Part>(words<u32>(w, i.at[k + 1])[l]);
            }
            return all_parts;
        });
    };
    auto const run_split = [](warp& w, instruction const& i, lanes who) {
        std::array<Whole, warp_size> from;
        for (unsigned l = 0; l < warp_size; ++l) { from[l] = words<Whole>(w, i.at[parts])[l]; }
        for (std::size_t k = 0; k < parts; ++k)
        {
            write_lanes<Part>(
                w, i.at[k], who, [&](unsigned l) { return static_cast<Part>(from[l] >> (8 * sizeof(Part) * k)); });
        }
    };
    all["mov." + type + ".join" + count]  = {run_join, join};
    all["mov." + type + ".split" + count] = {run_split, split};
}

} // namespace

void add_arithmetic(operations& all)
{
    add_bits<u16>(all, "16");
    add_bits<u32>(all, "32");
    add_bits<u64>(all, "64");
    add_integers<u16>(all, "u16");
    add_integers<s16>(all, "s16");
    add_integers<u32>(all, "u32");
    add_integers<s32>(all, "s32");
    add_integers<u64>(all, "u64");
    add_integers<s64>(all, "s64");
    for (char const kind : {'b', 'u', 's'})
    {
        add_moves<u16>(all, std::string{kind} + "16");
        add_moves<u32>(all, std::string{kind} + "32");
        add_moves<u64>(all, std::string{kind} + "64");
    }
    add_moves<u32>(all, "f32");
    add_moves<u64>(all, "f64");
    add_floats<float>(all, "f32");
    add_floats<double>(all, "f64");
    add_parts<u16, u32>(all, "b32", "2");
    add_parts<u32, u64>(all, "b64", "2");
    add_parts<u16, u64>(all, "b64", "4");

    all["mov.pred"] = each<[](bool a) { return a; }>();
    all["not.pred"] = each<[](bool a) { return !a; }>();
    all["and.pred"] = each<[](bool a, bool b) { return a && b; }>();
    all["or.pred"]  = each<[](bool a, bool b) { return a || b; }>();
    all["xor.pred"] = each<[](bool a, bool b) { return a != b; }>();

    all["cvt.u16.u32"]       = each<[](u32 a) { return static_cast<u16>(a); }>();
    all["cvt.u16.u64"]       = each<[](u64 a) { return static_cast<u16>(a); }>();
    all["cvt.u32.u16"]       = each<[](u16 a) { return u32{a}; }>();
    all["cvt.s32.s16"]       = each<[](u16 a) { return s32{static_cast<std::int16_t>(a)}; }>();
    all["cvt.u32.u64"]       = each<[](u64 a) { return static_cast<u32>(a); }>();
    all["cvt.u64.u16"]       = each<[](u16 a) { return u64{a}; }>();
    all["cvt.u64.u32"]       = each<[](u32 a) { return u64{a}; }>();
    all["cvt.s64.s32"]       = each<[](s32 a) { return s64{a}; }>();
    all["cvt.rn.f32.u16"]    = each<[](u16 a) { return static_cast<float>(a); }>();
    all["cvt.rn.f32.s32"]    = each<[](s32 a) { return static_cast<float>(a); }>();
    all["cvt.rn.f32.s64"]    = each<[](s64 a) { return static_cast<float>(a); }>();
    all["cvt.rn.f64.u32"]    = each<[](u32 a) { return static_cast<double>(a); }>();
    all["cvt.rn.f64.s32"]    = each<[](s32 a) { return static_cast<double>(a); }>();
    all["cvt.rn.f64.s64"]    = each<[](s64 a) { return static_cast<double>(a); }>();
    all["cvt.rzi.s32.f32"]   = each<[](float a) { return integer_of<s32>(a); }>();
    all["cvt.rzi.u32.f64"]   = each<[](double a) { return integer_of<u32>(a); }>();
    all["cvt.rzi.s64.f64"]   = each<[](double a) { return integer_of<s64>(a); }>();
    all["cvt.rni.s32.f64"]   = each<[](double a) { return integer_of<s32>(std::nearbyint(a)); }>();
    all["cvt.rzi.f64.f64"]   = each<[](double a) { return std::trunc(a); }>();
    all["cvt.f64.f32"]       = each<[](float a) { return canonical(static_cast<double>(a)); }>();
    all["cvt.rn.f32.f64"]    = each<[](double a) { return canonical(static_cast<float>(a)); }>();
    all["cvt.sat.f32.f32"]   = each<[](float a) { return 0 < a ? std::min(a, 1.0F) : 0.0F; }>();
    all["cvt.f32.f16"]       = each<[](u16 a) { return canonical(static_cast<float>(std::bit_cast<f16>(a))); }>();
    all["cvt.rn.f16.f32"]    = each<[](float a) { return static_cast<u16>(half_bits(a)); }>();
    all["cvt.rn.bf16.f32"]   = each<[](float a) { return static_cast<u16>(bfloat_bits(a)); }>();
    all["cvt.rn.f16x2.f32"]  = each<[](float high, float low) { return half_bits(high) << 16 | half_bits(low); }>();
    all["cvt.rn.bf16x2.f32"] = each<[](float high, float low) { return bfloat_bits(high) << 16 | bfloat_bits(low); }>();
    all["fma.rm.f32"]        = each<[](float a, float b, float c) { return fused_down(a, b, c); }>();
    all["ex2.approx.f32"] =
        each<[](float a) { return canonical(static_cast<float>(std::exp2(static_cast<double>(a)))); }>();
    all["ex2.approx.ftz.f32"] = each<[](float a) {
        return canonical(flushed(static_cast<float>(std::exp2(static_cast<double>(flushed(a))))));
    }>();
    all["rcp.approx.ftz.f64"] =
        each<[](double a) { return std::bit_cast<double>(std::bit_cast<u64>(1 / a) & 0xffffffff00000000); }>();
    all["prmt.b32"] = each<[](u32 a, u32 b, u32 choice) { return chosen_bytes(a, b, choice); }>();
    all["bfi.b32"]  = each<[](u32 a, u32 b, u32 at, u32 count) { return inserted(a, b, at, count); }>();
    all["bfi.b64"]  = each<[](u64 a, u64 b, u32 at, u32 count) { return inserted(a, b, at, count); }>();
    all["clz.b64"]  = each<[](u64 a) { return static_cast<u32>(std::countl_zero(a)); }>();
    all["dp2a.lo.u32.u32"] =
        each<[](u32 a, u32 b, u32 c) { return c + (a & 0xffff) * (b & 255) + (a >> 16) * (b >> 8 & 255); }>();

    all["add.cc.u32"]    = carried<[](u64 a, u64 b, u64, u64) { return a + b; }, true>();
    all["addc.cc.u32"]   = carried<[](u64 a, u64 b, u64, u64 carry) { return a + b + carry; }, true>();
    all["addc.u32"]      = carried<[](u64 a, u64 b, u64, u64 carry) { return a + b + carry; }, false>();
    all["sub.cc.u32"]    = carried<[](u64 a, u64 b, u64, u64) { return a - b; }, true>();
    all["subc.cc.u32"]   = carried<[](u64 a, u64 b, u64, u64 carry) { return a - b - carry; }, true>();
    all["subc.u32"]      = carried<[](u64 a, u64 b, u64, u64 carry) { return a - b - carry; }, false>();
    all["mad.lo.cc.u32"] = carried<[](u64 a, u64 b, u64 c, u64) { return (a * b & 0xffffffff) + c; }, true>();
    all["madc.lo.cc.u32"] =
        carried<[](u64 a, u64 b, u64 c, u64 carry) { return (a * b & 0xffffffff) + c + carry; }, true>();
    all["madc.hi.cc.u32"] = carried<[](u64 a, u64 b, u64 c, u64 carry) { return (a * b >> 32) + c + carry; }, true>();
    all["madc.hi.u32"]    = carried<[](u64 a, u64 b, u64 c, u64 carry) { return (a * b >> 32) + c + carry; }, false>();

    // Generic addresses of the windows; those of device memory are the same in both.
    all["cvta.shared.u64"]    = each<[](u64 a) { return a + shared_window; }>();
    all["cvta.local.u64"]     = each<[](u64 a) { return a + local_window; }>();
    all["cvta.param.u64"]     = each<[](u64 a) { return a; }>(); // parameters' addresses are generic ones
    all["cvta.to.global.u64"] = each<[](u64 a) { return a; }>();
    all["cvta.to.shared.u64"] = each<[](u64 a) { return a - shared_window; }>();
    all["cvta.to.local.u64"]  = each<[](u64 a) { return a - local_window; }>();
}

} // namespace ptx
