// Attention: a task is some queries of one row that share a key/value head. Scores of a few queries
// stay in the first-level cache; slots that none of them sees are not read.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "vector.h"

namespace jaxllm {
namespace {

constexpr int kSlots = 4;    // whose products with a query are summed together
constexpr int kQueries = 4;  // that share what is read of the cache
constexpr long kBlockQueries = 64;  // of one task

class AttentionWork : public Work {
 public:
  explicit AttentionWork(const Attention& call)
      : Work(call.B * call.K * blocks_of(call)), c(call), blocks_(blocks_of(call)) {}

  void run(long task) override {
    const long place = task / blocks_, block = task % blocks_;
    const long row = place / c.K, head = place % c.K;
    const float *k = c.k + place * c.S * c.H, *v = c.v + place * c.S * c.H;
    thread_local std::vector<float> weights;
    weights.resize(kQueries * (c.S + kWidth));
    const long queries = std::min(c.T * c.G, (block + 1) * kBlockQueries);
    for (long first = block * kBlockQueries; first < queries; first += kQueries) {
      const int count = static_cast<int>(std::min<long>(kQueries, queries - first));
      const float* q[kQueries];
      float* y[kQueries];
      const bool* visible[kQueries];
      const float* bias[kQueries];
      for (int j = 0; j < count; ++j) {
        const long t = (first + j) / c.G, n = head * c.G + (first + j) % c.G;
        const long query = ((row * c.T + t) * c.K * c.G + n) * c.H;
        q[j] = c.q + query;
        y[j] = c.y + query;
        visible[j] = c.visible + (row * c.visible_queries + (c.visible_queries > 1 ? t : 0)) * c.S;
        const long bias_row = c.bias_rows > 1 ? row : 0;
        bias[j] = c.bias ? c.bias + ((bias_row * c.K * c.G + n) * c.T + t) * c.S : nullptr;
      }
      switch (count) {
        case 1: queries_of<1>(q, y, visible, bias, k, v, weights.data()); break;
        case 2: queries_of<2>(q, y, visible, bias, k, v, weights.data()); break;
        case 3: queries_of<3>(q, y, visible, bias, k, v, weights.data()); break;
        default: queries_of<4>(q, y, visible, bias, k, v, weights.data());
      }
    }
  }

 private:
  static long blocks_of(const Attention& call) {
    return (call.T * call.G + kBlockQueries - 1) / kBlockQueries;
  }

  template <int Q>
  void queries_of(const float* const* q, float* const* y, const bool* const* visible,
                  const float* const* bias, const float* k, const float* v, float* weights) {
    const long stride = c.S + kWidth;
    long begin = c.S, end = 0;  // slots that some query sees
    for (int j = 0; j < Q; ++j) {
      if (j > 0 && visible[j] == visible[j - 1]) continue;
      const void* first = std::memchr(visible[j], true, c.S);
      if (!first) continue;
      long last = c.S;
      while (!visible[j][last - 1]) --last;
      begin = std::min<long>(begin, static_cast<const bool*>(first) - visible[j]);
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
    const float none = -std::numeric_limits<float>::infinity();
    const auto* sees = reinterpret_cast<const int8_t*>(visible);
    Vector largest = zero() + none;
    for (long s = begin; s < end; s += kWidth) {
      const long count = std::min<long>(kWidth, end - s);  // w has place for a whole vector
      const auto of = [=](auto* p) { return count == kWidth ? load(p) : load_first(p, count); };
      Vector score = load(w + s) * c.scale;
      if (bias) score += of(bias + s);
      score = of(sees + s) > 0.0f ? score : zero() + none;
      store(w + s, score);
      largest = score > largest || score != score ? score : largest;
    }
    float top = none;
    for (int i = 0; i < kWidth; ++i) top = largest[i] > top || largest[i] != largest[i] ? largest[i] : top;
    if (top == none) {
      std::fill(w + begin, w + end, 0.0f);
      return std::numeric_limits<float>::infinity();
    }
    Vector total = zero();
    for (long s = begin; s < end; s += kWidth) {
      const Vector e = exp(load(w + s) - top);
      store(w + s, e);
      total += e;
    }
    return sum(total);
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
  const long blocks_;
};

void attention(const Attention& call) {
  AttentionWork work(call);
  Pool::instance().run(work);
}

}  // namespace
}  // namespace jaxllm
