// What XLA calls: handlers of the kernels for the processor's best instruction set.
#include <cstdlib>
#include <string>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jaxllm {
namespace {

// JAXLLM_CPU_KERNELS can name the instruction set; else it is the best one of this processor.
const Kernels& choose() {
  const char* name = std::getenv("JAXLLM_CPU_KERNELS");
  const std::string set = name ? name : "";
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (set != "plain" && set != "avx2" && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return avx512_kernels;
  if (set != "plain" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return avx2_kernels;
#endif
  return plain_kernels;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

using F32 = ffi::Buffer<ffi::F32>;

ffi::Error run_linear(const Linear& call, F32& x, const ffi::Span<const int64_t>& matrix) {
  if (x.dimensions().size() != 2 || matrix.size() != 2 || x.dimensions()[1] != matrix[1])
    return ffi::Error::InvalidArgument("jaxllm_linear: x [rows, inputs], W [outputs, inputs]");
  Linear sized = call;
  sized.rows = x.dimensions()[0], sized.inputs = matrix[1], sized.outputs = matrix[0];
  kernels().linear(sized);
  return ffi::Error::Success();
}

ffi::Error linear_handler(F32 x, F32 w, ffi::Result<F32> y) {
  return run_linear({x.typed_data(), w.typed_data(), nullptr, {}, nullptr, y->typed_data()}, x,
                    w.dimensions());
}

ffi::Error linear_int8_handler(F32 x, ffi::Buffer<ffi::S8> w, F32 scale, ffi::Result<F32> y) {
  return run_linear(
      {x.typed_data(), nullptr, w.typed_data(), {}, scale.typed_data(), y->typed_data()}, x,
      w.dimensions());
}

ffi::Error linear_int4_handler(F32 x, ffi::AnyBuffer groups, ffi::Buffer<ffi::S8> multipliers,
                               F32 scale, ffi::Result<F32> y) {
  const auto size = groups.dimensions();
  if (groups.element_type() != ffi::S4 || size.size() != 3 || size[2] != 32)
    return ffi::Error::InvalidArgument("jaxllm_linear_int4: int4 groups [inputs / 32, outputs, 32]");
  const int64_t matrix[] = {size[1], size[0] * 32};
  const Int4 w{static_cast<const uint8_t*>(groups.untyped_data()), multipliers.typed_data(), size[1]};
  return run_linear({x.typed_data(), nullptr, nullptr, w, scale.typed_data(), y->typed_data()}, x,
                    ffi::Span<const int64_t>(matrix, 2));
}

ffi::Error attention_handler(F32 q, F32 k, F32 v, ffi::Buffer<ffi::PRED> visible,
                             ffi::RemainingArgs rest, ffi::Result<F32> y, float scale) {
  auto size = q.dimensions();
  Attention call{q.typed_data(), k.typed_data(), v.typed_data(), visible.typed_data(), nullptr,
                 y->typed_data()};
  call.B = size[0], call.T = size[1], call.H = size[3];
  call.K = k.dimensions()[0] / call.B, call.G = size[2] / call.K, call.S = k.dimensions()[1];
  if (k.dimensions().size() != 3 || call.K * call.B != k.dimensions()[0] || call.H % 16)
    return ffi::Error::InvalidArgument("jaxllm_attention: k [B * K, S, H], H a multiple of 16");
  call.visible_queries = visible.dimensions()[2];
  call.scale = scale;
  if (rest.size() > 0) {
    auto bias = rest.get<F32>(0);
    if (!bias.has_value()) return ffi::Error::InvalidArgument("jaxllm_attention: float32 bias");
    call.bias = bias->typed_data(), call.bias_rows = bias->dimensions()[0];
  }
  kernels().attention(call);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxllm

extern "C" const char* jaxllm_instruction_set() {
#if defined(__x86_64__)
  if (&jaxllm::kernels() == &jaxllm::avx512_kernels) return "AVX-512";
  if (&jaxllm::kernels() == &jaxllm::avx2_kernels) return "AVX2";
#endif
  return "portable";
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxllm_linear, jaxllm::linear_handler,
    ffi::Ffi::Bind().Arg<jaxllm::F32>().Arg<jaxllm::F32>().Ret<jaxllm::F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_linear_int8, jaxllm::linear_int8_handler,
                              ffi::Ffi::Bind()
                                  .Arg<jaxllm::F32>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Arg<jaxllm::F32>()
                                  .Ret<jaxllm::F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_linear_int4, jaxllm::linear_int4_handler,
                              ffi::Ffi::Bind()
                                  .Arg<jaxllm::F32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Arg<jaxllm::F32>()
                                  .Ret<jaxllm::F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxllm_attention, jaxllm::attention_handler,
                              ffi::Ffi::Bind()
                                  .Arg<jaxllm::F32>()
                                  .Arg<jaxllm::F32>()
                                  .Arg<jaxllm::F32>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .RemainingArgs()
                                  .Ret<jaxllm::F32>()
                                  .Attr<float>("scale"));
