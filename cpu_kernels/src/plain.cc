// The kernels for any processor.
#include "attention.h"
#include "linear.h"

namespace jaxllm {
extern const Kernels plain_kernels = {linear, attention};
}
