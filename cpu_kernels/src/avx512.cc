// The kernels for x86 with AVX-512.
#include <algorithm>
#include <limits>
#include <vector>

#include "kernels.h"
#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define JAXLLM_AVX512
#include "attention.h"
#include "linear.h"

namespace jaxllm {
extern const Kernels avx512_kernels = {linear, attention};
}
#pragma GCC pop_options
#endif
