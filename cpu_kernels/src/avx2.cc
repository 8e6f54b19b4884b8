// The kernels for x86 with AVX2 and FMA.
#include <algorithm>
#include <limits>
#include <vector>

#include "kernels.h"
#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define JAXLLM_AVX2
#include "attention.h"
#include "linear.h"

namespace jaxllm {
extern const Kernels avx2_kernels = {linear, attention};
}
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
