/// \file eigen.hpp: Eigen as the runner uses it: no threads of its own, row-major views of plain buffers
#pragma once

// Threads come from the caller's executor alone. The macro only matters under OpenMP, but there it must come first.
#ifndef EIGEN_DONT_PARALLELIZE
#    define EIGEN_DONT_PARALLELIZE
#endif

// g++ 12's AVX-512 headers start some registers from "undefined" values and then warn about it in every product.
#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC diagnostic push
#    pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#    pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <Eigen/Core>
#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC diagnostic pop
#endif

namespace runner
{

/// An owned, uninitialised, vector-aligned buffer [rows, columns].
using float_matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// Rows of a plain buffer whose starts are `stride` floats apart.
using matrix_view       = Eigen::Map<float_matrix, Eigen::Unaligned, Eigen::OuterStride<>>;
using const_matrix_view = Eigen::Map<float_matrix const, Eigen::Unaligned, Eigen::OuterStride<>>;

/// A run of floats.
using row_view       = Eigen::Map<Eigen::ArrayXf>;
using const_row_view = Eigen::Map<Eigen::ArrayXf const>;

} // namespace runner
