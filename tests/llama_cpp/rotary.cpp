// The encoding that is read from a graph, beside ggml's own: queries at their positions, turned, are those that ggml encodes at
// later positions, to the rounding of its angles, which are floats.
#include <doctest/doctest.h>

#include <mdkv/core/types.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/replay/replay.hpp>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "llama_cpp/rotary_of_node.hpp"
#include "support/host.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace
{

constexpr std::int64_t dim = 64, heads = 3, tokens = 20;

struct rope
{
    int mode     = GGML_ROPE_TYPE_NORMAL;
    int rotating = 64;
    float base   = 10000;
    float scale  = 1;
    float yarn   = 0; ///< ext_factor
    bool factors = false;
    bool scaled  = false; ///< by a node after it
};

struct encoded
{
    std::vector<float> rows; ///< [tokens, heads, dim]
    mdkv_ggml::node_rotation rotation;
};

encoded encode(rope const& how, int first)
{
    ggml_context* const c      = ggml_init({64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true});
    ggml_tensor* const plain   = ggml_new_tensor_3d(c, GGML_TYPE_F32, dim, heads, tokens);
    bool const sections        = how.mode == GGML_ROPE_TYPE_MROPE;
    ggml_tensor* const places  = ggml_new_tensor_1d(c, GGML_TYPE_I32, sections ? 4 * tokens : tokens);
    ggml_tensor* const factors = how.factors ? ggml_new_tensor_1d(c, GGML_TYPE_F32, how.rotating / 2) : nullptr;
    int each[GGML_MROPE_SECTIONS]{8, 12, 12, 0};
    ggml_tensor* turned = sections ? ggml_rope_multi(c, plain, places, factors, how.rotating, each, how.mode, 4096,
                              how.base, how.scale, how.yarn, 1, 32, 1)
                                   : ggml_rope_ext(c, plain, places, factors, how.rotating, how.mode, 4096, how.base,
                                       how.scale, how.yarn, 1, 32, 1);
    if (how.scaled) { turned = ggml_scale(c, turned, 2); }
    ggml_tensor* const queries = ggml_permute(c, turned, 0, 2, 1, 3);
    ggml_cgraph* const graph   = ggml_new_graph(c);
    ggml_build_forward_expand(graph, turned);
    ggml_backend_t const cpu           = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    ggml_backend_buffer_t const memory = ggml_backend_alloc_ctx_tensors(c, cpu);
    std::vector<float> rows;
    for (std::int64_t i = 0; i < dim * heads * tokens; ++i) { rows.push_back(std::sin(static_cast<float>(7 * i + 1))); }
    std::vector<std::int32_t> at;
    for (int i = 0; i < (sections ? 4 : 1) * tokens; ++i) { at.push_back(first + i % static_cast<int>(tokens)); }
    ggml_backend_tensor_set(plain, rows.data(), 0, ggml_nbytes(plain));
    ggml_backend_tensor_set(places, at.data(), 0, ggml_nbytes(places));
    std::vector<float> f;
    for (int i = 0; how.factors && i < how.rotating / 2; ++i) { f.push_back(1 + 0.25F * static_cast<float>(i % 5)); }
    if (how.factors) { ggml_backend_tensor_set(factors, f.data(), 0, ggml_nbytes(factors)); }
    REQUIRE(ggml_backend_graph_compute(cpu, graph) == GGML_STATUS_SUCCESS);
    ggml_backend_tensor_get(turned, rows.data(), 0, ggml_nbytes(turned));
    ggml_tensor node{};
    node.src[0] = queries;
    encoded made{rows, mdkv_ggml::rotation_of({&node})};
    ggml_backend_buffer_free(memory);
    ggml_backend_free(cpu);
    ggml_free(c);
    return made;
}

} // namespace

TEST_CASE("ggml: the position encoding that is read from a graph turns queries as ggml does")
{
    for (rope const& how : {rope{}, rope{.mode = GGML_ROPE_TYPE_NEOX, .base = 5e5F}, rope{.rotating = 32},
             rope{.mode = GGML_ROPE_TYPE_NEOX, .rotating = 48, .factors = true}, rope{.scale = 0.25F},
             rope{.scale = 0.25F, .yarn = 1}, rope{.mode = GGML_ROPE_TYPE_MROPE, .base = 1e6F}, rope{.scaled = true}})
    {
        CAPTURE(how.mode);
        CAPTURE(how.rotating);
        CAPTURE(how.yarn);
        constexpr int ahead = 1000;
        auto const before   = encode(how, 5);
        auto const after    = encode(how, 5 + ahead);
        REQUIRE_FALSE(before.rotation.none());
        std::vector<float> got(before.rows.size());
        support::run([&](mdkv::cpu::backend const& on) {
            mdkv::advance(on, mdkv::in(on, before.rows.data(), {heads, tokens, dim}, {dim, heads * dim, 1}), ahead,
                before.rotation.encoding(on), mdkv::out(on, got.data(), {heads, tokens, dim}, {dim, heads * dim, 1}));
        });
        float most = 0;
        for (std::size_t i = 0; i < got.size(); ++i) { most = std::max(most, std::fabs(got[i] - after.rows[i])); }
        CHECK(most < 1e-3F); // 1,000 radians are rounded to 2^-15
    }
}

TEST_CASE("ggml: queries that are not rotated, or in a way that is not known, have no encoding")
{
    ggml_context* const c    = ggml_init({16 * ggml_tensor_overhead(), nullptr, true});
    ggml_tensor* const plain = ggml_new_tensor_3d(c, GGML_TYPE_F32, dim, heads, tokens);
    ggml_tensor node{};
    node.src[0] = ggml_permute(c, plain, 0, 2, 1, 3);
    CHECK(mdkv_ggml::rotation_of({&node}).none());
    ggml_tensor* const places = ggml_new_tensor_1d(c, GGML_TYPE_I32, 4 * tokens);
    int sections[GGML_MROPE_SECTIONS]{8, 8, 8, 8};
    ggml_tensor* const turned =
        ggml_rope_multi(c, plain, places, nullptr, 32, sections, GGML_ROPE_TYPE_VISION, 4096, 1e4F, 1, 0, 1, 32, 1);
    node.src[0] = ggml_rms_norm(c, turned, 1e-6F);
    CHECK(mdkv_ggml::rotation_of({&node}).none());
    node.src[0] = turned;
    CHECK(mdkv_ggml::rotation_of({&node}).none());
    ggml_free(c);
}
