/// \file evaluate.hpp: samples through many policies and sizes at once: one prefill for all, then all answers in lock step
#pragma once

#include <mdkv/core/budget.hpp>
#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/executor.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "answer_lane.hpp"
#include "answer_log.hpp"
#include "layer_prefix.hpp"
#include "runner/chat.hpp"
#include "runner/decode.hpp"
#include "runner/language_model.hpp"
#include "runner/matmul.hpp"
#include "runner/policies.hpp"
#include "runner/prefill.hpp"
#include "runner/real_replay.hpp"
#include "runner/scratch_memory.hpp"
#include "runner/sequence_cache.hpp"
#include "runner/terminal.hpp"
#include "runner/tokenizer.hpp"
#include "sample.hpp"

namespace runner
{

/// Every policy at every size and question place, the full cache first, asked for or not: the others are judged by it.
[[nodiscard]] inline std::vector<entrant> entrants_of(std::vector<policy> const& policies,
    std::vector<std::int64_t> const& kv_sizes, std::vector<question_place> const& questions)
{
    std::vector<entrant> all;
    std::set<std::string> labels;
    for (question_place const place : questions) { all.push_back({find_policy("full"), 0, place}); }
    for (policy const& one : policies)
    {
        if (one.whole() || !labels.insert(one.label).second) { continue; }
        for (std::int64_t const size : kv_sizes)
        {
            mdkv::expects(size >= 1, "kv-size: ", size, " is not at least 1");
            for (question_place const place : questions) { all.push_back({one, size, place}); }
        }
    }
    return all;
}

/// What an evaluation runs on and what its answers are filed under.
struct evaluation_setting
{
    language_model const& model;
    tokenizer const& words;
    mdkv::cpu::executor_ref executor;
    answer_origin origin;          // its window is the policies'
    std::size_t most_at_once = 64; // entrants that share a prefill: their caches are in memory together
};

[[nodiscard]] inline answer_key key_of(
    evaluation_setting const& setting, sample const& one, std::string const& mark, entrant const& who)
{
    return {one.task, one.id, mark, who.chosen.label, who.kv_size, text_of(who.question), setting.origin};
}

namespace detail
{

/// How many sequences a step is run with so that `live` of them are in it: products of this many rows go the way of
/// matrix products, in whole register tiles, where a row's bits do not depend on how many others there are. So neither the
/// number of entrants nor which of them are finished already changes an answer. (For one or two sequences dot products
/// would be faster, but they round in another order.)
[[nodiscard]] constexpr std::size_t lock_step(std::size_t live) noexcept
{
    constexpr std::size_t tile = 4;
    auto const least           = static_cast<std::size_t>(most_dot_tokens) + 1;
    return (std::max(live, least) + tile - 1) / tile * tile;
}

/// The tokens between two answers; none where there is one only.
[[nodiscard]] inline std::vector<std::int32_t> next_question_of(evaluation_setting const& setting, sample const& one)
{
    if (one.next_question.empty()) { return {}; }
    return encode_next_question(setting.words, one.next_question, one.chat);
}

/// All entrants of one prefill.
template <mdkv::element T>
class sample_run
{
public:
    sample_run(evaluation_setting const& setting, sample const& one, prompt_parts const& parts)
        : setting_{setting}
        , sample_{one}
        , parts_{parts}
        , tokens_{parts.whole()}
        , next_{next_question_of(setting, one)}
    {}

    void enter(entrant const& who)
    {
        bool const sees   = who.question == question_place::window;
        auto const limit  = who.chosen.whole() ? mdkv::budget::fraction(1, 1) : mdkv::budget::kv_size(who.kv_size);
        auto const behind = sees ? 0 : std::ssize(parts_.question);
        auto const fed =
            behind + sample_.max_new_tokens + (next_.empty() ? 0 : std::ssize(next_) + sample_.max_new_tokens);
        lanes_.push_back({&who, sequence_cache<T>{setting_.model, who.chosen, limit, setting_.origin.window, fed},
            std::ssize(tokens_) - behind});
        if (!sees) { lanes_.back().reading.assign(parts_.question.rbegin(), parts_.question.rend()); }
        keep_ = std::max(keep_, behind + queries_to_keep(who.chosen, setting_.origin.window, lanes_.back().position));
    }

    /// \param progress   void(share of the work that is done, from 0 to 1)
    template <class Progress>
    void run(Progress const& progress)
    {
        for (question_place const place : {question_place::window, question_place::after})
        {
            std::vector<sequence_cache<T>*> caches;
            for (lane<T>& at : lanes_)
            {
                if (at.who->question == place) { caches.push_back(&at.cache); }
            }
            auto const length =
                place == question_place::window ? tokens_.size() : static_cast<std::size_t>(std::ssize(parts_.context));
            replay_really(
                setting_.model, setting_.words, std::span{tokens_}.first(length), setting_.executor, scratch_, caches);
        }
        constexpr double prefill_share  = 0.7; // of the time, roughly
        std::vector<float> const logits = prefill<T>(
            setting_.model, tokens_, keep_, setting_.executor, [&](layer_kv<T> const& kv) { compress(kv); },
            [&](std::int64_t done, std::int64_t total) {
                progress(prefill_share * static_cast<double>(done) / static_cast<double>(total));
                if (interrupt_requested()) { throw interrupted{}; }
                return true;
            },
            [&](layer_chunk<T> const& chunk) {
                for (lane<T>& at : lanes_)
                {
                    bool const sees = at.who->question == question_place::window;
                    at.cache.score_chunk(
                        chunk, sees ? chunk.tokens : std::ssize(parts_.context), setting_.executor, scratch_);
                }
            });
        for (lane<T>& at : lanes_)
        {
            std::vector<float> own; // logits of a prompt that was compressed while it was read
            if (at.who->chosen.while_reading)
            {
                auto const seen = std::span{tokens_}.first(static_cast<std::size_t>(at.position));
                own             = at.cache.read(seen, setting_.executor, [](std::int64_t, std::int64_t) {
                    if (interrupt_requested()) { throw interrupted{}; }
                });
            }
            if (at.reading.empty()) { take(at, own.empty() ? logits : own); }
        }
        auto const answers = next_.empty() ? 1 : 2;
        auto const steps =
            static_cast<double>(std::ssize(parts_.question) + std::ssize(next_) + answers * sample_.max_new_tokens);
        for (double step = 0; step_all(); ++step)
        {
            progress(prefill_share + (1 - prefill_share) * std::min(1.0, step / steps));
            if (interrupt_requested()) { throw interrupted{}; }
        }
    }

    [[nodiscard]] std::vector<lane<T>> const& lanes() const noexcept { return lanes_; }

private:
    void compress(layer_kv<T> const& kv)
    {
        bool const some_see_less = std::any_of(
            lanes_.begin(), lanes_.end(), [](auto const& at) { return at.who->question == question_place::after; });
        layer_kv<T> const before_question =
            some_see_less ? prefix_.of(kv, std::ssize(parts_.context), setting_.model.shape()) : kv;
        for (lane<T>& at : lanes_)
        {
            bool const sees = at.who->question == question_place::window;
            try
            {
                at.cache.compress_layer(sees ? kv : before_question, setting_.executor, scratch_);
            }
            catch (interrupted const&)
            {
                throw;
            }
            catch (std::exception const& problem)
            {
                throw mdkv::error{"task " + sample_.task + ", sample " + sample_.id + ", policy " + at.who->chosen.label
                                  + " at KV size " + std::to_string(at.who->kv_size) + ": " + problem.what()};
            }
        }
    }

    /// Makes a lane's next token, and lets it read the next question where that token ends the answer to the first one.
    void take(lane<T>& at, std::span<float const> logits)
    {
        std::int32_t const token = chosen_token(logits, setting_.words, sample_, at.made);
        take_token(at, token, setting_.words, sample_);
        if (at.done && !next_.empty() && !at.next_asked) { ask_next(at, token, setting_.words, next_); }
    }

    /// One token further for every lane that is not done; false when all are.
    bool step_all()
    {
        std::vector<lane<T>*> going;
        for (lane<T>& at : lanes_)
        {
            if (!at.done) { going.push_back(&at); }
        }
        if (!going.empty()) { step(going); }
        return !going.empty();
    }

    void step(std::span<lane<T>* const> going)
    {
        std::vector<std::int32_t> fed;
        std::vector<std::int64_t> positions;
        for (lane<T>* const at : going)
        {
            fed.push_back(at->reading.empty() ? at->token : at->reading.back());
            positions.push_back(at->position);
        }
        fed.resize(lock_step(going.size()), fed[0]); // what is computed for these is not looked at
        positions.resize(fed.size(), positions[0]);
        auto const vocabulary = static_cast<std::size_t>(setting_.model.shape().vocabulary);
        auto const heads      = setting_.model.shape().query_heads * setting_.model.shape().value_dim;
        logits_.resize(fed.size() * vocabulary);
        decode_step(
            setting_.model, fed, positions, setting_.executor,
            [&](std::int64_t layer, std::int64_t b, float const* query, float const* key, float const* value,
                float* out) {
                if (b >= std::ssize(going)) { std::fill_n(out, heads, 0.0F); }
                else { going[static_cast<std::size_t>(b)]->cache.attend(layer, query, key, value, out, {}); }
            },
            logits_, space_);
        for (std::size_t i = 0; i < going.size(); ++i)
        {
            lane<T>& at = *going[i];
            ++at.position;
            if (!at.reading.empty()) { at.reading.pop_back(); }
            if (!at.reading.empty()) { continue; } // the question goes on
            take(at, std::span{logits_}.subspan(i * vocabulary, vocabulary));
        }
    }

    evaluation_setting const& setting_;
    sample const& sample_;
    prompt_parts const& parts_;
    std::vector<std::int32_t> tokens_; // the whole prompt's
    std::vector<std::int32_t> next_;   // what comes behind the first of two answers; else empty
    std::int64_t keep_ = 0;            // queries prefill hands over
    std::vector<lane<T>> lanes_;
    layer_prefix<T> prefix_;
    scratch_memory scratch_;
    decode_workspace space_;
    std::vector<float> logits_; // [lanes of a step, vocabulary]
};

/// What is still to be answered.
struct open_sample
{
    sample const* one;
    std::string mark;
    std::vector<entrant const*> who;
    double work = 0; // an estimate, for the time left
};

[[nodiscard]] inline prompt_parts parts_of(evaluation_setting const& setting, sample const& one)
{
    return encode_parts(setting.words, one.context, one.question, one.answer_prefix, one.chat);
}

/// \throws mdkv::error   the sample cannot be run on the model
inline void expect_fits(evaluation_setting const& setting, sample const& one, prompt_parts const& parts)
{
    std::string const name = "task " + one.task + ", sample " + one.id + ": ";
    auto const next        = std::ssize(next_question_of(setting, one));
    auto const prompt      = std::ssize(parts.context) + std::ssize(parts.question) + next;
    auto const made        = one.max_new_tokens * (next > 0 ? 2 : 1);
    auto const limit       = setting.model.shape().context;
    if (one.max_new_tokens < 1)
    {
        throw mdkv::error{name + "max_new_tokens is " + std::to_string(one.max_new_tokens) + ", not at least 1"};
    }
    if (parts.context.empty()) { throw mdkv::error{name + "the context is empty, so there is nothing to compress"}; }
    if (next > 0 && !one.stop_at_newline)
    {
        throw mdkv::error{name + "two answers are told apart by lines, but none ends at a line's end"};
    }
    if (made > limit || prompt > limit - made)
    {
        throw mdkv::error{
            name + "a prompt of " + std::to_string(prompt) + " tokens and an answer of up to " + std::to_string(made)
            + " are longer than the model's context of " + std::to_string(limit)
            + "; make the prompts shorter (--lengths or --max-length), or take a model with more context. "
              "Finished answers are kept"};
    }
}

[[nodiscard]] inline std::vector<open_sample> open_samples(evaluation_setting const& setting,
    std::span<sample const> samples, std::span<entrant const> entrants, answer_log const& log)
{
    std::vector<open_sample> open;
    for (sample const& one : samples)
    {
        open_sample left{&one, sample_mark(one), {}};
        for (entrant const& who : entrants)
        {
            if (!log.has(key_of(setting, one, left.mark, who))) { left.who.push_back(&who); }
        }
        if (left.who.empty()) { continue; }
        prompt_parts const parts = parts_of(setting, one);
        expect_fits(setting, one, parts);
        // A prefill of all layers costs about as much as making caches of it for eight policies.
        auto const batches = (left.who.size() + setting.most_at_once - 1) / setting.most_at_once;
        left.work =
            static_cast<double>((8 * batches + left.who.size()) * (parts.context.size() + parts.question.size()));
        open.push_back(std::move(left));
    }
    return open;
}

} // namespace detail

/// Runs what the log does not have yet, sample by sample, and files every sample's answers as soon as they are there.
///
/// \param title   of the line of progress on standard error
/// \param score   std::map<std::string, double>(sample const&, std::string const& answer), each from 0 to 100; of two
///                questions the answers are one text, a line each
/// \order  answers do not depend on the executor, on `most_at_once` or on what was finished before
/// \throws interrupted    after Ctrl-C; what the log has stays
/// \throws mdkv::error    before anything is run: a sample is longer than the model's context
template <mdkv::element T, class Score>
void evaluate(evaluation_setting const& setting, std::string const& title, std::span<sample const> samples,
    std::span<entrant const> entrants, answer_log& log, Score const& score)
{
    mdkv::expects(setting.most_at_once >= 1, "at-once: ", setting.most_at_once, " is not at least 1");
    std::vector<detail::open_sample> const open = detail::open_samples(setting, samples, entrants, log);
    double total                                = 0;
    for (detail::open_sample const& left : open) { total += left.work; }
    progress_bar bar{title};
    double done = 0;
    for (std::size_t i = 0; i < open.size(); ++i)
    {
        detail::open_sample const& left = open[i];
        bar.rename(title + ": sample " + std::to_string(samples.size() - open.size() + i + 1) + " of "
                   + std::to_string(samples.size()));
        prompt_parts const parts = detail::parts_of(setting, *left.one);
        std::vector<answer> answers;
        for (std::size_t first = 0; first < left.who.size(); first += setting.most_at_once)
        {
            std::size_t const last = std::min(first + setting.most_at_once, left.who.size());
            double const share     = left.work / static_cast<double>(left.who.size());
            detail::sample_run<T> run{setting, *left.one, parts};
            for (std::size_t c = first; c < last; ++c) { run.enter(*left.who[c]); }
            run.run([&](double part) {
                double const now =
                    done + share * (static_cast<double>(first) + static_cast<double>(last - first) * part);
                bar.show(static_cast<std::int64_t>(now), static_cast<std::int64_t>(total));
            });
            for (auto const& lane : run.lanes())
            {
                std::string const text = lane.before + lane.text;
                answers.push_back({key_of(setting, *left.one, left.mark, *lane.who), text, score(*left.one, text),
                    lane.cache.resident_bytes(), lane.cache.full_bytes(), left.one->about,
                    lane.cache.compress_seconds() + lane.cache.attend_seconds()});
            }
        }
        log.add(answers);
        done += left.work;
    }
}

} // namespace runner
