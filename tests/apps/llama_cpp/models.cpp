// Decodes with whole models, once by llama.cpp alone and once through the backend, and compares the logits of every step.
//
//   mdkv_llama_cpp_models LIMIT MODEL.gguf...    LIMIT: the largest mean KL divergence (nats) that passes
//
// The backend's settings are those of the environment; tokens are random. Per model one line: the divergence, and how many
// attention nodes were served from compressed caches. What passed through, the backend says itself.
#include "ggml-backend.h"
#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace
{

constexpr int prompt = 180, decoded = 48, taken_back = 5; // some models know no more than 256 positions

struct release
{
    void operator()(llama_model* model) const { llama_model_free(model); }
    void operator()(llama_context* context) const { llama_free(context); }
};

using logits = std::vector<std::vector<float>>; // [steps][vocabulary]

/// The logits after the prompt and after each decoded token; some of these are taken back and others follow.
logits run(llama_model* model)
{
    llama_context_params parameters = llama_context_default_params();
    parameters.n_ctx                = 512;
    parameters.swa_full             = false; // as llama.cpp's programs
    parameters.n_batch = parameters.n_ubatch = 128;
    parameters.n_threads = parameters.n_threads_batch = 1;
    parameters.flash_attn_type                        = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    std::unique_ptr<llama_context, release> const context{llama_init_from_model(model, parameters)};
    if (!context) { return {}; }
    auto const vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::mt19937 random{17};
    std::vector<llama_token> tokens;
    for (int i = 0; i < prompt + decoded; ++i)
    {
        tokens.push_back(static_cast<llama_token>(random() % static_cast<unsigned>(vocabulary)));
    }
    logits all;
    auto const feed = [&](llama_token* first, int count) {
        if (llama_decode(context.get(), llama_batch_get_one(first, count)) != 0) { return false; }
        float const* const last = llama_get_logits_ith(context.get(), -1);
        all.emplace_back(last, last + vocabulary);
        return true;
    };
    for (int i = 0; i < prompt; i += 60)
    {
        if (!feed(tokens.data() + i, 60)) { return {}; }
    }
    for (int i = 0; i < decoded; ++i)
    {
        bool const cut =
            i == decoded / 2 && llama_memory_seq_rm(llama_get_memory(context.get()), 0, prompt + i - taken_back, -1);
        int const again = cut ? taken_back : 0; // with the tokens after them
        if (!feed(tokens.data() + prompt + i - again, 1 + again)) { return {}; }
    }
    return all;
}

double divergence(std::vector<float> const& from, std::vector<float> const& to)
{
    auto const log_sum = [](std::vector<float> const& x) {
        double const most = *std::max_element(x.begin(), x.end());
        double sum        = 0;
        for (float const value : x) { sum += std::exp(double{value} - most); }
        return most + std::log(sum);
    };
    double const a = log_sum(from), b = log_sum(to);
    double total = 0;
    for (std::size_t i = 0; i < from.size(); ++i)
    {
        double const p = double{from[i]} - a;
        total += std::exp(p) * (p - (double{to[i]} - b));
    }
    return total;
}

} // namespace

int main(int argc, char** argv)
{
    if (argc < 3) { return 2; }
    double const limit = std::atof(argv[1]);
    llama_log_set(
        [](ggml_log_level level, char const* text, void*) {
            if (level == GGML_LOG_LEVEL_ERROR) { std::fputs(text, stderr); }
        },
        nullptr);
    llama_backend_init();
    std::vector<std::string> const files{argv + 2, argv + argc};
    std::vector<logits> want;
    std::vector<std::unique_ptr<llama_model, release>> models;
    for (std::string const& file : files)
    {
        llama_model_params parameters = llama_model_default_params();
        models.emplace_back(llama_model_load_from_file(file.c_str(), parameters));
        want.push_back(models.back() ? run(models.back().get()) : logits{});
    }
    // Every context from here on has the backend.
    if (ggml_backend_load(MDKV_GGML_BACKEND) == nullptr) { return 2; }
    int failed = 0;
    for (std::size_t i = 0; i < files.size(); ++i)
    {
        if (want[i].empty())
        {
            std::printf("%s: llama.cpp alone does not run it\n", files[i].c_str());
            continue;
        }
        auto const got = run(models[i].get());
        double total = 0, most = 0;
        for (std::size_t s = 0; s < got.size(); ++s)
        {
            double const one = divergence(want[i][s], got[s]);
            total += one / static_cast<double>(got.size());
            most = std::max(most, one);
        }
        bool const passed = got.size() == want[i].size() && total <= limit; // a NaN does not
        std::printf("%s: %s: KL %.2e in the mean, %.2e at most, over %zu steps\n", passed ? "passed" : "failed",
            files[i].c_str(), total, most, got.size());
        std::fflush(stdout);
        failed += passed ? 0 : 1;
    }
    return failed == 0 ? 0 : 1;
}
