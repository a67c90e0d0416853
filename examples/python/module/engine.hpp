/// \file engine.hpp: what the module knows of prompts and caches: calls on tensors, behind which lie element type and device
#pragma once

#include <mdkv/compress.hpp>
#include <mdkv/core/allocation.hpp>
#include <mdkv/core/budget.hpp>
#include <mdkv/core/cache.hpp>
#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/presets.hpp>
#include <mdkv/reader.hpp>
#include <mdkv/recompress.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "turn_lock.hpp"

namespace mdkv_python
{

using mdkv::index_t;

class host;   // host.hpp
class device; // device.cuh, in a build with CUDA

/// A tensor with the members of DLPack's DLTensor, which mdkv::in and mdkv::out take.
struct tensor
{
    void* data = nullptr;
    int ndim   = 0;
    std::int64_t const* shape{};
    std::int64_t const* strides{};
    std::uint64_t byte_offset = 0;
    struct
    {
        std::uint8_t code, bits;
        std::uint16_t lanes;
    } dtype{};
    struct
    {
        int device_type, device_id;
    } device{};
};

/// Queries, keys and values of a layer, and the log-sum-exps of the queries.
struct rows
{
    tensor queries, keys, values;
    std::optional<tensor> lse;
    std::optional<tensor> sink_logits; ///< [H*G]
};

/// A model's rotary position encoding: see mdkv::rotary_encoding.
struct rope
{
    double base              = 10000;
    index_t rotating         = 0;
    mdkv::rotary_pairs pairs = mdkv::rotary_pairs::halves;
    std::vector<double> frequencies;
};

/// Sizes of a prompt and of the model that reads it.
struct prompt_sizes
{
    index_t layers, heads, group;
    mdkv::head_dims dims;
    index_t tokens;
    rope encoding;
    bool check_finite;
    mdkv::ranks const* ranks = nullptr; ///< outlive the prompt; null: all heads are here
};

/// What a layer's cache is.
struct layer_facts
{
    index_t heads = 0;
    mdkv::head_dims dims{};
    index_t element_bytes = 0;
    index_t read          = 0; ///< tokens of the compressed part's text, dropped ones included
    index_t appended      = 0; ///< tokens of the tail
    index_t window        = 0; ///< last tokens of the compressed part, which stay as they are
    index_t arena         = 0; ///< bytes
    index_t tail          = 0; ///< bytes
    index_t directory     = 0; ///< bytes
    index_t fold_limit    = 0; ///< bytes
    bool on_host          = true;
    mdkv::ratio_set ratios{mdkv::full};
};

/// What the compressed part holds.
struct rung_counts
{
    std::array<index_t, mdkv::max_rungs> tokens{};           ///< by rung, over all heads
    index_t stand_ins = 0;                                   ///< over all heads
    std::vector<std::array<index_t, mdkv::max_rungs>> heads; ///< tokens of each head by rung
};

/// A cache in host memory, read only; none if it lies on a device.
using readable_cache = std::variant<std::monostate, mdkv::cache_view<float const, mdkv::space::host>,
    mdkv::cache_view<mdkv::half const, mdkv::space::host>, mdkv::cache_view<mdkv::bfloat16 const, mdkv::space::host>>;

/// One layer's packed cache of one sequence.
class layer
{
public:
    layer()                        = default;
    layer(layer const&)            = delete;
    layer& operator=(layer const&) = delete;
    virtual ~layer()               = default;

    virtual void append(tensor const& keys, tensor const& values) = 0;
    virtual void attend(tensor const& queries, tensor const& output, std::optional<tensor> const& lse, float scale,
        std::optional<tensor> const& sink_logits)                 = 0;
    virtual void truncate(index_t appended)                       = 0;
    virtual void reserve(index_t appended)                        = 0;
    /// \param sources  see mdkv::recompress_options::sources
    virtual mdkv::recompress_report recompress(tensor const& queries, std::optional<mdkv::budget> const& limit,
        mdkv::preset const& chosen, std::optional<tensor> const& sources, std::optional<tensor> const& sink_logits) = 0;
    [[nodiscard]] virtual std::unique_ptr<layer> copy() const                                                       = 0;
    [[nodiscard]] virtual std::unique_ptr<layer> on_host(std::shared_ptr<host> to) const = 0; ///< a copy there
    [[nodiscard]] virtual layer_facts facts() const                                      = 0;
    [[nodiscard]] virtual rung_counts counts() const                                     = 0;
    [[nodiscard]] virtual std::vector<index_t> unpack(
        tensor const& keys, tensor const& values) const            = 0; ///< rows of each head
    [[nodiscard]] virtual readable_cache view() const              = 0; ///< stays while the turn is held
    [[nodiscard]] virtual std::unique_lock<turn_lock> turn() const = 0;
};

using packed_layer = std::pair<std::unique_ptr<layer>, mdkv::compress_report>;

/// Bytes that a reader holds.
struct reader_bytes
{
    index_t arena = 0, tail = 0, directory = 0; ///< sums over all layers
    index_t losses = 0;                         ///< losses of stored tokens
    index_t state  = 0;                         ///< the rest
};

/// All layers of one prompt.
class prompt
{
public:
    prompt()                         = default;
    prompt(prompt const&)            = delete;
    prompt& operator=(prompt const&) = delete;
    virtual ~prompt()                = default;

    virtual void read_chunk(index_t layer, index_t first, rows const& x)  = 0;
    virtual void take_losses(index_t layer, tensor const& losses)         = 0; ///< [H, R, n] of the first n tokens
    virtual void finish_layer(index_t layer, rows const& x)               = 0;
    [[nodiscard]] virtual mdkv::allocation allocate(mdkv::budget limit)   = 0;
    [[nodiscard]] virtual mdkv::allocation allocate(tensor const& quotas) = 0; ///< [L, H] bytes of each head
    [[nodiscard]] virtual packed_layer pack(index_t layer, rows const& x) = 0;
    [[nodiscard]] virtual std::vector<std::uint8_t> rungs_of(index_t layer) const = 0; ///< [H, rung_tokens]
    [[nodiscard]] virtual std::vector<float> losses_of(index_t layer) const       = 0; ///< [H, R, N - W]
    [[nodiscard]] virtual index_t past_tokens(index_t layer) const                = 0; ///< N - W
    [[nodiscard]] virtual index_t rung_tokens(index_t layer) const = 0; ///< N - W; N if the window is coded
    [[nodiscard]] virtual std::size_t state_bytes() const noexcept = 0;
};

/// A prompt that is compressed while it is read.
class reader
{
public:
    reader()                         = default;
    reader(reader const&)            = delete;
    reader& operator=(reader const&) = delete;
    virtual ~reader()                = default;

    /// \param ahead  the rows are of tokens after those that were read, which the reader does not keep
    virtual void attend(
        index_t layer, rows const& x, tensor const& output, std::optional<tensor> const& lse, bool ahead) = 0;
    virtual mdkv::reader_report end_chunk()                                                               = 0;
    virtual void forget_chunk()                                                                           = 0;
    [[nodiscard]] virtual std::pair<std::vector<std::unique_ptr<layer>>, mdkv::reader_report> finish()    = 0;
    [[nodiscard]] virtual index_t tokens() const                                                          = 0;
    [[nodiscard]] virtual reader_bytes bytes() const                                                      = 0;
};

/// Where streams and memory of a device come from, if not from CUDA's own pool; called by one thread at a time.
class device_source
{
public:
    explicit device_source(int number)
        : number_{number}
    {}
    device_source(device_source const&)            = delete;
    device_source& operator=(device_source const&) = delete;
    virtual ~device_source()                       = default;

    /// The stream of the call that begins, ordered behind the stream of the call before.
    [[nodiscard]] virtual std::uintptr_t stream()           = 0;
    [[nodiscard]] virtual void* allocate(std::size_t bytes) = 0; ///< for that stream
    virtual void release(void* data) noexcept               = 0;
    [[nodiscard]] int number() const noexcept { return number_; } ///< the device's

private:
    int number_;
};

/// \param from   null: the device's own pool, and one stream for all calls
[[nodiscard]] std::shared_ptr<device> make_device(std::uintptr_t stream, std::unique_ptr<device_source> from);
[[nodiscard]] index_t scratch_bytes(device& on);
void release_scratch(device& on);

/// A prompt whose keys and values are of the element type T, in memory of the place; `chosen` is copied.
template <mdkv::element T, class Place>
[[nodiscard]] std::unique_ptr<prompt> make_prompt(
    std::shared_ptr<Place> on, mdkv::preset const& chosen, prompt_sizes const& sizes);

/// Likewise a reader.
template <mdkv::element T, class Place>
[[nodiscard]] std::unique_ptr<reader> make_reader(std::shared_ptr<Place> on, mdkv::preset const& chosen,
    prompt_sizes const& sizes, mdkv::reader_options const& options);

/// A layer of a cache in host memory.
template <mdkv::element T>
[[nodiscard]] std::unique_ptr<layer> make_layer(
    std::shared_ptr<host> on, mdkv::ratio_set const& ratios, index_t read, mdkv::cpu::cache<T> cache, index_t appended);

/// A layer on a device, of a copy of a cache in host memory.
template <mdkv::element T>
[[nodiscard]] std::unique_ptr<layer> make_layer(
    std::shared_ptr<device> on, layer_facts const& facts, mdkv::cache_view<T const, mdkv::space::host> const& stored);

/// A layer whose arena lies in the bytes of a file, which must outlive it.
/// \param read   tokens of the compressed part's text, dropped ones included
template <mdkv::element T>
[[nodiscard]] std::unique_ptr<layer> make_mapped_layer(std::shared_ptr<host> on,
    mdkv::cache_view<T const, mdkv::space::host> const& stored, mdkv::ratio_set const& ratios, index_t read);

/// [H*G, Q]  log-sum-exps of the last Q of N tokens' queries over the keys that each one sees.
template <mdkv::element T>
[[nodiscard]] std::vector<float> log_sum_exps(host& on, tensor const& queries, tensor const& keys, float scale);

} // namespace mdkv_python
