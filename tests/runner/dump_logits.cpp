/// \file dump_logits.cpp: writes the runner's logits as raw floats, for tests/tools/reference_forward.py
///
///   dump_logits step MODEL IDS OUT      logits of every position [n, vocabulary]: single steps on a plain float cache
///   dump_logits prefill MODEL IDS OUT   logits of the last position [1, vocabulary]: one prefill of all tokens
///
/// IDS holds token ids as decimal text between spaces.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <mdkv/cpu/thread_pool.hpp>

#include "runner/gguf.hpp"
#include "runner/model.hpp"
#include "support/full_cache.hpp"

namespace
{

std::vector<std::int32_t> read_ids(std::string const& path)
{
    std::ifstream in(path);
    std::vector<std::int32_t> ids;
    for (std::int32_t id = 0; in >> id;) { ids.push_back(id); }
    if (!in.eof() || ids.empty()) { throw std::runtime_error(path + ": expected token ids between spaces"); }
    return ids;
}

void append(std::ofstream& out, std::vector<float> const& logits)
{
    out.write(
        reinterpret_cast<char const*>(logits.data()), static_cast<std::streamsize>(logits.size() * sizeof(float)));
}

void step_through(runner::language_model const& model, std::vector<std::int32_t> const& ids,
    mdkv::cpu::executor_ref executor, std::ofstream& out)
{
    support::full_cache<float> cache(model.shape());
    runner::decode_workspace space;
    std::vector<float> logits(static_cast<std::size_t>(model.shape().vocabulary));
    for (std::size_t i = 0; i < ids.size(); ++i)
    {
        std::int32_t const token[1]    = {ids[i]};
        std::int64_t const position[1] = {static_cast<std::int64_t>(i)};
        runner::decode_step(
            model, token, position, executor,
            [&](std::int64_t layer, std::int64_t, float const* q, float const* k, float const* v, float* attended) {
                cache.attend(layer, q, k, v, attended);
            },
            logits, space);
        append(out, logits);
    }
}

void run(
    std::string_view command, std::string const& model_path, std::string const& ids_path, std::string const& out_path)
{
    auto const model = runner::language_model::load(runner::gguf_file::open(model_path));
    auto const ids   = read_ids(ids_path);
    mdkv::cpu::thread_pool pool(2);
    std::ofstream out(out_path, std::ios::binary);
    if (command == "step") { step_through(model, ids, pool, out); }
    else if (command == "prefill")
    {
        append(out, runner::prefill<float>(
                        model, ids, 0, pool, [](runner::layer_kv<float> const&) {},
                        [](std::int64_t, std::int64_t) { return true; }));
    }
    else { throw std::runtime_error("unknown command " + std::string(command)); }
    if (!out.flush()) { throw std::runtime_error(out_path + ": cannot be written"); }
}

} // namespace

int main(int count, char** arguments)
{
    if (count != 5)
    {
        std::fputs("usage: dump_logits step|prefill MODEL IDS OUT\n", stderr);
        return 2;
    }
    try
    {
        run(arguments[1], arguments[2], arguments[3], arguments[4]);
        return 0;
    }
    catch (std::exception const& error)
    {
        std::fprintf(stderr, "dump_logits: %s\n", error.what());
        return 1;
    }
}
