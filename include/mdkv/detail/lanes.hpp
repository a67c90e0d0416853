/// \file lanes.hpp: how loops over neighbouring tokens are written so that every compiler makes vector instructions of them.
#pragma once

// `MDKV_FOR_LANES(l, Team::lanes) { x[l] = ...; }` is a plain loop. g++ would unroll it into scalar code before it looks
// for vectors; `MDKV_UNROLL` is for the loops around it whose bounds are known, so that arrays become registers.
#if defined(__CUDACC__)
#    define MDKV_FOR_LANES(l, lanes) for (int l = 0; l < (lanes); ++l)
#    define MDKV_UNROLL _Pragma("unroll")
#else
#    define MDKV_FOR_LANES(l, lanes) _Pragma("GCC unroll 1") for (int l = 0; l < (lanes); ++l)
#    define MDKV_UNROLL _Pragma("GCC unroll 16")
#endif
