/// \file engine_of.hpp: prompts and caches of one element type in one place
#pragma once

#include <mdkv/append.hpp>
#include <mdkv/attend.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/engine/unpack.hpp>
#include <mdkv/prompt.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "dlpack.hpp"
#include "engine.hpp"
#include "host.hpp"
#include "ranks.hpp"

namespace mdkv_python
{

/// \param frequencies  where those of the encoding lie, in memory of the backend
template <mdkv::backend B>
[[nodiscard]] mdkv::prompt_shape<B> shape_of(prompt_sizes const& sizes, std::byte const* frequencies)
{
    rope const& r    = sizes.encoding;
    auto const count = static_cast<index_t>(r.frequencies.size());
    mdkv::prompt_shape<B> shape{.layers = sizes.layers,
        .heads                          = sizes.heads,
        .group                          = sizes.group,
        .dims                           = sizes.dims,
        .tokens                         = sizes.tokens,
        .encoding                       = {.base = r.base, .rotating = r.rotating, .pairs = r.pairs},
        .on_non_finite                  = sizes.check_finite ? mdkv::non_finite::error : mdkv::non_finite::unchecked,
        .ranks                          = sizes.ranks};
    if (count > 0) { shape.encoding.frequencies = mdkv::in(B{}, reinterpret_cast<double const*>(frequencies), count); }
    return shape;
}

/// Sink logits [H*G] as the library takes them: one for all queries of a head.
template <mdkv::backend B>
[[nodiscard]] std::optional<mdkv::in_view<float, 2, B>> elsewhere(B const& on, std::optional<tensor> const& sink_logits)
{
    if (!sink_logits) { return std::nullopt; }
    auto const all = in<float, 1>(on, *sink_logits);
    return mdkv::in(on, all.data_handle(), all.extent(0), 1);
}

template <mdkv::element T, mdkv::backend B>
[[nodiscard]] mdkv::prompt_rows<B, T> views_of(rows const& x)
{
    B const on{};
    mdkv::prompt_rows<B, T> views{
        .queries = in<T, 3>(on, x.queries), .keys = in<T, 3>(on, x.keys), .values = in<T, 3>(on, x.values)};
    if (x.lse) { views.lse = in<float, 2>(on, *x.lse); }
    views.lse_elsewhere = elsewhere(on, x.sink_logits);
    return views;
}

template <mdkv::element T, class Place, class Cache = typename place_types<Place>::template cache<T>>
class layer_of final : public layer
{
    using types   = place_types<Place>;
    using backend = typename types::backend;

public:
    layer_of(
        std::shared_ptr<Place> on, mdkv::ratio_set const& ratios, index_t read, Cache cache = {}, index_t appended = 0)
        : on_{std::move(on)}
        , ratios_{ratios}
        , read_{read}
        , cache_{std::move(cache)}
        , appended_{appended}
    {}

    [[nodiscard]] Cache& cache() noexcept { return cache_; }

    void append(tensor const& keys, tensor const& values) override
    {
        auto const turn    = on_->turn();
        auto const k       = in<T, 3>(backend{}, keys);
        auto const v       = in<T, 3>(backend{}, values);
        auto const& layout = cache_.layout();
        on_->lend([&](backend on) { // refuses what must not grow the tail
            mdkv::detail::checks{on, "append"}
                .rows("keys", k, {layout.heads, k.extent(1), layout.dims.keys}, "H,n,D")
                .rows("values", v, {layout.heads, k.extent(1), layout.dims.values}, "H,n,Dv");
        });
        index_t const n = appended_ + k.extent(1);
        if (n > cache_.tail_capacity())
        {
            cache_.reserve_tail(std::max(n, cache_.tail_capacity() + std::max(least_growth, n / 8)));
        }
        on_->lend([&, this](backend on) { mdkv::append(on, k, v, cache_); });
        appended_ = n;
    }

    void attend(tensor const& queries, tensor const& output, std::optional<tensor> const& lse, float scale,
        std::optional<tensor> const& sink_logits) override
    {
        auto const turn = on_->turn();
        auto const q    = in<T, 3>(backend{}, queries);
        auto const o    = out<T, 3>(backend{}, output);
        mdkv::expects(q.extent(1) <= std::max<index_t>(appended_, 1), "attend: queries [H*G, n, D] are of ",
            q.extent(1), " tokens, but ", appended_, " were appended");
        on_->lend([&, this](backend on) {
            mdkv::workspace::frame own{on.scratch}; // decoding allocates nothing
            auto const l =
                lse ? out<float, 2>(backend{}, *lse)
                    : mdkv::out(backend{}, own.take<float>(q.extent(0) * q.extent(1)), q.extent(0), q.extent(1));
            mdkv::attend(on, q, cache_, {scale, elsewhere(on, sink_logits)}, o, l);
        });
    }

    void truncate(index_t appended) override
    {
        auto const turn = on_->turn();
        on_->lend([&, this](backend on) { mdkv::truncate_tail(on, appended, cache_); });
        appended_ = std::min(appended_, appended);
    }
    void reserve(index_t appended) override
    {
        auto const turn = on_->turn();
        cache_.reserve_tail(appended);
    }

    mdkv::recompress_report recompress(tensor const& queries, std::optional<mdkv::budget> const& limit,
        mdkv::preset const& chosen, std::optional<tensor> const& sources,
        std::optional<tensor> const& sink_logits) override
    {
        auto const turn = on_->turn();
        auto const q    = in<T, 3>(backend{}, queries);
        auto options =
            mdkv::fold_options<backend>(chosen, limit.value_or(mdkv::budget::bytes(cache_.fold_limit)), q.extent(1));
        mdkv::expects(limit || cache_.fold_limit > 0, "recompress: limit is missing; the layer has none of its own");
        if (sources) { options.sources = out<std::int32_t, 2>(backend{}, *sources); }
        options.lse_elsewhere = elsewhere(backend{}, sink_logits);
        auto const report =
            on_->lend([&, this](backend on) { return mdkv::recompress(on, q, chosen.ratios, options, cache_); });
        ratios_ = chosen.ratios;
        read_ += std::exchange(appended_, 0);
        return report;
    }

    [[nodiscard]] std::unique_ptr<layer> copy() const override
    {
        auto const turn  = on_->turn();
        auto other       = std::make_unique<layer_of>(on_, ratios_, read_);
        other->appended_ = appended_;
        if constexpr (requires { cache_.shared(); }) { other->cache_ = cache_.shared(); }
        else
        {
            other->cache_ = cache_.template copied<decltype(other->cache_)>(
                [&](std::byte const* from, std::byte* to, index_t bytes) { on_->copy(from, to, bytes); },
                cache_.memory());
        }
        return other;
    }

    [[nodiscard]] std::unique_ptr<layer> on_host(std::shared_ptr<host> to) const override
    {
        auto const turn = on_->turn();
        if constexpr (requires { cache_.shared(); })
        {
            return std::make_unique<layer_of>(std::move(to), ratios_, read_, cache_.shared(), appended_);
        }
        else
        {
            return make_layer<T>(std::move(to), ratios_, read_,
                cache_.template copied<mdkv::cpu::cache<T>>(
                    [&](std::byte const* from, std::byte* here, index_t bytes) { on_->copy(from, here, bytes); }),
                appended_);
        }
    }

    [[nodiscard]] layer_facts facts() const override
    {
        auto const turn    = on_->turn();
        auto const& layout = cache_.layout();
        return {.heads     = layout.heads,
            .dims          = layout.dims,
            .element_bytes = index_t{sizeof(T)},
            .read          = read_,
            .appended      = appended_,
            .window        = layout.window,
            .arena         = cache_.arena_bytes(),
            .tail          = cache_.tail_bytes(),
            .directory     = cache_.directory_bytes(),
            .fold_limit    = cache_.fold_limit,
            .on_host       = backend::memory_space == mdkv::space::host,
            .ratios        = ratios_};
    }

    [[nodiscard]] rung_counts counts() const override
    {
        auto const turn    = on_->turn();
        auto const view    = cache_.view();
        auto const& layout = view.layout;
        std::vector<mdkv::head_entry> heads(static_cast<std::size_t>(layout.heads));
        on_->lend([&](backend on) { fetch(on, view.heads, heads.data(), layout.heads); });
        rung_counts x;
        for (mdkv::head_entry const& head : heads)
        {
            auto& tokens   = x.heads.emplace_back();
            index_t stored = 0;
            for (std::size_t r = 0; r < layout.rungs; ++r)
            {
                tokens[r]             = r == layout.full_rung ? head.exact.tokens : head.runs[r].tokens;
                std::size_t const run = r == layout.full_rung ? layout.rungs : r;
                tokens[r] -= run == layout.stand_in_run ? head.stand_ins : 0;
                stored += tokens[r];
            }
            if (ratios_.can_drop()) { tokens[0] = read_ - stored; }
            for (std::size_t r = 0; r < tokens.size(); ++r) { x.tokens[r] += tokens[r]; }
            x.stand_ins += head.stand_ins;
        }
        return x;
    }

    [[nodiscard]] std::vector<index_t> unpack(tensor const& keys, tensor const& values) const override
    {
        auto const turn = on_->turn();
        auto const k    = out<T, 3>(backend{}, keys);
        auto const v    = out<T, 3>(backend{}, values);
        std::vector<index_t> rows(static_cast<std::size_t>(cache_.layout().heads));
        auto const there = on_->copy_of(rows);
        auto const kept  = mdkv::out(backend{}, reinterpret_cast<index_t*>(there.data()), std::ssize(rows));
        on_->lend([&](backend on) { mdkv::unpack<backend, T const>(on, cache_.view(), k, v, kept); });
        on_->lend([&](backend on) { fetch(on, kept.data_handle(), rows.data(), std::ssize(rows)); });
        return rows;
    }
    [[nodiscard]] readable_cache view() const override
    {
        if constexpr (backend::memory_space == mdkv::space::host) { return cache_.view(); }
        else { return {}; }
    }
    [[nodiscard]] std::unique_lock<turn_lock> turn() const override { return std::move(on_->turn().lock); }

private:
    static constexpr index_t least_growth = 32; // tokens

    std::shared_ptr<Place> on_;
    mdkv::ratio_set ratios_;
    index_t read_;
    Cache cache_;
    index_t appended_; // tokens in the tail, which a GPU counts for itself
};

template <mdkv::element T, class Place>
class prompt_of final : public prompt
{
    using types   = place_types<Place>;
    using backend = typename types::backend;
    using type    = mdkv::prompt<backend, T>;

public:
    prompt_of(std::shared_ptr<Place> on, mdkv::preset const& chosen, prompt_sizes const& sizes)
        : on_{std::move(on)}
        , preset_{chosen}
        , sizes_{sizes}
        , frequencies_{on_->copy_of(sizes.encoding.frequencies)}
        , state_{on_->source()}
        , prompt_{on_->with(state_), chosen, shape()}
        , finished_(static_cast<std::size_t>(sizes.layers))
        , packed_(finished_.size())
    {}

    void read_chunk(index_t layer, index_t first, rows const& x) override
    {
        auto const viewed = views_of<T, backend>(x);
        on_->lend([&](backend on) { prompt_.read_chunk(on, layer, first, viewed); });
    }
    void take_losses(index_t layer, tensor const& losses) override
    {
        auto const viewed = in<float, 3>(backend{}, losses);
        on_->lend([&](backend on) { prompt_.take_losses(on, layer, viewed); });
    }
    void finish_layer(index_t layer, rows const& x) override
    {
        auto const turn   = on_->turn();
        bool const joins  = preset_.replayed && preset_.last_queries_score(); // over all ranks
        auto const viewed = before_exchange(joins ? sizes_.ranks : nullptr, [&] { return views_of<T, backend>(x); });
        on_->lend([&](backend on) { prompt_.finish_layer(on, layer, viewed); });
        tokens_                                    = viewed.keys.extent(1);
        finished_[static_cast<std::size_t>(layer)] = true;
    }
    mdkv::allocation allocate(mdkv::budget limit) override
    {
        auto const turn   = on_->turn();
        auto const chosen = on_->lend([&](backend on) { return prompt_.allocate(on, limit); });
        allocated_        = true;
        return chosen;
    }
    mdkv::allocation allocate(tensor const& quotas) override
    {
        auto const turn   = on_->turn();
        auto const viewed = in<index_t, 2>(backend{}, quotas);
        auto const chosen = on_->lend([&](backend on) { return prompt_.allocate(on, viewed); });
        allocated_        = true;
        return chosen;
    }
    packed_layer pack(index_t layer, rows const& x) override
    {
        auto const turn = on_->turn();
        auto packed =
            std::make_unique<layer_of<T, Place>>(on_, preset_.ratios, tokens_, on_->template empty_cache<T>());
        auto const report =
            on_->lend([&](backend on) { return prompt_.pack(on, layer, views_of<T, backend>(x), packed->cache()); });
        packed_[static_cast<std::size_t>(layer)] = true;
        if (std::ranges::find(packed_, false) == packed_.end())
        {
            on_->release_scratch();
            packed_.assign(packed_.size(), false);
        }
        return {std::move(packed), report};
    }

    [[nodiscard]] std::vector<std::uint8_t> rungs_of(index_t layer) const override
    {
        auto const turn  = on_->turn();
        auto const rungs = prompt_.rungs_of(layer);
        mdkv::expects(allocated_, "prompt::rungs_of: no rungs were chosen; call allocate first");
        return fetched(rungs);
    }
    [[nodiscard]] std::vector<float> losses_of(index_t layer) const override
    {
        auto const turn   = on_->turn();
        auto const losses = prompt_.losses_of(layer);
        mdkv::expects(finished_[static_cast<std::size_t>(layer)], "prompt::losses_of: layer ", layer,
            " is not finished; call finish_layer first");
        return fetched(losses);
    }
    [[nodiscard]] index_t past_tokens(index_t layer) const override { return prompt_.losses_of(layer).extent(2); }
    [[nodiscard]] index_t rung_tokens(index_t layer) const override { return prompt_.rungs_of(layer).extent(1); }
    [[nodiscard]] std::size_t state_bytes() const noexcept override { return state_.held(); }

private:
    [[nodiscard]] mdkv::prompt_shape<backend> shape() const { return shape_of<backend>(sizes_, frequencies_.data()); }

    /// A view's elements in host memory, without gaps.
    template <class View>
    [[nodiscard]] auto fetched(View const& x) const
    {
        using value = std::remove_const_t<std::remove_pointer_t<decltype(x.data_handle())>>;
        std::vector<value> all(static_cast<std::size_t>(x.empty() ? 0 : x.required_span_size()));
        on_->lend([&](backend on) { fetch(on, x.data_handle(), all.data(), static_cast<index_t>(all.size())); });
        std::size_t count = 1;
        for (std::size_t d = 0; d < View::rank(); ++d) { count *= static_cast<std::size_t>(x.extent(d)); }
        std::vector<value> dense(count);
        for (std::size_t i = 0; i < dense.size(); ++i)
        {
            auto rest      = static_cast<index_t>(i);
            index_t offset = 0;
            for (std::size_t d = View::rank(); d-- > 0; rest /= x.extent(d))
            {
                offset += rest % x.extent(d) * x.stride(d);
            }
            dense[i] = all[static_cast<std::size_t>(offset)];
        }
        return dense;
    }

    std::shared_ptr<Place> on_;
    mdkv::preset preset_;
    prompt_sizes sizes_;
    typename types::memory frequencies_;
    mdkv::workspace state_;
    type prompt_;
    index_t tokens_ = 0;
    std::vector<bool> finished_, packed_; // layers
    bool allocated_ = false;
};

} // namespace mdkv_python
