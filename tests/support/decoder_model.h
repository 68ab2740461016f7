#pragma once
/// A decoder's shape and numbers, for tests that run over several.

#include <functional>
#include <ostream>
#include <utility>

#include "kvkeep/core/dtype.h"
#include "kvkeep/core/rope.h"
#include "kvkeep/lm/config.h"

namespace kvkeep::lm {

struct Model {
  const char* name;
  LmConfig config;
  Dtype dtype = Dtype::f32;
  RopeStyle style = RopeStyle::half;
};
inline void PrintTo(const Model& model, std::ostream* out) { *out << model.name; }

inline Model with(Model model, const std::function<void(LmConfig&)>& change) {
  change(model.config);
  return model;
}

}  // namespace kvkeep::lm
