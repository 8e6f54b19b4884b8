// Matrices of int4 (`Int4`): memory is read in 4 bits.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace jaxllm {
namespace {

constexpr long kGroup = 32, kParts = kGroup / kWidth;

// y[n + j] = scale[n + j] * x . w[n + j, :] for N rows of w and the only row of x.
template <int N>
void dots_of_int4(const Linear& call, long n) {
  Vector dots[N] = {};
  for (long g = 0; g < call.inputs / kGroup; ++g) {
    const long row = g * call.w4.outputs + n;
    Vector x[kParts];
    UNROLL for (int k = 0; k < kParts; ++k) x[k] = load(call.x + g * kGroup + k * kWidth);
    // Groups of a row are far apart, so the processor does not see which entries come next.
    const uint8_t* next = call.w4.groups + (row + 2 * N) * kGroup / 2;
    for (int j = 0; j < N; j += 4) __builtin_prefetch(next + j * kGroup / 2);
    float multipliers[N];
    for (int j = 0; j < N; ++j) multipliers[j] = call.w4.multipliers[row + j];
    UNROLL for (int j = 0; j < N; ++j) {
      Vector entries[kParts], dot = zero();
      load_int4(call.w4.groups + (row + j) * kGroup / 2, entries);
      UNROLL for (int k = 0; k < kParts; ++k) dot += x[k] * entries[k];
      dots[j] += dot * multipliers[j];
    }
  }
  for (int j = 0; j < N; ++j) call.y[n + j] = sum(dots[j]) * call.scale[n + j];
}

// Entries [i, i + size) of rows [n, n + N) as floats, which stay in the first-level cache for several
// rows of x; without the scale of a row.
template <int N>
void unpack(const Int4& w, long n, long i, long size, float* out) {
  for (long g = i / kGroup; g < (i + size) / kGroup; ++g, out += kGroup)
    UNROLL for (int j = 0; j < N; ++j) {
      const long row = g * w.outputs + n + j;
      Vector entries[kParts];
      load_int4(w.groups + row * kGroup / 2, entries);
      const float multiplier = w.multipliers[row];
      UNROLL for (int k = 0; k < kParts; ++k)
        store(out + j * size + k * kWidth, entries[k] * multiplier);
    }
}

}  // namespace
}  // namespace jaxllm
