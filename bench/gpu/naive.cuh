/// \file naive.cuh: algorithm 1 as a first version would have it (arXiv 2603.20616): everything materialised, with cuBLAS, cuSOLVER and a bisection that waits for the device
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/presets.hpp>
#include <mdkv/stages/allocate.hpp>
#include <mdkv/stages/pool.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>

#include <cublas_v2.h>
#include <cusolverDn.h>

#include "bench.cuh"
#include "bisection.cuh"
#include "layers.cuh"
#include "naive_kernels.cuh"

namespace bench
{

inline void expects_success(cublasStatus_t code, char const* what)
{
    mdkv::expects<mdkv::error>(code == CUBLAS_STATUS_SUCCESS, what, ": ", cublasGetStatusString(code));
}
inline void expects_success(cusolverStatus_t code, char const* what)
{
    mdkv::expects<mdkv::error>(code == CUSOLVER_STATUS_SUCCESS, what, ": cuSOLVER status ", static_cast<int>(code));
}

/// The paper's rungs of one layer: bases, losses, pooling, rungs. It does not pack.
class materialised
{
public:
    materialised(source_layer const& from, index_t limit)
        : from_{from}
        , limit_{limit}
    {
        expects_success(cublasCreate(&blas_), "cublasCreate");
        expects_success(cublasSetStream(blas_, stream()), "cublasSetStream");
        expects_success(cusolverDnCreate(&solver_), "cusolverDnCreate");
        expects_success(cusolverDnSetStream(solver_, stream()), "cusolverDnSetStream");
        expects_success(cusolverDnCreateSyevjInfo(&jacobi_), "cusolverDnCreateSyevjInfo");
        int size = 0;
        expects_success(cusolverDnSsyevjBatched_bufferSize(solver_, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER,
                            dim, gram_.data(), dim, energy_.data(), &size, jacobi_, 2 * heads),
            "cusolverDnSsyevjBatched_bufferSize");
        room_ = device_array<float>{size};
    }
    ~materialised()
    {
        cusolverDnDestroySyevjInfo(jacobi_);
        cusolverDnDestroy(solver_);
        cublasDestroy(blas_);
    }
    materialised(materialised const&)            = delete;
    materialised& operator=(materialised const&) = delete;

    /// Waits for the device many times.
    bisected run()
    {
        fit_bases();
        lengths(from_.values.data(), nullptr, length_);
        probabilities(from_.keys.data(), full_);
        losses(nullptr, 0);
        for (std::size_t r = 1; r < ratios.size(); ++r)
        {
            if (ratios[r].projected()) { project(r); }
            else
            {
                expects_success(
                    cudaMemset2DAsync(loss_of(r), row_bytes(ratios.size()), 0, row_bytes(1), heads, stream()),
                    "cudaMemset2DAsync");
            }
        }
        enqueue([&](gpu::backend const& on) {
            mdkv::pool(on, mdkv::in(on, loss_.data(), heads, rungs, tokens_), mdkv::presets::paper.pooling,
                mdkv::out(on, pooled_.data(), heads, rungs, tokens_));
        });
        constexpr mdkv::rung_costs costs{ratios, dims, index_t{sizeof(element)}};
        return bisection_.solve(choice<ratios.size()>{pooled_.data(), tokens_, costs, 0.0}, heads * tokens_,
            limit_ - heads * costs.widest_projection(), rung_.data());
    }

private:
    static constexpr auto const& ratios = mdkv::presets::paper.ratios;
    static constexpr auto rungs         = static_cast<index_t>(ratios.size());
    static constexpr index_t queries    = group * window; // of a KV head

    [[nodiscard]] float* loss_of(std::size_t r) const { return loss_.data() + static_cast<index_t>(r) * tokens_; }
    [[nodiscard]] std::size_t row_bytes(std::size_t rows) const
    {
        return rows * static_cast<std::size_t>(tokens_) * sizeof(float);
    }

    /// For every head, columns first: c [m, n] = a or its transpose [m, k], times b or its transpose [k, n].
    struct matrix
    {
        element const* data;
        cublasOperation_t operation;
        index_t leading;
        index_t stride; // from head to head
    };
    template <class C>
    void multiply(index_t m, index_t n, index_t k, matrix const& a, matrix const& b, C* c, index_t leading,
        index_t stride, float factor = 1.0F)
    {
        constexpr cudaDataType_t type = sizeof(C) == sizeof(float) ? CUDA_R_32F : CUDA_R_16BF;
        float const nothing           = 0.0F;
        auto const narrow             = [](index_t x) { return static_cast<int>(x); };
        expects_success(
            cublasGemmStridedBatchedEx(blas_, a.operation, b.operation, narrow(m), narrow(n), narrow(k), &factor,
                a.data, CUDA_R_16BF, narrow(a.leading), a.stride, b.data, CUDA_R_16BF, narrow(b.leading), b.stride,
                &nothing, c, type, narrow(leading), stride, heads, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
            "cublasGemmStridedBatchedEx");
    }

    void fit_bases()
    {
        for (index_t which = 0; which < 2; ++which)
        {
            element const* const x = which == 0 ? from_.keys.data() : from_.values.data();
            multiply(dim, dim, tokens_, {x, CUBLAS_OP_N, dim, columns_ * dim}, {x, CUBLAS_OP_T, dim, columns_ * dim},
                gram_.data() + which * heads * dim * dim, dim, dim * dim);
        }
        expects_success(
            cusolverDnSsyevjBatched(solver_, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER, dim, gram_.data(), dim,
                energy_.data(), room_.data(), static_cast<int>(room_.size()), info_.data(), jacobi_, 2 * heads),
            "cusolverDnSsyevjBatched");
        launch(kernels::narrow_all{gram_.data(), basis_.data(), gram_.size()},
            gram_.size() / kernels::narrow_all::threads);
    }

    void lengths(element const* x, element const* y, device_array<float> const& to)
    {
        using kernel = kernels::row_lengths;
        launch(
            kernel{x, y, to.data(), tokens_, columns_}, (heads * tokens_ + kernel::rows_each - 1) / kernel::rows_each);
    }

    void probabilities(element const* keys, device_array<float> const& to)
    {
        multiply(columns_, queries, dim, {keys, CUBLAS_OP_T, dim, columns_ * dim},
            {from_.queries.data(), CUBLAS_OP_N, dim, queries * dim}, to.data(), columns_, queries * columns_,
            1.0F / std::sqrt(static_cast<float>(dim)));
        launch(kernels::softmax_rows{to.data(), tokens_, columns_}, heads * queries);
    }

    void losses(float const* other, std::size_t r)
    {
        using kernel = kernels::token_losses;
        launch(kernel{full_.data(), other, length_.data(), distance_.data(), loss_of(r), rungs, tokens_, columns_},
            (heads * tokens_ + kernel::threads - 1) / kernel::threads);
    }

    /// Keys and values as rung r would have them, and what is lost.
    void project(std::size_t r)
    {
        index_t const kept = ratios.coordinates(r, dim);
        for (index_t which = 0; which < 2; ++which)
        {
            element const* const x = which == 0 ? from_.keys.data() : from_.values.data();
            // Energies ascend: the leading directions are the last columns.
            element const* const u = basis_.data() + which * heads * dim * dim + (dim - kept) * dim;
            multiply(kept, tokens_, dim, {u, CUBLAS_OP_T, dim, dim * dim}, {x, CUBLAS_OP_N, dim, columns_ * dim},
                latent_.data(), kept, tokens_ * kept);
            multiply(dim, tokens_, kept, {u, CUBLAS_OP_N, dim, dim * dim},
                {latent_.data(), CUBLAS_OP_N, kept, tokens_ * kept}, restored_.data(), dim, columns_ * dim);
            if (which == 1) { break; }
            auto const row    = static_cast<std::size_t>(columns_ * dim) * sizeof(element);
            auto const before = tokens_ * dim; // the window's keys stay as they are
            expects_success(cudaMemcpy2DAsync(restored_.data() + before, row, x + before, row,
                                std::size_t{window * dim} * sizeof(element), heads, cudaMemcpyDeviceToDevice, stream()),
                "cudaMemcpy2DAsync");
            probabilities(restored_.data(), other_);
        }
        lengths(from_.values.data(), restored_.data(), distance_);
        losses(other_.data(), r);
    }

    source_layer const& from_;
    index_t limit_;
    index_t tokens_  = from_.tokens;
    index_t columns_ = from_.tokens + window;
    cublasHandle_t blas_{};
    cusolverDnHandle_t solver_{};
    syevjInfo_t jacobi_{};
    device_array<float> gram_{2 * heads * dim * dim}; // [2, H, D, D]
    device_array<float> energy_{2 * heads * dim};     // [2, H, D]
    device_array<float> room_;
    device_array<int> info_{2 * heads};                      // [2, H]
    device_array<element> basis_{2 * heads * dim * dim};     // [2, H, D, D]
    device_array<element> latent_{heads * tokens_ * dim};    // [H, N, r]
    device_array<element> restored_{heads * columns_ * dim}; // [H, N + W, D]
    device_array<float> length_{heads * tokens_};            // [H, N]
    device_array<float> distance_{heads * tokens_};          // [H, N]
    device_array<float> full_{heads * queries * columns_};   // [H, G*Q, N + W]
    device_array<float> other_{heads * queries * columns_};  // [H, G*Q, N + W]
    device_array<float> loss_{heads * rungs * tokens_};      // [H, R, N]
    device_array<float> pooled_{heads * rungs * tokens_};    // [H, R, N]
    device_array<std::uint8_t> rung_{heads * tokens_};       // [H, N]
    bisection bisection_;
};

} // namespace bench
