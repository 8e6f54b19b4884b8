// Products x W^T. Rows of x and of W are both contiguous: a tile of y is a block of dot products,
// whose partial sums stay in registers. W is read from memory once, in order.
#pragma once

#include <algorithm>

#include "int4.h"
#include "kernels.h"
#include "pool.h"
#include "vector.h"

namespace jaxllm {
namespace {

constexpr long kBlock = 1024;          // entries of a row that are summed at a time
constexpr long kChunkBytes = 1 << 18;  // of W: the most that a thread takes at a time

// Rows of W in a tile with 4 rows of x: as many sums as registers hold.
#if defined(JAXLLM_AVX512)
constexpr int kRowsOf4 = 6;
#else
constexpr int kRowsOf4 = 2;
#endif

// y[m, n] (+)= scale[n] * x[m, :] . w[n, :] for M rows of x and N rows of w.
template <int M, int N, class T>
void tile(const float* x, long inputs, const T* w, long stride, long size, const float* scale,
          float* y, long outputs, bool add) {
  Vector dots[N * M] = {};
  const auto multiply = [&](auto of) {
    Vector b[N];
    UNROLL for (int n = 0; n < N; ++n) b[n] = of(w + n * stride);
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
void column(const Linear& call, const T* w, long stride, long n, long i, long size) {
  const float* x = call.x + i;
  const float* scale = call.scale ? call.scale + n : nullptr;
  float* y = call.y + n;
  const bool add = i > 0;
  long m = 0;
  for (; m + 4 <= call.rows; m += 4, x += 4 * call.inputs, y += 4 * call.outputs)
    tile<4, N>(x, call.inputs, w, stride, size, scale, y, call.outputs, add);
  switch (call.rows - m) {
    case 1: return tile<1, N>(x, call.inputs, w, stride, size, scale, y, call.outputs, add);
    case 2: return tile<2, N>(x, call.inputs, w, stride, size, scale, y, call.outputs, add);
    case 3: return tile<3, N>(x, call.inputs, w, stride, size, scale, y, call.outputs, add);
  }
}

template <int N, class T>
void column(const Linear& call, const T* const& w, long n, long i, long size) {
  column<N>(call, w + n * call.inputs + i, call.inputs, n, i, size);
}

template <int N>
void column(const Linear& call, const Int4& w, long n, long i, long size) {
  float rows[N * kBlock];
  unpack<N>(w, n, i, size, rows);
  column<N>(call, rows, size, n, i, size);
}

// Rows [begin, end) of W, N at a time.
template <int N, class T>
void rows_of(const Linear& call, const T& w, long begin, long end) {
  for (long i = 0; i < call.inputs; i += kBlock) {
    const long size = std::min(kBlock, call.inputs - i);
    long n = begin;
    for (; n + N <= end; n += N) column<N>(call, w, n, i, size);
    for (; n < end; ++n) column<1>(call, w, n, i, size);
  }
}

// Rows [begin, end) of W with M rows of x, each read once and in order: what memory delivers fastest.
template <int M, class T>
void rows_in_order(const Linear& call, const T* w, long begin, long end) {
  constexpr int U = 4;  // sums of a product that do not wait for each other
  for (long n = begin; n < end; ++n) {
    const T* row = w + n * call.inputs;
    Vector dots[M * U] = {};
    const auto multiply = [&](int u, auto of) {
      const Vector b = of(row);
      UNROLL for (int m = 0; m < M; ++m) dots[m * U + u] += of(call.x + m * call.inputs) * b;
    };
    long i = 0;
    for (; i + U * kWidth <= call.inputs; i += U * kWidth)
      UNROLL for (int u = 0; u < U; ++u) multiply(u, [=](auto* p) { return load(p + i + u * kWidth); });
    for (; i + kWidth <= call.inputs; i += kWidth) multiply(0, [=](auto* p) { return load(p + i); });
    if (i < call.inputs) multiply(1, [=](auto* p) { return load_first(p + i, call.inputs - i); });
    UNROLL for (int m = 0; m < M; ++m) {
      const Vector* d = dots + m * U;
      const float value = sum((d[0] + d[1]) + (d[2] + d[3]));
      call.y[m * call.outputs + n] = call.scale ? value * call.scale[n] : value;
    }
  }
}

class LinearWork : public Work {
 public:
  LinearWork(const Linear& call, long chunk)
      : Work((call.outputs + chunk - 1) / chunk, weights_of(call)), call_(call), chunk_(chunk) {}

  void run(long task) override {
    const long begin = task * chunk_, end = std::min(begin + chunk_, call_.outputs);
    if (call_.w)
      rows(call_.w, begin, end);
    else if (call_.w8)
      rows(call_.w8, begin, end);
    else
      rows(call_.w4, begin, end);
  }

 private:
  template <class T>
  void rows(const T* w, long begin, long end) {
    switch (call_.rows) {
      case 1: return rows_in_order<1>(call_, w, begin, end);
      case 2: return rows_in_order<2>(call_, w, begin, end);
      case 3: return rows_in_order<3>(call_, w, begin, end);
      default: return rows_of<kRowsOf4, const T*>(call_, w, begin, end);
    }
  }

  void rows(const Int4& w, long begin, long end) {
    if (call_.rows > 1) return rows_of<kRowsOf4>(call_, w, begin, end);
    for (; begin + 8 <= end; begin += 8) dots_of_int4<8>(call_, begin);
    for (; begin < end; ++begin) dots_of_int4<1>(call_, begin);
  }

  static Range weights_of(const Linear& call) {
    const long entries = call.inputs * call.outputs;
    if (call.w) return {reinterpret_cast<const char*>(call.w), 4 * entries};
    if (call.w8) return {reinterpret_cast<const char*>(call.w8), entries};
    return {reinterpret_cast<const char*>(call.w4.groups), entries / 2};
  }

  const Linear& call_;
  const long chunk_;
};

void linear(const Linear& call) {
  const long bytes = std::max<long>(call.w ? call.inputs * 4 : call.inputs, 1);
  const long share = call.outputs / (2 * Pool::instance().threads());  // so that none waits for long
  LinearWork work(call, std::max(24L, std::min(kChunkBytes / bytes, share) / 24 * 24));
  Pool::instance().run(work);
}

}  // namespace
}  // namespace jaxllm
