/// \file seeds.cpp: fuzz_seeds FOLDER: writes inputs for every fuzz target to start from
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include <mdkv/core/ratios.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/cpu/attend.hpp>
#include <mdkv/engine/stored.hpp>

#include "runner/policies.hpp"
#include "support/byte_vocabulary.hpp"
#include "support/decoding.hpp"
#include "support/gguf_bytes.hpp"
#include "support/packed.hpp"
#include "support/stored.hpp"
#include "support/synthetic_llama.hpp"

namespace
{

class seeds
{
public:
    explicit seeds(std::filesystem::path folder)
        : folder_{std::move(folder)}
    {}

    void add(std::string const& target, std::string const& bytes)
    {
        std::filesystem::create_directories(folder_ / target);
        std::ofstream file{folder_ / target / ("seed" + std::to_string(number_++)), std::ios::binary};
        file << bytes;
        if (!file.flush()) { throw std::runtime_error{(folder_ / target).string() + ": cannot be written"}; }
    }
    void add(std::string const& target, std::span<std::byte const> bytes)
    {
        add(target, std::string{reinterpret_cast<char const*>(bytes.data()), bytes.size()});
    }

private:
    std::filesystem::path folder_;
    int number_ = 0;
};

template <class T>
void add_stored(seeds& all, support::packed_sizes const& sizes, mdkv::index_t appended, std::int32_t slots)
{
    support::layers_to_store<T> stored;
    support::source random{"seeds"};
    stored.caches.push_back(support::packed_layer<T>{sizes}.packed(appended));
    support::append_random(stored.caches.back(), random, appended);
    if (slots > 0)
    {
        stored.positions.push_back(support::tensor<std::int32_t, 2>{{sizes.heads, slots}});
        for (mdkv::index_t h = 0; h < sizes.heads; ++h)
        {
            for (std::int32_t s = 0; s < slots; ++s) { stored.positions.back().set(s - 1, h, s); }
        }
    }
    all.add("stored", stored.written());
}

/// The metadata of a vocabulary, behind a text of one byte's length.
void add_words(seeds& all, gguf_parts const& parts)
{
    std::string const text = " Hello, wörld 12\n\n<|im_end|>\xff";
    all.add("tokenizer", std::string(1, static_cast<char>(text.size())) + text + parts.bytes());
}

} // namespace

int main(int argc, char** argv)
{
    seeds all{argc > 1 ? argv[1] : "seeds"};
    using namespace mdkv;
    add_stored<half>(all,
        {.heads        = 2,
            .tokens    = 19,
            .window    = 3,
            .dims      = {8, 4},
            .rungs     = {drop, fraction(1, 4), fraction(1, 2).as(storage::int8), full_int4, full},
            .stand_ins = 2},
        3, 30);
    add_stored<half>(all,
        {.heads = 1, .tokens = 40, .window = 0, .dims = {16, 16}, .rungs = {drop, full_int4, full_int8, full}}, 0, 0);
    add_stored<float>(all, {.heads = 1, .tokens = 3, .window = 2, .dims = {4, 4}, .rungs = {drop, full}}, 17, 0);
    add_stored<half>(all, {.heads = 1, .tokens = 0, .window = 0, .dims = {2, 3}, .rungs = {full_int8}}, 0, 0);

    for (bool const qwen2 : {false, true})
    {
        support::synthetic_llama const model{{.layers = 1,
            .embedding                                = 8,
            .feed_forward                             = 8,
            .query_heads                              = 2,
            .kv_heads                                 = 1,
            .key_dim                                  = 4,
            .value_dim                                = 4,
            .rotated                                  = 4,
            .vocabulary                               = 5,
            .qwen2                                    = qwen2}};
        all.add("gguf", model.writer().bytes());
    }
    gguf_parts bytes;
    runner::byte_alphabet const alphabet;
    std::vector<std::string> tokens;
    for (unsigned b = 0; b < 256; ++b) { tokens.push_back(alphabet.written(static_cast<unsigned char>(b))); }
    for (std::string const& merge : {"He", "ll", "<|im_end|>"}) { tokens.push_back(merge); }
    std::vector<std::int32_t> kinds(tokens.size(), 1);
    kinds.back() = 3;
    bytes.text("tokenizer.ggml.model", "gpt2");
    bytes.text("tokenizer.ggml.pre", "qwen2");
    bytes.texts("tokenizer.ggml.tokens", tokens);
    bytes.integers("tokenizer.ggml.token_type", kinds);
    bytes.texts("tokenizer.ggml.merges", {"H e", "l l"});
    bytes.boolean("tokenizer.ggml.add_bos_token", true);
    bytes.integer("tokenizer.ggml.bos_token_id", 258U);
    add_words(all, bytes);

    for (runner::policy const& p : runner::all_policies())
    {
        all.add("options", p.name);
        for (std::string const& parameter : p.parameters) { all.add("options", p.name + "[" + parameter + "=3]"); }
    }
    for (std::string const& text :
        {"0,1/8,1/4,1", "0,1:int4,1:int8,1", "10%", "1/16", "4096", "best[pool=7+join=3+refit=no]"})
    {
        all.add("options", text);
    }

    for (char const byte : {'\0', '\1', '\x7f'})
    {
        all.add("views", std::string(120, byte));
        all.add("allocate", std::string(400, byte));
    }
    return 0;
}
