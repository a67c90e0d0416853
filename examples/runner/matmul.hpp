/// \file matmul.hpp: products with weight matrices that stay in the model file's quantised blocks
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include <mdkv/cpu/executor.hpp>

#include "dequantise.hpp"
#include "dot_tile.hpp"
#include "eigen.hpp"
#include "ggml_type.hpp"
#include "gguf.hpp"

namespace runner
{

/// A matrix of the model file: rows are output features, columns input features. It refers to the file's bytes, which
/// must outlive it. Products turn a panel of rows into floats, use it for all tokens and forget it, so a model needs
/// little more memory than its file whatever its format.
class weight_matrix
{
public:
    weight_matrix() = default;

    /// \throws std::invalid_argument   the tensor is no matrix of whole blocks, or its bytes are too few for one
    explicit weight_matrix(tensor_info const& tensor)
        : name_{tensor.name}
        , type_{tensor.type}
        , rows_{tensor.dims[1]}
        , columns_{tensor.dims[0]}
        , bytes_{tensor.data}
    {
        if (tensor.n_dims != 2 || rows_ < 1 || columns_ < 1 || columns_ % block_elements(type_) != 0)
        {
            throw std::invalid_argument("tensor " + std::string(name_) + ": " + std::to_string(rows_) + " rows of "
                                        + std::to_string(columns_) + " columns in " + std::to_string(tensor.n_dims)
                                        + " dimensions are no matrix in blocks of "
                                        + std::to_string(block_elements(type_)) + " elements");
        }
        row_bytes_ = columns_ / block_elements(type_) * block_bytes(type_);
        if (std::cmp_greater(rows_, bytes_.size() / static_cast<std::size_t>(row_bytes_)))
        {
            throw std::invalid_argument("tensor " + std::string(name_) + ": " + std::to_string(rows_) + " rows of "
                                        + std::to_string(row_bytes_) + " bytes do not fit in its "
                                        + std::to_string(bytes_.size()) + " bytes");
        }
    }

    [[nodiscard]] std::string_view name() const noexcept { return name_; }
    [[nodiscard]] ggml_type type() const noexcept { return type_; }
    [[nodiscard]] std::int64_t rows() const noexcept { return rows_; }
    [[nodiscard]] std::int64_t columns() const noexcept { return columns_; }
    [[nodiscard]] std::int64_t row_bytes() const noexcept { return row_bytes_; }

    /// Rows [first, first + count) as floats.
    void dequantise_rows(std::int64_t first, std::int64_t count, float* out /* [count, columns] */) const
    {
        dequantise(type_, bytes_.data() + first * row_bytes_, count * columns_, out);
    }

private:
    std::string_view name_;
    ggml_type type_{};
    std::int64_t rows_{};
    std::int64_t columns_{};
    std::int64_t row_bytes_{};
    std::span<std::byte const> bytes_;
};

/// One of several products of the same tokens.
struct product
{
    weight_matrix const* weights; // [rows, columns]
    float* out;                   // [tokens, rows]
};

namespace detail
{

inline constexpr std::int64_t most_dot_tokens = 16; // below it a matrix product spends its time packing operands
inline constexpr std::int64_t panel_rows      = 96; // two of Eigen's widest register tiles; its panel stays in L2
inline constexpr std::int64_t dot_panel_rows  = 48; // enough weights to be worth handing to another thread

/// Rows [first, first + count) of the product by dot products; a few rows at a time stay in the first cache level.
inline void multiply_few(weight_matrix const& weights, std::int64_t first, std::int64_t count, float const* x,
    std::int64_t tokens, float* out)
{
    constexpr int group        = 4;
    std::int64_t const columns = weights.columns();
    float_matrix rows(group, columns);
    std::int64_t r = first;
    for (; r + group <= first + count; r += group)
    {
        weights.dequantise_rows(r, group, rows.data());
        dot_rows<group>(rows.data(), x, tokens, columns, out + r, weights.rows());
    }
    for (; r < first + count; ++r)
    {
        weights.dequantise_rows(r, 1, rows.data());
        dot_rows<1>(rows.data(), x, tokens, columns, out + r, weights.rows());
    }
}

/// Rows [first, first + count) of the product by Eigen's matrix product.
inline void multiply_many(weight_matrix const& weights, std::int64_t first, std::int64_t count, float const* x,
    std::int64_t tokens, float* out)
{
    std::int64_t const columns = weights.columns();
    float_matrix panel(count, columns);
    weights.dequantise_rows(first, count, panel.data());
    const_matrix_view const inputs(x, tokens, columns, Eigen::OuterStride<>(columns));
    matrix_view outputs(out + first, tokens, count, Eigen::OuterStride<>(weights.rows()));
    outputs.noalias() = inputs * panel.transpose();
}

inline void multiply_panel(
    product const& task, std::int64_t panel, std::int64_t rows_per_panel, float const* x, std::int64_t tokens)
{
    std::int64_t const first = panel * rows_per_panel;
    std::int64_t const count = std::min(rows_per_panel, task.weights->rows() - first);
    if (tokens <= most_dot_tokens) { multiply_few(*task.weights, first, count, x, tokens, task.out); }
    else { multiply_many(*task.weights, first, count, x, tokens, task.out); }
}

} // namespace detail

/// out = x W^T for every product of the list, as one loop over panels of rows. All weights have the same columns;
/// outputs must not overlap x or one another. The panels do not depend on the executor, so the bits do not either.
/// \throws std::invalid_argument   the numbers of columns differ
inline void multiply(mdkv::cpu::executor_ref executor, std::initializer_list<product> products,
    float const* x /* [tokens, columns] */, std::int64_t tokens)
{
    if (tokens <= 0 || products.size() == 0) { return; }
    std::int64_t const rows_per_panel = tokens <= detail::most_dot_tokens ? detail::dot_panel_rows : detail::panel_rows;
    auto const panels_of = [&](product const& p) { return (p.weights->rows() + rows_per_panel - 1) / rows_per_panel; };

    std::int64_t panels = 0;
    for (product const& p : products)
    {
        if (p.weights->columns() != products.begin()->weights->columns())
        {
            throw std::invalid_argument("multiply: " + std::string(p.weights->name()) + " has "
                                        + std::to_string(p.weights->columns()) + " columns, "
                                        + std::string(products.begin()->weights->name()) + " has "
                                        + std::to_string(products.begin()->weights->columns()));
        }
        panels += panels_of(p);
    }
    executor.parallel_for(panels, [&](std::int64_t panel) {
        for (product const& p : products)
        {
            if (panel < panels_of(p)) { return detail::multiply_panel(p, panel, rows_per_panel, x, tokens); }
            panel -= panels_of(p);
        }
    });
}

/// out = x W^T: x [tokens, columns], out [tokens, rows].
inline void multiply(
    mdkv::cpu::executor_ref executor, weight_matrix const& weights, float const* x, std::int64_t tokens, float* out)
{
    multiply(executor, {product{&weights, out}}, x, tokens);
}

} // namespace runner
