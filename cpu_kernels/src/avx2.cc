// The kernels for x86 with AVX2 and FMA.
#include <algorithm>
#include <limits>
#include <vector>

#include "kernels.h"
#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define JAXLLM_AVX2
#include "attention.h"
#include "linear.h"

namespace jaxllm {
extern const Kernels avx2_kernels = {linear, attention};
}
#pragma GCC pop_options
#endif
