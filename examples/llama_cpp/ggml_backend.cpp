/// \file ggml_backend.cpp: a backend of ggml that decodes from compressed KV caches, with its device and registry
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>

#include "engine_context.hpp"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "settings.hpp"

namespace mdkv_ggml
{
namespace
{

// --- a backend -------------------------------------------------------------------------------------------------------

char const* name_of(ggml_backend_t)
{
    return "MDKV";
}

void free_backend(ggml_backend_t backend)
{
    delete static_cast<context*>(backend->context);
    delete backend;
}

ggml_status compute_graph(ggml_backend_t backend, ggml_cgraph* graph)
{
    try
    {
        for (int i = 0; i < ggml_graph_n_nodes(graph); ++i)
        {
            ggml_tensor* const node = ggml_graph_node(graph, i);
            bool const computed     = (node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0; // views are not
            if (node->op != GGML_OP_FLASH_ATTN_EXT || !computed) { continue; }
            ggml_status const status = static_cast<context*>(backend->context)->compute(node);
            if (status != GGML_STATUS_SUCCESS) { return status; }
        }
        return GGML_STATUS_SUCCESS;
    }
    catch (std::exception const& error)
    {
        std::fprintf(stderr, "mdkv: error: %s\n", error.what());
        return GGML_STATUS_FAILED;
    }
}

void set_threads(ggml_backend_t backend, int threads)
{
    static_cast<context*>(backend->context)->set_threads(std::max(threads, 1));
}

/// Nodes that were computed from compressed caches: `std::int64_t (*)(ggml_backend_t)` by the name mdkv_served_nodes.
std::int64_t served_nodes(ggml_backend_t backend)
{
    return static_cast<context const*>(backend->context)->served();
}

// --- a device --------------------------------------------------------------------------------------------------------

char const* device_name(ggml_backend_dev_t)
{
    return "MDKV";
}

char const* device_description(ggml_backend_dev_t)
{
    return "attention over compressed KV caches";
}

void device_memory(ggml_backend_dev_t, std::size_t* free, std::size_t* total)
{
    *free = *total = 0; // the device has no memory of its own
}

enum ggml_backend_dev_type device_type(ggml_backend_dev_t)
{
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

void device_properties(ggml_backend_dev_t device, ggml_backend_dev_props* properties)
{
    properties->name        = device_name(device);
    properties->description = device_description(device);
    properties->type        = device_type(device);
    device_memory(device, &properties->memory_free, &properties->memory_total);
    properties->caps                      = {};
    properties->caps.buffer_from_host_ptr = true;
}

ggml_backend_t make_backend(ggml_backend_dev_t device, char const*)
{
    static ggml_guid guid = {
        0x6d, 0x64, 0x6b, 0x76, 0x2e, 0x67, 0x67, 0x6d, 0x6c, 0x2e, 0x62, 0x61, 0x63, 0x6b, 0x65, 0x6e};
    try
    {
        settings const chosen        = settings_from_environment();
        auto made                    = std::make_unique<context>(chosen);
        any_contexts                 = any_contexts || chosen.verbosity > 0;
        auto backend                 = std::make_unique<ggml_backend>();
        backend->guid                = &guid;
        backend->device              = device;
        backend->context             = made.release();
        backend->iface               = {};
        backend->iface.get_name      = name_of;
        backend->iface.free          = free_backend;
        backend->iface.graph_compute = compute_graph;
        return backend.release();
    }
    catch (std::exception const& error)
    {
        std::fprintf(stderr, "mdkv: error: %s\n", error.what());
        return nullptr;
    }
}

ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t)
{
    return ggml_backend_cpu_buffer_type();
}

ggml_backend_buffer_t buffer_from(ggml_backend_dev_t, void* data, std::size_t size, std::size_t)
{
    return ggml_backend_cpu_buffer_from_ptr(data, size);
}

/// Supports views, and all attention that the engine's own code can compute: nodes that cannot be served are passed on to
/// that code, and counted.
bool supports_node(ggml_backend_dev_t, ggml_tensor const* node)
{
    switch (node->op)
    {
        case GGML_OP_NONE:
        case GGML_OP_RESHAPE:
        case GGML_OP_VIEW:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
            return true;
        case GGML_OP_FLASH_ATTN_EXT:
        {
            ggml_backend_dev_t const cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
            return cpu != nullptr && ggml_backend_dev_supports_op(cpu, node);
        }
        default:
            return false;
    }
}

bool supports_buffers(ggml_backend_dev_t, ggml_backend_buffer_type_t type)
{
    return ggml_backend_buft_is_host(type);
}

// --- the registry ----------------------------------------------------------------------------------------------------

char const* registry_name(ggml_backend_reg_t)
{
    return "MDKV";
}

std::size_t device_count(ggml_backend_reg_t)
{
    return 1;
}

ggml_backend_dev_t device_of(ggml_backend_reg_t registry, std::size_t)
{
    static ggml_backend_device device = [&] {
        ggml_backend_device made{};
        made.iface.get_name             = device_name;
        made.iface.get_description      = device_description;
        made.iface.get_memory           = device_memory;
        made.iface.get_type             = device_type;
        made.iface.get_props            = device_properties;
        made.iface.init_backend         = make_backend;
        made.iface.get_buffer_type      = buffer_type;
        made.iface.buffer_from_host_ptr = buffer_from;
        made.iface.supports_op          = supports_node;
        made.iface.supports_buft        = supports_buffers;
        made.reg                        = registry;
        return made;
    }();
    return &device;
}

void* function_of(ggml_backend_reg_t, char const* name)
{
    if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) { return reinterpret_cast<void*>(set_threads); }
    if (std::strcmp(name, "mdkv_served_nodes") == 0) { return reinterpret_cast<void*>(served_nodes); }
    return nullptr;
}

/// The registry; null, after a message, if the environment's settings are wrong. Every context reads the settings anew.
ggml_backend_reg_t registry()
{
    static ggml_backend_reg made{
        GGML_BACKEND_API_VERSION, {registry_name, device_count, device_of, function_of}, nullptr};
    try
    {
        static_cast<void>(settings_from_environment());
        return &made;
    }
    catch (std::exception const& error)
    {
        std::fprintf(stderr, "mdkv: error: %s\n", error.what());
        return nullptr;
    }
}

} // namespace
} // namespace mdkv_ggml

#define MDKV_GGML_EXPORT extern "C" __attribute__((visibility("default")))

/// The function that ggml's loader looks for, e.g. if GGML_BACKEND_PATH names this library.
MDKV_GGML_EXPORT ggml_backend_reg_t ggml_backend_init()
{
    return mdkv_ggml::registry();
}

/// For programs that load the library themselves. Returns whether it can be used.
MDKV_GGML_EXPORT bool mdkv_ggml_register()
{
    ggml_backend_reg_t const registry = mdkv_ggml::registry();
    ggml_backend_register(registry); // ignores null
    return registry != nullptr;
}

namespace
{

/// LD_PRELOAD is for programs that have their backends linked in and look for no others.
[[gnu::constructor]] void register_where_preloaded()
{
    char const* const preloaded = std::getenv("LD_PRELOAD");
    if (preloaded != nullptr && std::strstr(preloaded, "libggml-mdkv.so") != nullptr) { mdkv_ggml_register(); }
}

} // namespace
