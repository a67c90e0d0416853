/// \file ggml_rival.hpp: ggml's attention on a CPU: ggml_flash_attn_ext, or two products with a softmax between them
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <memory_resource>
#include <string>
#include <utility>
#include <vector>

#include <ggml-cpu.h>
#include <ggml.h>

#include "rival.hpp"

namespace peers
{

template <auto Free>
struct freed_by
{
    template <class T>
    void operator()(T* x) const noexcept
    {
        Free(x);
    }
};

/// Rows of halves as another type of ggml's.
inline void write_as(ggml_type type, half const* from, index_t count, std::byte* to)
{
    if (type == GGML_TYPE_F16)
    {
        std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(half));
        return;
    }
    constexpr index_t block = 1024 * dim;
    std::vector<float> floats(static_cast<std::size_t>(block));
    for (index_t i = 0; i < count; i += block)
    {
        index_t const n = std::min(block, count - i);
        ggml_fp16_to_fp32_row(reinterpret_cast<ggml_fp16_t const*>(from + i), floats.data(), n);
        to += ggml_quantize_chunk(type, floats.data(), to, 0, n / dim, dim, nullptr);
    }
}

inline constexpr index_t waking_tokens = 512; // ggml shares fewer among threads in another way

/// ggml's own threads, shared by all its rivals. They poll for work between begin_turn and end_turn and sleep otherwise.
class ggml_threads
{
public:
    void resize(int threads)
    {
        if (count_ == threads) { return; }
        count_                        = threads;
        ggml_threadpool_params params = ggml_threadpool_params_default(threads);
        params.paused                 = true;
        pool_.reset(); // ends the old threads first
        apart const them;
        pool_.reset(ggml_threadpool_new(&params));
        if (pool_ == nullptr) { fail("ggml makes no threads"); }
    }
    [[nodiscard]] ggml_threadpool* get() const { return pool_.get(); }

private:
    int count_ = 0;
    std::unique_ptr<ggml_threadpool, freed_by<ggml_threadpool_free>> pool_;
};

/// Which of ggml's two ways to attend. A product of all four queries of a head reads its keys once.
enum class by : std::uint8_t
{
    flash_attention,
    products
};

class ggml_rival final : public rival
{
public:
    ggml_rival(std::string name_, source const& from, ggml_type type, by way, std::shared_ptr<ggml_threads> threads)
        : rival{std::move(name_), 2 * half_of(from, type)}
        , type_{type}
        , way_{way}
        , tokens_{from.tokens}
        , threads_{std::move(threads)}
        , queries_{from.queries}
        , output_(queries_.size())
        , between_(way == by::products ? static_cast<std::size_t>(2 * rows * from.tokens) : 0)
    {
        index_t const count = layers_beyond_caches(bytes);
        for (index_t i = 0; i < count; ++i) { layers_.emplace_back(static_cast<std::size_t>(bytes), &bench::memory()); }
        std::byte* const first = layers_[0].data();
        write_as(type, from.keys(), from.count(), first);
        if (way == by::products) { write_transposed(from, reinterpret_cast<half*>(first + bytes / 2)); }
        else { write_as(type, from.values(), from.count(), first + bytes / 2); }
        for (auto l = layers_.begin() + 1; l != layers_.end(); ++l) { std::memcpy(l->data(), first, l->size()); }
    }

    void use_threads(mdkv::cpu::thread_pool& as_many) override
    {
        int const threads = as_many.threads();
        threads_->resize(threads);
        ready_.clear();
        context_.reset(
            ggml_init({(layers_.size() + 1) * 8 * (ggml_tensor_overhead() + ggml_graph_overhead()), nullptr, true}));
        for (auto& memory : layers_) { ready_.push_back(planned(memory.data(), tokens_, threads)); }
        ready_.push_back(planned(layers_[0].data(), waking_tokens, threads));
        std::size_t work = 0;
        for (auto const& one : ready_) { work = std::max(work, one.plan.work_size); }
        work_.resize(work + 64);
        for (auto& one : ready_) { one.plan.work_data = reinterpret_cast<std::uint8_t*>(work_.data()); }
    }
    void begin_turn() override
    {
        ggml_threadpool_resume(threads_->get());
        attend_to(layers_.size());
    }
    void end_turn() override { ggml_threadpool_pause(threads_->get()); }
    void attend_to(std::size_t l) override
    {
        if (ggml_graph_compute(ready_[l].graph, &ready_[l].plan) != GGML_STATUS_SUCCESS)
        {
            fail("ggml does not compute");
        }
    }
    [[nodiscard]] std::size_t layers() const override { return layers_.size(); }
    [[nodiscard]] std::byte const* memory(std::size_t l) const override { return layers_[l].data(); }
    [[nodiscard]] std::vector<float> const& output() const override { return output_; }

private:
    struct ready
    {
        ggml_cgraph* graph;
        ggml_cplan plan;
    };

    [[nodiscard]] static index_t half_of(source const& from, ggml_type type)
    {
        return heads * from.tokens * static_cast<index_t>(ggml_row_size(type, dim));
    }

    /// Values as [H, D, N], whose rows a product with the probabilities goes along.
    void write_transposed(source const& from, half* to) const
    {
        for (index_t h = 0; h < heads; ++h)
        {
            half const* const values = from.values() + h * tokens_ * dim;
            for (index_t i = 0; i < tokens_; ++i)
            {
                for (index_t d = 0; d < dim; ++d) { to[(h * dim + d) * tokens_ + i] = values[i * dim + d]; }
            }
        }
    }

    [[nodiscard]] ready planned(std::byte* memory, index_t tokens, int threads)
    {
        ggml_context* const c   = context_.get();
        float const scale       = 1.0F / std::sqrt(static_cast<float>(dim));
        ggml_tensor* const k    = ggml_new_tensor_3d(c, type_, dim, tokens, heads);
        k->data                 = memory;
        std::byte* const v_data = memory + bytes / 2;
        ggml_tensor* result     = nullptr;
        if (way_ == by::flash_attention)
        {
            ggml_tensor* const q = ggml_new_tensor_3d(c, GGML_TYPE_F32, dim, 1, rows);
            ggml_tensor* const v = ggml_new_tensor_3d(c, type_, dim, tokens, heads);
            q->data              = queries_.data();
            v->data              = v_data;
            result               = ggml_flash_attn_ext(c, q, k, v, nullptr, scale, 0.0F, 0.0F);
        }
        else
        {
            ggml_tensor* const q = ggml_new_tensor_3d(c, GGML_TYPE_F32, dim, group, heads);
            ggml_tensor* const v = ggml_new_tensor_3d(c, type_, tokens, dim, heads);
            q->data              = queries_.data();
            v->data              = v_data;
            ggml_tensor* const s = ggml_mul_mat(c, k, q);
            s->data              = between_.data();
            ggml_tensor* const p = ggml_soft_max_ext(c, s, nullptr, scale, 0.0F);
            p->data              = between_.data() + rows * tokens;
            result               = ggml_mul_mat(c, v, p);
        }
        result->data = output_.data();
        ready made{ggml_new_graph_custom(c, 16, false), {}};
        ggml_build_forward_expand(made.graph, result);
        made.plan = ggml_graph_plan(made.graph, threads, threads_->get());
        return made;
    }

    ggml_type type_;
    by way_;
    index_t tokens_;
    std::shared_ptr<ggml_threads> threads_;
    std::vector<std::pmr::vector<std::byte>> layers_; // each keys, then values
    std::vector<float> queries_;
    std::vector<float> output_;
    std::vector<float> between_; // logits and probabilities
    std::unique_ptr<ggml_context, freed_by<ggml_free>> context_;
    std::vector<std::byte> work_;
    std::vector<ready> ready_; // one for each layer, and a short one that wakes the threads
};

} // namespace peers
