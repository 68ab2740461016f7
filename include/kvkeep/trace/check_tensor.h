#pragma once
/// Checks of a trace's tensors.

#include <string>

#include "kvkeep/core/error.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/io/safetensors.h"

namespace kvkeep::trace {

inline std::string shape_of(const Tensor& t) {
  std::string out = "[";
  for (std::int64_t d = 0; d < t.dim(); ++d) out += (d > 0 ? ", " : "") + std::to_string(t.size(d));
  return out + "]";
}

inline void want(const io::SafetensorsFile& file, const std::string& name, const Tensor& t, bool ok,
                 const std::string& allowed) {
  KVKEEP_REQUIRE(ok, file.where(), ": tensor \"", name, "\" has shape ", shape_of(t), " and dtype ", t.dtype(),
                 "; allowed ", allowed);
}

/// A metadata value that is a positive number; `fallback` if it is absent.
double number(const io::SafetensorsFile& file, const std::string& key, double fallback);

}  // namespace kvkeep::trace
