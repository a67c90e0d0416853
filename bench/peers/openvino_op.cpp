/// \file openvino_op.cpp: an operation of OpenVINO's that holds keys and values itself: a probe, one sequence, one thread
// It copies the engine's attention, or decodes from a cache that mdkv compresses. openvino_op.py compiles and measures it.
#include <mdkv/mdkv.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/op/assign.hpp>
#include <openvino/op/op.hpp>
#include <openvino/openvino.hpp>

using mdkv::half;
using mdkv::index_t;
using host = mdkv::cpu::backend;

namespace
{
constexpr index_t last = 64; // queries that score
double packing_seconds = 0, evaluation_seconds = 0;

double now()
{
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// One layer of the sequence: keys and values, [H, capacity, D], until they are compressed, and the prompt's last queries.
struct layer_state
{
    std::vector<float> keys, values, queries;
    index_t tokens = 0, capacity = 0;
    mdkv::cpu::cache<half> cache;
    bool compressed = false;

    void grow(index_t heads, index_t more, index_t dim)
    {
        if (tokens + more <= capacity) { return; }
        index_t const room = std::max({2 * capacity, tokens + more, index_t{1024}});
        for (auto* rows : {&keys, &values})
        {
            std::vector<float> moved(static_cast<std::size_t>(heads * room * dim));
            for (index_t h = 0; h < heads; ++h)
            {
                std::copy_n(rows->begin() + h * capacity * dim, tokens * dim, moved.begin() + h * room * dim);
            }
            rows->swap(moved);
        }
        capacity = room;
    }
};

/// Causal attention of t queries, [H*G, t, D], the last of all tokens.
void attend_fully(
    layer_state const& layer, float const* queries, index_t heads, index_t group, index_t t, index_t dim, float* output)
{
    float const scale = 1.0F / std::sqrt(static_cast<float>(dim));
    std::vector<float> weights(static_cast<std::size_t>(group * layer.tokens));
    for (index_t h = 0; h < heads; ++h)
    {
        float const* const keys   = &layer.keys[static_cast<std::size_t>(h * layer.capacity * dim)];
        float const* const values = &layer.values[static_cast<std::size_t>(h * layer.capacity * dim)];
        for (index_t i = 0; i < t; ++i)
        {
            index_t const seen = layer.tokens - t + i + 1;
            for (index_t j = 0; j < seen; ++j)
            {
                for (index_t g = 0; g < group; ++g)
                {
                    float const* const query = queries + ((h * group + g) * t + i) * dim;
                    float dot                = 0;
#pragma omp simd reduction(+ : dot)
                    for (index_t d = 0; d < dim; ++d) { dot += query[d] * keys[j * dim + d]; }
                    weights[static_cast<std::size_t>(g * seen + j)] = dot * scale;
                }
            }
            for (index_t g = 0; g < group; ++g)
            {
                float* const weight = &weights[static_cast<std::size_t>(g * seen)];
                float const most    = *std::max_element(weight, weight + seen);
                float total         = 0;
                for (index_t j = 0; j < seen; ++j) { total += weight[j] = std::exp(weight[j] - most); }
                for (index_t j = 0; j < seen; ++j) { weight[j] /= total; }
                std::fill_n(output + ((h * group + g) * t + i) * dim, dim, 0.0F);
            }
            for (index_t j = 0; j < seen; ++j)
            {
                for (index_t g = 0; g < group; ++g)
                {
                    float const weight = weights[static_cast<std::size_t>(g * seen + j)];
                    float* const sum   = output + ((h * group + g) * t + i) * dim;
#pragma omp simd
                    for (index_t d = 0; d < dim; ++d) { sum[d] += weight * values[j * dim + d]; }
                }
            }
        }
    }
}

std::vector<half> halves(float const* rows, index_t heads, index_t stride, index_t count)
{
    std::vector<half> result(static_cast<std::size_t>(heads * count));
    for (index_t h = 0; h < heads; ++h)
    {
        std::transform(rows + h * stride, rows + h * stride + count, result.begin() + h * count, mdkv::narrow<half>);
    }
    return result;
}

/// Inputs: queries [1, H*G, t, D], keys and values [1, H, t, D] of t new tokens after position encoding, and the attention mask,
/// [1, tokens so far]. A mask of t tokens begins a sequence.
class held_attention : public ov::op::Op
{
public:
    OPENVINO_OP("HeldAttention", "mdkv_probe");

    held_attention() = default;
    held_attention(ov::OutputVector const& arguments, double bytes)
        : Op(arguments)
        , share(bytes)
    {
        constructor_validate_and_infer_types();
    }
    void validate_and_infer_types() override
    {
        set_output_type(0, get_input_element_type(0), get_input_partial_shape(0));
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(ov::OutputVector const& arguments) const override
    {
        return std::make_shared<held_attention>(arguments, share);
    }
    bool visit_attributes(ov::AttributeVisitor& visitor) override
    {
        visitor.on_attribute("share", share);
        return true;
    }
    bool has_evaluate() const override { return true; }
    bool evaluate(ov::TensorVector& outputs, ov::TensorVector const& inputs) const override
    {
        double const begin = now();
        try // OpenVINO would take an exception for an operation that it has to evaluate in another way
        {
            outputs[0].set_shape(inputs[0].get_shape());
            step(inputs, outputs[0].data<float>());
        }
        catch (std::exception const& error)
        {
            std::fprintf(stderr, "openvino_op: %s\n", error.what());
            std::terminate();
        }
        evaluation_seconds += now() - begin;
        return true;
    }

private:
    double share                       = 0; // of the bytes; 0: nothing is compressed
    std::shared_ptr<layer_state> state = std::make_shared<layer_state>();

    void step(ov::TensorVector const& inputs, float* output) const
    {
        auto const shape          = inputs[0].get_shape();
        index_t const query_heads = static_cast<index_t>(shape[1]), t = static_cast<index_t>(shape[2]),
                      dim          = static_cast<index_t>(shape[3]);
        index_t const heads        = static_cast<index_t>(inputs[1].get_shape()[1]);
        float const* const queries = inputs[0].data<float const>();
        float const* const keys    = inputs[1].data<float const>();
        float const* const values  = inputs[2].data<float const>();
        layer_state& layer         = *state;
        if (static_cast<index_t>(inputs[3].get_shape()[1]) == t) { layer = {}; }
        static mdkv::workspace scratch{mdkv::cpu::host_memory{}};
        host const on{&scratch};
        if (t == 1 && share > 0 && layer.tokens >= last)
        {
            if (!layer.compressed) { compress(on, query_heads, heads, dim); }
            auto const key = halves(keys, heads, dim, dim), value = halves(values, heads, dim, dim);
            std::vector<float> lse(static_cast<std::size_t>(query_heads));
            mdkv::append(on, mdkv::in(on, key.data(), heads, dim), mdkv::in(on, value.data(), heads, dim), layer.cache);
            mdkv::attend(on, mdkv::in(on, queries, query_heads, dim), layer.cache, {},
                mdkv::out(on, output, query_heads, dim), mdkv::out(on, lse.data(), query_heads));
            return;
        }
        layer.grow(heads, t, dim);
        for (index_t h = 0; h < heads; ++h)
        {
            index_t const to = (h * layer.capacity + layer.tokens) * dim;
            std::copy_n(keys + h * t * dim, t * dim, layer.keys.begin() + to);
            std::copy_n(values + h * t * dim, t * dim, layer.values.begin() + to);
        }
        layer.tokens += t;
        if (t >= last)
        {
            layer.queries.resize(static_cast<std::size_t>(query_heads * last * dim));
            for (index_t h = 0; h < query_heads; ++h)
            {
                std::copy_n(queries + (h * t + t - last) * dim, last * dim, layer.queries.begin() + h * last * dim);
            }
        }
        attend_fully(layer, queries, heads, query_heads / heads, t, dim, output);
    }

    void compress(host const& on, index_t query_heads, index_t heads, index_t dim) const
    {
        double const begin = now();
        layer_state& layer = *state;
        auto const keys    = halves(layer.keys.data(), heads, layer.capacity * dim, layer.tokens * dim);
        auto const values  = halves(layer.values.data(), heads, layer.capacity * dim, layer.tokens * dim);
        mdkv::prompt_rows<host, half, float> const rows{mdkv::in(on, layer.queries.data(), query_heads, last, dim),
            mdkv::in(on, keys.data(), heads, layer.tokens, dim), mdkv::in(on, values.data(), heads, layer.tokens, dim)};
        mdkv::compress(on, rows, mdkv::presets::by_window,
            mdkv::budget::fraction(static_cast<index_t>(share * 1000), 1000), layer.cache);
        layer.cache.reserve_tail(1024);
        layer.keys = layer.values = layer.queries = {};
        layer.compressed                          = true;
        packing_seconds += now() - begin;
    }
};

/// The keys or values of new tokens alone: up to where the engine's state is joined with them.
ov::Output<ov::Node> of_new_tokens(ov::Output<ov::Node> from)
{
    auto node = from.get_node_shared_ptr();
    while (std::string{node->get_type_name()} != "Concat"
           || std::string{node->input_value(0).get_node()->get_type_name()} != "Gather")
    {
        node = node->input_value(0).get_node_shared_ptr();
    }
    return node->input_value(1);
}
} // namespace

/// Writes a model whose attention is held_attention. Returns how many operations were replaced.
extern "C" int replace_attention(char const* from, char const* to, double share)
{
    auto const model = ov::Core{}.read_model(from);
    int replaced     = 0;
    for (auto const& node : model->get_ordered_ops())
    {
        if (std::string{node->get_type_name()} != "ScaledDotProductAttention") { continue; }
        auto const held =
            std::make_shared<held_attention>(ov::OutputVector{node->input_value(0), of_new_tokens(node->input_value(1)),
                                                 of_new_tokens(node->input_value(2)), model->input("attention_mask")},
                share);
        ov::replace_node(node, held);
        ++replaced;
    }
    for (auto const& sink : ov::SinkVector{model->get_sinks()})
    {
        auto const state = std::dynamic_pointer_cast<ov::op::util::AssignBase>(sink);
        model->remove_sink(sink);
        if (state) { model->remove_variable(model->get_variable_by_id(state->get_variable_id())); }
    }
    ov::save_model(model, to, false);
    return replaced;
}

/// Seconds since the last call: of all operations, packing included, or of packing alone.
extern "C" double evaluation()
{
    return std::exchange(evaluation_seconds, 0);
}
extern "C" double packing()
{
    return std::exchange(packing_seconds, 0);
}

OPENVINO_CREATE_EXTENSIONS(std::vector<ov::Extension::Ptr>{std::make_shared<ov::OpExtension<held_attention>>()})
