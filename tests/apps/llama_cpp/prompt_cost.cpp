// Seconds and resident memory of a long prompt, with the backend or without, by hand.
//
//   mdkv_llama_cpp_prompt_cost MODEL TEXT TOKENS CONTEXT THREADS [PLUGIN]
//
// Reads TOKENS tokens of TEXT in batches of 512, then 8 one by one. Memory is RssAnon: cells, caches and the engine's buffers,
// without the mapped model; it is told at each fourth batch, because the cells' zeros make the peak before the first. PLUGIN is
// libggml-mdkv.so, whose settings are those of the environment.
#include "ggml-backend.h"
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include <sys/resource.h>

namespace
{

struct release
{
    void operator()(llama_model* model) const { llama_model_free(model); }
    void operator()(llama_context* context) const { llama_free(context); }
};

double seconds()
{
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double processor_seconds()
{
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    auto const of = [](timeval const& t) {
        return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
    };
    return of(used.ru_utime) + of(used.ru_stime);
}

double resident_mebibytes()
{
    std::ifstream status{"/proc/self/status"};
    for (std::string line; std::getline(status, line);)
    {
        if (line.rfind("RssAnon:", 0) == 0) { return std::atof(line.c_str() + 8) / 1024; }
    }
    return 0;
}

} // namespace

int main(int argc, char** argv)
{
    if (argc < 6) { return 2; }
    constexpr int batch = 512, decoded = 8;
    int const prompt = std::atoi(argv[3]);
    llama_log_set([](ggml_log_level, char const*, void*) {}, nullptr);
    llama_backend_init();
    ggml_backend_load_all();
    if (argc > 6 && ggml_backend_load(argv[6]) == nullptr) { return 2; }
    std::unique_ptr<llama_model, release> const model{
        llama_model_load_from_file(argv[1], llama_model_default_params())};
    if (!model) { return 2; }
    std::ifstream file{argv[2]};
    std::string const text{std::istreambuf_iterator<char>{file}, {}};
    std::vector<llama_token> tokens(text.size() + 1);
    int const there = llama_tokenize(llama_model_get_vocab(model.get()), text.data(), static_cast<int>(text.size()),
        tokens.data(), static_cast<int>(tokens.size()), true, false);
    llama_context_params parameters = llama_context_default_params();
    parameters.n_ctx                = static_cast<std::uint32_t>(std::atoi(argv[4]));
    parameters.n_batch = parameters.n_ubatch = batch;
    parameters.n_threads = parameters.n_threads_batch = std::atoi(argv[5]);
    parameters.flash_attn_type                        = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    std::unique_ptr<llama_context, release> const context{llama_init_from_model(model.get(), parameters)};
    if (!context || there < prompt + decoded) { return 2; }
    double const begin = seconds(), processor = processor_seconds();
    double most     = 0;
    auto const feed = [&](int first, int count) {
        return llama_decode(context.get(), llama_batch_get_one(tokens.data() + first, count)) == 0;
    };
    auto const tell = [&](char const* what, int count) {
        std::printf("%s %d tokens: %.1f s, of processors %.1f s, %.1f MiB\n", what, count, seconds() - begin,
            processor_seconds() - processor, resident_mebibytes());
        std::fflush(stdout);
    };
    tell("before", 0);
    for (int first = 0; first < prompt; first += batch)
    {
        int const count = std::min(batch, prompt - first);
        if (!feed(first, count)) { return 1; }
        if (first > 0) { most = std::max(most, resident_mebibytes()); }
        if (first / batch % 4 == 3 || first + count == prompt) { tell("read", first + count); }
    }
    for (int i = 0; i < decoded; ++i)
    {
        if (!feed(prompt + i, 1)) { return 1; }
    }
    tell("decoded", prompt + decoded);
    std::printf("at most %.1f MiB after a batch, from the second on\n", most);
}
