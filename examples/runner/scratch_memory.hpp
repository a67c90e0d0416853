/// \file scratch_memory.hpp: scratch for the library's stages that grows to what a call needs and is kept for the next one
#pragma once

#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/executor.hpp>

#include <cstddef>
#include <memory>
#include <new>
#include <span>

namespace runner
{

class scratch_memory
{
public:
    /// Runs `call(backend)` once to count and once for real.
    template <class Call>
    auto run(mdkv::cpu::executor_ref executor, Call const& call)
    {
        mdkv::workspace counting;
        static_cast<void>(call(mdkv::cpu::backend{&counting, executor}));
        if (counting.bytes() > size_)
        {
            memory_.reset(static_cast<std::byte*>(
                ::operator new[](counting.bytes(), std::align_val_t{mdkv::workspace::alignment})));
            size_ = counting.bytes();
        }
        mdkv::workspace lent{std::span{memory_.get(), size_}};
        return call(mdkv::cpu::backend{&lent, executor});
    }

    [[nodiscard]] std::size_t bytes() const noexcept { return size_; }

private:
    struct release
    {
        void operator()(std::byte* memory) const noexcept
        {
            ::operator delete[](memory, std::align_val_t{mdkv::workspace::alignment});
        }
    };
    std::unique_ptr<std::byte[], release> memory_;
    std::size_t size_ = 0;
};

} // namespace runner
