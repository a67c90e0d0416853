/// \file folding_cache.hpp: a packed cache that stays within fixed memory: it folds appended tokens into its compressed part
#pragma once

#include <mdkv/core/budget.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>
#include <mdkv/cpu/score.hpp>
#include <mdkv/recompress.hpp>
#include <mdkv/stages/allocate.hpp>
#include <mdkv/stages/pack.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <utility>

#include "fold_plan.hpp"
#include "packed_cache.hpp"
#include "runner/element_rows.hpp"
#include "runner/policies.hpp"
#include "runner/scratch_memory.hpp"

namespace runner
{

/// The folding cache of a policy made by compress. All its buffers come from the ledger's memory.
template <mdkv::element T>
class folding_cache : public packed_cache<T>
{
public:
    /// \param finished   made in the ledger's memory
    /// \param ledger     must outlive the cache
    folding_cache(mdkv::cpu::cache<T> finished, std::int64_t group, policy const& chosen, fold_plan const& plan,
        fold_ledger& ledger)
        : packed_cache<T>{std::move(finished), group, plan.every}
        , ratios_{chosen.options.ratios}
        , plan_{plan}
        , ledger_{&ledger}
        , options_{mdkv::fold_options<mdkv::cpu::backend>(
              chosen.options, mdkv::budget::bytes(plan.arena), plan.queries)}
        , queries_{&ledger.memory}
    {
        queries_.resize(static_cast<std::size_t>(query_rows() * plan.queries * key_dim()));
    }

    void attend(mdkv::cpu::executor_ref executor, scratch_memory& scratch, float const* query, float const* key,
        float const* value, float* output) override
    {
        if (cache_.appended() == plan_.every) { fold(executor, scratch); }
        // The tail will be folded by the last queries before it is full.
        std::int64_t const place = cache_.appended() - (plan_.every - plan_.queries);
        for (std::int64_t row = 0; place >= 0 && row < query_rows(); ++row)
        {
            narrow_row(query + row * key_dim(), key_dim(), queries_.data() + (row * plan_.queries + place) * key_dim());
        }
        packed_cache<T>::attend(executor, scratch, query, key, value, output);
    }

private:
    using packed_cache<T>::cache_;

    [[nodiscard]] std::int64_t query_rows() const noexcept { return this->query_heads_; }
    [[nodiscard]] std::int64_t key_dim() const noexcept { return cache_.layout().dims.keys; }

    void fold(mdkv::cpu::executor_ref executor, scratch_memory& scratch)
    {
        auto const start = std::chrono::steady_clock::now();
        folded_ += plan_.every;
        if (plan_.prompt > 0)
        {
            options_.limit = mdkv::budget::bytes(plan_.arena * (plan_.prompt + folded_) / plan_.prompt);
        }
        scratch.run(executor, [&](mdkv::cpu::backend on) {
            return mdkv::recompress(
                on, mdkv::in(on, queries_.data(), query_rows(), plan_.queries, key_dim()), ratios_, options_, cache_);
        });
        ++ledger_->folds;
        ledger_->seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }

    mdkv::ratio_set ratios_;
    fold_plan plan_;
    fold_ledger* ledger_;
    mdkv::recompress_options<mdkv::cpu::backend> options_;
    std::int64_t folded_ = 0;     // tokens
    std::pmr::vector<T> queries_; // [query_heads, plan.queries, D]
};

} // namespace runner
