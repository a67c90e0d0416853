/// \file reader_of.hpp: readers of one element type in one place, and how prompts and readers are made
#pragma once

#include <mdkv/append.hpp>
#include <mdkv/attend.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/reader.hpp>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine.hpp"
#include "engine_of.hpp"
#include "host.hpp"

namespace mdkv_python
{

template <mdkv::element T, class Place>
class reader_of final : public reader
{
    using types   = place_types<Place>;
    using backend = typename types::backend;
    using cache   = typename types::template cache<T>;
    using type    = mdkv::reader<backend, cache>;

public:
    reader_of(std::shared_ptr<Place> on, mdkv::preset const& chosen, prompt_sizes const& sizes,
        mdkv::reader_options const& options)
        : on_{std::move(on)}
        , ratios_{chosen.ratios}
        , scale_{chosen.scale}
        , frequencies_{on_->copy_of(sizes.encoding.frequencies)}
        , state_{on_->source()}
        , chunk_(static_cast<std::size_t>(sizes.layers > 0 ? sizes.layers : 0))
    {
        auto const turn  = on_->turn();
        auto const shape = shape_of<backend>(sizes, frequencies_.data());
        for (std::size_t l = 0; l < chunk_.size(); ++l) { caches_.push_back(on_->template empty_cache<T>()); }
        reader_.emplace(on_->with(state_), chosen, shape, options, std::span{caches_});
    }

    void attend(
        index_t layer, rows const& x, tensor const& output, std::optional<tensor> const& lse, bool ahead) override
    {
        auto const turn = on_->turn();
        auto const all  = views_of<T, backend>(x);
        auto const o    = out<T, 3>(backend{}, output);
        index_t const q = all.queries.extent(0);
        index_t const n = all.queries.extent(1);
        auto const own  = on_->memory(lse ? 0 : static_cast<std::size_t>(q * n) * sizeof(float));
        auto const l =
            lse ? out<float, 2>(backend{}, *lse) : mdkv::out(backend{}, reinterpret_cast<float*>(own.data()), q, n);
        if (ahead) { return attend_ahead(layer, all, o, l); }
        on_->lend([&](backend on) { reader_->attend(on, layer, all, o, l); });
        chunk_[static_cast<std::size_t>(layer)] += n;
    }

    mdkv::reader_report end_chunk() override
    {
        auto const turn = on_->turn();
        return ended(on_->lend([&](backend on) { return reader_->end_chunk(on); }));
    }
    void forget_chunk() override
    {
        auto const turn = on_->turn();
        on_->lend([&](backend on) { reader_->forget_chunk(on); });
        chunk_.assign(chunk_.size(), 0);
    }
    [[nodiscard]] std::pair<std::vector<std::unique_ptr<layer>>, mdkv::reader_report> finish() override
    {
        auto const turn   = on_->turn();
        auto const report = ended(on_->lend([&](backend on) { return reader_->finish(on); }));
        std::vector<std::unique_ptr<layer>> layers;
        for (cache& one : caches_)
        {
            layers.push_back(std::make_unique<layer_of<T, Place>>(on_, ratios_, report.tokens, std::move(one)));
        }
        finished_ = true;
        losses_   = 0;
        on_->release_scratch();
        return {std::move(layers), report};
    }

    [[nodiscard]] index_t tokens() const override
    {
        auto const turn = on_->turn();
        return reader_->tokens();
    }
    [[nodiscard]] reader_bytes bytes() const override
    {
        auto const turn = on_->turn();
        reader_bytes x{.losses = losses_, .state = static_cast<index_t>(state_.held())};
        for (cache const& one : caches_)
        {
            x.arena += one.arena_bytes();
            x.tail += one.tail_bytes();
            x.directory += one.directory_bytes();
        }
        return x;
    }

private:
    /// Attention of tokens behind the chunk, e.g. drafts, which leave the tail again.
    void attend_ahead(index_t layer, mdkv::prompt_rows<backend, T> const& x, mdkv::out_view<T, 3, backend> output,
        mdkv::out_view<float, 2, backend> lse)
    {
        mdkv::expects(layer >= 0 && layer < std::ssize(caches_) && !finished_, "Reader.attend: layer is ", layer,
            "; it must be from 0 to ", std::ssize(caches_) - 1, ", and the prompt not finished");
        cache& to            = caches_[static_cast<std::size_t>(layer)];
        index_t const before = chunk_[static_cast<std::size_t>(layer)];
        index_t const after  = before + x.queries.extent(1);
        if (after > to.tail_capacity()) { to.reserve_tail(after); }
        on_->lend([&](backend on) { mdkv::append(on, x.keys, x.values, to); });
        auto const take_back = [&] { on_->lend([&](backend on) { mdkv::truncate_tail(on, before, to); }); };
        try
        {
            on_->lend([&](backend on) { mdkv::attend(on, x.queries, to, {scale_, x.lse_elsewhere}, output, lse); });
        }
        catch (...)
        {
            take_back();
            throw;
        }
        take_back();
    }

    mdkv::reader_report const& ended(mdkv::reader_report const& report)
    {
        chunk_.assign(chunk_.size(), 0);
        losses_ = report.losses_bytes;
        return report;
    }

    std::shared_ptr<Place> on_;
    mdkv::ratio_set ratios_;
    float scale_;
    typename types::memory frequencies_;
    mdkv::workspace state_;
    std::vector<cache> caches_;
    std::optional<type> reader_;
    std::vector<index_t> chunk_; // tokens of the chunk, by layer
    index_t losses_ = 0;         // bytes
    bool finished_  = false;
};

template <mdkv::element T, class Place>
std::unique_ptr<prompt> make_prompt(std::shared_ptr<Place> on, mdkv::preset const& chosen, prompt_sizes const& sizes)
{
    auto const turn = on->turn(); // asks a device for the call's stream
    return std::make_unique<prompt_of<T, Place>>(on, chosen, sizes);
}

template <mdkv::element T, class Place>
std::unique_ptr<reader> make_reader(std::shared_ptr<Place> on, mdkv::preset const& chosen, prompt_sizes const& sizes,
    mdkv::reader_options const& options)
{
    auto const turn = on->turn();
    return std::make_unique<reader_of<T, Place>>(on, chosen, sizes, options);
}

} // namespace mdkv_python
