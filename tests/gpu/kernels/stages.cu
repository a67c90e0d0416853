// Kernels of all stages but attention, for ptxas: whether they compile, and whether their registers suffice.
#include <mdkv/append.hpp>
#include <mdkv/compress.hpp>
#include <mdkv/engine/finite.hpp>
#include <mdkv/engine/gather.hpp>
#include <mdkv/engine/unpack.hpp>
#include <mdkv/gpu/backend.cuh>
#include <mdkv/gpu/cache.cuh>
#include <mdkv/gpu/score.cuh>
#include <mdkv/merge.hpp>
#include <mdkv/recompress.hpp>
#include <mdkv/replay/balance.hpp>
#include <mdkv/replay/leverage.hpp>
#include <mdkv/replay/refit.hpp>
#include <mdkv/replay/replay.hpp>
#include <mdkv/replay/stand_in.hpp>
#include <mdkv/stages/allocate.hpp>
#include <mdkv/stages/pack.hpp>
#include <mdkv/stages/pool.hpp>

#include <cstdint>

#include "../../support/counting_job.hpp"

#define KERNEL(...) template __global__ void entry(__grid_constant__ __VA_ARGS__ const);
#define JOB(...) KERNEL(job_of_teams<mdkv::detail::__VA_ARGS__>)
#define BACKEND_FIRST(job) JOB(job<backend, float>) JOB(job<backend, half>) JOB(job<backend, bfloat16>)
#define ELEMENT_FIRST(job, place) JOB(job<float, place>) JOB(job<half, place>) JOB(job<bfloat16, place>)
#define TWO_ELEMENTS(job)                                                                                              \
    JOB(job<backend, float, float>)                                                                                    \
    JOB(job<backend, half, half>)                                                                                      \
    JOB(job<backend, half, float>)                                                                                     \
    JOB(job<backend, bfloat16, bfloat16>)                                                                              \
    JOB(job<backend, bfloat16, float>)
#define PRODUCTS(sum)                                                                                                  \
    JOB(panel_product<backend, float, sum>)                                                                            \
    JOB(panel_product<backend, half, sum>)                                                                             \
    JOB(panel_product<backend, bfloat16, sum>)
#define SWEEP(second) KERNEL(score_sweep<float, second>) KERNEL(score_sweep<half, second>) KERNEL(score_sweep<bfloat16, second>)

namespace MDKV_NAMESPACE::gpu::kernels
{

// replay: advance, join, balance, leverage
BACKEND_FIRST(advance_rows)
JOB(sum_pieces<backend>)
JOB(add_totals<backend>)
JOB(total_leverages<backend>)
JOB(weigh_surroundings<backend>)
JOB(weigh_losses<backend>)
JOB(whiten<backend>)
JOB(add_squares<backend>)

// allocate
JOB(dual::begin<space::device>)
JOB(dual::weigh<space::device>)
JOB(dual::narrow<space::device>)
JOB(dual::assign<space::device>)
JOB(dual::conclude<space::device>)

// basis, pool, score
TWO_ELEMENTS(copy_rows)
PRODUCTS(double)
PRODUCTS(float)
JOB(eigenvectors<space::device>)
JOB(fill<double>)
JOB(pool_losses<backend>)
BACKEND_FIRST(score_queries)
JOB(score_channels<half, half, backend>)
KERNEL(score_fragments<half>)
KERNEL(score_fragments<bfloat16>)
JOB(score_join<backend>)
SWEEP(false)
SWEEP(true)
ELEMENT_FIRST(score_losses, backend)

// pack, unpack, recompress
ELEMENT_FIRST(lay_out_heads, backend)
ELEMENT_FIRST(write_channels, backend)
ELEMENT_FIRST(pack_tiles, backend)
JOB(copy_rows<backend, float, half>)
JOB(copy_rows<backend, float, bfloat16>)
ELEMENT_FIRST(read_projections, space::device)
ELEMENT_FIRST(read_tokens, space::device)
ELEMENT_FIRST(carry_over, space::device)
JOB(stored_channels<half, half, backend>)
JOB(mask_losses<half, space::device>) // the same code for every element
JOB(settle_rungs<half, space::device>)
JOB(copy_rows<backend, std::uint8_t>)

// refit, stand_in
JOB(soften_rows<backend>)
BACKEND_FIRST(change_values)
JOB(miss_rows<backend>)
JOB(judge_changes<backend>)
JOB(count_fitted<backend>)
BACKEND_FIRST(choose_seeds)
JOB(attend_dropped<backend>)
JOB(place_stand_in<backend>)

// caches and rows
TWO_ELEMENTS(append_token)
JOB(fill<head_entry>)
JOB(fill<std::uint8_t>)
ELEMENT_FIRST(move_tail, space::device)
BACKEND_FIRST(find_not_finite)
BACKEND_FIRST(gather_page_rows)
BACKEND_FIRST(merge_rows)
JOB(sort_slots<backend>)
KERNEL(job_of_teams<support::count_bytes>)

} // namespace MDKV_NAMESPACE::gpu::kernels
