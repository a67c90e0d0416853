/// \file machine.hpp: the inline namespace that all of mdkv stands in, named after what a source is compiled for, and the flags it refuses.
#pragma once

// Results need IEEE arithmetic in the order in which it is written: a sum with a large constant rounds to a whole number,
// and -infinity is the log-sum-exp of no tokens. (clang has no macro for -fassociative-math alone; see MDKV_IN_ORDER.)
#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__)                            \
    || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#    error "mdkv computes wrong results with -ffast-math, -Ofast, -funsafe-math-optimizations, -fassociative-math, " \
        "-freciprocal-math or -ffinite-math-only: compile the sources that include it without, e.g. -fno-fast-math after them"
#elif defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0 && __FLT_EVAL_METHOD__ != 16
#    error "mdkv computes wrong results where float arithmetic has the range or precision of another type (-mfpmath=387)"
#endif

/// First in a block whose sums must be made in the order in which they are written.
#if defined(__clang__)
#    define MDKV_IN_ORDER _Pragma("clang fp reassociate(off)")
#else
#    define MDKV_IN_ORDER
#endif

// A program and its shared libraries may hold sources that are compiled for different processors. The linker keeps either of two
// functions with one name, and a processor may then meet instructions that it does not have. Everything of mdkv therefore stands in
// a namespace named after the instructions that the compiler may use: mdkv::x86_sse4_avx2 (x86-64-v3), mdkv::arm64_dotprod. Objects
// with different names share no function and no type; a call from one to the other by mdkv's types is an error of the linker.

// MDKV_DETAIL_IF(__AVX2__, _avx2) is _avx2 if the macro is 1, otherwise nothing: MDKV_DETAIL_COMMA_1 makes the word the second one.
#define MDKV_DETAIL_COMMA_1 ,
#define MDKV_DETAIL_SECOND(first, second, ...) second
#define MDKV_DETAIL_PICK(...) MDKV_DETAIL_SECOND(__VA_ARGS__)
#define MDKV_DETAIL_IF_VALUE(value, word) MDKV_DETAIL_PICK(MDKV_DETAIL_COMMA_##value word, , )
#define MDKV_DETAIL_IF(macro, word) MDKV_DETAIL_IF_VALUE(macro, word)
#define MDKV_DETAIL_PASTE(a, b, c, d, e, f, g, h) a##b##c##d##e##f##g##h
#define MDKV_DETAIL_JOIN(a, b, c, d, e, f, g, h) MDKV_DETAIL_PASTE(a, b, c, d, e, f, g, h)

#if defined(__x86_64__)
// A level of x86-64's ABI is one word; the parts of a level that is not reached are a word each, e.g. with -mavx2 -mfma.
#    if defined(__SSE3__) && defined(__SSSE3__) && defined(__SSE4_1__) && defined(__SSE4_2__) && defined(__POPCNT__)
#        define MDKV_DETAIL_SSE _sse4
#    else
#        define MDKV_DETAIL_SSE                                                                                        \
            MDKV_DETAIL_JOIN(MDKV_DETAIL_IF(__SSE3__, _sse3), MDKV_DETAIL_IF(__SSSE3__, _ssse3),                       \
                MDKV_DETAIL_IF(__SSE4_1__, _sse41), MDKV_DETAIL_IF(__SSE4_2__, _sse42), MDKV_DETAIL_IF(__POPCNT__, _popcnt), , , )
#    endif
#    if defined(__AVX__) && defined(__AVX2__) && defined(__BMI__) && defined(__BMI2__) && defined(__F16C__)                 \
        && defined(__FMA__) && defined(__LZCNT__) && defined(__MOVBE__)
#        define MDKV_DETAIL_AVX _avx2
#    else
#        define MDKV_DETAIL_AVX                                                                                        \
            MDKV_DETAIL_JOIN(MDKV_DETAIL_IF(__AVX__, _avx), MDKV_DETAIL_IF(__AVX2__, _avx2), MDKV_DETAIL_IF(__BMI__, _bmi),   \
                MDKV_DETAIL_IF(__BMI2__, _bmi2), MDKV_DETAIL_IF(__F16C__, _f16c), MDKV_DETAIL_IF(__FMA__, _fma),       \
                MDKV_DETAIL_IF(__LZCNT__, _lzcnt), MDKV_DETAIL_IF(__MOVBE__, _movbe))
#    endif
#    if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512CD__) && defined(__AVX512DQ__)                     \
        && defined(__AVX512VL__)
#        define MDKV_DETAIL_AVX512 _avx512
#    else
#        define MDKV_DETAIL_AVX512                                                                                     \
            MDKV_DETAIL_JOIN(MDKV_DETAIL_IF(__AVX512F__, _avx512f), MDKV_DETAIL_IF(__AVX512BW__, _avx512bw),           \
                MDKV_DETAIL_IF(__AVX512CD__, _avx512cd), MDKV_DETAIL_IF(__AVX512DQ__, _avx512dq),                      \
                MDKV_DETAIL_IF(__AVX512VL__, _avx512vl), , , )
#    endif
// Instructions outside the levels that compilers use unasked, or that mdkv uses; those of Ice Lake and Zen 4 are one word.
#    if defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && defined(__AVX512VBMI2__) && defined(__AVX512BITALG__)         \
        && defined(__AVX512VPOPCNTDQ__) && defined(__AVX512IFMA__) && defined(__GFNI__)
#        define MDKV_DETAIL_MORE _icelake
#    else
#        define MDKV_DETAIL_MORE                                                                                       \
            MDKV_DETAIL_JOIN(MDKV_DETAIL_IF(__AVX512VNNI__, _vnni), MDKV_DETAIL_IF(__AVX512VBMI__, _vbmi),             \
                MDKV_DETAIL_IF(__AVX512VBMI2__, _vbmi2), MDKV_DETAIL_IF(__AVX512BITALG__, _bitalg),                    \
                MDKV_DETAIL_IF(__AVX512VPOPCNTDQ__, _vpopcntdq), MDKV_DETAIL_IF(__AVX512IFMA__, _ifma), MDKV_DETAIL_IF(__GFNI__, _gfni), )
#    endif
#    define MDKV_DETAIL_OTHER                                                                                          \
        MDKV_DETAIL_JOIN(MDKV_DETAIL_IF(__AVX512BF16__, _bf16), MDKV_DETAIL_IF(__AVX512FP16__, _fp16),                 \
            MDKV_DETAIL_IF(__AVXVNNI__, _avxvnni), MDKV_DETAIL_IF(__AVXIFMA__, _avxifma), MDKV_DETAIL_IF(__FMA4__, _fma4), \
            MDKV_DETAIL_IF(__AVXNECONVERT__, _avxneconvert), MDKV_DETAIL_IF(__XOP__, _xop), MDKV_DETAIL_IF(__TBM__, _tbm))
#    define MDKV_DETAIL_MACHINE                                                                                        \
        MDKV_DETAIL_JOIN(x86, MDKV_DETAIL_SSE, MDKV_DETAIL_AVX, MDKV_DETAIL_AVX512, MDKV_DETAIL_MORE, MDKV_DETAIL_OTHER,    \
            MDKV_DETAIL_IF(__APX_F__, _apx), )
#elif defined(__aarch64__)
#    define MDKV_DETAIL_MORE                                                                                           \
        MDKV_DETAIL_JOIN(MDKV_DETAIL_IF(__ARM_FEATURE_DOTPROD, _dotprod), MDKV_DETAIL_IF(__ARM_FEATURE_MATMUL_INT8, _i8mm), \
            MDKV_DETAIL_IF(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC, _fp16), MDKV_DETAIL_IF(__ARM_FEATURE_FP16_FML, _fp16fml),  \
            MDKV_DETAIL_IF(__ARM_FEATURE_BF16, _bf16), MDKV_DETAIL_IF(__ARM_FEATURE_COMPLEX, _complex),                \
            MDKV_DETAIL_IF(__ARM_FEATURE_QRDMX, _rdm), MDKV_DETAIL_IF(__ARM_FEATURE_FRINT, _frint))
#    define MDKV_DETAIL_OTHER                                                                                          \
        MDKV_DETAIL_JOIN(MDKV_DETAIL_IF(__ARM_FEATURE_ATOMICS, _lse), MDKV_DETAIL_IF(__ARM_FEATURE_RCPC, _rcpc),       \
            MDKV_DETAIL_IF(__ARM_FEATURE_MOPS, _mops), MDKV_DETAIL_IF(__ARM_FEATURE_CSSC, _cssc), MDKV_DETAIL_IF(__ARM_FEATURE_SVE, _sve), \
            MDKV_DETAIL_IF(__ARM_FEATURE_SVE2, _sve2), MDKV_DETAIL_IF(__ARM_FEATURE_SME, _sme), )
#    define MDKV_DETAIL_MACHINE MDKV_DETAIL_JOIN(arm64, MDKV_DETAIL_MORE, MDKV_DETAIL_OTHER, , , , , )
#else
// Objects for different processors of another architecture are not told apart: compile a program for one of them.
#    define MDKV_DETAIL_MACHINE portable
#endif

/// The namespace's name. Sources without exceptions end the program instead of throwing, so they have a name of their own.
#if defined(__cpp_exceptions)
#    define MDKV_MACHINE MDKV_DETAIL_MACHINE
#else
#    define MDKV_MACHINE MDKV_DETAIL_JOIN(MDKV_DETAIL_MACHINE, _no_exceptions, , , , , , )
#endif

/// `namespace MDKV_NAMESPACE::detail` opens mdkv::detail, spelled so that tools which read no macros see a namespace, too.
#define MDKV_NAMESPACE mdkv::inline MDKV_MACHINE
