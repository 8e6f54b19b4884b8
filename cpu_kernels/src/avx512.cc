// The kernels for x86 with AVX-512.
#include <algorithm>
#include <limits>
#include <vector>

#include "kernels.h"
#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif
#define JAXLLM_AVX512
#include "attention.h"
#include "linear.h"

namespace jaxllm {
extern const Kernels avx512_kernels = {linear, attention};
}
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
