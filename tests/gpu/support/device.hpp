/// \file device.hpp: tensors in device memory, and a call as a user of the CUDA backend makes it: dry run, scratch, stream
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/gpu/backend.cuh>

#include <device_memory.hpp>

#include "support/host.hpp"

#include <array>
#include <cstddef>
#include <span>
#include <vector>

namespace support
{

/// A copy of a host tensor on the device, laid out the same, slack included.
template <class T, std::size_t Rank>
class device_tensor
{
public:
    explicit device_tensor(tensor<T, Rank> const& like)
        : memory_{like.memory(), reinterpret_cast<std::uintptr_t>(like.data()) % 64}
    {
        for (std::size_t i = 0; i < Rank; ++i)
        {
            extents_[i] = like.extent(i);
            strides_[i] = like.stride(i);
        }
    }

    /// Uninitialised (poison), of contiguous rows.
    explicit device_tensor(std::array<index_t, Rank> extents, placement how = {})
        : device_tensor{tensor<T, Rank>{extents, how}}
    {}

    // The four members that make it a strided tensor to the library.
    [[nodiscard]] static constexpr std::size_t rank() { return Rank; }
    [[nodiscard]] T* data_handle() const { return reinterpret_cast<T*>(memory_.data()); }
    [[nodiscard]] index_t extent(std::size_t i) const { return extents_[i]; }
    [[nodiscard]] index_t stride(std::size_t i) const { return strides_[i]; }

    [[nodiscard]] mdkv::in_view<T, Rank, mdkv::gpu::backend> in() const
    {
        return mdkv::in(mdkv::gpu::backend{}, *this);
    }
    [[nodiscard]] mdkv::out_view<T, Rank, mdkv::gpu::backend> out() { return mdkv::out(mdkv::gpu::backend{}, *this); }

    /// What the device holds now, as contiguous rows; waits for the device.
    [[nodiscard]] tensor<T, Rank> host() const
    {
        std::vector<std::byte> const bytes = memory_.host();
        tensor<T, Rank> copy{extents_};
        std::vector<T> all(static_cast<std::size_t>(copy.count()));
        for (std::size_t flat = 0; flat < all.size(); ++flat)
        {
            auto left      = static_cast<index_t>(flat);
            index_t offset = 0;
            for (std::size_t i = Rank; i-- > 0;)
            {
                offset += left % extents_[i] * strides_[i];
                left /= extents_[i];
            }
            std::memcpy(
                static_cast<void*>(&all[flat]), bytes.data() + static_cast<std::size_t>(offset) * sizeof(T), sizeof(T));
        }
        copy.assign(all);
        return copy;
    }
    [[nodiscard]] std::vector<T> elements() const { return host().elements(); }

private:
    std::array<index_t, Rank> extents_{};
    std::array<index_t, Rank> strides_{};
    device_memory memory_;
};

/// The call's dry run, then the call with exactly the scratch it asked for, on a stream of its own, to its end. Returns the
/// scratch's size. `call(backend)` must be the whole call; what it enqueues is recorded in a graph first where there is one.
template <class Call>
std::size_t run_on_device(Call const& call)
{
    mdkv::workspace count;
    call(mdkv::gpu::backend{nullptr, &count});
    device_memory const memory = device_memory::scratch(count.bytes());
    mdkv::workspace scratch{{memory.data(), count.bytes()}};
    run_on_stream([&](cudaStream_t stream) { call(mdkv::gpu::backend{stream, &scratch}); });
    return count.bytes();
}

/// The same without a graph: for a call that waits for the device.
template <class Call>
std::size_t run_on_device_now(Call const& call)
{
    mdkv::workspace count;
    call(mdkv::gpu::backend{nullptr, &count});
    device_memory const memory = device_memory::scratch(count.bytes());
    mdkv::workspace scratch{{memory.data(), count.bytes()}};
    run_on_stream_now([&](cudaStream_t stream) { call(mdkv::gpu::backend{stream, &scratch}); });
    return count.bytes();
}

} // namespace support
