// Products x W^T. Rows of x and of W are both contiguous: a tile of y is a block of dot products,
// whose partial sums stay in registers. W is read from memory once, in order.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "pool.h"
#include "vector.h"

namespace jaxllm {
namespace {

constexpr long kBlock = 1024;          // entries of a row that are summed at a time
constexpr long kChunkBytes = 1 << 16;  // of W: what a thread takes at a time

// Rows of W in a tile with 1 to 3 rows of x, and with 4: as many sums as registers hold.
#if defined(JAXLLM_AVX512)
constexpr int kRowsOf1 = 8, kRowsOf4 = 6;
#else
constexpr int kRowsOf1 = 4, kRowsOf4 = 2;
#endif

// y[m, n] (+)= scale[n] * x[m, :] . w[n, :] for M rows of x and N rows of w.
template <int M, int N, class T>
void tile(const float* x, long inputs, const T* w, long size, const float* scale, float* y,
          long outputs, bool add) {
  Vector dots[N * M] = {};
  const auto multiply = [&](auto of) {
    Vector b[N];
    UNROLL for (int n = 0; n < N; ++n) b[n] = of(w + n * inputs);
    UNROLL for (int m = 0; m < M; ++m) {
      const Vector a = of(x + m * inputs);
      UNROLL for (int n = 0; n < N; ++n) dots[n * M + m] += a * b[n];
    }
  };
  long i = 0;
  for (; i + kWidth <= size; i += kWidth) multiply([=](auto* p) { return load(p + i); });
  if (i < size) multiply([=](auto* p) { return load_first(p + i, size - i); });
  UNROLL for (int first = 0; first < N * M; first += 4) {
    float four[4];
    store_sums(four, dots[first], first + 1 < N * M ? dots[first + 1] : zero(),
               first + 2 < N * M ? dots[first + 2] : zero(),
               first + 3 < N * M ? dots[first + 3] : zero());
    for (int j = 0; j < 4 && first + j < N * M; ++j) {
      const int n = (first + j) / M, m = (first + j) % M;
      const float value = scale ? four[j] * scale[n] : four[j];
      y[m * outputs + n] = add ? y[m * outputs + n] + value : value;
    }
  }
}

// All rows of x with N rows of w, which stay in the first-level cache.
template <int N, class T>
void column(const Linear& call, const T* w, long n, long i, long size) {
  const float* x = call.x + i;
  const float* scale = call.scale ? call.scale + n : nullptr;
  float* y = call.y + n;
  w += n * call.inputs + i;
  const bool add = i > 0;
  long m = 0;
  for (; m + 4 <= call.rows; m += 4, x += 4 * call.inputs, y += 4 * call.outputs)
    tile<4, N>(x, call.inputs, w, size, scale, y, call.outputs, add);
  switch (call.rows - m) {
    case 1: return tile<1, N>(x, call.inputs, w, size, scale, y, call.outputs, add);
    case 2: return tile<2, N>(x, call.inputs, w, size, scale, y, call.outputs, add);
    case 3: return tile<3, N>(x, call.inputs, w, size, scale, y, call.outputs, add);
  }
}

// Rows [begin, end) of W, N at a time.
template <int N, class T>
void rows_of(const Linear& call, const T* w, long begin, long end) {
  for (long i = 0; i < call.inputs; i += kBlock) {
    const long size = std::min(kBlock, call.inputs - i);
    long n = begin;
    for (; n + N <= end; n += N) column<N>(call, w, n, i, size);
    for (; n < end; ++n) column<1>(call, w, n, i, size);
  }
}

class LinearWork : public Work {
 public:
  LinearWork(const Linear& call, long chunk)
      : Work((call.outputs + chunk - 1) / chunk), call_(call), chunk_(chunk) {}

  void run(long task) override {
    const long begin = task * chunk_, end = std::min(begin + chunk_, call_.outputs);
    if (call_.w)
      rows(call_.w, begin, end);
    else
      rows(call_.w8, begin, end);
  }

 private:
  template <class T>
  void rows(const T* w, long begin, long end) {
    const auto run = call_.rows < 4 ? rows_of<kRowsOf1, T> : rows_of<kRowsOf4, T>;
    run(call_, w, begin, end);
  }

  const Linear& call_;
  const long chunk_;
};

void linear(const Linear& call) {
  const long bytes = std::max<long>(call.inputs * (call.w ? 4 : 1), 1);
  LinearWork work(call, std::max(24L, kChunkBytes / bytes / 24 * 24));
  Pool::instance().run(work);
}

}  // namespace
}  // namespace jaxllm
