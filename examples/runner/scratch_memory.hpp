/// \file scratch_memory.hpp: scratch for the library's stages that grows to what a call needs and is kept for the next one
#pragma once

#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/cache.hpp>
#include <mdkv/cpu/executor.hpp>

#include <memory>

namespace runner
{

class scratch_memory
{
public:
    /// Calls `call(backend)`.
    template <class Call>
    auto run(mdkv::cpu::executor_ref executor, Call const& call)
    {
        return call(mdkv::cpu::backend{memory_.get(), executor});
    }

private:
    std::unique_ptr<mdkv::workspace> memory_ = std::make_unique<mdkv::workspace>(mdkv::cpu::host_memory{});
};

} // namespace runner
