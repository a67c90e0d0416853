// The backend of examples/llama_cpp inside ggml's scheduler, beside the CPU's own flash attention: what it serves, what it
// passes through, what it refuses.
#include <doctest/doctest.h>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <regex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

namespace
{

constexpr std::int64_t head_dim = 64, heads = 2;

template <auto Release>
struct by
{
    template <class T>
    void operator()(T* resource) const
    {
        Release(resource);
    }
};
template <class T, auto Release>
using owned = std::unique_ptr<T, by<Release>>;

/// Environment variables for contexts that are made while it lives.
class environment
{
public:
    explicit environment(std::map<std::string, std::string> values)
        : values_{std::move(values)}
    {
        values_.try_emplace("MDKV_VERBOSE", "0");
        for (auto const& [name, value] : values_) { setenv(name.c_str(), value.c_str(), 1); }
    }
    environment(environment const&)            = delete;
    environment& operator=(environment const&) = delete;
    ~environment()
    {
        for (auto const& [name, value] : values_) { unsetenv(name.c_str()); }
    }

private:
    std::map<std::string, std::string> values_;
};

ggml_backend_reg_t plugin()
{
    static ggml_backend_reg_t const loaded = ggml_backend_load(MDKV_GGML_BACKEND);
    return loaded;
}

struct layer_kind
{
    std::int64_t cells       = 512;
    std::int64_t query_heads = 6;
    int keys_of              = -1; ///< another layer whose cells it reads
    bool sinks               = false;
    bool own_values          = true; ///< otherwise they are the keys' first half
    ggml_type type           = GGML_TYPE_F16;
    float scale              = 0.125F; ///< of logits: 1 / sqrt(head_dim)
    float bias               = 0;
    float cap                = 0;
};

/// What of an engine is needed: cells, batches, a mask. A token's vectors depend on its number alone.
class engine
{
public:
    /// \param sequences   that have cells of their own
    engine(std::vector<layer_kind> kinds, bool compressing, std::int64_t sequences = 1)
        : kinds_{std::move(kinds)}
    {
        if (compressing)
        {
            REQUIRE(plugin() != nullptr);
            mdkv_.reset(ggml_backend_dev_init(ggml_backend_reg_dev_get(plugin(), 0), nullptr));
            REQUIRE(mdkv_ != nullptr);
            backends_.push_back(mdkv_.get());
        }
        cpu_.reset(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
        backends_.push_back(cpu_.get());
        sched_.reset(
            ggml_backend_sched_new(backends_.data(), nullptr, static_cast<int>(backends_.size()), 1024, false, true));

        context_.reset(ggml_init({64 * ggml_tensor_overhead(), nullptr, true}));
        for (std::size_t i = 0; i < kinds_.size(); ++i)
        {
            layer_kind const& kind = kinds_[i];
            for (auto* const kv : {&keys_, &values_})
            {
                kv->push_back(kind.keys_of >= 0 ? (*kv)[static_cast<std::size_t>(kind.keys_of)]
                                                : ggml_new_tensor_3d(context_.get(), kind.type, heads * head_dim,
                                                    kind.cells, sequences));
            }
            if (kind.keys_of >= 0) { continue; }
            ggml_format_name(keys_.back(), "cache_k_l%zu", i);
            ggml_format_name(values_.back(), "cache_v_l%zu", i);
        }
        cells_.reset(ggml_backend_alloc_ctx_tensors(context_.get(), cpu_.get()));
        ggml_backend_buffer_clear(cells_.get(), 0);
    }

    struct part
    {
        std::vector<int> tokens;
        std::int64_t first = 0; ///< cell
    };

    /// Feeds each sequence from `from` on as many tokens, into its cells from `first` on; `sees(i, cell, sequence)` is the
    /// mask of the i-th. Empty where it was refused, otherwise the outputs of all layers.
    template <class Sees>
    std::vector<float> feed_each(std::vector<part> const& parts, std::int64_t from, Sees const& sees)
    {
        auto const each = std::ssize(parts[0].tokens);
        std::vector<int> tokens;
        std::vector<std::int64_t> cells;
        for (part const& one : parts)
        {
            tokens.insert(tokens.end(), one.tokens.begin(), one.tokens.end());
            for (std::int64_t i = 0; i < each; ++i) { cells.push_back(one.first + i); }
        }
        return feed_cells(tokens, cells, std::ssize(parts), from, sees);
    }

    /// As many of the tokens into each of `ns` caches, into any cells of these.
    template <class Sees>
    std::vector<float> feed_cells(std::vector<int> const& tokens, std::vector<std::int64_t> cells, std::int64_t ns,
        std::int64_t from, Sees const& sees)
    {
        auto const n                    = std::ssize(tokens);
        auto const each                 = n / ns;
        auto const width                = [](layer_kind const& a, layer_kind const& b) { return a.cells < b.cells; };
        std::int64_t const cells_of_all = std::max_element(kinds_.begin(), kinds_.end(), width)->cells;
        auto const seen_cells           = static_cast<std::uint64_t>(seen_by(cells_of_all, n, each, sees));
        auto const kv = static_cast<std::int64_t>(std::bit_ceil(std::max<std::uint64_t>(256, seen_cells)));
        owned<ggml_context, ggml_free> const context{
            ggml_init({1024 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true})};
        ggml_context* const c    = context.get();
        ggml_cgraph* const graph = ggml_new_graph(c);
        auto const input         = [&](ggml_tensor* tensor) {
            ggml_set_input(tensor);
            return tensor;
        };
        ggml_tensor* const where = input(ggml_new_tensor_1d(c, GGML_TYPE_I64, n));
        std::map<std::int64_t, ggml_tensor*> masks;
        std::vector<ggml_tensor*> q, k, v, sinks, output;
        for (std::size_t i = 0; i < kinds_.size(); ++i)
        {
            layer_kind const& kind  = kinds_[i];
            std::int64_t const seen = std::min(kv, kind.cells);
            ggml_tensor*& mask      = masks[seen];
            if (mask == nullptr) { mask = input(ggml_new_tensor_4d(c, GGML_TYPE_F16, seen, each, 1, ns)); }
            q.push_back(input(ggml_new_tensor_3d(c, GGML_TYPE_F32, head_dim, kind.query_heads, n)));
            if (kind.keys_of < 0)
            {
                k.push_back(input(ggml_new_tensor_2d(c, GGML_TYPE_F32, head_dim * heads, n)));
                v.push_back(input(ggml_new_tensor_2d(c, GGML_TYPE_F32, head_dim * heads, n)));
                auto const rows = [&](ggml_tensor* all) {
                    return ggml_reshape_2d(c, all, all->ne[0], all->ne[1] * all->ne[2]);
                };
                ggml_build_forward_expand(graph, ggml_set_rows(c, rows(keys_[i]), k.back(), where));
                ggml_build_forward_expand(graph, ggml_set_rows(c, rows(values_[i]), v.back(), where));
            }
            else
            {
                k.push_back(nullptr);
                v.push_back(nullptr);
            }
            auto const view = [&](ggml_tensor* all) {
                std::size_t const row = ggml_row_size(all->type, head_dim);
                return ggml_permute(c,
                    ggml_view_4d(c, all, head_dim, heads, seen, ns, row, all->nb[1], all->nb[2],
                        static_cast<std::size_t>(from) * all->nb[2]),
                    0, 2, 1, 3);
            };
            ggml_tensor* const queries  = ggml_reshape_4d(c, q.back(), head_dim, kind.query_heads, each, ns);
            ggml_tensor* const attended = ggml_flash_attn_ext(c, ggml_permute(c, queries, 0, 2, 1, 3), view(keys_[i]),
                view(kind.own_values ? values_[i] : keys_[i]), mask, kind.scale, kind.bias, kind.cap);
            sinks.push_back(kind.sinks ? input(ggml_new_tensor_1d(c, GGML_TYPE_F32, kind.query_heads)) : nullptr);
            ggml_flash_attn_ext_add_sinks(attended, sinks.back());
            ggml_set_output(attended);
            ggml_build_forward_expand(graph, attended);
            output.push_back(attended);
        }
        ggml_backend_sched_reset(sched_.get());
        REQUIRE(ggml_backend_sched_alloc_graph(sched_.get(), graph));

        for (std::int64_t i = 0; i < n; ++i)
        {
            cells[static_cast<std::size_t>(i)] += (from + i / each) * kinds_[0].cells;
        }
        ggml_backend_tensor_set(where, cells.data(), 0, ggml_nbytes(where));
        for (auto const& [seen, mask] : masks)
        {
            std::vector<ggml_fp16_t> bits;
            for (std::int64_t i = 0; i < n; ++i)
            {
                for (std::int64_t cell = 0; cell < seen; ++cell)
                {
                    bits.push_back(ggml_fp32_to_fp16(sees(i % each, cell, i / each) ? 0.0F : -INFINITY));
                }
            }
            ggml_backend_tensor_set(mask, bits.data(), 0, ggml_nbytes(mask));
        }
        for (std::size_t i = 0; i < kinds_.size(); ++i)
        {
            set(q[i], tokens, 3 * i, 4.0F);
            set(k[i], tokens, 3 * i + 1, 1.0F);
            set(v[i], tokens, 3 * i + 2, 1.0F);
            if (sinks[i] != nullptr) { set(sinks[i], {0}, 99, 1.0F); }
        }
        if (ggml_backend_sched_graph_compute(sched_.get(), graph) != GGML_STATUS_SUCCESS) { return {}; }
        std::vector<float> all;
        for (ggml_tensor* const one : output)
        {
            auto const old = all.size();
            all.resize(old + static_cast<std::size_t>(ggml_nelements(one)));
            ggml_backend_tensor_get(one, all.data() + old, 0, ggml_nbytes(one));
        }
        return all;
    }

    /// Of several sequences.
    std::vector<float> feed(std::vector<part> const& parts, std::int64_t from)
    {
        return feed_each(parts, from, [&](std::int64_t i, std::int64_t cell, std::int64_t s) {
            return cell <= parts[static_cast<std::size_t>(s)].first + i;
        });
    }

    /// Of the first sequence.
    template <class Sees>
    std::vector<float> feed(std::vector<int> const& tokens, std::int64_t first, Sees const& sees)
    {
        return feed_each(
            {part{tokens, first}}, 0, [&](std::int64_t i, std::int64_t cell, std::int64_t) { return sees(i, cell); });
    }
    std::vector<float> feed(std::vector<int> const& tokens, std::int64_t first)
    {
        return feed(std::vector<part>{{tokens, first}}, 0);
    }

    /// Of tokens whose numbers are their places.
    std::vector<float> feed(std::int64_t count, std::int64_t first)
    {
        std::vector<int> tokens;
        for (std::int64_t i = 0; i < count; ++i) { tokens.push_back(static_cast<int>(first + i)); }
        return feed(tokens, first);
    }

    /// As a program that loads a state: every cell below `end` is another one, or 0.
    void load(std::int64_t end, std::size_t salt, float factor = 1.0F)
    {
        for (std::size_t i = 0; i < keys_.size(); ++i)
        {
            for (auto* const all : {keys_[i], values_[i]})
            {
                std::vector<ggml_fp16_t> rows;
                for (std::int64_t cell = 0; cell < end; ++cell)
                {
                    for (float const x : vector(static_cast<int>(cell), salt + i, heads * head_dim, 1.0F))
                    {
                        rows.push_back(ggml_fp32_to_fp16(factor * x + 0.0F));
                    }
                }
                ggml_backend_tensor_set(all, rows.data(), 0, rows.size() * sizeof rows[0]);
            }
        }
    }

    /// As a program that writes another token into a cell.
    void replace(std::int64_t cell, int token)
    {
        for (std::size_t i = 0; i < keys_.size(); ++i)
        {
            for (auto const& [all, salt] : {std::pair{keys_[i], 3 * i + 1}, std::pair{values_[i], 3 * i + 2}})
            {
                std::vector<ggml_fp16_t> row;
                for (float const x : vector(token, salt, heads * head_dim, 1.0F))
                {
                    row.push_back(ggml_fp32_to_fp16(x));
                }
                ggml_backend_tensor_set(all, row.data(), static_cast<std::size_t>(cell) * all->nb[1], all->nb[1]);
            }
        }
    }

    /// As a program that loads a state into other cells.
    void copy_cell(std::int64_t from, std::int64_t to)
    {
        for (auto const* const all : {&keys_, &values_})
        {
            for (ggml_tensor* const one : *all)
            {
                std::vector<std::byte> row(one->nb[1]);
                ggml_backend_tensor_get(one, row.data(), static_cast<std::size_t>(from) * one->nb[1], one->nb[1]);
                ggml_backend_tensor_set(one, row.data(), static_cast<std::size_t>(to) * one->nb[1], one->nb[1]);
            }
        }
    }

    /// The bytes of some cells of all layers, keys and values, as a program saves them.
    [[nodiscard]] std::vector<std::vector<std::byte>> save(std::int64_t first, std::int64_t count) const
    {
        std::vector<std::vector<std::byte>> state;
        for (auto const* const all : {&keys_, &values_})
        {
            for (ggml_tensor* const one : *all)
            {
                state.emplace_back(static_cast<std::size_t>(count) * one->nb[1]);
                ggml_backend_tensor_get(
                    one, state.back().data(), static_cast<std::size_t>(first) * one->nb[1], state.back().size());
            }
        }
        return state;
    }
    /// As a program that loads them, into cells from `first` on.
    void restore(std::vector<std::vector<std::byte>> const& state, std::int64_t first)
    {
        auto from = state.begin();
        for (auto const* const all : {&keys_, &values_})
        {
            for (ggml_tensor* const one : *all)
            {
                ggml_backend_tensor_set(one, from->data(), static_cast<std::size_t>(first) * one->nb[1], from->size());
                ++from;
            }
        }
    }

    /// Of the first layer.
    [[nodiscard]] std::vector<ggml_fp16_t> keys() const
    {
        std::vector<ggml_fp16_t> all(static_cast<std::size_t>(ggml_nelements(keys_[0])));
        ggml_backend_tensor_get(keys_[0], all.data(), 0, ggml_nbytes(keys_[0]));
        return all;
    }
    void set_keys(std::vector<ggml_fp16_t> const& all)
    {
        ggml_backend_tensor_set(keys_[0], all.data(), 0, ggml_nbytes(keys_[0]));
    }

    /// From now on graphs end early, after so many of the CPU's own nodes; -1: none does.
    void abort_after(int nodes)
    {
        left_           = nodes;
        auto* const set = reinterpret_cast<ggml_backend_set_abort_callback_t>(ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu_.get())), "ggml_backend_set_abort_callback"));
        set(
            cpu_.get(), [](void* left) { return *static_cast<int*>(left) >= 0 && (*static_cast<int*>(left))-- == 0; },
            &left_);
    }

    [[nodiscard]] std::int64_t served() const
    {
        auto* const ask = reinterpret_cast<std::int64_t (*)(ggml_backend_t)>(
            ggml_backend_reg_get_proc_address(plugin(), "mdkv_served_nodes"));
        return ask(mdkv_.get());
    }

    /// Those of whole pages.
    [[nodiscard]] bool cells_are_zero(std::int64_t end) const
    {
        constexpr std::ptrdiff_t page = 4096 / sizeof(ggml_fp16_t);
        std::vector<ggml_fp16_t> rows(static_cast<std::size_t>(end * heads * head_dim));
        std::copy_n(
            static_cast<ggml_fp16_t const*>(keys_[0]->data), rows.size(), rows.data()); // ggml's reads bring caches
        return std::all_of(rows.begin() + page, rows.end(), [](ggml_fp16_t x) { return x == 0; });
    }

private:
    /// The end of the cells that any token of a batch sees.
    template <class Sees>
    static std::int64_t seen_by(std::int64_t cells, std::int64_t tokens, std::int64_t each, Sees const& sees)
    {
        for (std::int64_t cell = cells; cell > 0; --cell)
        {
            for (std::int64_t i = 0; i < tokens; ++i)
            {
                if (sees(i % each, cell - 1, i / each)) { return cell; }
            }
        }
        return 0;
    }

    /// Tokens have something in common, and so have queries, so that some keys are looked at more than others.
    static std::vector<float> vector(int token, std::size_t salt, std::int64_t count, float common)
    {
        std::vector<float> x(static_cast<std::size_t>(count));
        std::mt19937 own{static_cast<unsigned>(1000 * salt + static_cast<std::size_t>(token) + 1)};
        std::mt19937 all{static_cast<unsigned>(salt)};
        std::normal_distribution<float> normal;
        for (float& value : x) { value = normal(own) + 0.1F * common * normal(all); }
        return x;
    }

    static void set(ggml_tensor* tensor, std::vector<int> const& tokens, std::size_t salt, float common)
    {
        if (tensor == nullptr || tensor->buffer == nullptr) { return; }
        std::vector<float> all;
        for (int const token : tokens)
        {
            auto const one = vector(token, salt, ggml_nelements(tensor) / std::ssize(tokens), common);
            all.insert(all.end(), one.begin(), one.end());
        }
        ggml_backend_tensor_set(tensor, all.data(), 0, ggml_nbytes(tensor));
    }

    std::vector<layer_kind> kinds_;
    int left_ = -1; ///< the CPU's nodes until a graph ends early
    owned<ggml_backend, ggml_backend_free> mdkv_, cpu_;
    std::vector<ggml_backend_t> backends_;
    owned<ggml_backend_sched, ggml_backend_sched_free> sched_;
    owned<ggml_context, ggml_free> context_;
    owned<ggml_backend_buffer, ggml_backend_buffer_free> cells_;
    std::vector<ggml_tensor*> keys_, values_;
};

/// Of the difference; 0 only where all are equal.
float root_mean_square(std::vector<float> const& a, std::vector<float> const& b)
{
    REQUIRE(!a.empty());
    REQUIRE(a.size() == b.size());
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) { sum += double{a[i] - b[i]} * double{a[i] - b[i]}; }
    return static_cast<float>(std::sqrt(sum / static_cast<double>(a.size())));
}

/// The same calls on both; ggml's own flash attention sums values in half.
struct pair_of_engines
{
    engine with;
    engine without;

    explicit pair_of_engines(std::vector<layer_kind> const& kinds, std::int64_t sequences = 1)
        : with{kinds, true, sequences}
        , without{kinds, false, sequences}
    {}

    template <class... Arguments>
    float difference(Arguments const&... arguments)
    {
        return root_mean_square(with.feed(arguments...), without.feed(arguments...));
    }
};

/// What is written to the standard error while `work` runs.
template <class Work>
std::string said_by(Work const& work)
{
    std::fflush(stderr);
    int const before      = dup(2);
    std::FILE* const file = std::tmpfile();
    REQUIRE(file != nullptr);
    dup2(fileno(file), 2);
    work();
    std::fflush(stderr);
    dup2(before, 2);
    close(before);
    std::string all(static_cast<std::size_t>(std::ftell(file)), '\0');
    std::rewind(file);
    all.resize(std::fread(all.data(), 1, all.size(), file));
    std::fclose(file);
    return all;
}

constexpr float near_enough = 1e-3F; // outputs are about 0.3; the CPU sums in half

/// Sequences that share the cells of one cache, as llama.cpp's unified cache keeps them: a token goes into the next free
/// cell, and sees the cells of its sequence up to its own position.
class shared_cells
{
public:
    explicit shared_cells(std::vector<layer_kind> const& kinds = {{}, {}})
        : both{kinds}
    {}

    pair_of_engines both;

    struct token
    {
        int sequence;
        int number;
    };

    /// Feeds a batch to both. Returns the difference of all layers' outputs.
    float feed(std::vector<token> const& batch)
    {
        auto const [tokens, at, sees] = place(batch);
        return root_mean_square(
            both.with.feed_cells(tokens, at, 1, 0, sees), both.without.feed_cells(tokens, at, 1, 0, sees));
    }
    float feed(int sequence, int first, int count)
    {
        std::vector<token> batch;
        for (int i = 0; i < count; ++i) { batch.push_back({sequence, first + i}); }
        return feed(batch);
    }
    /// The same; if the batch is refused, its sequences are erased.
    float feed_or_erase(std::vector<token> const& batch)
    {
        auto const [tokens, at, sees] = place(batch);
        auto const want               = both.without.feed_cells(tokens, at, 1, 0, sees);
        auto const got                = both.with.feed_cells(tokens, at, 1, 0, sees);
        if (!got.empty()) { return root_mean_square(got, want); }
        for (token const& one : batch) { cut(one.sequence, 0); }
        return 0;
    }
    /// To the compressing one alone: empty if it was refused.
    std::vector<float> feed_one(std::vector<token> const& batch)
    {
        auto const [tokens, at, sees] = place(batch);
        return both.with.feed_cells(tokens, at, 1, 0, sees);
    }

    /// A token each of sequences 0, 1, ...; their numbers go on.
    float step(int sequences)
    {
        std::vector<token> batch;
        for (int s = 0; s < sequences; ++s) { batch.push_back({s, next_++}); }
        return feed(batch);
    }

    void cut(int sequence, int positions)
    {
        for (kept& one : cells_)
        {
            if (one.of.contains(sequence) && one.position >= positions) { one.of.erase(sequence); }
        }
        auto const freed = std::find_if(cells_.begin(), cells_.end(), [](kept const& one) { return one.of.empty(); });
        head_            = std::min(head_, freed - cells_.begin());
    }
    void copy(int from, int to)
    {
        for (kept& one : cells_)
        {
            if (one.of.contains(from)) { one.of.insert(to); }
        }
    }
    /// Moves a sequence's tokens to free cells, in the order of their cells, as a state that is saved and loaded.
    void reload(int sequence)
    {
        std::vector<std::pair<std::int64_t, kept>> saved;
        for (std::int64_t i = 0; i < std::ssize(cells_); ++i)
        {
            if (cells_[static_cast<std::size_t>(i)].of.contains(sequence))
            {
                saved.emplace_back(i, cells_[static_cast<std::size_t>(i)]);
            }
        }
        std::vector<std::int64_t> to;
        for (auto const& [from, one] : saved) { to.push_back(take({sequence}, one.position)); }
        for (std::size_t i = 0; i < to.size(); ++i)
        {
            for (engine* const one : {&both.with, &both.without}) { one->copy_cell(saved[i].first, to[i]); }
            cells_[static_cast<std::size_t>(saved[i].first)].of.erase(sequence);
        }
    }
    void start_from(std::int64_t cell) { head_ = cell; }

    [[nodiscard]] int tokens(int sequence) const
    {
        return static_cast<int>(
            std::count_if(cells_.begin(), cells_.end(), [&](kept const& one) { return one.of.contains(sequence); }));
    }
    [[nodiscard]] int free_cells() const
    {
        return static_cast<int>(
            std::count_if(cells_.begin(), cells_.end(), [](kept const& one) { return one.of.empty(); }));
    }

private:
    struct kept
    {
        std::set<int> of;
        int position = -1;
    };

    std::int64_t take(std::set<int> of, int position)
    {
        head_ %= std::ssize(cells_);
        while (!cells_[static_cast<std::size_t>(head_)].of.empty()) { head_ = (head_ + 1) % std::ssize(cells_); }
        cells_[static_cast<std::size_t>(head_)] = {std::move(of), position};
        return head_++;
    }

    struct placed
    {
        std::vector<int> tokens;
        std::vector<std::int64_t> cells;
        std::function<bool(std::int64_t, std::int64_t, std::int64_t)> sees;
    };

    placed place(std::vector<token> const& batch)
    {
        placed made;
        std::vector<std::pair<int, int>> who; // sequence and position
        for (auto const& [sequence, number] : batch)
        {
            int last = -1;
            for (kept const& one : cells_)
            {
                if (one.of.contains(sequence)) { last = std::max(last, one.position); }
            }
            made.tokens.push_back(number);
            who.emplace_back(sequence, last + 1);
            made.cells.push_back(take({sequence}, last + 1));
        }
        made.sees = [this, who](std::int64_t i, std::int64_t cell, std::int64_t) {
            auto const [sequence, position] = who[static_cast<std::size_t>(i)];
            auto const& one                 = cells_[static_cast<std::size_t>(cell)];
            return one.of.contains(sequence) && one.position <= position;
        };
        return made;
    }

    std::vector<kept> cells_ = std::vector<kept>(512);
    std::ptrdiff_t head_     = 0;
    int next_                = 100000;
};

} // namespace

TEST_CASE("ggml: with everything kept, decoding agrees with the CPU's flash attention")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    pair_of_engines both{{{}, {}}};
    CHECK(both.difference(100, 0) == 0); // the prompt is the CPU's own work
    CHECK(both.difference(100, 100) == 0);
    CHECK(both.with.served() == 0);
    for (int i = 0; i < 20; ++i) { CHECK(both.difference(1, 200 + i) < near_enough); }
    CHECK(both.with.served() == 40);
    CHECK(both.difference(7, 220) < near_enough); // several tokens in a batch
    for (int i = 0; i < 40; ++i) { CHECK(both.difference(1, 227 + i) < near_enough); }
    CHECK(both.with.served() == 2 * (20 + 1 + 40));
}

TEST_CASE("ggml: sink logits take their part of every softmax")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    layer_kind kind;
    kind.sinks = true;
    pair_of_engines both{{kind, {}}};
    CHECK(both.difference(200, 0) == 0);
    for (int i = 0; i < 4; ++i) { CHECK(both.difference(1, 200 + i) < near_enough); }
    CHECK(both.difference(20, 204) < near_enough); // several tokens in one step
    CHECK(both.with.served() > 8);
}

TEST_CASE("ggml: a limit is kept to while the tail is folded")
{
    layer_kind kind;
    std::string preset = "by_window";
    SUBCASE("of plain attention")
    {}
    SUBCASE("scored by replayed queries, too, the layers sharing one limit")
    {
        preset = "best";
    }
    SUBCASE("scored by replayed queries alone")
    {
        preset = "any_question";
    }
    SUBCASE("scored by replayed queries, with sink logits")
    {
        preset     = "any_question";
        kind.sinks = true;
    }
    SUBCASE("of attention with sink logits")
    {
        kind.sinks = true;
    }
    SUBCASE("scored by replayed queries, with a scale of the model's own")
    {
        preset     = "best";
        kind.scale = 0.4F;
    }
    environment const settings{
        {{"MDKV_BUDGET", "60%"}, {"MDKV_MIN", "64"}, {"MDKV_TAIL", "16"}, {"MDKV_PRESET", preset}}};
    pair_of_engines both{{kind, {}}};
    both.difference(200, 0);
    std::vector<float> spread;
    for (int i = 0; i < 100; ++i)
    {
        auto const want = both.without.feed(1, 200 + i);
        auto const got  = both.with.feed(1, 200 + i);
        float const off = root_mean_square(got, want);
        CHECK(off < 0.25F * root_mean_square(want, std::vector<float>(want.size())));
        spread.push_back(off);
    }
    CHECK(both.with.served() == 200);
    CHECK(spread.back() > 1e-4F); // it is compressed
}

TEST_CASE("ggml: a limit is kept to while tail and limit grow with the sequence")
{
    // By default a sixteenth of the tokens are the tail: at 512 tokens it grows, and so do the last tokens that a fold leaves in it.
    for (auto const& [preset, percent] :
        {std::pair{"by_window", 60}, std::pair{"best", 60}, std::pair{"best", 20}, std::pair{"any_question", 20}})
    {
        environment const settings{{{"MDKV_BUDGET", std::to_string(percent) + "%"}, {"MDKV_MIN", "64"},
            {"MDKV_PRESET", preset}, {"MDKV_VERBOSE", "1"}}};
        std::string const said = said_by([&] {
            // So many query heads that a fold's queries are as few as the tokens by which `keep` grows.
            layer_kind const kind{.cells = 1024, .query_heads = 8};
            engine with{{kind, kind}, true};
            with.feed(480, 0);
            for (int i = 480; i < 800; ++i) { with.feed(1, i); }
        });
        CAPTURE(said);
        std::smatch line;
        REQUIRE(std::regex_search(said, line, std::regex{"in the mean ([0-9.]+) % of the cells"}));
        CHECK(std::stod(line[1]) <= percent + 0.051); // rounded to tenths
        CHECK(std::stod(line[1]) > 0.9 * percent);
        CHECK(said.find("unfolded") == std::string::npos);
    }
}

TEST_CASE("ggml: the closing line says if nothing was compressed, and why")
{
    environment const settings{{{"MDKV_BUDGET", "60%"}, {"MDKV_MIN", "256"}, {"MDKV_VERBOSE", "1"}}};
    std::string const said = said_by([&] {
        engine with{{{}, {}}, true};
        with.feed(100, 0);
        for (int i = 100; i < 110; ++i) { with.feed(1, i); }
    });
    CAPTURE(said);
    CHECK(said.find("no token was decoded from a compressed cache") != std::string::npos);
    CHECK(said.find("passed through: 2 layers (20 nodes): it has fewer tokens than MDKV_MIN") != std::string::npos);
}

TEST_CASE("ggml: presets score differently, and where a prompt was not replayed, by its last queries")
{
    auto const decoded = [](std::string const& preset, bool loads) {
        environment const settings{{{"MDKV_BUDGET", "30%"}, {"MDKV_MIN", "64"}, {"MDKV_PRESET", preset}}};
        engine with{{{}, {}}, true};
        with.feed(100, 0);
        if (loads) { with.load(50, 7); }
        with.feed(100, 100);
        auto const output = with.feed(1, 200);
        CHECK(with.served() == 2);
        return output;
    };
    auto const by_window = decoded("by_window", false);
    auto const best      = decoded("best", false);
    auto const any       = decoded("any_question", false);
    CHECK(by_window != best);
    CHECK(best != any);
    CHECK(decoded("best", false) == best);
    CHECK(decoded("best", true) != best); // served all the same
}

TEST_CASE("ggml: a prompt that takes less than its limit leaves the rest of it to what follows")
{
    for (char const* const preset : {"by_window", "best"})
    {
        environment const settings{
            {{"MDKV_BUDGET", "500"}, {"MDKV_MIN", "64"}, {"MDKV_TAIL", "16"}, {"MDKV_PRESET", preset}}};
        pair_of_engines both{{{}, {}}};
        both.difference(100, 0);
        for (int i = 0; i < 150; ++i) { CHECK(both.difference(1, 100 + i) < near_enough); }
        CHECK(both.with.served() == 300);
    }
}

TEST_CASE("ggml: tokens of the tail are taken back, and others follow")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    pair_of_engines both{{{}, {}}};
    both.difference(200, 0);
    for (int i = 0; i < 10; ++i) { both.difference(1, 200 + i); }
    CHECK(both.difference(std::vector<int>{900, 901}, std::int64_t{204}) < near_enough);
    CHECK(both.difference(std::vector<int>{902}, std::int64_t{206}) < near_enough);
    CHECK(both.with.served() == 2 * 12);
}

TEST_CASE("ggml: a sequence that is cut within the compressed part is compressed again")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    pair_of_engines both{{{}, {}}};
    both.difference(200, 0);
    for (int i = 0; i < 4; ++i) { both.difference(1, 200 + i); }
    CHECK(both.difference(std::vector<int>{900, 901, 902}, std::int64_t{150}) == 0); // as a prompt
    for (int i = 0; i < 20; ++i)
    {
        CHECK(both.difference(std::vector<int>{910 + i}, std::int64_t{153 + i}) < near_enough);
    }
    CHECK(both.with.served() > 2 * 4);
}

TEST_CASE("ggml: another sequence in the same cells")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    pair_of_engines both{{{}, {}}};
    both.difference(200, 0);
    for (int i = 0; i < 4; ++i) { both.difference(1, 200 + i); }
    std::vector<int> other;
    for (int i = 0; i < 204; ++i) { other.push_back(1000 + i); }
    CHECK(both.difference(other, std::int64_t{0}) == 0);
    CHECK(both.difference(std::vector<int>{1204}, std::int64_t{204}) < near_enough);
    CHECK(both.with.served() == 2 * 5);
}

TEST_CASE("ggml: a state that is loaded behind its back is noticed")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    pair_of_engines both{{{}, {}}};
    both.difference(200, 0);
    for (int i = 0; i < 4; ++i) { both.difference(1, 200 + i); }
    both.with.load(204, 7);
    both.without.load(204, 7);
    for (int i = 0; i < 12; ++i) { CHECK(both.difference(1, 204 + i) < near_enough); }
}

TEST_CASE("ggml: cells that were given back are not needed for decoding, and refused for anything else")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}, {"MDKV_FREE", "1"}}};
    pair_of_engines both{{{.cells = 512}, {.cells = 512}}};
    both.difference(256, 0);
    for (int i = 0; i < 8; ++i) { CHECK(both.difference(1, 256 + i) < near_enough); }
    CHECK(both.with.cells_are_zero(200));
    CHECK_FALSE(both.without.cells_are_zero(200));
    SUBCASE("a cut within the compressed part")
    {
        CHECK(both.with.feed(1, 100).empty());
    }
    SUBCASE("two sequences")
    {
        auto const gap = [](std::int64_t, std::int64_t cell) { return cell <= 264 && cell != 10; };
        CHECK(both.with.feed({264}, 264, gap).empty());
    }
    SUBCASE("cells that are beside them are the CPU's")
    {
        auto const other = [](std::int64_t, std::int64_t cell) { return cell == 264; };
        CHECK(both.difference(std::vector<int>{264}, std::int64_t{264}, other) == 0);
        CHECK(both.difference(1, 264) < near_enough); // the first sequence goes on
    }
    SUBCASE("a state that was saved without them is loaded")
    {
        auto const saved = both.with.keys();
        CHECK(both.difference(256, 0) == 0); // another conversation
        for (int i = 0; i < 8; ++i) { CHECK(both.difference(1, 256 + i) < near_enough); }
        both.with.set_keys(saved);
        SUBCASE("as it was")
        {
            CHECK(both.with.feed(1, 264).empty());
        }
        SUBCASE("and cut where the compressed part ends")
        {
            CHECK(both.with.feed(1, 256).empty());
        }
        SUBCASE("and cut to its first token")
        {
            CHECK(both.with.feed(1, 1).empty());
        }
        SUBCASE("and cut to the first page")
        {
            CHECK(both.with.feed(1, 17).empty());
        }
    }
    CHECK(both.difference(100, 0) == 0); // a new one starts
    CHECK(both.difference(1, 100) < near_enough);
}

TEST_CASE("ggml: a state that was saved without its cells is refused")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    engine restarted{{{}, {}}, true};
    restarted.load(200, 7, 0.0F);
    CHECK(restarted.feed(1, 200).empty());
    CHECK_FALSE(restarted.feed(100, 0).empty());
}

TEST_CASE("ggml: a state that is saved after cells were given back is refused, in this process and in another")
{
    for (char const* const reading : {"0", "1"})
    {
        CAPTURE(reading);
        environment const settings{{{"MDKV_BUDGET", "40%"}, {"MDKV_MIN", "64"}, {"MDKV_FREE", "1"},
            {"MDKV_PRESET", "any_question"}, {"MDKV_READING", reading}}};
        engine one{{{}, {}}, true};
        one.feed(128, 0);
        one.feed(128, 128);
        REQUIRE_FALSE(one.feed(1, 256).empty());
        auto const state = one.save(0, 257);
        REQUIRE(one.cells_are_zero(100));
        engine restarted{{{}, {}}, true};
        restarted.restore(state, 0);
        CHECK(restarted.feed(1, 257).empty());
        CHECK_FALSE(restarted.feed(100, 0).empty()); // a new one starts
        one.restore(state, 0);
        CHECK(one.feed(1, 200).empty());
    }
}

TEST_CASE("ggml: what cannot be served is the CPU's own result")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    layer_kind kind;
    SUBCASE("soft caps")
    {
        kind.cap = 30;
    }
    SUBCASE("ALiBi")
    {
        kind.bias = 8;
    }
    SUBCASE("quantised cells")
    {
        kind.type = GGML_TYPE_Q8_0;
    }
    SUBCASE("values that are keys")
    {
        kind.own_values = false;
    }
    pair_of_engines both{{kind}};
    CHECK(both.difference(200, 0) == 0);
    for (int i = 0; i < 3; ++i) { CHECK(both.difference(1, 200 + i) == 0); }
    CHECK(both.with.served() == 0);
}

TEST_CASE("ggml: masks of windows that slide are the CPU's, and so is a second token at the same place")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    pair_of_engines both{{{}}};
    both.difference(200, 0);
    both.difference(1, 200);
    auto const window = [](std::int64_t i, std::int64_t cell) { return cell <= 201 + i && cell > 100 + i; };
    CHECK(both.difference(std::vector<int>{201}, std::int64_t{201}, window) == 0);
    CHECK(both.with.served() == 1);
    auto const two = [](std::int64_t i, std::int64_t cell) { return cell <= 200 || cell == 202 + i; };
    CHECK(both.difference(std::vector<int>{202, 203}, std::int64_t{202}, two) < near_enough);
    CHECK(both.with.served() == 2); // the first continues the sequence
}

TEST_CASE("ggml: tokens that see those after them are the CPU's, and belong to their sequence")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    pair_of_engines both{{{}, {}}};
    both.difference(200, 0);
    both.difference(1, 200);
    std::vector<int> picture;
    for (int i = 0; i < 20; ++i) { picture.push_back(5000 + i); }
    auto const all = [](std::int64_t, std::int64_t cell) { return cell < 221; };
    CHECK(both.difference(picture, std::int64_t{201}, all) == 0);
    CHECK(both.with.served() == 2);
    for (int i = 0; i < 4; ++i) { CHECK(both.difference(1, 221 + i) < near_enough); }
    CHECK(both.with.served() == 2 * 5);
    auto const first = [](std::int64_t, std::int64_t cell) { return cell < 20; };
    CHECK(both.difference(picture, std::int64_t{0}, first) == 0);
}

TEST_CASE("ggml: a layer whose cache is smaller has a sliding window")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    pair_of_engines both{{{.cells = 256}, {.cells = 512}}};
    both.difference(100, 0);
    both.difference(1, 100);
    CHECK(both.with.served() == 1);
}

TEST_CASE("ggml: bytes are told of all layers, of which some pass through in full, and of those served")
{
    // Percentages of the closing line are rounded to tenths.
    constexpr double tenth = 0.051;
    constexpr double limit = 60;
    environment const settings{
        {{"MDKV_BUDGET", "60%"}, {"MDKV_MIN", "64"}, {"MDKV_TAIL", "16"}, {"MDKV_VERBOSE", "1"}}};
    layer_kind passed;
    double doubled = 1; // times that the cells of the layers served are held
    std::vector<layer_kind> kinds{{}, {}};
    SUBCASE("all are served")
    {}
    SUBCASE("a window that is shorter than the other layers' caches")
    {
        passed.cells = 256;
        kinds        = {passed, {}, passed, passed, {}};
    }
    SUBCASE("soft caps")
    {
        passed.cap = 30;
        kinds      = {{}, passed};
    }
    SUBCASE("quantised cells")
    {
        passed.type = GGML_TYPE_Q8_0;
        kinds       = {passed, {}, {}};
    }
    SUBCASE("values that are keys")
    {
        passed.own_values = false;
        kinds             = {{}, passed};
    }
    SUBCASE("layers that read one layer's cells, of which each has a compressed cache")
    {
        kinds   = {{}, {.keys_of = 0}};
        doubled = 2;
    }
    constexpr int prompt = 200, decoded = 40;
    double served_bytes = 0, passed_bytes = 0; // of cells, of all tokens decoded
    int layers = 0, served = 0;
    for (layer_kind const& kind : kinds)
    {
        if (kind.keys_of >= 0) { continue; }
        bool const passes = kind.cells < 512 || kind.cap > 0 || kind.type != GGML_TYPE_F16 || !kind.own_values;
        double const each = static_cast<double>(ggml_row_size(kind.type, heads * head_dim)) * (kind.own_values ? 2 : 1);
        for (int tokens = prompt + 1; tokens <= prompt + decoded; ++tokens)
        {
            (passes ? passed_bytes : served_bytes) += each * tokens;
        }
        ++layers;
        served += passes ? 0 : 1;
    }
    std::string const said = said_by([&] {
        engine with{kinds, true};
        with.feed(prompt, 0);
        for (int i = 0; i < decoded; ++i) { with.feed(1, prompt + i); }
    });
    CAPTURE(said);
    std::smatch line;
    REQUIRE(std::regex_search(said, line,
        std::regex{"in the mean ([0-9.]+) % of the cells of all ([0-9]+) layers, ([0-9.]+) % of those of the ([0-9]+) "
                   "served"}));
    CHECK(std::stoi(line[2]) == layers);
    CHECK(std::stoi(line[4]) == served);
    double const of_all = std::stod(line[1]), of_served = std::stod(line[3]);
    CHECK(of_served <= doubled * limit + tenth);
    CHECK(of_served > doubled * 0.8 * limit);
    double const all = (of_served * served_bytes + 100 * passed_bytes) / (served_bytes + passed_bytes);
    CHECK(std::abs(of_all - all) <= 2 * tenth);
}

TEST_CASE("ggml: sequences with cells of their own are served each by itself, alone or in one batch")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    using part = engine::part;
    pair_of_engines both{{{}, {}}, 3};
    auto const tokens = [](int first, int count) {
        std::vector<int> all;
        for (int i = 0; i < count; ++i) { all.push_back(first + i); }
        return all;
    };
    CHECK(both.difference(std::vector<part>{{tokens(0, 100), 0}, {tokens(1000, 100), 0}}, std::int64_t{0}) == 0);
    CHECK(both.difference(std::vector<part>{{tokens(1100, 50), 100}, {tokens(2000, 50), 0}}, std::int64_t{1}) == 0);
    int a = 100, b = 150, c = 50;
    auto const three = [&] {
        std::vector<part> const parts{{{a}, a}, {{1000 + b}, b}, {{2000 + c}, c}};
        ++a, ++b, ++c;
        return both.difference(parts, std::int64_t{0});
    };
    // A piece of a prompt may be one token, so that the first step does not count as decoding.
    CHECK(three() == 0);
    CHECK(both.with.served() == 0);
    for (int i = 0; i < 4; ++i) { CHECK(three() < near_enough); }
    CHECK(both.with.served() == 2 * 2 * 4); // the third sequence is short
    for (int i = 0; i < 4; ++i, ++b)        // one of them alone
    {
        CHECK(both.difference(std::vector<part>{{{1000 + b}, b}}, std::int64_t{1}) < near_enough);
    }
    CHECK(both.with.served() == 2 * (2 * 4 + 4));
    // The second starts again with a prompt that differs by one token, beside the first.
    auto again = tokens(1000, 120);
    again[30]  = 9000;
    CHECK(both.difference(std::vector<part>{{tokens(a, 10), a}, {tokens(1000, 10), 0}}, std::int64_t{0}) < near_enough);
    a += 10;
    again.erase(again.begin(), again.begin() + 10);
    CHECK(both.difference(std::vector<part>{{again, 10}}, std::int64_t{1}) == 0);
    b = 120;
    for (int i = 0; i < 12; ++i) { CHECK(three() < near_enough); }
}

TEST_CASE("ggml: sequences whose cells are mixed in one cache are served each by itself")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    shared_cells cache;
    int sequences = 0;
    SUBCASE("two")
    {
        sequences = 2;
    }
    SUBCASE("four")
    {
        sequences = 4;
    }
    for (int s = 0; s < sequences; ++s) { CHECK(cache.feed(s, 1000 * s, 40) == 0); }
    for (int s = 0; s < sequences; ++s)
    {
        CHECK(cache.feed(s, 1000 * s + 40, 40) == 0);
    }                                  // second pieces of the prompts
    CHECK(cache.step(sequences) == 0); // a piece of a prompt may be one token
    for (int i = 0; i < 20; ++i) { CHECK(cache.step(sequences) < near_enough); }
    CHECK(cache.both.with.served() == 2 * 20 * sequences);
    CHECK(cache.feed(1, 5000, 1) < near_enough); // one alone
    CHECK(cache.feed(0, 5001, 5) < near_enough); // several tokens of one
    CHECK(cache.feed({{1, 5010}, {0, 5011}, {1, 5012}}) < near_enough);
    CHECK(cache.both.with.served() == 2 * (20 * sequences + 1 + 1 + 3));
}

TEST_CASE("ggml: tails of sequences that share cells are folded, and limits kept to")
{
    environment const settings{{{"MDKV_BUDGET", "60%"}, {"MDKV_MIN", "64"}, {"MDKV_TAIL", "16"}}};
    shared_cells cache;
    for (int s = 0; s < 3; ++s) { cache.feed(s, 1000 * s, 90); }
    CHECK(cache.step(3) == 0);
    float off = 0;
    for (int i = 0; i < 60; ++i)
    {
        off = cache.step(3);
        CHECK(off < 0.15F);
    }
    CHECK(off > 1e-4F); // they are compressed
    CHECK(cache.both.with.served() == 2 * 3 * 60);
}

TEST_CASE("ggml: a sequence is decoded beside another one's prompt, which passes through")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    shared_cells cache;
    cache.feed(0, 0, 100);
    for (int i = 0; i < 4; ++i) { CHECK(cache.feed(0, 100 + i, 1) < near_enough); }
    std::vector<shared_cells::token> mixed{{0, 104}};
    for (int i = 0; i < 70; ++i) { mixed.push_back({1, 1000 + i}); }
    CHECK(cache.feed(mixed) < near_enough);
    CHECK(cache.both.with.served() == 2 * 5);
    CHECK(cache.feed({{0, 105}, {1, 1070}}) < near_enough); // may be a piece of the prompt
    CHECK(cache.both.with.served() == 2 * 6);
    CHECK(cache.feed({{0, 106}, {1, 1071}}) < near_enough);
    CHECK(cache.both.with.served() == 2 * 8);
}

TEST_CASE("ggml: a sequence is cut or erased, and its cells are another one's from then on")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    shared_cells cache;
    for (int s = 0; s < 2; ++s) { cache.feed(s, 1000 * s, 100); }
    for (int i = 0; i < 10; ++i) { CHECK(cache.step(2) < near_enough); }
    auto const served = [&] { return cache.both.with.served(); };
    auto const until  = served();
    SUBCASE("within the tail")
    {
        cache.cut(0, 105);
        CHECK(cache.feed(1, 2000, 1) < near_enough); // takes a cell of the first
        CHECK(cache.feed(0, 3000, 1) < near_enough);
        for (int i = 0; i < 4; ++i) { CHECK(cache.step(2) < near_enough); }
        CHECK(served() == until + 2 * (1 + 1 + 8));
    }
    SUBCASE("within the compressed part")
    {
        cache.cut(0, 50);
        CHECK(cache.feed(1, 2000, 20) < near_enough); // takes cells of the first
        CHECK(cache.feed(0, 3000, 40) == 0);
        CHECK(cache.feed(0, 3040, 1) < near_enough);
        CHECK(served() == until + 2 * 2);
        for (int i = 0; i < 4; ++i) { CHECK(cache.step(2) < near_enough); }
        CHECK(served() == until + 2 * (2 + 8));
    }
    SUBCASE("all of it")
    {
        cache.cut(0, 0);
        CHECK(cache.feed(2, 2000, 90) == 0);
        CHECK(cache.feed(2, 2090, 1) < near_enough);
        CHECK(cache.feed(1, 2091, 1) < near_enough);
        CHECK(served() == until + 2 * 2);
        CHECK(cache.feed(0, 4000, 90) == 0); // it starts again elsewhere
        CHECK(cache.feed(0, 4090, 1) < near_enough);
        for (int i = 0; i < 4; ++i) { CHECK(cache.step(3) < near_enough); }
        CHECK(served() == until + 2 * (3 + 12));
    }
    SUBCASE("and cells run over the end of the cache")
    {
        cache.cut(0, 0);
        cache.start_from(450);
        CHECK(cache.feed(0, 4000, 120) == 0);
        for (int i = 0; i < 10; ++i) { CHECK(cache.feed(0, 4120 + i, 1) < near_enough); }
        CHECK(served() == until + 2 * 10);
        CHECK(cache.feed(1, 5000, 1) < near_enough);
    }
}

TEST_CASE("ggml: sequences that share the cells of their first tokens")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    shared_cells cache;
    auto const served = [&] { return cache.both.with.served(); };
    cache.feed(0, 0, 100);
    SUBCASE("copied before any is decoded")
    {
        cache.copy(0, 1);
        cache.copy(0, 2);
        for (int i = 0; i < 30; ++i) { CHECK(cache.step(3) < near_enough); }
        CHECK(served() > 2 * 3 * 15); // the copies have no queries at first
    }
    SUBCASE("copied from one that is decoded from its compressed cache")
    {
        for (int i = 0; i < 4; ++i) { CHECK(cache.feed(0, 100 + i, 1) < near_enough); }
        cache.copy(0, 1);
        for (int i = 0; i < 30; ++i) { CHECK(cache.step(2) < near_enough); }
        CHECK(served() > 2 * 2 * 20);
        cache.cut(1, 0); // its cells that are the other's, too, stay
        for (int i = 0; i < 4; ++i) { CHECK(cache.feed(0, 200 + i, 1) < near_enough); }
    }
    SUBCASE("and a part of them only")
    {
        for (int i = 0; i < 4; ++i) { CHECK(cache.feed(0, 100 + i, 1) < near_enough); }
        cache.copy(0, 1);
        cache.cut(1, 60);
        CHECK(cache.feed(1, 2000, 40) == 0);
        for (int i = 0; i < 20; ++i) { CHECK(cache.step(2) < near_enough); }
        CHECK(served() > 2 * 2 * 15);
    }
}

TEST_CASE("ggml: a sequence that is loaded into other cells is compressed when its own queries are there")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    shared_cells cache;
    for (int s = 0; s < 2; ++s) { cache.feed(s, 1000 * s, 100); }
    for (int i = 0; i < 10; ++i) { CHECK(cache.step(2) < near_enough); }
    cache.reload(0);
    auto const until = cache.both.with.served();
    for (int i = 0; i < 8; ++i) { CHECK(cache.step(2) < near_enough); }
    CHECK(cache.both.with.served() == until + 2 * 8);
    for (int i = 0; i < 8; ++i) { CHECK(cache.step(2) < near_enough); }
    CHECK(cache.both.with.served() == until + 2 * (8 + 16));
}

TEST_CASE("ggml: whatever befalls sequences that share cells, outputs are the CPU's")
{
    std::map<std::string, std::string> chosen{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "48"}};
    SUBCASE("prompts pass through")
    {}
    SUBCASE("prompts are compressed while they are read")
    {
        chosen.merge(std::map<std::string, std::string>{{"MDKV_READING", "1"}, {"MDKV_PRESET", "any_question"}});
    }
    SUBCASE("cells are given back")
    {
        chosen["MDKV_FREE"] = "1";
    }
    SUBCASE("prompts are compressed while they are read, and their cells given back")
    {
        chosen.merge(std::map<std::string, std::string>{
            {"MDKV_READING", "1"}, {"MDKV_PRESET", "any_question"}, {"MDKV_FREE", "1"}});
    }
    environment const settings{chosen};
    std::int64_t served = 0;
    for (unsigned const seed : {1U, 2U, 3U, 4U, 5U, 6U})
    {
        CAPTURE(seed);
        shared_cells cache;
        std::mt19937 random{seed};
        auto const below = [&](int end) { return static_cast<int>(random() % static_cast<unsigned>(end)); };
        int number       = 0;
        for (int round = 0; round < 120; ++round)
        {
            CAPTURE(round);
            int const one = below(5), other = (one + 1 + below(4)) % 5, action = below(20);
            if (cache.free_cells() < 140) { cache.cut(one, 0); }
            if (action == 0) { cache.cut(one, cache.tokens(one) - below(6)); }
            if (action == 1) { cache.cut(one, below(1 + cache.tokens(one))); }
            if (action == 2)
            {
                cache.cut(one, 0);
                cache.copy(other, one);
                if (below(2) == 0) { cache.cut(one, below(1 + cache.tokens(one))); }
            }
            if (action == 3 && cache.free_cells() > cache.tokens(one)) { cache.reload(one); }
            if (action == 4) { cache.start_from(below(512)); }
            std::vector<shared_cells::token> batch;
            for (int s = 0; s < 5; ++s)
            {
                if (cache.tokens(s) > 0 && below(4) > 0) { batch.push_back({s, ++number}); }
            }
            int const prompt = action > 15 ? 20 + below(50) : 0;
            for (int i = 0; i < prompt; ++i) { batch.push_back({one, ++number}); }
            if (!batch.empty()) { CHECK(cache.feed_or_erase(batch) < near_enough); }
        }
        served += cache.both.with.served();
    }
    CHECK(served > 1000);
    MESSAGE(served, " parts of nodes were served");
}

namespace
{

/// Settings with which a prompt is compressed while it is read.
std::map<std::string, std::string> reading(std::map<std::string, std::string> more = {})
{
    more.merge(std::map<std::string, std::string>{
        {"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}, {"MDKV_PRESET", "any_question"}, {"MDKV_READING", "1"}});
    return more;
}

} // namespace

TEST_CASE("ggml: a prompt is compressed while it is read, and outputs are the CPU's if everything fits")
{
    std::map<std::string, std::string> more;
    std::vector<layer_kind> kinds{{}, {}};
    SUBCASE("any_question")
    {}
    SUBCASE("best")
    {
        more["MDKV_PRESET"] = "best";
    }
    SUBCASE("cells are given back")
    {
        more["MDKV_FREE"] = "1";
    }
    SUBCASE("a limit in tokens")
    {
        more["MDKV_BUDGET"] = "400";
        more["MDKV_TAIL"]   = "32";
    }
    SUBCASE("a limit in bytes")
    {
        more["MDKV_BUDGET"] = "400KiB";
    }
    SUBCASE("sink logits, a scale of the model's own")
    {
        kinds[0].sinks = kinds[1].sinks = true;
        kinds[0].scale = kinds[1].scale = 0.2F;
    }
    SUBCASE("layers of two kinds, each with a reader of its own")
    {
        kinds = {{}, {.query_heads = 4}, {}};
    }
    SUBCASE("a layer that passes through")
    {
        kinds = {{.cells = 256}, {}, {}, {.cap = 30}};
    }
    SUBCASE("layers that share keys")
    {
        kinds = {{}, {.keys_of = 0}};
    }
    environment const settings{reading(more)};
    pair_of_engines both{kinds};
    auto const served = std::count_if(
        kinds.begin(), kinds.end(), [](layer_kind const& kind) { return kind.cells == 512 && kind.cap == 0; });
    CHECK(both.difference(77, 0) == 0); // the layers are known after it
    CHECK(both.difference(101, 77) < near_enough);
    CHECK(both.difference(5, 178) < near_enough);
    CHECK(both.with.served() == 2 * served);
    CHECK(both.with.cells_are_zero(178) == more.contains("MDKV_FREE"));
    for (int i = 0; i < 20; ++i) { CHECK(both.difference(1, 183 + i) < near_enough); }
    CHECK(both.difference(40, 203) < near_enough);
    CHECK(both.with.served() == (2 + 20 + 1) * served);
    CHECK(both.difference(100, 0) == 0); // another prompt
    CHECK(both.difference(50, 100) < near_enough);
    CHECK(both.difference(1, 150) < near_enough);
    CHECK(both.with.served() == (2 + 20 + 1 + 2) * served);
}

TEST_CASE("ggml: a prompt's bytes stay within limit, slack and a part while it is read")
{
    for (char const* const preset : {"best", "any_question"})
    {
        constexpr double limit = 255, cells = 2040, part = 512, token_bytes = 2 * heads * head_dim * 2, layers = 2;
        environment const settings{
            reading({{"MDKV_BUDGET", "12.5%"}, {"MDKV_FREE", "1"}, {"MDKV_VERBOSE", "1"}, {"MDKV_PRESET", preset}})};
        std::string const said = said_by([&] {
            pair_of_engines both{{{.cells = 2040}, {.cells = 2040}}};
            std::int64_t read = 0;
            for (std::int64_t const n : {300, 511, 3, 512, 130, 259})
            {
                auto const want = both.without.feed(n, read);
                float const off = root_mean_square(both.with.feed(n, read), want);
                CHECK(off < 0.8F * root_mean_square(want, std::vector<float>(want.size()))); // no key has a pattern
                CHECK(both.with.cells_are_zero(read));
                read += n;
            }
            for (int i = 0; i < 8; ++i) { CHECK_FALSE(both.with.feed(1, read + i).empty()); }
            CHECK(both.with.served() == layers * (5 + 8));
            CHECK(both.with.cells_are_zero(read));
        });
        CAPTURE(said);
        std::smatch line, reading_line;
        REQUIRE(std::regex_search(said, line, std::regex{"caches: ([0-9.]+) MiB of these at most"}));
        REQUIRE(std::regex_search(
            said, reading_line, std::regex{"read ([0-9]+) parts of prompts.* ([0-9.]+) MiB at most, with the parts"}));
        constexpr double each = layers * token_bytes / 0x1p20, losses = cells * heads * 6 * layers / 0x1p20;
        CHECK(std::stod(line[1]) <= limit * each + 0.005); // rounded
        CHECK(std::stod(reading_line[2]) <= (1.25 * limit + part) * each + losses);
        CHECK(std::stod(reading_line[2]) > limit * each);
    }
}

TEST_CASE("ggml: a prompt that is read and then cut, overwritten, or goes on without being seen")
{
    std::map<std::string, std::string> more;
    bool frees = false;
    SUBCASE("cells stay")
    {}
    SUBCASE("cells are given back")
    {
        frees             = true;
        more["MDKV_FREE"] = "1";
    }
    environment const settings{reading(more)};
    pair_of_engines both{{{}, {}}};
    both.difference(90, 0);
    CHECK(both.difference(60, 90) < near_enough);
    CHECK(both.difference(60, 150) < near_enough);
    // Passed through from cells that are there, and refused otherwise.
    auto const passes = [&](auto const&... arguments) {
        if (frees) { CHECK(both.with.feed(arguments...).empty()); }
        else { CHECK(both.difference(arguments...) == 0); }
    };
    auto const decodes_from = [&](std::int64_t at) {
        for (int i = 0; i < 12; ++i) { CHECK(both.difference(1, at + i) < near_enough); }
        CHECK(both.with.served() > 2 * 2);
    };
    SUBCASE("cut within the last part")
    {
        passes(20, 170);
        if (!frees) { decodes_from(190); }
    }
    SUBCASE("cut within the first part")
    {
        passes(80, 50);
        if (!frees) { decodes_from(130); }
    }
    SUBCASE("a state is loaded")
    {
        for (engine* const one : {&both.with, &both.without}) { one->load(210, 7); }
        passes(20, 210);
        if (!frees) { decodes_from(230); }
    }
    SUBCASE("a token is replaced")
    {
        for (engine* const one : {&both.with, &both.without}) { one->replace(170, 9000); }
        passes(20, 210);
        if (!frees) { decodes_from(230); }
    }
    SUBCASE("tokens come unseen")
    {
        for (engine* const one : {&both.with, &both.without}) { one->replace(210, 210); }
        CHECK(both.difference(20, 211) < near_enough);
        decodes_from(231);
    }
    SUBCASE("a graph ends early, and is computed again")
    {
        both.with.abort_after(2);
        CHECK(both.with.feed(20, 210).empty());
        both.with.abort_after(-1);
        CHECK(both.with.served() == 2 * 2 + 1);
        CHECK(both.difference(20, 210) < near_enough);
        decodes_from(230);
    }
    SUBCASE("tokens that see those after them")
    {
        std::vector<int> picture;
        for (int i = 0; i < 20; ++i) { picture.push_back(5000 + i); }
        auto const all = [](std::int64_t, std::int64_t cell) { return cell < 230; };
        passes(picture, std::int64_t{210}, all);
        if (!frees) { decodes_from(230); }
    }
}

TEST_CASE("ggml: a batch that is longer than those before ends the reading of a prompt")
{
    environment const settings{reading({{"MDKV_FREE", "1"}})};
    pair_of_engines both{{{.cells = 2048}, {.cells = 2048}}};
    both.difference(200, 0);
    CHECK(both.difference(100, 200) < near_enough);
    CHECK(both.difference(700, 300) < near_enough);
    for (int i = 0; i < 4; ++i) { CHECK(both.difference(1, 1000 + i) < near_enough); }
    CHECK(both.with.served() > 2 * 4);
}

TEST_CASE("ggml: prompts that are compressed before their end, or are shorter than any that is")
{
    std::map<std::string, std::string> more{{"MDKV_FREE", "1"}};
    SUBCASE("once some tokens are there")
    {
        more["MDKV_AT"] = "128";
        environment const settings{reading(more)};
        pair_of_engines both{{{}, {}}};
        both.difference(60, 0);
        CHECK(both.difference(60, 60) < near_enough);
        CHECK(both.difference(60, 120) < near_enough);
        CHECK_FALSE(both.with.cells_are_zero(120));
        CHECK(both.difference(60, 180) < near_enough);
        CHECK(both.with.cells_are_zero(180));
    }
    SUBCASE("one batch")
    {
        environment const settings{reading(more)};
        pair_of_engines both{{{}, {}}};
        both.difference(100, 0);
        for (int i = 0; i < 4; ++i) { CHECK(both.difference(1, 100 + i) < near_enough); }
        CHECK(both.with.served() == 2 * 4);
        CHECK(both.with.cells_are_zero(100));
    }
    SUBCASE("a first token alone")
    {
        environment const settings{reading(more)};
        pair_of_engines both{{{}, {}}};
        CHECK(both.difference(1, 0) == 0);
        CHECK(both.difference(99, 1) < near_enough);
        for (int i = 0; i < 4; ++i) { CHECK(both.difference(1, 100 + i) < near_enough); }
        CHECK(both.with.served() == 2 * 5);
    }
    SUBCASE("short")
    {
        environment const settings{reading(more)};
        pair_of_engines both{{{}, {}}};
        both.difference(20, 0);
        CHECK(both.difference(20, 20) < near_enough);
        for (int i = 0; i < 4; ++i) { CHECK(both.difference(1, 40 + i) == 0); }
        CHECK(both.difference(40, 44) < near_enough); // few enough that all queries are remembered
        for (int i = 0; i < 4; ++i) { CHECK(both.difference(1, 84 + i) < near_enough); }
        CHECK(both.with.served() > 2);
    }
}

TEST_CASE("ggml: presets that need the last queries cannot compress a prompt while it is read")
{
    environment const settings{reading({{"MDKV_PRESET", "by_window"}})};
    std::string const said =
        said_by([] { CHECK(ggml_backend_dev_init(ggml_backend_reg_dev_get(plugin(), 0), nullptr) == nullptr); });
    CHECK(said.find("MDKV_READING=1: MDKV_PRESET=by_window") != std::string::npos);
}

TEST_CASE("ggml: cells that several sequences may need are not given back")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}, {"MDKV_FREE", "1"}}};
    shared_cells cache;
    cache.feed(0, 0, 200);
    SUBCASE("they are the first one's alone")
    {
        cache.feed(1, 1000, 100);
        for (int i = 0; i < 20; ++i) { CHECK(cache.step(2) < near_enough); }
        CHECK(cache.both.with.cells_are_zero(200));
        cache.cut(0, 0);
        for (int i = 0; i < 4; ++i) { CHECK(cache.feed(1, 2000 + i, 1) < near_enough); }
        CHECK(cache.feed(2, 3000, 150) == 0); // into cells that were given back
        for (int i = 0; i < 4; ++i) { CHECK(cache.feed(2, 3150 + i, 1) < near_enough); }
        CHECK(cache.both.with.served() == 2 * (20 + 20 - 1 - 1 + 4 + 4));
    }
    SUBCASE("two have them")
    {
        cache.copy(0, 1);
        for (int i = 0; i < 20; ++i) { CHECK(cache.step(2) < near_enough); }
        CHECK_FALSE(cache.both.with.cells_are_zero(200));
    }
    SUBCASE("another one has them unseen")
    {
        for (int i = 0; i < 4; ++i) { CHECK(cache.feed(0, 200 + i, 1) < near_enough); }
        CHECK(cache.both.with.cells_are_zero(200));
        cache.copy(0, 1);
        cache.cut(1, 100);
        CHECK(cache.feed_one({{1, 3000}}).empty());
    }
}

TEST_CASE("ggml: one token is replaced while the backend is not asked, and each layer notices")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    pair_of_engines both{{{}, {}, {}}};
    both.difference(200, 0);
    for (int i = 0; i < 4; ++i) { both.difference(1, 200 + i); }
    for (engine* const one : {&both.with, &both.without}) { one->replace(37, 9000); }
    auto const served = both.with.served();
    for (int i = 0; i < 20; ++i) { CHECK(both.difference(1, 204 + i) < near_enough); }
    CHECK(both.with.served() > served); // compressed again
}

TEST_CASE("ggml: tokens of a state that is loaded are not scored by the queries of others")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}}};
    pair_of_engines both{{{}}};
    both.difference(200, 0);
    for (engine* const one : {&both.with, &both.without}) { one->load(200, 7); }
    for (int i = 0; i < 8; ++i) { CHECK(both.difference(1, 200 + i) == 0); }
    CHECK(both.with.served() == 0);
    CHECK(both.difference(1, 208) < near_enough); // by those of its own
    CHECK(both.with.served() == 1);
}

TEST_CASE("ggml: a layer that gave up tries again when there are more tokens")
{
    environment const settings{{{"MDKV_BUDGET", "16%"}, {"MDKV_MIN", "64"}}};
    pair_of_engines both{{{}}};
    both.difference(90, 0);
    CHECK(both.difference(1, 90) == 0); // its budget does not hold the tail
    both.difference(309, 91);
    both.difference(1, 400);
    CHECK(both.with.served() == 1);
}

TEST_CASE("ggml: layers that share keys have caches of their own")
{
    environment const settings{{{"MDKV_BUDGET", "30%"}, {"MDKV_MIN", "64"}, {"MDKV_TAIL", "0"}}};
    engine alone{{{}, {}}, true}; // its second layer reads the same numbers from cells of its own
    engine shared{{{}, {.keys_of = 0}}, true};
    for (engine* const one : {&alone, &shared}) { one->feed(200, 0); }
    for (int i = 0; i < 8; ++i)
    {
        auto const a = alone.feed(1, 200 + i), b = shared.feed(1, 200 + i);
        // The first layers are equal; the second ones have other keys here, and must not disturb the first.
        CHECK(std::equal(a.begin(), a.begin() + std::ssize(a) / 2, b.begin()));
    }
    CHECK(shared.served() == 16);
}

TEST_CASE("ggml: cells that two layers read are not given back")
{
    environment const settings{{{"MDKV_BUDGET", "100%"}, {"MDKV_MIN", "64"}, {"MDKV_FREE", "1"}}};
    pair_of_engines both{{{}, {.keys_of = 0}}};
    both.difference(256, 0);
    for (int i = 0; i < 4; ++i) { CHECK(both.difference(1, 256 + i) < near_enough); }
    CHECK_FALSE(both.with.cells_are_zero(200));
    CHECK(both.with.served() == 8);
}

TEST_CASE("ggml: a preset that cannot be had and a budget that holds nothing")
{
    SUBCASE("the settings are refused")
    {
        environment const settings{{{"MDKV_PRESET", "no_such"}}};
        CHECK(ggml_backend_dev_init(ggml_backend_reg_dev_get(plugin(), 0), nullptr) == nullptr);
    }
    SUBCASE("the layers pass through")
    {
        environment const settings{{{"MDKV_BUDGET", "20"}, {"MDKV_MIN", "64"}}};
        pair_of_engines both{{{}}};
        both.difference(200, 0);
        CHECK(both.difference(1, 200) == 0);
        CHECK(both.with.served() == 0);
    }
}
