// Attention over a cache: a task is the queries of one row that share a key/value head.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "vector.h"

namespace jaxllm {
namespace {

constexpr int kSlots = 4;    // whose products with a query are summed together
constexpr int kQueries = 4;  // that share what is read of the cache

class AttentionWork : public Work {
 public:
  explicit AttentionWork(const Attention& call) : Work(call.B * call.K), c(call) {}

  void run(long task) override {
    const long row = task / c.K, head = task % c.K;
    thread_local std::vector<float> weights;
    weights.resize(kQueries * (c.S + kWidth));
    const long queries = c.T * c.G;
    for (long first = 0; first < queries; first += kQueries) {
      const int count = static_cast<int>(std::min<long>(kQueries, queries - first));
      const float* q[kQueries];
      float* y[kQueries];
      const bool* visible[kQueries];
      const float* bias[kQueries];
      for (int j = 0; j < count; ++j) {
        const long t = (first + j) / c.G, n = head * c.G + (first + j) % c.G;
        const long place = ((row * c.T + t) * c.K * c.G + n) * c.H;
        q[j] = c.q + place;
        y[j] = c.y + place;
        visible[j] = c.visible + (row * c.visible_queries + (c.visible_queries > 1 ? t : 0)) * c.S;
        const long bias_row = c.bias_rows > 1 ? row : 0;
        bias[j] = c.bias ? c.bias + ((bias_row * c.K * c.G + n) * c.T + t) * c.S : nullptr;
      }
      const float *k = c.k + task * c.S * c.H, *v = c.v + task * c.S * c.H;
      switch (count) {
        case 1: queries_of<1>(q, y, visible, bias, k, v, weights.data()); break;
        case 2: queries_of<2>(q, y, visible, bias, k, v, weights.data()); break;
        case 3: queries_of<3>(q, y, visible, bias, k, v, weights.data()); break;
        default: queries_of<4>(q, y, visible, bias, k, v, weights.data());
      }
    }
  }

 private:
  template <int Q>
  void queries_of(const float* const* q, float* const* y, const bool* const* visible,
                  const float* const* bias, const float* k, const float* v, float* weights) {
    const long stride = c.S + kWidth;
    long begin = c.S, end = 0;  // slots that some query sees
    for (int j = 0; j < Q; ++j) {
      const bool* first = std::find(visible[j], visible[j] + c.S, true);
      if (first == visible[j] + c.S) continue;
      long last = c.S;
      while (!visible[j][last - 1]) --last;
      begin = std::min<long>(begin, first - visible[j]);
      end = std::max(end, last);
    }
    begin = std::min(begin, end);  // no query sees any
    for (long slot = begin; slot < end; slot += kSlots)
      scores<Q>(q, k, slot, std::min<long>(kSlots, end - slot), weights + slot, stride);
    float sums[Q];
    for (int j = 0; j < Q; ++j)
      sums[j] = softmax(weights + j * stride, visible[j], bias[j], begin, end);
    long h = 0;
    for (; h + 4 * kWidth <= c.H; h += 4 * kWidth) mix<Q, 4>(weights, stride, sums, v + h, begin, end, y, h);
    for (; h < c.H; h += kWidth) mix<Q, 1>(weights, stride, sums, v + h, begin, end, y, h);
  }

  template <int Q>
  void scores(const float* const* q, const float* k, long slot, long count, float* out, long stride) {
    const float* keys[kSlots];
    for (int s = 0; s < kSlots; ++s) keys[s] = k + (slot + std::min<long>(s, count - 1)) * c.H;
    Vector sum_[Q][kSlots];
    UNROLL for (int j = 0; j < Q; ++j)
      UNROLL for (int s = 0; s < kSlots; ++s) sum_[j][s] = zero();
    for (long h = 0; h < c.H; h += kWidth) {
      Vector b[kSlots];
      UNROLL for (int s = 0; s < kSlots; ++s) b[s] = load(keys[s] + h);
      UNROLL for (int j = 0; j < Q; ++j) {
        Vector a = load(q[j] + h);
        UNROLL for (int s = 0; s < kSlots; ++s) sum_[j][s] += a * b[s];
      }
    }
    UNROLL for (int j = 0; j < Q; ++j)
      store_sums(out + j * stride, sum_[j][0], sum_[j][1], sum_[j][2], sum_[j][3]);
  }

  // Replaces scores by exponentials; returns their sum, infinity if nothing is visible.
  float softmax(float* w, const bool* visible, const float* bias, long begin, long end) {
    float largest = -std::numeric_limits<float>::infinity();
    for (long s = begin; s < end; ++s) {
      w[s] = visible[s] ? w[s] * c.scale + (bias ? bias[s] : 0.0f)
                        : -std::numeric_limits<float>::infinity();
      largest = std::max(largest, w[s]);
    }
    if (largest == -std::numeric_limits<float>::infinity()) {
      std::fill(w + begin, w + end, 0.0f);
      return std::numeric_limits<float>::infinity();
    }
    float total = 0.0f;
    Vector totals = zero();
    long s = begin;
    for (; s + kWidth <= end; s += kWidth) {
      Vector e = exp(load(w + s) - largest);
      store(w + s, e);
      totals += e;
    }
    if (s < end) {
      Vector e = exp(load_first(w + s, end - s) - largest);
      for (int i = 0; s < end; ++s, ++i) total += w[s] = e[i];
    }
    return total + sum(totals);
  }

  // Weighted sums of N vectors of each value.
  template <int Q, int N>
  void mix(const float* weights, long stride, const float* sums, const float* v, long begin,
           long end, float* const* y, long h) {
    Vector sum_[Q][N];
    UNROLL for (int j = 0; j < Q; ++j)
      UNROLL for (int n = 0; n < N; ++n) sum_[j][n] = zero();
    for (long s = begin; s < end; ++s) {
      Vector b[N];
      UNROLL for (int n = 0; n < N; ++n) b[n] = load(v + s * c.H + n * kWidth);
      UNROLL for (int j = 0; j < Q; ++j) {
        const float w = weights[j * stride + s];
        UNROLL for (int n = 0; n < N; ++n) sum_[j][n] += w * b[n];
      }
    }
    UNROLL for (int j = 0; j < Q; ++j)
      UNROLL for (int n = 0; n < N; ++n) store(y[j] + h + n * kWidth, sum_[j][n] / sums[j]);
  }

  const Attention& c;
};

void attention(const Attention& call) {
  AttentionWork work(call);
  Pool::instance().run(work);
}

}  // namespace
}  // namespace jaxllm
