// Runs every stage of the CPU backend on fixed data and one thread, for callgrind, which counts the instructions of each;
// count.py compiles, runs and compares. Without callgrind it prints the stages' names.
#include <mdkv/mdkv.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <valgrind/callgrind.h>

namespace
{

using namespace mdkv;
using host = cpu::backend;

constexpr index_t heads  = 2;
constexpr index_t group  = 2;
constexpr index_t tokens = 512;
constexpr index_t window = 32;
constexpr index_t dim    = 64;
constexpr index_t rungs  = 4; // of either ratio set
constexpr index_t folded = 32;

/// Memory on a cache line, so that its address changes no count.
template <class T>
class block
{
public:
    explicit block(index_t count)
        : lines_(static_cast<std::size_t>(count) * sizeof(T) / sizeof(line) + 1)
    {}
    [[nodiscard]] T* data() noexcept { return reinterpret_cast<T*>(lines_.data()); }

private:
    struct alignas(workspace::alignment) line
    {
        std::byte bytes[workspace::alignment];
    };
    std::vector<line> lines_;
};

/// A workspace of one block, which no stage lets grow.
workspace& grown_workspace()
{
    static workspace scratch{cpu::host_memory{}};
    static_cast<void>(workspace::frame{scratch}.take<std::byte>(1 << 24));
    return scratch;
}

/// Calls `stage(backend)` on one thread; callgrind counts what it executes if it has a name.
template <class Stage>
void run_stage(char const* name, Stage const& stage)
{
    host const on{&grown_workspace()};
    if (name == nullptr) { return stage(on); }
    CALLGRIND_TOGGLE_COLLECT;
    stage(on);
    CALLGRIND_TOGGLE_COLLECT;
    CALLGRIND_DUMP_STATS_AT(name);
    std::puts(name);
}

/// Near a normal distribution by sums of integers alone, the same everywhere; strength falls from coordinate to coordinate.
block<half> rows(index_t count, std::uint64_t seed, float mean)
{
    block<half> all{count * dim};
    std::uint64_t state = seed;
    for (index_t i = 0; i < count * dim; ++i)
    {
        index_t sum = 0;
        for (int part = 0; part < 4; ++part)
        {
            state = state * 6364136223846793005U + 1442695040888963407U;
            sum += static_cast<index_t>(state >> 48U);
        }
        auto const normal = static_cast<float>(sum - (1 << 17)) * 0x1p-15F;
        all.data()[i]     = narrow<half>(mean + 3.0F * normal / (1.0F + 0.1F * static_cast<float>(i % dim)));
    }
    return all;
}

struct layer
{
    host on{};
    block<half> q = rows(heads * group * window, 1, 0.3F);
    block<half> k = rows(heads * (tokens + window), 2, 0.0F);
    block<half> v = rows(heads * (tokens + window), 3, 0.0F);
    prompt_rows<host, half> all{in(on, q.data(), heads* group, window, dim),
        in(on, k.data(), heads, tokens + window, dim), in(on, v.data(), heads, tokens + window, dim)};
    struct
    {
        in_view<half, 3, host> queries, keys, values, window_keys, window_values;
    } of{all.queries, slice<1>(all.keys, 0, tokens), slice<1>(all.values, 0, tokens),
        slice<1>(all.keys, tokens, window), slice<1>(all.values, tokens, window)};
    layer_shape shape{heads, group, tokens, window, {dim, dim}, sizeof(half)};
};

/// A packed layer, every stored token at `rung`, or at rungs as they were chosen.
cpu::cache<half> packed(layer const& x, ratio_set const& ratios, in_view<std::uint8_t, 2, host> rung,
    in_view<float, 3, host> key_basis, in_view<float, 3, host> value_basis, char const* name = nullptr)
{
    cache_layout const layout{ratios, heads, window, x.shape.dims};
    host const on{&grown_workspace()};
    cpu::cache<half> cache{layout, packed_bytes<half>(on, rung, layout), folded};
    run_stage(name, [&](host const& with) {
        pack(with, x.of.keys, x.of.values, x.of.window_keys, x.of.window_values, key_basis, value_basis, rung,
            cache.view());
    });
    return cache;
}

struct decoding
{
    host on{};
    block<half> q = rows(heads * group, 4, 0.3F);
    block<half> output{heads * group * dim};
    block<float> lse{heads * group};

    void attend_to(char const* name, cpu::cache<half>& cache)
    {
        run_stage(name, [&](host const& with) {
            attend(with, in(on, q.data(), heads * group, dim), cache.view(), {},
                out(on, output.data(), heads * group, dim), out(on, lse.data(), heads * group));
        });
    }
};

void stages_of_prefill(layer const& x)
{
    host const on;
    block<float> bases[]{block<float>{heads * dim * dim}, block<float>{heads * dim * dim}};
    block<float> energy{heads * dim};
    block<float> losses[]{block<float>{heads * rungs * tokens}, block<float>{heads * rungs * tokens}};
    block<std::uint8_t> rung_of{heads * tokens};
    block<half> turned{heads * group * window * dim};
    auto const uk = out(on, bases[0].data(), heads, dim, dim), uv = out(on, bases[1].data(), heads, dim, dim);
    auto const loss   = out(on, losses[0].data(), heads, rungs, tokens);
    auto const smooth = out(on, losses[1].data(), heads, rungs, tokens);
    auto const rung   = out(on, rung_of.data(), heads, tokens);
    auto const spread = out(on, energy.data(), heads, dim);
    decoding step;

    constexpr index_t page = 16;
    block<std::int32_t> table{tokens / page};
    for (index_t i = 0; i < tokens / page; ++i) { table.data()[i] = static_cast<std::int32_t>(tokens / page - 1 - i); }
    block<half> brought{heads * tokens * dim};
    run_stage("gather_pages", [&](host const& with) {
        gather_pages(with, in(on, x.of.keys.data_handle(), tokens / page, page, heads, dim),
            in(on, table.data(), tokens / page), out(on, brought.data(), heads, tokens, dim));
    });
    run_stage("expects_finite", [&](host const& with) { expects_finite(with, "keys", x.of.keys); });
    run_stage("fit_basis", [&](host const& with) { fit_basis(with, x.of.keys, uk, spread); });
    run_stage(nullptr, [&](host const& with) { fit_basis(with, x.of.values, uv, spread); });
    auto const scored = [&](char const* name, ratio_set const& ratios, score_options<host> const& options) {
        run_stage(name, [&](host const& with) {
            score(with, x.of.queries, x.of.keys, x.of.values, x.of.window_keys, as_input(uk), as_input(uv), ratios,
                options, loss);
        });
    };
    auto const allocated = [&](char const* name, preset const& chosen, index_t kv_size) {
        index_t const limit = budget::kv_size(kv_size).in_bytes(x.shape) - x.shape.window_bytes();
        allocation report;
        run_stage(name, [&](host const& with) {
            allocate(with, {as_input(smooth), rung}, {chosen.ratios, x.shape.dims, x.shape.element_bytes},
                in(on, &limit, 1), {.charge = chosen.charge}, out(on, &report, 1));
        });
    };

    scored("score paper", paper_ratios, {});
    run_stage("pool max", [&](host const& with) { pool(with, as_input(loss), presets::paper.pooling, smooth); });
    allocated("allocate paper", presets::paper, 160);
    // The time is to grow in proportion to heads, each of which chooses its projections, and little with the limits.
    for (index_t const many : {128, 256})
    {
        block<float> of_heads{many * 4 * 64};
        block<std::uint8_t> rungs_of_heads{many * 64};
        block<allocation> reports{many};
        block<index_t> limits{many};
        unsigned state = 1;
        for (index_t i = 0; i < many * 4 * 64; ++i)
        {
            state              = state * 1664525U + 1013904223U;
            of_heads.data()[i] = static_cast<float>(3 - i / 64 % 4) * static_cast<float>(state >> 8) * 0x1p-24F;
        }
        rung_costs const costs{paper_ratios, {dim, dim}, 2};
        auto const with_limits = [&](char const* name, index_t count, projection_charge charge) {
            std::fill_n(limits.data(), count, many / count * 64 * dim * 2);
            run_stage(name, [&](host const& with) {
                allocate(with,
                    {in(on, static_cast<float const*>(of_heads.data()), many, 4, 64),
                        out(on, rungs_of_heads.data(), many, 64)},
                    costs, in(on, static_cast<index_t const*>(limits.data()), count), {.charge = charge},
                    out(on, reports.data(), count));
            });
        };
        with_limits(many == 128 ? "allocate 128 heads" : "allocate 256 heads", 1, projection_charge::if_better);
        with_limits(many == 128 ? "allocate 128 limits" : "allocate 256 limits", many, projection_charge::always);
    }
    auto mixed = packed(x, paper_ratios, as_input(rung), as_input(uk), as_input(uv), "pack paper");
    step.attend_to("attend paper", mixed);

    scored("score bits", bit_ratios, {});
    run_stage(
        "pool adaptive", [&](host const& with) { pool(with, as_input(loss), presets::by_window.pooling, smooth); });
    run_stage("join", [&](host const& with) { join(with, as_input(smooth), as_input(loss), 4.0F, smooth); });
    block<leverage_sum> leverages{tokens};
    std::fill_n(leverages.data(), tokens, 0);
    run_stage(
        "add_leverage", [&](host const& with) { add_leverage(with, x.of.keys, out(on, leverages.data(), tokens)); });
    run_stage("balance", [&](host const& with) {
        balance(with, out(on, losses[0].data(), 1, heads, rungs, tokens),
            {.leverage_power = 16.0F, .leverages = in(on, leverages.data(), tokens)});
    });
    allocated("allocate bits", presets::by_window, 160);
    static_cast<void>(packed(x, bit_ratios, as_input(rung), as_input(uk), as_input(uv), "pack bits"));
    run_stage("advance", [&](host const& with) {
        advance(with, x.of.queries, tokens, {}, out(on, turned.data(), heads * group, window, dim));
    });

    block<float> sums{heads * group * window};
    std::fill_n(sums.data(), heads * group * window, 6.0F);
    block<float> stand_ins{2 * heads * 8 * dim};
    run_stage("stand_in", [&](host const& with) {
        stand_in(with, x.of.queries, x.of.keys, x.of.values, as_input(rung),
            in(on, static_cast<float const*>(sums.data()), heads * group, window), tokens + window, {},
            out(on, stand_ins.data(), heads, 8, dim), out(on, stand_ins.data() + heads * 8 * dim, heads, 8, dim));
    });

    char const* const names[]{"", "attend int4", "attend int8", "attend plain"};
    for (std::uint8_t r = 1; r < rungs; ++r)
    {
        std::fill_n(rung_of.data(), heads * tokens, r);
        auto cache = packed(x, bit_ratios, as_input(rung), as_input(uk), as_input(uv));
        step.attend_to(names[r], cache);
    }
}

void stages_of_decoding(layer const& x)
{
    host const on;
    cpu::cache<half> cache;
    auto const compressed = [&](char const* name, preset const& chosen) {
        run_stage(name, [&](host const& with) { compress(with, x.all, chosen, budget::kv_size(160), cache); });
    };
    compressed("compress paper", presets::paper);
    compressed("compress by_window", presets::by_window);

    cache.reserve_tail(folded);
    for (index_t i = 0; i < folded; ++i)
    {
        auto const row = in(on, x.of.keys.data_handle() + i * heads * dim, heads, dim);
        run_stage(i == 0 ? "append" : nullptr, [&](host const& with) { append(with, row, row, cache.view()); });
    }
    decoding a;
    a.attend_to("attend by_window", cache);
    decoding b = a;
    run_stage("merge_attention", [&](host const& with) {
        auto const to  = out(on, a.output.data(), heads * group, dim);
        auto const lse = out(on, a.lse.data(), heads * group);
        merge_attention(with, as_input(to), as_input(lse), in(on, b.output.data(), heads * group, dim),
            in(on, b.lse.data(), heads * group), to, lse);
    });
    run_stage("recompress", [&](host const& with) {
        recompress_options<host> options{.limit = budget::kv_size(160), .pooling = presets::by_window.pooling};
        recompress(with, slice<1>(x.of.queries, window - 8, 8), bit_ratios, options, cache);
    });
}

} // namespace

int main()
{
    layer const x;
    stages_of_prefill(x);
    stages_of_decoding(x);
}
