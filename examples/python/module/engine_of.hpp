/// \file engine_of.hpp: prompts and caches of one element type on the CPU
#pragma once

#include <mdkv/append.hpp>
#include <mdkv/attend.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/cpu/basis.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/engine/dlpack.hpp>
#include <mdkv/prompt.hpp>

#include <cmath>
#include <utility>

#include "engine.hpp"
#include "host.hpp"

namespace mdkv_python
{

template <mdkv::element T>
class layer_of final : public layer
{
    using backend = host::backend;

public:
    layer_of(std::shared_ptr<host> on, mdkv::ratio_set const& ratios, index_t read)
        : on_{std::move(on)}
        , ratios_{ratios}
        , read_{read}
    {}

    [[nodiscard]] mdkv::cpu::cache<T>& cache() noexcept { return cache_; }

    void append(tensor const& keys, tensor const& values) override
    {
        auto const turn = on_->turn();
        auto const k    = mdkv::in<T, 3>(backend{}, keys);
        auto const v    = mdkv::in<T, 3>(backend{}, values);
        mdkv::workspace counting; // a dry run refuses what must not grow the tail
        mdkv::append(backend{&counting}, k, v, cache_.view());
        index_t const n = cache_.appended() + k.extent(1);
        if (n > cache_.tail_capacity())
        {
            cache_.reserve_tail(std::max(n, cache_.tail_capacity() + std::max(least_growth, n / 8)));
        }
        on_->lend([&](backend on) { mdkv::append(on, k, v, cache_.view()); });
    }

    void attend(tensor const& queries, tensor const& output, std::optional<tensor> const& lse, float scale) override
    {
        auto const q = mdkv::in<T, 3>(backend{}, queries);
        auto const o = mdkv::out<T, 3>(backend{}, output);
        std::vector<float> own(lse ? 0 : static_cast<std::size_t>(q.extent(0) * q.extent(1)));
        auto const l =
            lse ? mdkv::out<float, 2>(backend{}, *lse) : mdkv::out(backend{}, own.data(), q.extent(0), q.extent(1));
        on_->lend([&](backend on) { mdkv::attend(on, q, std::as_const(cache_).view(), {scale}, o, l); });
    }

    void truncate(index_t appended) override
    {
        on_->lend([&](backend on) { mdkv::truncate_tail(on, appended, cache_.view()); });
    }
    void reserve(index_t appended) override
    {
        auto const turn = on_->turn();
        cache_.reserve_tail(appended);
    }

    mdkv::recompress_report recompress(tensor const& queries, mdkv::budget limit, mdkv::preset const& chosen) override
    {
        auto const turn      = on_->turn();
        auto const q         = mdkv::in<T, 3>(backend{}, queries);
        index_t const count  = q.extent(1);
        index_t const folded = cache_.appended();
        std::vector<float> weights(static_cast<std::size_t>(count));
        for (index_t i = 0; i < count; ++i) { weights[static_cast<std::size_t>(i)] = chosen.query_weight(i, count); }
        mdkv::recompress_options<backend> options{.limit = limit, .pooling = chosen.pooling};
        options.allocation.charge = chosen.charge;
        options.scale             = chosen.scale;
        options.query_weights     = mdkv::in(backend{}, weights.data(), count);
        options.even_queries      = chosen.even_queries(count);
        auto const report =
            on_->lend([&](backend on) { return mdkv::recompress(on, q, chosen.ratios, options, cache_); });
        ratios_ = chosen.ratios;
        read_ += folded;
        return report;
    }

    [[nodiscard]] std::unique_ptr<layer> copy() const override
    {
        auto const turn = on_->turn();
        auto other      = std::make_unique<layer_of>(on_, ratios_, read_);
        other->cache_   = cache_.copy();
        return other;
    }

    [[nodiscard]] layer_facts facts() const override
    {
        auto const turn    = on_->turn();
        auto const view    = cache_.view();
        auto const& layout = view.layout;
        layer_facts x{.heads = layout.heads,
            .dims            = layout.dims,
            .element_bytes   = index_t{sizeof(T)},
            .read            = read_,
            .appended        = cache_.appended(),
            .arena           = cache_.arena_bytes(),
            .tail            = cache_.tail_bytes(),
            .directory       = cache_.directory_bytes(),
            .ratios          = ratios_};
        index_t stored = 0;
        for (index_t h = 0; h < layout.heads; ++h)
        {
            mdkv::head_entry const& head = view.heads[h];
            for (std::size_t r = 0; r < layout.rungs; ++r)
            {
                index_t const n = r == layout.full_rung ? 0 : head.runs[r].tokens;
                x.tokens[r] += n;
                stored += n;
            }
            index_t const exact = head.exact.tokens - head.stand_ins;
            if (layout.full_rung < layout.rungs) { x.tokens[layout.full_rung] += exact; }
            stored += exact;
            x.stand_ins += head.stand_ins;
        }
        if (ratios_.can_drop()) { x.tokens[0] = layout.heads * read_ - stored; }
        return x;
    }

private:
    static constexpr index_t least_growth = 32; // tokens

    std::shared_ptr<host> on_;
    mdkv::ratio_set ratios_;
    index_t read_;
    mdkv::cpu::cache<T> cache_;
};

template <mdkv::element T>
class prompt_of final : public prompt
{
    using backend = host::backend;
    using type    = mdkv::prompt<backend, T>;

public:
    prompt_of(std::shared_ptr<host> on, mdkv::preset const& chosen, prompt_sizes const& sizes)
        : on_{std::move(on)}
        , preset_{chosen}
        , sizes_{sizes}
        , memory_{bytes_of(chosen, shape())}
        , state_{memory_.bytes()}
        , prompt_{backend{&state_}, chosen, shape()}
    {}

    void read_chunk(index_t layer, index_t first, rows const& x) override
    {
        auto const viewed = views(x);
        on_->lend([&](backend on) { prompt_.read_chunk(on, layer, first, viewed); });
    }
    void finish_layer(index_t layer, rows const& x) override
    {
        auto const turn   = on_->turn();
        auto const viewed = views(x);
        on_->lend([&](backend on) { prompt_.finish_layer(on, layer, viewed); });
        tokens_ = viewed.keys.extent(1);
    }
    mdkv::allocation allocate(mdkv::budget limit) override
    {
        return on_->lend([&](backend on) { return prompt_.allocate(on, limit); });
    }
    packed_layer pack(index_t layer, rows const& x) override
    {
        auto packed       = std::make_unique<layer_of<T>>(on_, preset_.ratios, tokens_);
        auto const viewed = views(x);
        auto const report = on_->lend([&](backend on) { return prompt_.pack(on, layer, viewed, packed->cache()); });
        return {std::move(packed), report};
    }

    [[nodiscard]] std::vector<std::uint8_t> rungs_of(index_t layer) const override
    {
        auto const turn = on_->turn();
        auto const x    = prompt_.rungs_of(layer);
        std::vector<std::uint8_t> all;
        for (index_t h = 0; h < x.extent(0); ++h)
        {
            for (index_t i = 0; i < x.extent(1); ++i) { all.push_back(x(h, i)); }
        }
        return all;
    }
    [[nodiscard]] std::vector<float> losses_of(index_t layer) const override
    {
        auto const turn = on_->turn();
        auto const x    = prompt_.losses_of(layer);
        std::vector<float> all;
        for (index_t h = 0; h < x.extent(0); ++h)
        {
            for (index_t r = 0; r < x.extent(1); ++r)
            {
                for (index_t i = 0; i < x.extent(2); ++i) { all.push_back(x(h, r, i)); }
            }
        }
        return all;
    }
    [[nodiscard]] index_t past_tokens(index_t layer) const override { return prompt_.losses_of(layer).extent(2); }
    [[nodiscard]] std::size_t state_bytes() const noexcept override { return memory_.size(); }

private:
    [[nodiscard]] mdkv::prompt_shape<backend> shape() const
    {
        rope const& r = sizes_.encoding;
        mdkv::prompt_shape<backend> shape{.layers = sizes_.layers,
            .heads                                = sizes_.heads,
            .group                                = sizes_.group,
            .dims                                 = sizes_.dims,
            .tokens                               = sizes_.tokens,
            .encoding                             = {.base = r.base, .rotating = r.rotating, .pairs = r.pairs},
            .on_non_finite = sizes_.check_finite ? mdkv::non_finite::error : mdkv::non_finite::unchecked};
        if (!r.frequencies.empty())
        {
            shape.encoding.frequencies =
                mdkv::in(backend{}, r.frequencies.data(), static_cast<index_t>(r.frequencies.size()));
        }
        return shape;
    }

    [[nodiscard]] static std::size_t bytes_of(mdkv::preset const& chosen, mdkv::prompt_shape<backend> const& shape)
    {
        mdkv::workspace counting;
        static_cast<void>(type{backend{&counting}, chosen, shape});
        return counting.bytes();
    }

    [[nodiscard]] static mdkv::prompt_rows<backend, T> views(rows const& x)
    {
        backend const on{};
        mdkv::prompt_rows<backend, T> views{.queries = mdkv::in<T, 3>(on, x.queries),
            .keys                                    = mdkv::in<T, 3>(on, x.keys),
            .values                                  = mdkv::in<T, 3>(on, x.values)};
        if (x.lse) { views.lse = mdkv::in<float, 2>(on, *x.lse); }
        return views;
    }

    std::shared_ptr<host> on_;
    mdkv::preset preset_;
    prompt_sizes sizes_;
    aligned_bytes memory_;
    mdkv::workspace state_;
    type prompt_;
    index_t tokens_ = 0;
};

} // namespace mdkv_python
