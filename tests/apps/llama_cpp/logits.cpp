// llama.cpp's logits as raw floats, in the place of tests/apps/runner/dump_logits.cpp for tests/tools/reference_forward.py:
//
//   mdkv_llama_cpp_logits step MODEL IDS OUT      logits of every position [n, vocabulary]
//   mdkv_llama_cpp_logits prefill MODEL IDS OUT   logits of the last position [1, vocabulary]
//
// IDS holds token ids as decimal text between spaces. Keys and values are floats. llama.cpp rounds activations to 8 bits
// where weights are quantised; with the weights as floats (reference_forward.py float) nothing is rounded.
#include "llama.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

namespace
{

struct release
{
    void operator()(llama_model* model) const { llama_model_free(model); }
    void operator()(llama_context* context) const { llama_free(context); }
};

/// \param all   the logits of every token, or of the last one alone
bool decode(llama_context* context, std::vector<llama_token> const& ids, bool all, std::ofstream& out)
{
    constexpr int most = 512;
    auto const width   = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
    auto const last    = static_cast<int>(ids.size()) - 1;
    llama_batch batch  = llama_batch_init(most, 0, 1);
    bool good          = true;
    for (int first = 0; good && first <= last; first += most)
    {
        batch.n_tokens = std::min(most, last + 1 - first);
        for (int i = 0; i < batch.n_tokens; ++i)
        {
            batch.token[i]     = ids[static_cast<std::size_t>(first + i)];
            batch.pos[i]       = first + i;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i]    = all || first + i == last ? 1 : 0;
        }
        good = llama_decode(context, batch) == 0;
        for (int i = 0; good && i < batch.n_tokens; ++i)
        {
            if (batch.logits[i] == 0) { continue; }
            out.write(reinterpret_cast<char const*>(llama_get_logits_ith(context, i)),
                static_cast<std::streamsize>(width) * static_cast<std::streamsize>(sizeof(float)));
        }
    }
    llama_batch_free(batch);
    return good;
}

} // namespace

int main(int argc, char** argv)
{
    std::string const command = argc == 5 ? argv[1] : "";
    if (command != "step" && command != "prefill")
    {
        std::fputs("usage: mdkv_llama_cpp_logits step|prefill MODEL IDS OUT\n", stderr);
        return 2;
    }
    std::vector<llama_token> ids;
    std::ifstream in(argv[3]);
    for (llama_token id = 0; in >> id;) { ids.push_back(id); }
    llama_log_set(
        [](ggml_log_level level, char const* text, void*) {
            if (level == GGML_LOG_LEVEL_ERROR) { std::fputs(text, stderr); }
        },
        nullptr);
    llama_backend_init();
    std::unique_ptr<llama_model, release> const model{
        llama_model_load_from_file(argv[2], llama_model_default_params())};
    if (!model || ids.empty()) { return 1; }
    llama_context_params parameters = llama_context_default_params();
    parameters.n_ctx                = static_cast<std::uint32_t>(ids.size() + 255) / 256 * 256;
    parameters.n_batch = parameters.n_ubatch = 512;
    parameters.type_k = parameters.type_v = GGML_TYPE_F32;
    parameters.flash_attn_type            = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    std::unique_ptr<llama_context, release> const context{llama_init_from_model(model.get(), parameters)};
    std::ofstream out(argv[4], std::ios::binary);
    bool const good = context && decode(context.get(), ids, command == "step", out) && out.flush();
    if (!good) { std::fprintf(stderr, "mdkv_llama_cpp_logits: %s cannot be run\n", argv[2]); }
    return good ? 0 : 1;
}
