/// \file device.hpp: tensors in device memory, and a call as a user of the CUDA backend makes it, on a stream
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/memory.cuh>

#include <device_memory.hpp>

#include "support/host.hpp"

#include <array>
#include <cstddef>
#include <map>
#include <new>
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

/// Device memory full of NaNs, each piece on its own; counts what is not given back, and fails when asked to.
class device_resource
{
public:
    /// \param scratch  memory of `device_memory::scratch`
    explicit device_resource(bool scratch = false)
        : scratch_{scratch}
    {}
    [[nodiscard]] void* allocate(cudaStream_t, std::size_t bytes, std::size_t)
    {
        if (fail_after_-- == 0) { throw std::bad_alloc{}; }
        device_memory piece =
            scratch_ ? device_memory::scratch(bytes) : device_memory{std::vector<std::byte>(bytes, std::byte{0xFF}), 0};
        void* const pointer = piece.data();
        pieces_.emplace(pointer, std::move(piece));
        return pointer;
    }
    void deallocate(cudaStream_t, void* pointer, std::size_t, std::size_t) noexcept { pieces_.erase(pointer); }

    [[nodiscard]] std::size_t outstanding() const { return pieces_.size(); }
    void fail_after(int allocations) { fail_after_ = allocations; }

private:
    std::map<void*, device_memory> pieces_;
    int fail_after_ = -1;
    bool scratch_;
};

/// The call, on a stream of its own, to its end, with a workspace of its own; returns the scratch that it needed. What it
/// enqueues is recorded in a graph, twice: the first time scratch grows.
template <class Call>
index_t run_on_device(Call const& call)
{
    device_resource memory{true};
    mdkv::workspace scratch{mdkv::gpu::stream_memory<device_resource>{nullptr, &memory}};
    run_on_stream([&](cudaStream_t stream) { call(mdkv::gpu::backend{stream, &scratch}); });
    return scratch.peak();
}

/// The scratch of a call that is recorded and never made: nothing is read or written, wherever its operands lie.
template <class Call>
index_t scratch_of_recording(Call const& call)
{
    own_stream const stream;
    device_resource memory{true};
    mdkv::workspace scratch{mdkv::gpu::stream_memory<device_resource>{nullptr, &memory}};
    cudaGraphDestroy(recorded(stream.get(), cudaStreamCaptureModeRelaxed, [&](cudaStream_t on) {
        call(mdkv::gpu::backend{on, &scratch});
    }));
    return scratch.peak();
}

/// The same without a graph: for a call that waits for the device.
template <class Call>
index_t run_on_device_now(Call const& call)
{
    device_resource memory{true};
    mdkv::workspace scratch{mdkv::gpu::stream_memory<device_resource>{nullptr, &memory}};
    run_on_stream_now([&](cudaStream_t stream) { call(mdkv::gpu::backend{stream, &scratch}); });
    return scratch.peak();
}

} // namespace support
