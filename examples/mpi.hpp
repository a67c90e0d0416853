/// \file mpi.hpp: the sums of `mdkv::ranks` over an MPI communicator, for an engine to copy; its heads may lie on GPUs, too.
///
///     MPI_Comm comm = MPI_COMM_WORLD;
///     mdkv::ranks const all{.first_head = first, .heads = heads, .sum = sum_over_mpi, .state = &comm};
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/types.hpp>

#include <cstdint>

#include <mpi.h>

/// MPI ends all ranks by default if one is killed; errors that the communicator returns instead are thrown.
/// \param comm  an MPI_Comm; one thread of each rank calls it
inline void sum_over_mpi(void* comm, std::int64_t* numbers, mdkv::index_t count)
{
    constexpr mdkv::index_t most = 1 << 30; // MPI counts in int
    for (; count > 0; count -= most, numbers += most)
    {
        int const code = MPI_Allreduce(MPI_IN_PLACE, numbers, static_cast<int>(count < most ? count : most),
            MPI_INT64_T, MPI_SUM, *static_cast<MPI_Comm*>(comm));
        mdkv::expects<mdkv::error>(code == MPI_SUCCESS, "sum_over_mpi: MPI returned error ", code);
    }
}
