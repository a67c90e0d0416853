/// \file allocate_passes.cuh: what one block does with one piece of tokens in a pass of allocate (arXiv 2603.20616, section 4.3)
#pragma once

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/detail/allocate_block.cuh>
#include <mdkv/gpu/detail/allocate_state.cuh>
#include <mdkv/gpu/detail/allocate_tokens.cuh>
#include <mdkv/gpu/device.cuh>

#include <cstddef>
#include <cstdint>

namespace mdkv::gpu::dual
{

/// One piece of tokens of one limit.
class piece_pass
{
public:
    __device__ piece_pass(problem const& p, block_room const& own, index_t number)
        : p_{p}
        , own_{own}
        , number_{number}
        , head_{p.head_of(number)}
        , row_{p.first_head() + head_}
        , begin_{(number - head_ * p.all().pieces_per_head) * piece_tokens}
        , end_{begin_ + piece_tokens < p.tokens() ? begin_ + piece_tokens : p.tokens()}
        , open_{p.offer_to(head_)}
    {}

    /// Adds the steps whose thresholds fall into the bins.
    __device__ void weigh() const
    {
        int const bins = p_.state().shift == first_shift ? static_cast<int>(exact_bins) : 1 << shift_step;
        for (int b = device::thread(); b < bins; b += threads) { own_.low[b] = own_.high[b] = 0; }
        device::sync();
        if (open_.rungs.count > 1)
        {
            with_rungs(open_.rungs.count, [&](auto count) { weigh_tokens<decltype(count)::value>(); });
        }
        device::sync();
        for (int b = device::thread(); b < bins; b += threads)
        {
            auto const bytes =
                static_cast<index_t>((static_cast<std::uint64_t>(own_.high[b]) << 32U) | std::uint64_t{own_.low[b]});
            if (bytes != 0) { device::atomic_add(p_.bins() + b, bytes); }
        }
    }

    /// Every token takes as many steps as it has thresholds above the multiplier.
    __device__ void assign() const
    {
        with_rungs(open_.rungs.count, [&](auto count) { assign_tokens<decltype(count)::value>(); });
    }

    /// Sums of the rungs there are; what the plateau would take.
    [[gnu::noinline]] __device__ void measure() const
    {
        loss_rows<run_time> const from_rows = rows<run_time>();
        sums mine                           = begin();
        for_tokens([&](index_t at) -> counted {
            token<run_time> const t{from_rows, at};
            std::size_t const from = rung_at(at);
            mine.plateau += walk_plateau(open_.rungs, t.loss, from, p_.state().cap).bytes;
            mine.loss += double{t.loss[from]};
            return {from, t.finite};
        });
        store(mine);
    }

    /// \param walk   the tokens make all upgrades of the plateau first
    [[gnu::noinline]] __device__ void survey(bool walk) const
    {
        loss_rows<run_time> const from_rows = rows<run_time>();
        index_t const leftover              = p_.state().leftover;
        float const cap                     = p_.state().cap;
        sums mine                           = begin();
        for_tokens([&](index_t at) -> counted {
            token<run_time> const t{from_rows, at};
            std::size_t rung = rung_at(at);
            if (walk)
            {
                rung                    = walk_plateau(open_.rungs, t.loss, rung, cap).rung;
                p_.all().rung(row_, at) = open_.rungs.index[rung];
            }
            mine.loss += double{t.loss[rung]};
            upgrade_choice const best = best_upgrade(open_.rungs, t.loss, rung, leftover, cap);
            if (best.key > 0.0F)
            {
                auto const before = static_cast<std::uint64_t>(piece_tokens - 1 - (at - begin_));
                std::uint64_t const u =
                    (static_cast<std::uint64_t>(order_of(best.key)) << 32U) | (before << 8U) | best.target;
                mine.best = u > mine.best ? u : mine.best;
            }
            return {rung, t.finite};
        });
        store(mine);
    }

    /// The plateau's upgrades by position, as far as the budget lets anyone go without asking what his cost.
    /// \return the bytes that are left
    [[gnu::noinline]] __device__ index_t walk_until(index_t leftover) const
    {
        loss_rows<run_time> const from_rows = rows<run_time>();
        bool open                           = true;
        for (index_t tile = begin_; tile < end_ && open; tile += threads)
        {
            index_t const at = tile + device::thread();
            plateau_walk mine{0, 0};
            if (at < end_)
            {
                token<run_time> const t{from_rows, at};
                mine = walk_plateau(open_.rungs, t.loss, rung_at(at), p_.state().cap);
            }
            device::prefix<index_t> const taken = device::block_prefix(mine.bytes, own_.whole);
            bool const can                      = leftover - taken.before >= open_.rungs.unit;
            if (can && mine.bytes > 0) { p_.all().rung(row_, at) = open_.rungs.index[mine.rung]; }
            leftover -= device::block_sum(can ? mine.bytes : index_t{0}, own_.whole);
            open = !block_any(!can, own_.whole);
        }
        return leftover;
    }

    /// One token takes a rung of the table.
    __device__ void set(index_t position, std::size_t rung) const
    {
        p_.all().rung(row_, begin_ + position) = open_.rungs.index[rung];
    }
    [[nodiscard]] __device__ std::size_t rung_of(index_t position) const { return rung_at(begin_ + position); }
    [[nodiscard]] __device__ rung_table const& rungs() const { return open_.rungs; }

    /// What the head would take under every offer at the multiplier that is tried. Rungs are chosen in float, which may
    /// miss the least by its rounding; the losses and bytes of those chosen are summed in double.
    __device__ void price() const
    {
        with_rungs(p_.all().costs.rungs, [&](auto count) { price_tokens<decltype(count)::value>(); });
    }

    /// Every token takes the rung of the ratio set; what the least losses would have been.
    [[gnu::noinline]] __device__ void settle() const
    {
        loss_rows<run_time> const from_rows = rows<run_time>();
        std::size_t const wanted            = open_.place[p_.state().everywhere];
        sums mine                           = begin();
        double least                        = 0;
        for_tokens([&](index_t at) -> counted {
            token<run_time> const t{from_rows, at};
            float lowest = t.loss[0];
            for (std::size_t r = 1; r < open_.rungs.count; ++r) { lowest = t.loss[r] < lowest ? t.loss[r] : lowest; }
            least += double{lowest};
            mine.loss += double{t.loss[wanted]};
            p_.all().rung(row_, at) = open_.rungs.index[wanted];
            return {wanted, t.finite};
        });
        least = device::block_sum(least, own_.real);
        if (device::thread() == 0) { p_.piece(number_).least = least; }
        store(mine);
    }

    /// Every token takes the rung of least loss + multiplier * bytes (the cheapest of several), in double.
    [[gnu::noinline]] __device__ void turn() const
    {
        loss_rows<run_time> const from_rows = rows<run_time>();
        double const multiplier             = p_.state().now.multiplier;
        sums mine                           = begin();
        for_tokens([&](index_t at) -> counted {
            token<run_time> const t{from_rows, at};
            std::size_t best = 0;
            double lowest    = price_of(t.loss[0], 0, multiplier);
            for (std::size_t r = 1; r < open_.rungs.count; ++r)
            {
                double const here = price_of(t.loss[r], r, multiplier);
                if (here < lowest)
                {
                    lowest = here;
                    best   = r;
                }
            }
            mine.loss += double{t.loss[best]};
            p_.all().rung(row_, at) = open_.rungs.index[best];
            return {best, t.finite};
        });
        store(mine);
    }

    __device__ void restore() const
    {
        for (index_t at = begin_ + device::thread(); at < end_; at += threads)
        {
            p_.all().rung(row_, at) = p_.kept(head_, at);
        }
    }

private:
    struct sums
    {
        double loss;
        index_t plateau;
        std::uint64_t best;
    };

    [[nodiscard]] __device__ double price_of(float loss, std::size_t rung, double multiplier) const
    {
        return device::add_product(loss, multiplier, static_cast<double>(open_.rungs.cost[rung]));
    }

    template <std::size_t Count>
    [[nodiscard]] __device__ loss_rows<Count> rows() const
    {
        return {p_.all(), open_.rungs, row_, p_.state().ask_closed};
    }
    /// Of the head's tokens.
    [[nodiscard]] __device__ std::uint8_t* rungs_out() const
    {
        return p_.all().rung.data_handle() + row_ * p_.all().rung.mapping().stride(0);
    }
    [[nodiscard]] __device__ std::size_t rung_at(index_t at) const { return open_.place[p_.all().rung(row_, at)]; }

    struct counted
    {
        std::size_t rung; ///< of the table
        bool finite;
    };

    /// Counts what body(position) says of every token.
    template <class Body>
    __device__ void for_tokens(Body const& body) const
    {
        for (index_t tile = begin_; tile < end_; tile += threads)
        {
            index_t const at = tile + device::thread();
            counted one{0, true};
            if (at < end_) { one = body(at); }
            count(one, at < end_);
        }
    }

    [[nodiscard]] __device__ sums begin() const
    {
        device::sync(); // the last piece's counts may still be read
        if (device::thread() <= static_cast<int>(max_rungs)) { own_.counts[device::thread()] = 0; }
        device::sync();
        return {0, 0, 0};
    }

    /// All lanes of a warp come, some without a token.
    __device__ void count(counted one, bool there) const
    {
        unsigned mine = 0;
        for (std::size_t r = 0; r < open_.rungs.count; ++r)
        {
            auto const n = static_cast<unsigned>(device::count_bits(device::ballot(there && one.rung == r)));
            mine         = device::lane() == static_cast<int>(open_.rungs.index[r]) ? n : mine;
        }
        auto const silent = static_cast<unsigned>(device::count_bits(device::ballot(there && !one.finite)));
        mine              = device::lane() == static_cast<int>(max_rungs) ? silent : mine;
        if (mine > 0) { device::atomic_add(own_.counts + device::lane(), mine); }
    }

    __device__ void store(sums const& mine) const
    {
        double const loss        = device::block_sum(mine.loss, own_.real);
        index_t const plateau    = device::block_sum(mine.plateau, own_.whole);
        std::uint64_t const best = block_max(mine.best, own_.key);
        piece_state& to          = p_.piece(number_);
        if (device::thread() < static_cast<int>(max_rungs))
        {
            to.tokens[static_cast<std::size_t>(device::thread())] =
                static_cast<std::int32_t>(own_.counts[device::thread()]);
        }
        if (device::thread() != 0) { return; }
        to.loss       = loss;
        to.plateau    = plateau;
        to.best       = best;
        to.non_finite = static_cast<std::int32_t>(own_.counts[max_rungs]);
    }

    /// A bin is 64 bits wide in two words; the carry is added by whoever makes it.
    __device__ void add(std::uint32_t bin, index_t bytes) const
    {
        auto const low        = static_cast<unsigned>(bytes);
        auto high             = static_cast<unsigned>(static_cast<std::uint64_t>(bytes) >> 32U);
        unsigned const before = device::atomic_add(own_.low + bin, low);
        high += before + low < before ? 1U : 0U;
        if (high != 0) { device::atomic_add(own_.high + bin, high); }
    }

    template <std::size_t Count>
    [[gnu::noinline]] __device__ void weigh_tokens() const
    {
        loss_rows<Count> const from_rows = rows<Count>();
        limit_state const& s             = p_.state();
        std::uint32_t const first        = s.first;
        int const shift                  = s.shift;
        std::uint32_t const bins         = shift == first_shift ? exact_bins : 1U << shift_step;
        std::size_t const count          = Count == run_time ? open_.rungs.count : Count;
        for (index_t at = begin_ + device::thread(); at < end_; at += threads)
        {
            token<Count> const t{from_rows, at};
            thresholds_of<Count> const steps{open_.rungs, t.loss};
            for (std::size_t j = 1; j < count; ++j)
            {
                if (!(steps.theta[j] > 0.0F)) { continue; }
                std::uint32_t const order = order_of(steps.theta[j]);
                if (order < first || (order - first) >> shift >= bins) { continue; }
                add((order - first) >> shift, open_.rungs.step(j));
            }
        }
    }

    template <std::size_t Count>
    [[gnu::noinline]] __device__ void assign_tokens() const
    {
        loss_rows<Count> const from_rows   = rows<Count>();
        loss_rows<run_time> const all_rows = rows<run_time>();
        std::uint8_t* const out            = rungs_out();
        float const cap                    = p_.state().cap;
        bool const keep                    = p_.state().keep_rungs;
        std::size_t const count            = Count == run_time ? open_.rungs.count : Count;
        float const near                   = mdkv::detail::plateau_begin(cap);
        sums mine                          = begin();
        for_tokens([&](index_t at) -> counted {
            token<Count> const t{from_rows, at};
            std::size_t rung = 0;
            float chosen     = t.loss[0];
            bool on_plateau  = false;
            if (count > 1)
            {
                thresholds_of<Count> const steps{open_.rungs, t.loss};
                for (std::size_t j = 1; j < count; ++j)
                {
                    bool const taken = steps.theta[j] > cap;
                    rung += taken ? 1 : 0;
                    chosen     = taken ? t.loss[j] : chosen;
                    on_plateau = on_plateau || (steps.theta[j] >= near && !taken);
                }
            }
            if (on_plateau && cap > 0.0F)
            {
                token<run_time> const again{all_rows, at};
                mine.plateau += walk_plateau(open_.rungs, again.loss, rung, cap).bytes;
            }
            mine.loss += double{chosen};
            std::uint8_t& to = out[at];
            if (keep) { p_.kept(head_, at) = to; }
            to = open_.rungs.index[rung];
            return {rung, t.finite};
        });
        store(mine);
    }

    template <std::size_t Count>
    [[gnu::noinline]] __device__ void price_tokens() const
    {
        constexpr std::size_t capacity = Count == run_time ? max_rungs : Count;
        work const& w                  = p_.all();
        menu const& offered            = *w.offered;
        double const multiplier        = p_.state().multiplier;
        bool const guessing            = p_.state().guessing;
        std::size_t const count        = Count == run_time ? offered.rungs : Count;
        float const* row[capacity];
        float price[capacity];
        float bytes[capacity];
        bool closes[capacity]; // the last of an offer
        for (std::size_t j = 0; j < count; ++j)
        {
            auto const b = static_cast<double>(offered.bytes[j]);
            row[j]       = w.loss.data_handle() + row_ * w.loss.mapping().stride(0)
                     + index_t{offered.order[j]} * w.loss.mapping().stride(1);
            price[j]  = static_cast<float>(multiplier * b);
            bytes[j]  = static_cast<float>(b);
            closes[j] = j + 1 == count || offered.opens[j + 1];
        }
        double losses_of[capacity] = {};
        double bytes_of[capacity]  = {};
        index_t silent             = 0;
        index_t const from         = begin_ + (guessing ? guess_begin(begin_, p_.tokens()) : 0);
        index_t const to           = !guessing || from + guess_tokens > end_ ? end_ : from + guess_tokens;
        for (index_t at = from + device::thread(); at < to; at += threads)
        {
            float loss[capacity];
            bool finite = true;
            for (std::size_t j = 0; j < count; ++j)
            {
                loss[j] = row[j][at];
                finite  = finite && is_finite(loss[j]);
            }
            silent += finite ? 0 : 1;
            float chosen  = finite ? loss[0] : 0.0F;
            float taken   = bytes[0];
            float least   = chosen + price[0];
            std::size_t k = 0;
            for (std::size_t j = 0; j < count; ++j)
            {
                float const mine   = finite ? loss[j] : 0.0F;
                float const here   = mine + price[j];
                bool const cheaper = here < least;
                least              = cheaper ? here : least;
                chosen             = cheaper ? mine : chosen;
                taken              = cheaper ? bytes[j] : taken;
                if constexpr (Count == run_time)
                {
                    losses_of[k] += closes[j] ? double{chosen} : 0.0;
                    bytes_of[k] += closes[j] ? double{taken} : 0.0;
                }
                else // registers have no index
                {
                    for (std::size_t o = 0; o < capacity; ++o)
                    {
                        losses_of[o] += closes[j] && o == k ? double{chosen} : 0.0;
                        bytes_of[o] += closes[j] && o == k ? double{taken} : 0.0;
                    }
                }
                k += closes[j] ? 1 : 0;
            }
        }
        index_t const place = p_.number() * p_.pieces() + number_;
        for (std::size_t k = 0; k < capacity && static_cast<index_t>(k) < p_.offers(); ++k)
        {
            outlay const sum{device::block_sum(losses_of[k], own_.real), device::block_sum(bytes_of[k], own_.real)};
            if (device::thread() == 0) { w.payers.outlays[place * p_.offers() + static_cast<index_t>(k)] = sum; }
        }
        silent = device::block_sum(silent, own_.whole);
        if (device::thread() == 0) { w.payers.silent[place] = static_cast<std::int32_t>(silent); }
    }

public:
    /// Where a guess begins to look at the tokens of a piece; the first tokens are no tokens like others. Pieces that end
    /// before are not looked at.
    [[nodiscard]] MDKV_HD static index_t guess_begin(index_t begin, index_t tokens)
    {
        index_t const unit_begin = begin / guess_unit * guess_unit;
        return tokens - unit_begin > piece_tokens ? piece_tokens / 2 : 0;
    }
    /// How many it looks at.
    [[nodiscard]] MDKV_HD static index_t guess_count(index_t begin, index_t tokens)
    {
        index_t const end  = begin + piece_tokens < tokens ? begin + piece_tokens : tokens;
        index_t const left = end - begin - guess_begin(begin, tokens);
        return left < 0 ? 0 : left < guess_tokens ? left : guess_tokens;
    }

private:
    problem const& p_;
    block_room const& own_;
    index_t number_;
    index_t head_; ///< under the limit
    index_t row_;  ///< of the losses
    index_t begin_;
    index_t end_;
    offer const& open_;
};

} // namespace mdkv::gpu::dual
