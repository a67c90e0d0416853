/// \file eigen.cuh: eigenvectors of symmetric matrices by Jacobi's rotations, a block for each matrix.
#pragma once

#include <mdkv/core/types.hpp>
#include <mdkv/core/view.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/collectives.cuh>
#include <mdkv/gpu/device.cuh>

#include <cmath>

namespace mdkv::gpu::kernels
{

/// Room for a matrix of D rows and its directions while they are turned. It is there whether shared memory holds them or
/// not, so that a dry run need not know the device.
struct eigen_room
{
    index_t side; ///< D, rounded up to even: the row added is never turned

    explicit eigen_room(index_t dim)
        : side{dim + dim % 2}
    {}
    /// Floats of scratch for one matrix.
    [[nodiscard]] MDKV_HD index_t scratch() const { return 2 * side * side; }
};

/// Cyclic Jacobi. In every round each row is turned against one other, so that side/2 rotations are independent; after side-1
/// rounds, a sweep, every two rows have met. Only the upper triangle is kept, its diagonal apart. `Shared` is 2 where matrix
/// and directions are in the block's shared memory, 1 where the matrix is, else 0, where rounds take several times as long;
/// the compiler must know which memory it reads.
template <int Shared>
struct symmetric_eigen
{
    static constexpr char const* name = "symmetric_eigen";
    static constexpr int threads      = 512;
    static constexpr int warps        = threads / device::warp_size;
    static constexpr int most_sweeps  = 32;       // 5 to 15 happen
    static constexpr float negligible = 0x1p-25F; // of the largest entry: as much as rounding leaves

    in_view<double, 3, backend> gram;
    out_view<float, 3, backend> basis;
    out_view<float, 2, backend> energy;
    float* scratch; // [H, room.scratch()]
    eigen_room room;

    /// Two rows and how they turn against each other; sine 0 where they stay. tau = tan(angle / 2).
    struct rotation
    {
        float sine;
        float tau;
    };

    struct rows_of_pair
    {
        int p;
        int q;
    };

    struct work
    {
        float* matrix;       // [side, side] upper triangle, without its diagonal
        float* directions;   // [side, side]
        float* diagonal;     // [side]
        rotation* rotations; // [side / 2]
        double* part;        // [warps]
        int side;

        __host__ __device__ work(symmetric_eigen const& k, device::shared_carver& carve, float* scratch)
            : side{static_cast<int>(k.room.side)}
        {
            index_t const n = k.room.side;
            part            = carve.take<double>(warps);
            diagonal        = carve.take<float>(n);
            rotations       = carve.take<rotation>(n / 2);
            if constexpr (Shared >= 1) { matrix = carve.take<float>(n * n); }
            else { matrix = scratch; }
            if constexpr (Shared >= 2) { directions = carve.take<float>(n * n); }
            else { directions = scratch == nullptr ? nullptr : scratch + n * n; }
        }
        [[nodiscard]] __device__ float& at(int i, int j) const
        {
            return i < j ? matrix[i * side + j] : matrix[j * side + i];
        }
        /// The two rows of pair i in a round: all stand in a circle but the last, which meets whoever is in turn.
        [[nodiscard]] __device__ rows_of_pair pair(int round, int i) const
        {
            int const circle = side - 1;
            int const behind = round >= i ? round - i : round - i + circle;
            return {round + i < circle ? round + i : round + i - circle, i == 0 ? circle : behind};
        }
    };

    [[nodiscard]] index_t shared_bytes() const
    {
        device::shared_carver carve{nullptr};
        work const counted{*this, carve, nullptr};
        static_cast<void>(counted);
        return carve.bytes();
    }

    /// The largest magnitude in this head's matrix; a NaN if not all are finite.
    [[nodiscard]] __device__ double largest(index_t head, double* part) const
    {
        index_t const n = gram.extent(1);
        double most     = 0;
        double spoilt   = 0;
        for (index_t i = device::thread(); i < n * n; i += threads)
        {
            double const x = gram(head, i / n, i % n);
            spoilt += x - x; // 0 only of what is finite
            most = fabs(x) > most ? fabs(x) : most;
        }
        for (int step = device::warp_size / 2; step > 0; step /= 2)
        {
            double const other = device::shuffle_xor(most, step);
            most               = other > most ? other : most;
        }
        spoilt = device::block_sum(spoilt, part);
        device::sync();
        if (device::lane() == 0) { part[device::warp()] = most; }
        device::sync();
        for (int w = 0; w < warps; ++w) { most = part[w] > most ? part[w] : most; }
        return most + spoilt;
    }

    /// To unit scale, so that neither huge nor tiny keys leave float's range; what is not finite counts as zeros.
    __device__ void begin(work const& w, index_t head, double unit) const
    {
        auto const dim    = static_cast<int>(gram.extent(1));
        bool const finite = unit - unit == 0;
        for (int i = device::thread(); i < w.side * w.side; i += threads)
        {
            int const row     = i / w.side;
            int const column  = i % w.side;
            w.directions[i]   = row == column ? 1.0F : 0.0F;
            bool const inside = finite && unit > 0 && row < dim && column < dim && row <= column;
            float const x     = inside ? static_cast<float>(gram(head, row, column) / unit) : 0.0F;
            w.matrix[i]       = x;
            if (row == column) { w.diagonal[row] = x; }
        }
        device::sync();
    }

    /// Rotations that make the entry between each pair's two rows 0. Returns how many of this thread's pairs turn.
    [[nodiscard]] __device__ static int choose(work const& w, int round)
    {
        int turned = 0;
        for (int i = device::thread(); i < w.side / 2; i += threads)
        {
            auto const [p, q] = w.pair(round, i);
            float& between    = w.at(p, q);
            rotation turn{0.0F, 0.0F};
            if (fabsf(between) > negligible)
            {
                float const theta   = (w.diagonal[q] - w.diagonal[p]) / (2.0F * between);
                float const steep   = fabsf(theta) + sqrtf(fmaf(theta, theta, 1.0F));
                float const tangent = theta < 0.0F ? -1.0F / steep : 1.0F / steep;
                float const cosine  = 1.0F / sqrtf(fmaf(tangent, tangent, 1.0F));
                turn.sine           = tangent * cosine;
                turn.tau            = turn.sine / (1.0F + cosine);
                w.diagonal[p] -= tangent * between;
                w.diagonal[q] += tangent * between;
                between = 0.0F;
                ++turned;
            }
            w.rotations[i] = turn;
        }
        return turned;
    }

    /// x' = c x - s y and y' = s x + c y, so written that a small angle changes no length.
    __device__ __forceinline__ static void turn(float& x, float& y, rotation by)
    {
        float const x_before = x;
        x                    = fmaf(-by.sine, fmaf(by.tau, x, y), x);
        y                    = fmaf(by.sine, fmaf(-by.tau, y, x_before), y);
    }

    /// The four entries where the rows of pair i cross those of pair j.
    __device__ static void turn_crossing(work const& w, int round, int i, int j)
    {
        rotation const a = w.rotations[i];
        rotation const b = w.rotations[j];
        if (a.sine == 0.0F && b.sine == 0.0F) { return; }
        auto const [p, q] = w.pair(round, i);
        auto const [r, s] = w.pair(round, j);
        float pr          = w.at(p, r);
        float ps          = w.at(p, s);
        float qr          = w.at(q, r);
        float qs          = w.at(q, s);
        turn(pr, qr, a);
        turn(ps, qs, a);
        turn(pr, ps, b);
        turn(qr, qs, b);
        w.at(p, r) = pr;
        w.at(p, s) = ps;
        w.at(q, r) = qr;
        w.at(q, s) = qs;
    }

    __device__ static void apply(work const& w, int round)
    {
        // Pairs i and i + gap: every two pairs once; neighbouring lanes touch neighbouring banks.
        int const pairs = w.side / 2;
        for (int gap = 1 + device::warp(); gap <= pairs / 2; gap += warps)
        {
            int const starts = 2 * gap == pairs ? gap : pairs;
            for (int i = device::lane(); i < starts; i += device::warp_size)
            {
                turn_crossing(w, round, i, i + gap < pairs ? i + gap : i + gap - pairs);
            }
        }
        for (int i = device::warp(); i < pairs; i += warps)
        {
            rotation const by = w.rotations[i];
            if (by.sine == 0.0F) { continue; }
            auto const [p, q] = w.pair(round, i);
            for (int k = device::lane(); k < w.side; k += device::warp_size)
            {
                turn(w.directions[p * w.side + k], w.directions[q * w.side + k], by);
            }
        }
    }

    /// Strongest first, equal ones in their order.
    __device__ void finish(work const& w, index_t head, double unit) const
    {
        auto const dim = static_cast<int>(gram.extent(1));
        for (int i = device::warp(); i < dim; i += warps)
        {
            float const mine = w.diagonal[i];
            int before       = 0;
            for (int j = device::lane(); j < dim; j += device::warp_size)
            {
                before += w.diagonal[j] > mine || (w.diagonal[j] == mine && j < i) ? 1 : 0;
            }
            before = device::warp_sum(before);
            for (int k = device::lane(); k < dim; k += device::warp_size)
            {
                basis(head, before, k) = w.directions[i * w.side + k];
            }
            if (device::lane() == 0)
            {
                double const value   = mine > 0.0F ? static_cast<double>(mine) * unit : 0.0;
                energy(head, before) = static_cast<float>(unit - unit == 0 ? value : unit - unit);
            }
        }
    }

    __device__ void operator()() const
    {
        index_t const head = device::block();
        device::shared_carver carve{device::shared_memory()};
        work const w{*this, carve, scratch + head * room.scratch()};
        double const unit = largest(head, w.part);
        begin(w, head, unit);
        for (int sweep = 0; sweep < most_sweeps; ++sweep)
        {
            int turned = 0;
            for (int round = 0; round < w.side - 1; ++round)
            {
                turned += choose(w, round);
                device::sync();
                apply(w, round);
                device::sync();
            }
            if (device::block_sum(turned, reinterpret_cast<int*>(w.part)) == 0) { break; }
        }
        finish(w, head, unit);
    }
};

} // namespace mdkv::gpu::kernels
