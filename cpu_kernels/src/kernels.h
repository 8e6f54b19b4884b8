// The kernels, compiled once for each instruction set.
#pragma once

#include <cstdint>

namespace jaxllm {

// A matrix W of int4 in groups of 32 entries of a row: groups [inputs / 32, outputs, 16], two entries
// to a byte, the first in the low half, and an integer factor for each group, [inputs / 32, outputs].
struct Int4 {
  const uint8_t* groups;
  const int8_t* multipliers;
  long outputs;
};

// y = x W^T for x [rows, inputs] and W [outputs, inputs] of float32, or of integers with a float32
// scale for each row.
struct Linear {
  const float* x;
  const float* w;
  const int8_t* w8;  // in place of w
  Int4 w4;           // in place of both
  const float* scale;
  float* y;
  long rows, inputs, outputs;
};

// Attention of T queries of each head over a cache: q and y [B, T, K * G, H], k and v [B * K, S, H],
// visible [B, 1, 1 or T, S], bias none or [1 or B, K * G, T, S].
struct Attention {
  const float *q, *k, *v;
  const bool* visible;
  const float* bias;
  float* y;
  long B, T, K, G, S, H, visible_queries, bias_rows;
  float scale;
};

struct Kernels {
  void (*linear)(const Linear&);
  void (*attention)(const Attention&);
};

extern const Kernels avx512_kernels, avx2_kernels, plain_kernels;

}  // namespace jaxllm
