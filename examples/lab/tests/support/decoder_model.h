// SPDX-License-Identifier: Apache-2.0
#pragma once
/// A decoder's shape and numbers, for tests that run over several.

#include <functional>
#include <ostream>
#include <utility>

#include "kvkeep/core/dtype.h"
#include "kvkeep/core/model_spec.h"
#include "kvkeep/io/model_config.h"

namespace kvkeep::lm {

struct Model {
  const char* name;
  io::ModelConfig config;
  Dtype dtype = Dtype::f32;
  RopeStyle style = RopeStyle::half;
};
inline void PrintTo(const Model& model, std::ostream* out) { *out << model.name; }

inline Model with(Model model, const std::function<void(io::ModelConfig&)>& change) {
  change(model.config);
  return model;
}

}  // namespace kvkeep::lm
