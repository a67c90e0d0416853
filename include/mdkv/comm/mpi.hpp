/// \file mpi.hpp: ranks over the caller's MPI communicator, for heads in the host's memory; needs <mpi.h>, and nothing else includes it.
#pragma once

#include <mdkv/core/error.hpp>
#include <mdkv/core/ranks.hpp>
#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>

#include <cstdint>

#include <mpi.h>

namespace MDKV_NAMESPACE
{

/// A communicator: `mdkv::mpi_communicator{comm}` after MPI_Init. One thread of each rank calls it. MPI ends all ranks by default
/// if one is killed; errors that its communicator returns instead are thrown.
struct mpi_communicator
{
    static constexpr space memory_space = space::host;

    MPI_Comm comm = MPI_COMM_WORLD; ///< the caller's

    [[nodiscard]] int rank() const
    {
        int number = 0;
        expects_success(MPI_Comm_rank(comm, &number));
        return number;
    }
    [[nodiscard]] int size() const
    {
        int number = 0;
        expects_success(MPI_Comm_size(comm, &number));
        return number;
    }
    /// \throws error   MPI has returned one
    void sum(std::int64_t* numbers, index_t n) const { reduce(numbers, n, MPI_INT64_T, MPI_SUM); }
    /// \throws error   MPI has returned one
    void least(std::uint64_t* numbers, index_t n) const { reduce(numbers, n, MPI_UINT64_T, MPI_MIN); }

private:
    static void expects_success(int code)
    {
        expects<error>(code == MPI_SUCCESS, "mpi_communicator: MPI returned error ", code);
    }

    template <class V>
    void reduce(V* numbers, index_t n, MPI_Datatype type, MPI_Op op) const
    {
        constexpr index_t most = 1 << 30; // MPI counts in int
        for (; n > 0; n -= most, numbers += most)
        {
            int const count = static_cast<int>(n < most ? n : most);
            expects_success(MPI_Allreduce(MPI_IN_PLACE, numbers, count, type, op, comm));
        }
    }
};
static_assert(communicator<mpi_communicator>);

} // namespace MDKV_NAMESPACE
