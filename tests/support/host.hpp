/// \file host.hpp: tensors that own their memory, laid out in every way an engine may hand them over, and a call's scratch
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/core/workspace.hpp>
#include <mdkv/cpu/backend.hpp>
#include <mdkv/cpu/executor.hpp>

#include "support/guarded_buffer.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace support
{

using mdkv::index_t;

/// Where a tensor's elements lie.
struct placement
{
    bool swapped               = false; ///< dimensions 0 and 1 change places in memory: [N, H, D] seen as [H, N, D]
    index_t slack              = 0;     ///< elements between two rows, filled with NaN
    index_t misalign           = 0;     ///< bytes the first element lies past an aligned address
    std::optional<guard> fence = std::nullopt; ///< a forbidden page right after the last element, or before the first
};

/// A tensor of any rank that is read and written one element at a time; everything that is no element is poison (0xFF:
/// a NaN in every element type).
template <class T, std::size_t Rank>
class tensor
{
public:
    explicit tensor(std::array<index_t, Rank> extents, placement how = {})
        : extents_{extents}
    {
        std::array<std::size_t, Rank> order{}; // from the outermost in memory to the innermost
        for (std::size_t i = 0; i < Rank; ++i) { order[i] = i; }
        if (how.swapped && Rank >= 3) { std::swap(order[0], order[1]); }
        index_t step = 1;
        for (std::size_t i = Rank; i-- > 0;)
        {
            strides_[order[i]] = step;
            step *= extents_[order[i]];
            if (i == Rank - 1) { step += how.slack; }
        }
        index_t span = 1;
        for (std::size_t i = 0; i < Rank; ++i)
        {
            count_ *= extents_[i];
            span += (extents_[i] - 1) * strides_[i];
        }
        if (count_ == 0) { span = 0; }
        auto const bytes = static_cast<std::size_t>(span) * sizeof(T);
        auto const shift = static_cast<std::size_t>(how.misalign);
        if (how.fence)
        {
            fenced_.emplace(bytes, *how.fence);
            data_ = fenced_->data();
        }
        else
        {
            heap_.reset(
                static_cast<std::byte*>(::operator new(std::max<std::size_t>(bytes + shift, 1), std::align_val_t{64})));
            data_ = heap_.get() + shift;
        }
        if (bytes > 0) { std::memset(data_, 0xFF, bytes); }
        bytes_ = bytes;
    }

    // The four members that make it a strided tensor to the library.
    [[nodiscard]] static constexpr std::size_t rank() { return Rank; }
    [[nodiscard]] T* data_handle() const { return data(); }
    [[nodiscard]] index_t extent(std::size_t i) const { return extents_[i]; }
    [[nodiscard]] index_t stride(std::size_t i) const { return strides_[i]; }
    [[nodiscard]] index_t count() const { return count_; }
    /// May be misaligned: only for handing on.
    [[nodiscard]] T* data() const { return reinterpret_cast<T*>(data_); }

    template <class... Indices>
    [[nodiscard]] T get(Indices... indices) const
    {
        T value;
        std::memcpy(static_cast<void*>(&value), place({static_cast<index_t>(indices)...}), sizeof value);
        return value;
    }
    template <class... Indices>
    void set(T value, Indices... indices)
    {
        std::memcpy(place({static_cast<index_t>(indices)...}), &value, sizeof value);
    }

    /// Everything in the tensor's memory, slack included.
    [[nodiscard]] std::vector<std::byte> memory() const { return {data_, data_ + bytes_}; }

    /// The elements in index order.
    [[nodiscard]] std::vector<T> elements() const
    {
        std::vector<T> all;
        all.reserve(static_cast<std::size_t>(count_));
        for (index_t i = 0; i < count_; ++i)
        {
            T value;
            std::memcpy(static_cast<void*>(&value), place(indices_of(i)), sizeof value);
            all.push_back(value);
        }
        return all;
    }

    /// Sets the elements in index order.
    void assign(std::span<T const> all)
    {
        for (index_t i = 0; i < count_; ++i)
        {
            std::memcpy(place(indices_of(i)), &all[static_cast<std::size_t>(i)], sizeof(T));
        }
    }

    /// The same elements, laid out differently.
    [[nodiscard]] tensor relaid(placement how) const
    {
        tensor other{extents_, how};
        other.assign(elements());
        return other;
    }

    [[nodiscard]] mdkv::in_view<T, Rank, mdkv::cpu::backend> in() const
    {
        return mdkv::in(mdkv::cpu::backend{}, *this);
    }
    [[nodiscard]] mdkv::out_view<T, Rank, mdkv::cpu::backend> out() { return mdkv::out(mdkv::cpu::backend{}, *this); }

private:
    struct release
    {
        void operator()(std::byte* memory) const { ::operator delete(memory, std::align_val_t{64}); }
    };

    [[nodiscard]] std::byte* place(std::array<index_t, Rank> const& at) const
    {
        index_t offset = 0;
        for (std::size_t i = 0; i < Rank; ++i) { offset += at[i] * strides_[i]; }
        return data_ + static_cast<std::size_t>(offset) * sizeof(T);
    }

    [[nodiscard]] std::array<index_t, Rank> indices_of(index_t flat) const
    {
        std::array<index_t, Rank> at{};
        for (std::size_t i = Rank; i-- > 0;)
        {
            at[i] = flat % extents_[i];
            flat /= extents_[i];
        }
        return at;
    }

    std::array<index_t, Rank> extents_;
    std::array<index_t, Rank> strides_{};
    index_t count_     = 1;
    std::size_t bytes_ = 0;
    std::byte* data_   = nullptr;
    std::unique_ptr<std::byte, release> heap_;
    std::optional<guarded_buffer> fenced_;
};

/// The same numbers in another element type, rounded where that is narrower.
template <class U, class T, std::size_t Rank>
[[nodiscard]] tensor<U, Rank> converted(tensor<T, Rank> const& from)
{
    std::array<index_t, Rank> extents{};
    for (std::size_t i = 0; i < Rank; ++i) { extents[i] = from.extent(i); }
    tensor<U, Rank> to{extents};
    std::vector<U> all;
    for (T const x : from.elements()) { all.push_back(mdkv::narrow<U>(mdkv::widen(x))); }
    to.assign(all);
    return to;
}

/// Memory of a workspace, filled with NaN so that reading it unwritten shows. Each block is of its own, for sanitizers.
struct nan_memory
{
    static constexpr std::size_t alignment = mdkv::workspace::alignment;

    [[nodiscard]] static void* allocate(std::size_t bytes)
    {
        return std::memset(::operator new(bytes, std::align_val_t{alignment}), 0xFF, bytes);
    }
    static void release(void* data, std::size_t) noexcept { ::operator delete(data, std::align_val_t{alignment}); }
};

/// Makes the call as a user does, with a workspace of its own; returns the bytes that it needed.
template <class Call>
index_t run(Call const& call, mdkv::cpu::executor_ref threads = {})
{
    mdkv::workspace scratch{nan_memory{}};
    call(mdkv::cpu::backend{&scratch, threads});
    return scratch.peak();
}

/// The text of what the call throws, if it is an E; otherwise a text that says what happened instead.
template <class E, class Call>
[[nodiscard]] std::string error_text(Call const& call)
{
    try
    {
        call();
    }
    catch (E const& e)
    {
        return e.what();
    }
    catch (std::exception const& e)
    {
        return std::string{"threw something else: "} + e.what();
    }
    return "threw nothing";
}

} // namespace support
