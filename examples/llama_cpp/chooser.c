/// \file chooser.c: libggml-mdkv.so of a release: it loads the backend beside it that fits ggml and the processor
///
/// ggml looks for variants of its own backends only. GGML_BACKEND_PATH names one file, and this one chooses. It runs on
/// every processor and needs the C library alone.
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <mdkv/core/version.hpp>

#define MDKV_GGML_EXPORT __attribute__((visibility("default")))

struct ggml_backend_reg;
__attribute__((weak)) char const* ggml_version(void);
__attribute__((weak)) void ggml_backend_register(struct ggml_backend_reg*);
__attribute__((weak)) void ggml_backend_buft_alloc_buffer_n(void); ///< ggml has it since version 3 of the interface

/// Whether all bits of `wanted` are set in `found`.
static bool has(unsigned found, unsigned wanted)
{
    return (found & wanted) == wanted;
}

/// The best variant that the processor executes and the system saves registers for; null if there is none. Not every
/// compiler's library serves __builtin_cpu_supports.
static char const* best_variant(void)
{
    unsigned a, b, ecx1, ebx7 = 0, ecx7 = 0, extended = 0, saved = 0, d;
    if (!__get_cpuid(1, &a, &b, &ecx1, &d) || !has(ecx1, bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C | bit_MOVBE)) { return NULL; }
    __get_cpuid_count(7, 0, &a, &ebx7, &ecx7, &d);
    __get_cpuid(0x80000001, &a, &b, &extended, &d);
    __asm__("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
    if (!has(ebx7, bit_AVX2 | bit_BMI | bit_BMI2) || !has(extended, bit_LZCNT) || !has(saved, 0x6)) { return NULL; }
    unsigned const v4 = bit_AVX512F | bit_AVX512BW | bit_AVX512CD | bit_AVX512DQ | bit_AVX512VL;
    if (!has(ebx7, v4) || !has(saved, 0xe6)) { return "x64-v3"; }
    return has(ecx7, bit_AVX512VNNI) ? "x64-v4-vnni" : "x64-v4";
}

/// Loads the chosen backend. ggml compares the version of its own interface with that of the registry, and refuses another
/// version with both numbers.
/// \return its registry; null, after a message, if it cannot be loaded
static struct ggml_backend_reg* load(void)
{
    static struct ggml_backend_reg* loaded = NULL; // llama-bench loads all backends twice
    if (loaded != NULL) { return loaded; }
    char const* const variant = best_variant();
    if (variant == NULL)
    {
        fputs("mdkv: error: libggml-mdkv.so needs a processor with AVX2 and FMA (x86-64-v3)\n", stderr);
        return NULL;
    }
    Dl_info self;
    char folder[PATH_MAX];
    if (dladdr((void*)load, &self) == 0 || realpath(self.dli_fname, folder) == NULL)
    {
        fputs("mdkv: error: the folder of libggml-mdkv.so is unknown\n", stderr);
        return NULL;
    }
    *strrchr(folder, '/') = '\0';
    int const interface   = ggml_backend_buft_alloc_buffer_n != NULL ? 3 : 2;
    char path[PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/libggml-mdkv-api%d-%s.so", folder, interface, variant);
    void* const backend = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    void* const init    = backend == NULL ? NULL : dlsym(backend, "ggml_backend_init");
    if (init == NULL)
    {
        fprintf(stderr, "mdkv: error: %s\n", dlerror());
        return NULL;
    }
    char const* const verbosity = getenv("MDKV_VERBOSE");
    if (verbosity == NULL || strcmp(verbosity, "0") != 0)
    {
        fprintf(stderr, "mdkv: version %d.%d.%d, %s for ggml %s; versions 2 and 3 of ggml's backend interface are served\n",
            MDKV_VERSION_MAJOR, MDKV_VERSION_MINOR, MDKV_VERSION_PATCH, strrchr(path, '/') + 1,
            ggml_version != NULL ? ggml_version() : "of unknown version");
    }
    loaded = ((struct ggml_backend_reg * (*)(void)) init)();
    return loaded;
}

/// LD_PRELOAD is for programs that have their backends linked in and look for no others.
__attribute__((constructor)) static void register_where_preloaded(void)
{
    char const* const preloaded = getenv("LD_PRELOAD");
    if (preloaded != NULL && strstr(preloaded, "libggml-mdkv.so") != NULL && ggml_backend_register != NULL)
    {
        ggml_backend_register(load()); // null is ignored
    }
}

/// The function by which ggml asks for support of the processor; 0: none.
MDKV_GGML_EXPORT int ggml_backend_score(void)
{
    return best_variant() != NULL;
}

/// The function by which ggml loads a backend.
MDKV_GGML_EXPORT struct ggml_backend_reg* ggml_backend_init(void)
{
    return load();
}
