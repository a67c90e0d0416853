/// \file own_code.hpp: single nodes computed by the engine's own code
#pragma once

#include <mdkv/core/error.hpp>

#include <memory>

#include "ggml-backend.h"
#include "ggml.h"

namespace mdkv_ggml
{

class own_code
{
public:
    own_code()
        : backend_{ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr)}
        , context_{ggml_init({ggml_graph_overhead_custom(1, false) + ggml_tensor_overhead(), nullptr, true})}
        , graph_{ggml_new_graph_custom(context_.get(), 1, false)}
    {
        mdkv::expects(backend_ != nullptr, "there is no CPU backend to pass nodes to");
    }

    [[nodiscard]] ggml_status compute(ggml_tensor* node) const
    {
        ggml_graph_clear(graph_);
        ggml_graph_add_node(graph_, node);
        return ggml_backend_graph_compute(backend_.get(), graph_);
    }

    void set_threads(int threads) const
    {
        auto* const registry = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend_.get()));
        auto* const set      = reinterpret_cast<ggml_backend_set_n_threads_t>(
            ggml_backend_reg_get_proc_address(registry, "ggml_backend_set_n_threads"));
        if (set != nullptr) { set(backend_.get(), threads); }
    }

private:
    struct release
    {
        void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); }
        void operator()(ggml_context* context) const { ggml_free(context); }
    };
    std::unique_ptr<ggml_backend, release> backend_;
    std::unique_ptr<ggml_context, release> context_;
    ggml_cgraph* graph_;
};

} // namespace mdkv_ggml
